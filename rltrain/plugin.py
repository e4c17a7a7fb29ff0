"""A function of the user's own, named FILE.py:NAME: estimators, losses, samplers, callbacks and reward functions.

The file is run as a module under a name of its own, because two files in different folders may share one, and it may
import its neighbours. Left out: names of installed modules (``package.module:NAME``), since a file that lies beside the
run is what users have, and its path can be checked before anything starts.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rltrain.errors import ConfigError

_MAX_TRACEBACK_CHARS = 4000
# Packages between a process's own loop and the first frame of the user's code.
_MACHINERY = ("importlib", "rltrain", "rltrain.rewards", "rltrain.rewards.processes")


def is_plugin(name: str) -> bool:
    """Whether ``name`` is FILE.py:NAME."""
    return ":" in name


@functools.cache
def load_plugin(key: str, name: str) -> Callable[..., Any]:
    """The function that ``key=FILE.py:NAME`` names. Raises ConfigError with the traceback of a file that does not import."""
    file, _, function_name = name.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"{key}={name}: {path.absolute()} is not a Python file.")
    try:
        module = _import_file(path)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; it is reported
        raise ConfigError(f"{key}={name} cannot be imported:\n{user_traceback(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(
            f"{key}={name}: the file has no function {function_name!r}; it defines {', '.join(own) or 'none'}."
        )
    return function


def _import_file(path: Path) -> ModuleType:
    name = f"rltrain_plugin_{path.stem}_{zlib.crc32(bytes(path.absolute()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        # Last: a neighbour that has the name of an installed package must not take its place for everybody.
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module


def user_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the user's code on, bounded. A syntax error has no frame but names its place."""
    first = error.__traceback__
    while first and first.tb_frame.f_globals.get("__package__") in _MACHINERY:
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first))[-_MAX_TRACEBACK_CHARS:].rstrip()
