"""``rltrain NAME``, ``python -m rltrain NAME`` and ``python -m rltrain.NAME`` run every command of the table."""

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import pytest

from rltrain.__main__ import _converters, main
from rltrain.base import commands
from tests.ranks import preload

ROOT = Path(__file__).parent.parent
MODULES = [f"rltrain.{name.replace(' ', '.')}" for name in commands.COMMANDS]


def run_module(name, arguments, environment, results):
    """Put the exit code and the errors of ``python -m name ARGUMENTS`` into ``results``."""
    os.environ.clear()  # the fork server has the environment of the test that started it
    os.environ.update(environment)
    sys.argv = [name, *arguments]
    sys.modules.pop(commands.home(name) or name, None)  # runpy warns about a module that is already imported
    errors = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:  # noqa: BLE001 - the test shows it
            code = repr(error)
    results.put((code, errors.getvalue()))


def forked(name, *arguments):
    """Run a module in a forked process: interpreters and their imports would take most of a minute."""
    preload()
    context = multiprocessing.get_context("forkserver")
    results = context.SimpleQueue()
    process = context.Process(target=run_module, args=(name, arguments, dict(os.environ), results))
    process.start()
    result = results.get()
    process.join()
    return result


@pytest.mark.parametrize("name", [*MODULES, "rltrain.env_report", "rltrain.controller.launch", "rltrain.main_ppo"])
def test_every_command_is_a_module(name):
    code, errors = forked(name, "--help")
    assert code in (0, 2), errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("words", [["data"], *(["data", name] for name in _converters())])
def test_every_converter_has_a_help(words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])  # main changes it
    with contextlib.suppress(SystemExit):
        assert main([*words, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: rltrain {' '.join(words)} ")


@pytest.mark.parametrize("name", commands.REMOVED)
def test_a_removed_command_is_answered_with_its_replacement(name, capsys):
    assert main([name, "RUN"]) == 2
    assert capsys.readouterr().err == f"error: {commands.REMOVED[name]}\n"
    assert forked(f"rltrain.{name}", "RUN") == (2, f"error: {commands.REMOVED[name]}\n")
