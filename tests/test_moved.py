"""Modules under the names that people type and import: scripts of the first versions go on working."""

import contextlib
import importlib
import io
import multiprocessing
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.base import moved
from tests.ranks import preload

ROOT = Path(__file__).parent.parent
# Written down once; never shortened.
TYPED = [
    "rltrain.view", "rltrain.report", "rltrain.port", "rltrain.doctor", "rltrain.sync", "rltrain.supervise",
    "rltrain.replay", "rltrain.collect", "rltrain.env_report", "rltrain.rewards.try", "rltrain.agents.try",
    "rltrain.evaluate", "rltrain.resolution",
    "rltrain.controller.launch", "rltrain.cli", "rltrain.main_ppo", "rltrain.average",
    "rltrain.checkpoint", "rltrain.compare", "rltrain.sweep", "rltrain.serve", "rltrain.simulate",
]  # fmt: skip
IMPORTED = [
    "rltrain.algorithms.value_loss", "rltrain.aside", "rltrain.base.aside",
    "rltrain.batch", "rltrain.chips", "rltrain.columns", "rltrain.device", "rltrain.dry_run",
    "rltrain.env", "rltrain.errors", "rltrain.help", "rltrain.imports", "rltrain.logs", "rltrain.plugin",
    "rltrain.plugins", "rltrain.port.shell", "rltrain.port.translate", "rltrain.ragged", "rltrain.report",
    "rltrain.rewards.jail.limits", "rltrain.rewards.processes.output",
    "rltrain.rewards.registry", "rltrain.seeds", "rltrain.stacks", "rltrain.stop", "rltrain.storage",
    "rltrain.trainer.build", "rltrain.trainer.run", "rltrain.versions", "rltrain.view",
    "rltrain.workers.rollout.base", "rltrain.workers.rollout.hf",
]  # fmt: skip


def begun(name, told):
    """What ``python -m name --help`` does, and how it ends."""
    sys.argv = [name, "--help"]
    for module in {name, moved.home(name) or name}:
        sys.modules.pop(module, None)  # runpy warns of one that is imported already
    said = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:  # noqa: BLE001 - whatever it is
            code = repr(error)
    told.put((code, said.getvalue()))


def test_python_finds_a_command_by_an_old_name():
    process = subprocess.run([sys.executable, "-m", TYPED[0], "--help"], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("usage:")


@pytest.mark.parametrize("name", TYPED)
def test_a_command_is_found_by_the_name_that_people_type(name):
    """In a forked process: the interpreters and their imports took most of a minute."""
    preload()
    making = multiprocessing.get_context("forkserver")
    told = making.SimpleQueue()
    process = making.Process(target=begun, args=(name, told))
    process.start()
    code, said = told.get()
    process.join()
    assert code in (0, 2), said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", IMPORTED)
def test_a_module_is_one_module_by_both_names(name):
    now = moved.home(name)
    assert now
    module = importlib.import_module(name)
    assert module is importlib.import_module(now)
    assert (module.__name__, module.__spec__.name) == (now, now)


def test_every_old_name_leads_somewhere():
    for old, new in moved.MOVED.items():
        assert importlib.import_module(old) is importlib.import_module(new)
    with pytest.raises(ModuleNotFoundError, match=r"rltrain\.nothing"):
        importlib.import_module("rltrain.nothing")


def test_a_command_never_takes_the_place_of_a_function_of_its_name():
    import rltrain

    function = rltrain.evaluate
    for name in moved.PROGRAMS:
        with pytest.raises(ImportError, match=f"{name} is a function; the module of the command is rltrain.tools"):
            importlib.import_module(name)
        importlib.import_module(moved.PROGRAMS[name])
    assert callable(function)
    assert rltrain.evaluate is function
