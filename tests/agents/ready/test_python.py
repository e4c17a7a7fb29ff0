"""The Python interpreter as a tool: its replies, the conditions under which it runs, and what it cannot access."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from rltrain.agents.ready.python import python
from rltrain.agents.toolbox import toolbox_of
from rltrain.common.errors import ConfigError
from rltrain.common.plugin import load_plugin
from rltrain.config.load import load_config
from rltrain.runtime.slots.limits import Limits, descendants, impose
from rltrain.runtime.slots.service import Service
from rltrain.runtime.slots.slot import Slot
from tests.clock import PATIENCE_S, eventually

PLACE = "rltrain.agents.ready.python"
TURNS = "actor_rollout_ref.rollout.multi_turn."
IN_A_FILE = "from rltrain import tool\nfrom rltrain.agents.ready.python import python\ntool(python)\n"


def slot(**limits):
    return Slot(Service(partial(load_plugin, "tools"), "the tool", "timeout", "memory"), Limits(**limits))


@pytest.fixture(scope="module")
def allowed():
    with slot(timeout_s=PATIENCE_S, allow_code_execution=True) as open_slot:
        yield open_slot


def told(open_slot, code):
    outcome = open_slot.call(f"{PLACE}:python", code)
    assert outcome.status == "ok", outcome.error
    return outcome.value


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print(1)\nprint('\u00e9')", "1\n\u00e9"),
        ("x = 6\nx * 7", "42"),
        ("x = 1", "(The program printed nothing.)"),
        ("```python\nprint({'a': 1})\n```", "{'a': 1}"),
        ("print('before')\nexit()", "before"),
        ("print('\\ud800')", "?"),
        ("import os\nos._exit(5)", "Error: the program has ended with exit code 5."),
        ("x = (", "  File \"answer.py\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed"),
        ("'\x00'", "SyntaxError: source code string cannot contain null bytes"),
        ("#" * 70_000, "Error: a program has at most 65,536 characters."),
    ],
)
def test_program_output_as_in_a_notebook(allowed, code, words):
    assert told(allowed, code) == words


def test_an_error_is_shown_in_the_lines_of_the_program_alone(allowed):
    text = told(allowed, "def half(n):\n    return n / 0\n\nprint('a')\nhalf(2)")
    assert text.startswith(
        'a\nTraceback (most recent call last):\n  File "answer.py", line 5, in <module>\n    half(2)'
    )
    assert '  File "answer.py", line 2, in half\n    return n / 0' in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert text.count("  File ") == 2


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "open('/tmp/out', 'w')",
        "import socket\nsocket.create_connection(('127.0.0.1', 1))",
        "import subprocess\nsubprocess.run(['ls'])",
        "import os\nos.kill(os.getppid(), 9)",
    ],
)
def test_files_sockets_and_processes_are_out_of_reach(allowed, code):
    text = told(allowed, code)
    assert text.splitlines()[-1].startswith("PermissionError: ")
    assert "jail.py" not in text


@pytest.fixture
def programs_may_run():
    """Allow programs in this process."""
    impose(Limits(PATIENCE_S, memory_mb=0, allow_code_execution=True))
    yield
    impose(Limits(memory_mb=0))


def test_programs_of_many_trajectories_run_beside_each_other(programs_may_run):
    """Each of eight programs runs until all have started."""
    below, most = set(descendants(os.getpid())), []

    def are_there():
        most.append(len(set(descendants(os.getpid())) - below))
        return most[-1] >= 8

    with ThreadPoolExecutor(8) as threads:
        told = [threads.submit(python, f"import signal\nsignal.pause()\n{number}") for number in range(8)]
        eventually(are_there, "eight programs")
        for pid in set(descendants(os.getpid())) - below:
            os.kill(pid, signal.SIGKILL)
    assert all(each.result().startswith("Error: the program") for each in told)
    assert set(descendants(os.getpid())) <= below


def test_output_before_a_timeout_is_returned():
    with slot(timeout_s=2.0, allow_code_execution=True) as open_slot:
        assert told(open_slot, "print('a')\nwhile True:\n    pass") == "a\nError: the program was stopped after 1.6 s."
        assert len(told(open_slot, "while True:\n    print('x' * 1000)")) <= 100_100


def test_nothing_runs_unless_it_was_allowed(tmp_path):
    with slot(timeout_s=5.0) as open_slot:
        outcome = open_slot.call(f"{PLACE}:python", "1")
    assert (outcome.status, outcome.kind) == ("crashed", "ConfigError")
    assert "allow_code_execution=False" in outcome.error
    (tmp_path / "tools.py").write_text(IN_A_FILE)
    for place in (PLACE, str(tmp_path / "tools.py")):
        keys = [f"{TURNS}function_tool_path={place}"]
        with pytest.raises(ConfigError, match=r"allow_code_execution=True, or remove the tool") as refusal:
            toolbox_of(load_config(keys).config.actor_rollout_ref.rollout.multi_turn)
        assert f"function_tool_path={place}: the tool 'python' runs programs" in str(refusal.value)
        allowed = load_config([*keys, f"{TURNS}allow_code_execution=True"]).config
        (schema,) = toolbox_of(allowed.actor_rollout_ref.rollout.multi_turn).schemas
        assert list(schema["function"]["parameters"]["properties"]) == ["code"]
