"""``rltrain NAME``, ``python -m rltrain NAME`` and ``python -m rltrain.NAME`` run every command of the table."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain import commands
from rltrain.__main__ import _converters, main
from tests.forked import run_module

ROOT = Path(__file__).parent.parent
# The others import what their flags are made of.
LIGHT = [name for name in commands.COMMANDS if name not in ("doctor", "watch", "checkpoint", "agents try")]
MODULES = [f"rltrain.{name.replace(' ', '.')}" for name in commands.COMMANDS]


@pytest.mark.parametrize("name", [*MODULES, "rltrain.env_report", "rltrain.runtime.launch", "rltrain.main_ppo"])
def test_every_command_is_a_module(name):
    done = run_module(name, "--help")
    assert done.returncode in (0, 2), done.stderr
    assert "Traceback" not in done.stderr


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
    assert run_module(f"rltrain.{name}", "RUN") == (2, "", f"error: {commands.REMOVED[name]}\n")


def test_usage_and_missing_words_are_answered_before_imports_that_take_seconds():
    words = [["sweep"], ["average"], ["resolution"], ["evaluate"], *([*name.split(), "--help"] for name in LIGHT)]
    script = f"""
import sys; from rltrain.__main__ import main
for words in {words!r}:
    try: main(words)
    except SystemExit: pass
    assert not (heavy := {{"torch", "ray", "transformers"}} & set(sys.modules)), (words, heavy)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for said in (
        "nothing is swept",
        "required: OUT, MODEL",
        "model= is not given: the model to search for",
        "data= is not given",
    ):
        assert said in done.stderr
