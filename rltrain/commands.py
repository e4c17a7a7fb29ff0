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

COMMANDS = {
    "train": ("rltrain.main_ppo", "train a model (rltrain train --help: its keys)"),
    "sft": ("rltrain.tools.sft", "supervised fine-tuning on conversations (rltrain sft --help)"),
    "supervise": (
        "rltrain.runtime.launch.supervise",
        "restart a command that was killed or may be retried: -- COMMAND ...",
    ),
    "doctor": ("rltrain.tools.doctor", "check the nodes of a cluster and their links (the keys of training)"),
    "port": ("rltrain.tools.port.__main__", "translate a launch script or saved configuration of verl"),
    "evaluate": ("rltrain.tools.evaluate.__main__", "evaluate a model on data, with intervals: model=… data=…"),
    "resolution": (
        "rltrain.tools.resolution.__main__",
        "search the image resolution at which a model answers best: model=… dev=… test=…",
    ),
    "report": ("rltrain.tools.report", "print the phase table of a run"),
    "watch": ("rltrain.tools.watch", "follow a running run by its folder"),
    "compare": ("rltrain.tools.compare", "compare runs: curves, paired differences, settings"),
    "simulate": ("rltrain.tools.simulate", "estimate the seconds of a step: key=value … --device H100"),
    "sweep": ("rltrain.tools.sweep", "one run per combination of settings: key=a,b ..."),
    "view": ("rltrain.tools.view", "show the samples of a run"),
    "average": ("rltrain.tools.average", "average the weights of several models"),
    "checkpoint": ("rltrain.tools.checkpoint", "export, thin or verify the checkpoints of a run"),
    "serve": ("rltrain.tools.serve", "start vLLM's OpenAI-compatible server of a model"),
    "lint": ("rltrain.data_preprocess.lint", "check data files before a run does"),
    "rewards try": ("rltrain.tools.try_reward", "try a reward function on rows and answers"),
    "agents try": ("rltrain.tools.try_agent", "try tools, an environment or an agent on a row"),
    "collect": ("rltrain.tools.collect", "collect the files of a run for a bug report"),
    "completion": ("rltrain.tools.completion", "tab completion for bash and zsh: source <(rltrain completion)"),
    "env": ("rltrain.tools.env", "versions, machine and devices, for a bug report"),
}
# Commands of earlier versions -> error message.
REMOVED: dict[str, str] = {
    "replay": "rltrain replay was removed: docs/recovery.md has the lines that load a saved mini-batch.",
    "sync": "rltrain sync was removed: type wandb sync RUN/wandb/offline-run-* (docs/logging.md).",
}
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
        if sentence := REMOVED.get(spec.name.removeprefix("rltrain.")):
            raise ImportError(sentence)
        module = importlib.import_module(str(home(spec.name)))
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module has already been executed, and keeps its name.
        module.__spec__ = self._own_spec

    def get_code(self, fullname: str) -> CodeType:
        if sentence := REMOVED.get(fullname.removeprefix("rltrain.")):
            text = f"import sys; sys.stderr.write({f'error: {sentence}'!r} + '\\n'); sys.exit(2)"
            return compile(text, fullname, "exec")
        name = str(home(fullname))
        return importlib.util.find_spec(name).loader.get_code(name)  # type: ignore[union-attr]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("rltrain."):
            return None
        name = home(fullname) or ("rltrain" if fullname.removeprefix("rltrain.") in REMOVED else "")
        found = importlib.util.find_spec(name) if name else None
        # runpy sets __file__ and sys.argv[0] to the origin.
        return ModuleSpec(fullname, _Loader(), origin=found.origin) if found else None


# This finder is last, so that real modules have priority.
sys.meta_path.append(_Finder())
