"""Modules under the names that people type, import in code of their own or have in scripts, wherever they stand today.

An old name gives the very module, so that a class is one class by both. It works for ``python -m`` too.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

_PACKAGES = {
    "compare": "tools.compare", "port": "tools.port", "resolution": "tools.resolution", "serve": "tools.serve",
    "plugins": "base.plugins",
}  # fmt: skip
_HOMES = {
    "base": "chips device env errors imports logs plugin seeds stacks stop storage versions",
    "base.columns": "batch ragged",
    "run": "dry_run",
    "run.report": "env_report view",
    "controller.launch": "supervise",
    "tools": "average checkpoint cli collect doctor replay simulate sweep sync watch",
}
MOVED = {
    **{f"rltrain.{name}": f"rltrain.{home}.{name}" for home, names in _HOMES.items() for name in names.split()},
    **{f"rltrain.{name}": f"rltrain.{home}" for name, home in _PACKAGES.items()},
    "rltrain.agents.try": "rltrain.tools.try_agent",
    "rltrain.algorithms.value_loss": "rltrain.algorithms.losses",
    "rltrain.aside": "rltrain.base.background",
    "rltrain.base.aside": "rltrain.base.background",
    "rltrain.columns": "rltrain.base.columns.names",
    "rltrain.help": "rltrain.config.help",
    "rltrain.report": "rltrain.run.report.table",
    "rltrain.rewards.jail": "rltrain.slots",
    "rltrain.rewards.jail.jail": "rltrain.slots.jail",
    "rltrain.rewards.jail.limits": "rltrain.slots.limits",
    "rltrain.rewards.processes.child": "rltrain.slots.child",
    "rltrain.rewards.processes.crew": "rltrain.rewards.processes.pool",
    "rltrain.rewards.processes.output": "rltrain.rewards.processes.log",
    "rltrain.rewards.registry": "rltrain.rewards.scorers.registry",
    "rltrain.rewards.try": "rltrain.tools.try_reward",
    "rltrain.trainer.build": "rltrain.run.build",
    "rltrain.trainer.run": "rltrain.run.fit",
    "rltrain.workers.rollout.base": "rltrain.workers.rollout.contract",
    "rltrain.workers.rollout.hf": "rltrain.workers.rollout.embedded.engine",
}

# Found by ``python -m`` alone: to import one would put a module in the place of the function of that name.
PROGRAMS = {"rltrain.evaluate": "rltrain.tools.evaluate.__main__"}


def home(name: str) -> str | None:
    """Where the module ``name`` stands now; None where it has not moved."""
    package, _, rest = name.removeprefix("rltrain.").partition(".")
    return (
        MOVED.get(name)
        or PROGRAMS.get(name)
        or (f"rltrain.{_PACKAGES[package]}.{rest}" if package in _PACKAGES else None)
    )


class _Loader(importlib.abc.InspectLoader):
    """Gives the module of ``spec``."""

    def __init__(self, spec: ModuleSpec) -> None:
        assert isinstance(spec.loader, importlib.abc.InspectLoader)
        self._spec, self._loader = spec, spec.loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in PROGRAMS:
            raise ImportError(f"{spec.name} is a function; the module of the command is {self._spec.name}.")
        return importlib.import_module(self._spec.name)

    def exec_module(self, module: ModuleType) -> None:
        # It has run under its own name already, and keeps it.
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        return self._loader.get_code(self._spec.name)

    def get_source(self, fullname: str) -> str | None:
        return self._loader.get_source(self._spec.name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = home(fullname) if fullname.startswith("rltrain.") else None
        home_spec = importlib.util.find_spec(name) if name else None
        if not home_spec:
            return None
        spec = ModuleSpec(fullname, _Loader(home_spec), origin=home_spec.origin)
        spec.submodule_search_locations = home_spec.submodule_search_locations
        return spec


# First: below a package that has moved, its own path would find the files a second time.
sys.meta_path.insert(0, _Finder())
