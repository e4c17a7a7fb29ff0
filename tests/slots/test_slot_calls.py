"""Functions that are no scorers, such as tools, in a slot: what their callers get back."""

import os
import re
import signal
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import rltrain.slots
from rltrain.base.errors import ConfigError
from rltrain.base.plugin import load_plugin
from rltrain.slots.limits import Limits
from rltrain.slots.service import Outcome, Service
from rltrain.slots.slot import Slot

TOOLS = """
    import asyncio, os, sys, time

    history = []

    def search(arguments):
        print("searching for", arguments["query"])
        return {"hits": [arguments["query"].upper(), 1.5, None], "pages": {"1": True}}

    def remember(word):
        history.append(word)
        if word == "hang": time.sleep(60)
        if word == "die": os._exit(3)
        if word == "eat": return len(bytearray(3 << 30))
        if word == "fail": return {}["no such page"]
        return list(history)

    def no_json():
        return {1, 2}

    def long(number):
        return "x" * number

    async def page(number):
        return "x" * number

    def deep(number):
        sys.setrecursionlimit(10**6)
        nested = []
        for _ in range(number): nested = [nested]
        return nested

    def echo(word, seconds=0):
        time.sleep(seconds)
        return word

    def imported():
        return sorted({"torch", "ray", "numpy", "rltrain.rewards"} & set(sys.modules))

    def meet(number):
        # returns once three calls are under way
        here = os.path.dirname(__file__)
        open(f"{here}/{number}.here", "w").close()
        while sum(name.endswith(".here") for name in os.listdir(here)) < 3: time.sleep(0.01)
        return 3

    async def fetch(page):
        await asyncio.sleep(60 if page == 3 else 0.3)
        return 10 // (page - 1)
"""


@pytest.fixture
def tools(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(textwrap.dedent(TOOLS))
    return lambda name: f"{file}:{name}"


@pytest.fixture
def slot():
    service = Service(partial(load_plugin, "my.tools"), "the tool", "my.timeout_s", "my.memory_limit_mb")
    with Slot(service, Limits(timeout_s=1.5, memory_mb=2048)) as made:
        yield made


def test_the_example_in_the_docs_of_the_room_runs(tools, tmp_path, monkeypatch):
    """So that the author of a tool loop can copy it."""
    example = re.search(r"\n\n(    from functools.*?)\n\n- ", rltrain.slots.__doc__, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(textwrap.dedent(example), names)
    assert names["text"] == {"hits": ["CAPITAL OF FRANCE", 1.5, None], "pages": {"1": True}}
    assert names["log"] == "searching for capital of France\n"


def test_what_is_no_json_or_too_long_is_rejected_with_the_reason(slot, tools):
    outcome = slot.call(tools("no_json"))
    assert (outcome.status, outcome.value) == ("rejected", None)
    assert "the tool returned set, which is not JSON" in outcome.error
    pid = slot.pid
    assert "the tool returned 2,000,0" in slot.call(tools("long"), 2_000_000).error
    assert slot.call(tools("long"), 1_000_000).value == "x" * 1_000_000
    assert slot.pid == pid


def test_a_result_that_is_too_long_is_rejected_alone(slot, tools):
    outcomes = slot.call_all(tools("page"), [(100_000,)] * 16)
    assert [outcome.value for outcome in outcomes] == ["x" * 100_000] * 16
    outcomes = slot.call_all(tools("page"), [(10,)] * 15 + [(2_000_000,)])
    assert [outcome.status for outcome in outcomes] == ["ok"] * 15 + ["rejected"]


def test_a_result_that_is_nested_too_deeply_is_rejected(slot, tools):
    assert slot.call(tools("deep"), 100).status == "ok"
    pid = slot.pid
    assert slot.call(tools("deep"), 50_000).error == "the tool returned what is nested too deeply"
    assert slot.pid == pid


def test_a_reply_that_an_interrupt_left_behind_is_not_the_next_one_s(slot, tools):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        slot.prepare(tools("echo"))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            slot.call(tools("echo"), "first", 0.5)
    finally:
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.5)
    assert [slot.call(tools("echo"), word).value for word in ("second", "third")] == ["second", "third"]


@pytest.mark.parametrize(
    ("word", "status", "said"),
    [
        ("hang", "timeout", "no result after 1.5 s (my.timeout_s)"),
        ("die", "crashed", "the tool's process ended with exit code 3"),
        ("eat", "crashed", "more memory than my.memory_limit_mb allows"),
        ("fail", "crashed", "KeyError: 'no such page'"),
    ],
)
def test_a_call_that_ends_the_process_fails_alone_and_with_its_key(slot, tools, word, status, said):
    assert slot.call(tools("remember"), "a").value == ["a"]
    assert slot.call(tools("remember"), "b").value == ["a", "b"]
    pid = slot.pid
    outcome = slot.call(tools("remember"), word)
    assert outcome.status == status
    assert said in outcome.error
    assert "rltrain/slots" not in outcome.error
    # Whoever keeps something in the process sees by its id that it is gone.
    lost = [] if slot.pid != pid else ["a", "b", word]
    assert (slot.pid == pid) == (word == "fail")
    assert slot.call(tools("remember"), "c").value == [*lost, "c"]


def test_a_process_that_somebody_kills_between_calls_costs_none(slot, tools):
    assert slot.call(tools("remember"), "a").value == ["a"]
    os.kill(slot.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert slot.call(tools("remember"), "b") == Outcome("ok", ["b"])
    assert "the tool's process was killed by SIGKILL\nbetween two calls" in slot.take_printed()


def test_a_call_may_have_a_deadline_of_its_own(slot, tools):
    started = time.monotonic()
    slot.prepare(tools("remember"))
    assert slot.call(tools("remember"), "hang", timeout_s=0.3).error == "no result after 0.3 s (my.timeout_s)"
    assert time.monotonic() - started < 20  # it would sleep for a minute


def test_calls_of_an_async_function_are_under_way_at_once(slot, tools):
    assert slot.prepare(tools("fetch"))
    started = time.monotonic()
    outcomes = slot.call_all(tools("fetch"), [(page,) for page in range(30)])
    assert time.monotonic() - started < 8  # one after the other they would take 10
    assert [outcome.status for outcome in outcomes] == [
        {1: "crashed", 3: "timeout"}.get(page, "ok") for page in range(30)
    ]
    assert outcomes[6].value == 2
    assert not slot.prepare(tools("remember"))
    assert [outcome.value for outcome in slot.call_all(tools("remember"), ["a", "b"])] == [["a"], ["a", "b"]]
    assert slot.call_all(tools("fetch"), []) == []


def test_a_tool_that_is_not_there_is_an_error_of_its_key(slot, tools):
    with pytest.raises(ConfigError, match=r"my\.tools=.*tools\.py:nothing: the file has no function 'nothing'"):
        slot.call(tools("nothing"))
    assert slot.call(tools("remember"), "a").status == "ok"


def test_the_process_begins_with_nothing_heavy(slot, tools):
    assert slot.call(tools("imported")).value == []


def test_slots_of_several_threads_work_at_once(tools):
    """As a tool loop needs it: each conversation's call has a slot and a thread."""
    service = Service(partial(load_plugin, "my.tools"), "the tool", "my.timeout_s", "my.memory_limit_mb")

    def call(number):
        with Slot(service, Limits(timeout_s=60.0)) as slot:
            return slot.call(tools("meet"), number, timeout_s=30.0).value

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(call, range(3))) == [3, 3, 3]
