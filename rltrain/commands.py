"""Commands ``rltrain NAME`` and their modules, which ``python -m rltrain.NAME`` also finds."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

_LINES = Path(__file__).with_name("commands.tsv").read_text(encoding="utf-8").splitlines()
COMMANDS = {name: (module, text) for name, module, text in (line.split("\t") for line in _LINES)}
_OTHER_NAMES = {"env_report": "env"}


def converters() -> list[str]:
    """Return the names that ``rltrain data`` takes."""
    helpers = {"benchmark", "common", "messages", "sources", "lint"}
    folder = str(Path(__file__).with_name("data_preprocess"))
    return [module.name for module in pkgutil.iter_modules([folder]) if module.name not in helpers]


def home(name: str) -> str | None:
    """Return the module of the command ``rltrain.NAME``, or None if there is none."""
    command = name.removeprefix("rltrain.").replace(".", " ")
    return COMMANDS.get(_OTHER_NAMES.get(command, command), (None, ""))[0]


class _Loader(importlib.abc.Loader):
    """Loader of a command's module, so that its classes are the same under both names."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in ("rltrain.evaluate", "rltrain.sft", "rltrain.train"):  # functions: see rltrain.__init__
            raise ImportError(f"{spec.name} is a function; the module of the command is {home(spec.name)}.")
        module = importlib.import_module(str(home(spec.name)))
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module has already been executed, and keeps its name.
        module.__spec__ = self._own_spec

    def get_code(self, fullname: str) -> CodeType:
        name = str(home(fullname))
        return importlib.util.find_spec(name).loader.get_code(name)  # type: ignore[union-attr]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("rltrain."):
            return None
        name = home(fullname)
        found = importlib.util.find_spec(name) if name else None
        # runpy sets __file__ and sys.argv[0] to the origin.
        return ModuleSpec(fullname, _Loader(), origin=found.origin) if found else None


# This finder is last, so that real modules have priority.
sys.meta_path.append(_Finder())
