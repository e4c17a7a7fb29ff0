"""``rltrain NAME``, ``python -m rltrain NAME`` and ``python -m rltrain.NAME`` run every command of the table."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain import commands
from rltrain.__main__ import main
from tests.forked import run_module

ROOT = Path(__file__).parent.parent
# The others import what their flags are made of.
LIGHT = [name for name in commands.COMMANDS if name not in ("doctor", "watch", "checkpoint", "agents try")]
MODULES = [f"rltrain.{name.replace(' ', '.')}" for name in commands.COMMANDS]


@pytest.fixture
def own_argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", [])  # main changes it


@pytest.mark.parametrize("name", [*MODULES, "rltrain.env_report", "rltrain.runtime.launch", "rltrain.main_ppo"])
def test_every_command_is_a_module(name):
    done = run_module(name, "--help")
    # The launch of a node takes --help for an unknown argument.
    assert done.returncode == 2 * (name == "rltrain.runtime.launch"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["data"], *(["data", name] for name in commands.converters())])
@pytest.mark.usefixtures("own_argv")
def test_every_converter_has_a_help(words, capsys):
    with contextlib.suppress(SystemExit):
        assert main([*words, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: rltrain {' '.join(words)} ")


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


@pytest.mark.parametrize("words", [["--help"], ["help"], *([*name.split(), "--help"] for name in LIGHT)])
@pytest.mark.usefixtures("own_argv")
def test_helps_begin_with_what_was_typed_and_have_no_marks(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        assert main(words) == 0
    text = capsys.readouterr().out
    name = " ".join(words[:-1])
    assert re.match(rf"usage: rltrain {name or 'COMMAND'}\b", text)
    assert "``" not in text
    assert "rltrain.main_ppo" not in text
    with contextlib.suppress(SystemExit):
        assert main(["help", *words[:-1]]) == 0
    assert capsys.readouterr().out == text


def test_tab_completes_commands_and_keys():
    script = """
source <(python -m rltrain completion)
complete -p rltrain
try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _rltrain 2>/dev/null; echo "${COMPREPLY[*]}"; }
try rltrain repo
try rltrain train a 1 2 3 4 5 6 7 8 data.train_b
try rltrain checkpoint ""
try rltrain help rewa
try rltrain train data.train_files = train
try rltrain report RU
"""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.stdout.splitlines() == [
        "complete -o default -F _rltrain rltrain", "report", "data.train_batch_size=", "export thin verify", "rewards",
        "", "",
    ], done.stderr  # fmt: skip
