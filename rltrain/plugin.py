"""A function of the user's own, named FILE.py:NAME."""

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


def is_plugin(name: str) -> bool:
    """Whether ``name`` is FILE.py:NAME."""
    return ":" in name


class NotPythonError(Exception):
    """The path is not a Python file."""


def import_file(path: Path, module_name: str) -> ModuleType:
    """Run a file as the module ``module_name``; it may import its neighbours. Raises NotPythonError, or whatever the file raises."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise NotPythonError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a module up by its name
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        # Last: a neighbour that is called as an installed package is must not take that package's place for everybody.
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module


@functools.cache
def load_plugin(key: str, name: str) -> Callable[..., Any]:
    """The function that ``key=FILE.py:NAME`` names. Raises ConfigError with the traceback of a file that does not import."""
    file, _, function_name = name.rpartition(":")
    path = Path(file).expanduser()
    # Two files may have one name in two folders.
    module_name = f"rltrain_plugin_{path.stem}_{zlib.crc32(bytes(path.absolute()))}"
    try:
        module = import_file(path, module_name)
    except NotPythonError:
        raise ConfigError(f"{key}={name}: {path.absolute()} is not a Python file.") from None
    except Exception as error:  # user code: whatever it raises is reported with its traceback
        raise ConfigError(f"{key}={name} cannot be imported:\n{traceback.format_exc(limit=-3)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [each for each, value in vars(module).items() if callable(value) and value.__module__ == module_name]
        raise ConfigError(
            f"{key}={name}: the file has no function {function_name!r}; it defines {', '.join(own) or 'none'}."
        )
    return function
