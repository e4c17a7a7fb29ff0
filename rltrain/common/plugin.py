"""User code, named FILE.py:NAME or package.module:NAME: rewards, estimators, losses, samplers, callbacks.

A file is run as a module with a unique name, because two files in different folders may have the same name. It may
import modules of its folder. A module is imported by its name, from installed packages or below the working directory.
verl's prefixes file:// and pkg:// are supported.

An object given to `rltrain.train` becomes a file too: cloudpickle writes it into the run folder, and driver, workers
and scorers load it from there under the same kind of name. So code is always passed in the same way, and the run's
config.yaml is complete.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rltrain.common import plugins
from rltrain.common.errors import ConfigError

_MAX_TRACEBACK_CHARS = 4000
# Packages whose frames may precede the first frame of user code.
_MACHINERY = (
    "asyncio",
    "importlib",
    "concurrent.futures",
    "rltrain",
    "rltrain.agents",
    "rltrain.common",
    "rltrain.data",
    "rltrain.data.turns.formats",
    "rltrain.rewards",
    "rltrain.rewards.processes",
    "rltrain.runtime.slots",
    "rltrain.tools",
)
_FILE, _PACKAGE = "file://", "pkg://"
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
_WITHOUT_VERL = (
    "\nIt needs {}, which is not installed here: install a version of verl that has it next to rltrain, or write the "
    "code without verl (docs/plugins.md has complete files)."
)


def is_plugin(name: str) -> bool:
    """Return whether ``name`` is FILE.py:NAME or package.module:NAME."""
    return ":" in name


def plugin_file(place: str) -> str | None:
    """Return the file in ``place`` (the part before :NAME), or None if it is a module."""
    dotted = all(part.isidentifier() for part in place.split("."))
    is_module = place.startswith(_PACKAGE) or (dotted and not place.endswith((".py", ".pkl")))
    return None if is_module else place.removeprefix(_FILE)


def save_object(key: str, value: Any, folder: Path) -> str:
    """Write a function or class of ``key`` into ``folder``. Returns the name to configure.

    The code of its module is included, unless it is an installed package, which other processes can import. Raises
    ConfigError for an object that cannot be pickled.
    """
    import cloudpickle

    name = getattr(value, "__name__", type(value).__name__)
    module = sys.modules.get(getattr(value, "__module__", None) or type(value).__module__)
    # cloudpickle stores a function of an imported module only by name, which other machines could not import.
    # Definitions in __main__ are always stored by value.
    by_value = module is not None and module.__name__ != "__main__" and not _is_installed(module)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        data = cloudpickle.dumps({name: value})
    except Exception as error:  # cloudpickle raises any error of the object's code
        raise ConfigError(
            f"{key}: {name} cannot be sent to other processes: {type(error).__name__}: {error}. Open files, locks, "
            "connections and generators cannot be sent: create them in the first call, or give FILE.py:NAME."
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    # The file is named by its content, so that a changed function gets a new name.
    file = folder / f"{name}-{zlib.crc32(data):08x}.pkl"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return f"{file}:{name}"


def _is_installed(module: ModuleType) -> bool:
    # A built-in module has no file and counts as installed.
    file = getattr(module, "__file__", None)
    places = [str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    return file is None or any(Path(file).is_relative_to(place) for place in places)


# The module is cached, because a second import would create different classes with the same names.
@functools.cache
def load_plugin(key: str, name: str) -> Callable[..., Any]:
    """Return the function or class that ``key=name`` names (see `is_plugin`).

    Raises ConfigError, with the traceback if the import fails.
    """
    place, _, function_name = name.rpartition(":")
    file = plugin_file(place)
    path = Path(file or "").expanduser()
    if file is not None and not (path.is_file() and path.suffix in (".py", ".pkl")):
        raise ConfigError(f"{key}={name}: {path.absolute()} is not a Python file.")
    module = _imported(f"{key}={name}", place if file is None else path)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [
            member for member, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
        ]
        kind = "module" if file is None else "file"
        raise ConfigError(
            f"{key}={name}: the {kind} has no function {function_name!r}; it defines {', '.join(names) or 'none'}."
        )
    return function


def load_module(key: str, name: str) -> ModuleType:
    """Return the Python file or module that ``key=name`` names. Raises ConfigError, with the traceback if it fails."""
    file = plugin_file(name)
    path = Path(file or "").expanduser()
    if file is not None and not (path.is_file() and path.suffix == ".py"):
        raise ConfigError(f"{key}={name}: it is not the name of a module, and {path.absolute()} is not a Python file.")
    return _imported(f"{key}={name}", name if file is None else path)


def import_libraries(key: str, names: Sequence[str]) -> None:
    """Import modules or files for their side effects. Raises ConfigError, with the traceback if it fails."""
    for name in names:
        _import_library(key, name)


@functools.cache
def _import_library(key: str, name: str) -> None:
    load_module(key, name)


def _imported(named: str, place: str | Path) -> ModuleType:
    """Import the module or file ``place``. named: the setting, for error messages."""
    try:
        return _import_file(place) if isinstance(place, Path) else _import_module(place)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything; it is reported
        lacking = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        advice = _WITHOUT_VERL.format(lacking) if lacking.partition(".")[0] == "verl" else ""
        raise ConfigError(f"{named} cannot be imported:\n{user_traceback(error)}{advice}") from None


def _import_module(place: str) -> ModuleType:
    # The working directory is importable, as with python -m, for any command that started the process. It is last, as
    # in `_import_file`.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(place.removeprefix(_PACKAGE).replace("/", "."))


def _import_file(path: Path) -> ModuleType:
    name = plugins.module_name(path)
    if path.suffix == ".pkl":  # from `save_object`
        module = ModuleType(name)
        # Loading a pickle can run code, but so can the .py file that a user may name instead.
        vars(module).update(pickle.loads(path.read_bytes()))
        return module
    earlier_module = sys.modules.get(name)
    if earlier_module and earlier_module.__spec__ and earlier_module.__spec__.loader_state != path.stat().st_mtime_ns:
        del sys.modules[name]  # the file has changed, for example next to a notebook
    return importlib.import_module(name)


def user_traceback(error: BaseException) -> str:
    """Return the traceback from the first frame of user code on, truncated. Syntax errors include their location."""
    first = error.__traceback__
    # Frames are identified by their package, which a user's file does not have.
    while first and first.tb_frame.f_globals.get("__package__") in _MACHINERY:
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first))[-_MAX_TRACEBACK_CHARS:].rstrip()
