"""Markers for the cost of a test, set from the fixtures and functions that it uses. `scripts/test.sh` runs the tests
without markers, `rest` the others.
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

# Name or text in the code of a test, or module.name of a function that it calls -> marker.
NAMES = {
    **dict.fromkeys(["subprocess", "multiprocessing", "Popen"], "process"),
    **dict.fromkeys(
        ["Slot", "ScoringSlot", "RemoteJudge", "ExecutorPool", "run_command", "descendants", "exec"], "process"
    ),
    **dict.fromkeys(["rltrain.tools.port.__main__.main", "rltrain.tools.port.shell.record"], "process"),
    **dict.fromkeys(["rltrain.data_preprocess.lint.main", "rltrain.data_preprocess.lint.lint"], "process"),
    **dict.fromkeys(["bench.device_memory.measured", "bench.device_memory.compare"], "process"),
    **dict.fromkeys(["ray", "start_ray", "Cluster", "RewardPool", "WorkerGroup"], "ray"),
    "Network": "network",
    **dict.fromkeys(["local_trainer", "HybridWorker"], "step"),
    **dict.fromkeys(["engine_of", "running_engine", "make_engine"], "engine"),
    **dict.fromkeys(["--dry-run", "env_report"], "run"),
}
MARKERS = frozenset(NAMES.values())
_TESTS = str(Path(__file__).parent)
# Commands of this Python that the current test has started so far.
STARTED: list[str] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and sys.executable in (words := arguments[1]):
        STARTED.append(" ".join(map(str, words))[:200])


sys.addaudithook(_note)


def costs(item: pytest.Function) -> set[str]:
    """Return the markers of a test."""
    fixtures = item._fixtureinfo.name2fixturedefs
    starts = [item.function, *(each.func for name in item.fixturenames for each in fixtures.get(name, ()))]
    return {NAMES[name] for name in _all_names(*starts) if name in NAMES}


@functools.cache
def _all_names(*starts: Any) -> set[str]:
    seen: set[int] = set()
    return {name for start in starts for name in _names(start, seen)}


def _names(found: Any, seen: set[int]) -> Iterator[str]:
    found = inspect.unwrap(found) if callable(found) else found
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, functools.partial):
        yield from _names(found.func, seen)
    elif isinstance(found, FunctionType):
        for code in _codes(found.__code__):
            yield from (text for text in code.co_consts if isinstance(text, str))
            for name in code.co_names:
                yield name
                if name in found.__globals__:
                    used = found.__globals__[name]
                    yield f"{getattr(used, '__module__', '')}.{getattr(used, '__name__', '')}"
                    yield from _ours(used, seen)
        for cell in found.__closure__ or ():
            yield from _ours(cell.cell_contents, seen)
    elif isinstance(found, type):
        for value in vars(found).values():
            yield from _ours(value.__func__ if isinstance(value, (classmethod, staticmethod)) else value, seen)


def _ours(found: Any, seen: set[int]) -> Iterator[str]:
    # Some folders of tests are no packages, so modules are known by their files.
    module = sys.modules.get(str(getattr(found, "__module__", "")))
    if not isinstance(found, ModuleType) and str(getattr(module, "__file__", "")).startswith(_TESTS):
        yield from _names(found, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
