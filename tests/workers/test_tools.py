"""Tools at work: many calls at once, each in a process that can be killed."""

import time

import pytest

from rltrain.base.errors import ConfigError
from rltrain.data.turns.calls import Call
from rltrain.slots.limits import Limits
from rltrain.workers.rollout.tools import Tools

FILE = '''
import os, time


def echo(word: str) -> str:
    """Say it again.

    Args:
        word: Any.
    """
    print("noise")
    return word


def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def fail(why: str) -> str:
    """Raise.

    Args:
        why: The words.
    """
    raise ValueError(why)


def leave() -> str:
    """End the process."""
    os._exit(3)


def flood() -> str:
    """Return more than anybody reads."""
    return "x" * (64 << 20)
'''


@pytest.fixture
def tools(tmp_path):
    (tmp_path / "tools.py").write_text(FILE)
    return Tools(str(tmp_path / "tools.py"), 4, Limits(timeout_s=1.5))


def answers(tools, number, within_s=30.0):
    found, end = {}, time.monotonic() + within_s
    while len(found) < number and time.monotonic() < end:
        found |= dict(tools.answered(0.1))
    return found


def test_calls_run_beside_each_other_and_a_turn_has_all_its_results_in_their_order(tools):
    tools.ask((0, 0), [Call("echo", {"word": "warm"})])
    answers(tools, 1)
    for sample in range(4):
        tools.ask((1, sample), [Call("nap", {"seconds": 0.5}), Call("echo", {"word": str(sample)})])
    found = answers(tools, 4)
    assert {key: [result.text for result in results] for key, results in found.items()} == {
        (1, sample): ["awake", str(sample)] for sample in range(4)
    }
    assert all(result.status == "ok" for results in found.values() for result in results)
    assert all(results[0].seconds >= 0.5 for results in found.values())


def test_what_goes_wrong_in_a_tool_is_text_for_the_model(tools):
    bad = {
        "raises": Call("fail", {"why": "no such city"}),
        "arguments": Call("echo", {"wrod": "x"}),
        "late": Call("nap", {"seconds": 60.0}),
        "dies": Call("leave", {}),
        "long": Call("flood", {}),
    }
    for number, call in enumerate(bad.values()):
        tools.ask((number, 0), [call, Call("echo", {"word": "still here"})])
    found = answers(tools, len(bad))
    outcomes = {name: found[number, 0] for number, name in enumerate(bad)}
    assert all(results[1].text == "still here" for results in outcomes.values())
    said = {name: (results[0].status, results[0].text) for name, results in outcomes.items()}
    assert said["raises"] == ("error", "Error: ValueError: no such city")
    assert said["arguments"][0] == "error"
    assert "unexpected keyword argument 'wrod'" in said["arguments"][1]
    assert said["late"] == (
        "timeout",
        "Error: no result after 1.5 s (actor_rollout_ref.rollout.multi_turn.tool_timeout_s)",
    )
    assert said["dies"][0] == "died"
    assert said["long"][0] == "error"


def test_what_nobody_waits_for_any_more_is_not_told(tools):
    tools.ask((0, 0), [Call("nap", {"seconds": 0.3})])
    tools.forget()
    tools.ask((1, 0), [Call("nap", {"seconds": 0.6})])
    assert list(answers(tools, 1)) == [(1, 0)]


def test_a_late_result_is_not_that_of_the_next_call_of_the_same_answer(tools):
    """Places and samples begin anew in every step."""
    tools.ask((0, 0), [Call("echo", {"word": "warm"})])
    answers(tools, 1)
    tools.ask((0, 0), [Call("nap", {"seconds": 0.4})])
    time.sleep(0.1)
    tools.forget()
    tools.ask((0, 0), [Call("echo", {"word": "new"}), Call("nap", {"seconds": 0.8})])
    assert [result.text for result in answers(tools, 1)[0, 0]] == ["new", "awake"]


def test_a_turn_without_a_call_to_run_is_answered_at_once(tools):
    tools.ask((2, 1), [])
    assert tools.answered(5.0) == [((2, 1), [])]


def test_tools_that_cannot_be_imported_end_the_wait(tmp_path):
    (tmp_path / "broken.py").write_text("import nowhere")
    tools = Tools(str(tmp_path / "broken.py"), 1, Limits(timeout_s=1.5))
    tools.ask((0, 0), [Call("echo", {"word": "x"})])
    with pytest.raises(ConfigError, match="cannot be imported"):
        answers(tools, 1)
