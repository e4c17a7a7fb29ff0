"""Programs that a model wrote, run from a function in a slot."""

import textwrap
from functools import partial

import pytest

from rltrain.base.plugin import load_plugin
from rltrain.slots.limits import Limits
from rltrain.slots.service import Service
from rltrain.slots.slot import Slot

INTERPRETER = """
    from rltrain.slots.limits import current_limits
    from rltrain.slots.program import run_program

    def interpreter(code, stdin=""):
        if not current_limits().allow_code_execution:
            raise PermissionError("programs are not allowed")
        return run_program(code, stdin, seconds=2.0)
"""


@pytest.fixture
def run(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(textwrap.dedent(INTERPRETER))

    def run(*arguments, allow=True):
        service = Service(partial(load_plugin, "my.tools"), "the tool", "my.timeout_s", "my.memory_limit_mb")
        with Slot(service, Limits(timeout_s=20.0, allow_code_execution=allow)) as slot:
            return slot.call(f"{file}:interpreter", *arguments)

    return run


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * int(input()))", "42\n"),
        ("print(1 / 0)", ""),
        ("while True: pass", None),
        ("import socket; socket.socket()", ""),
        ("print(open('/etc/passwd').read())", ""),
    ],
)
def test_a_tool_may_run_programs_of_the_model_s(run, code, output):
    assert run(code, "7").value == output


def test_a_tool_is_told_whether_it_may(run):
    outcome = run("print(1)", allow=False)
    assert outcome.status == "crashed"
    assert "programs are not allowed" in outcome.error
