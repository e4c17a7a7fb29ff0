"""How the process of a slot ends, what is left of all that it has started, and which calls are made again."""

import os
import signal
import textwrap
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from rltrain.base.plugin import load_plugin
from rltrain.slots.limits import Limits, descendants
from rltrain.slots.service import Service
from rltrain.slots.slot import Slot

TOOLS = """
    import asyncio, os, signal, subprocess, time

    from rltrain.slots.program import run_program

    def leave(file, command="exec sleep 60", code=None):
        process = subprocess.Popen(["sh", "-c", command], start_new_session=True)
        with open(file, "w") as opened: opened.write(str(process.pid))
        if code is not None: os._exit(code)

    def program():
        return run_program("import time; time.sleep(60)", seconds=50)

    def children(number):
        for _ in range(number): subprocess.run(["sh", "-c", "(sleep 0.1 &) ; exit 0"])
        process = subprocess.Popen(["sh", "-c", "exit 3"])
        time.sleep(0.5)
        return process.wait()

    def fork():
        if os.fork() == 0: time.sleep(60)
        os._exit(5)

    def echo(word):
        return word

    def note(file, number):
        with open(file, "a") as opened: opened.write(f"{number}\\n")

    def die(file, number):
        note(file, number)
        os.kill(os.getpid(), signal.SIGKILL)

    async def die_at_1(file, number):
        note(file, number)
        await asyncio.sleep(0.1)
        if number == 1: os.kill(os.getpid(), signal.SIGKILL)
        return number
"""
SERVICE = Service(partial(load_plugin, "my.tools"), "the tool", "my.timeout_s", "my.memory_limit_mb")


@pytest.fixture
def tools(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(textwrap.dedent(TOOLS))
    return lambda name: f"{file}:{name}"


@pytest.fixture
def slot():
    with Slot(SERVICE, Limits(timeout_s=20.0, memory_mb=2048, allow_code_execution=True)) as made:
        yield made


def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def becomes(check):
    deadline = time.monotonic() + 10
    while not (true := check()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


def test_a_process_in_a_session_of_its_own_ends_with_the_one_that_died(slot, tools, tmp_path):
    outcome = slot.call(tools("leave"), str(tmp_path / "pid"), "exec sleep 60", 3)
    assert outcome.error == "the tool's process ended with exit code 3"
    assert state(int((tmp_path / "pid").read_text())) in ("", "Z")


def test_programs_end_with_a_slot_whose_processes_were_killed(slot, tools):
    """Both at once: neither can end what is below it."""
    slot.prepare(tools("program"))
    calls = threading.Thread(target=slot.call, args=(tools("program"),), kwargs={"timeout_s": 3.0})
    calls.start()
    assert becomes(lambda: len(descendants(slot.pid)) > 1)
    below, pid = descendants(slot.pid), slot.pid
    for killed in (pid, below[0]):
        with suppress(ProcessLookupError):  # the second may have gone with the first
            os.kill(killed, signal.SIGKILL)
    assert becomes(lambda: all(state(each) in ("", "Z") for each in below))
    calls.join()
    assert slot.pid != pid


def test_what_outlives_its_slot_s_process_does_not_print_into_later_calls(slot, tools, tmp_path):
    """As what is in a session of its own does where the reaper was killed."""
    slot.call(tools("leave"), str(tmp_path / "pid"), "trap '' PIPE; while echo FLOOD; do :; done")
    os.kill(slot.pid, signal.SIGKILL)
    assert becomes(lambda: state(slot.pid) == "Z")
    slot.prepare(tools("echo"))
    slot.take_printed()
    assert slot.call(tools("echo"), "quiet").value == "quiet"
    assert slot.take_printed() == ""
    assert becomes(lambda: state(int((tmp_path / "pid").read_text())) in ("", "Z"))


def test_what_functions_leave_behind_is_reaped_and_exit_codes_are_theirs(slot, tools):
    assert slot.call(tools("children"), 10).value == 3
    assert becomes(lambda: len(descendants(slot.pid)) == 1)


def test_the_end_of_a_process_is_noticed_though_a_fork_has_its_connection(slot, tools):
    slot.prepare(tools("fork"))
    started = time.monotonic()
    assert slot.call(tools("fork")).error == "the tool's process ended with exit code 5"
    assert time.monotonic() - started < 10  # the deadline is 20


def test_an_import_that_somebody_kills_is_made_once_more(slot, tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(
        "import os, signal\n"
        "if not os.path.exists(f'{__file__}.seen'):\n"
        "    open(f'{__file__}.seen', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def echo(word): return word\n"
    )
    assert slot.call(f"{file}:echo", "a").value == "a"


@pytest.mark.parametrize(("may_repeat", "times"), [(True, 2), (False, 1)])
def test_a_call_is_made_twice_at_most_and_once_where_it_must_not_be_repeated(tools, tmp_path, may_repeat, times):
    file = tmp_path / "calls"
    with Slot(replace(SERVICE, may_repeat=may_repeat), Limits(timeout_s=20.0)) as slot:
        assert slot.call(tools("die"), str(file), 0).error == "the tool's process was killed by SIGKILL"
        assert file.read_text().split() == ["0"] * times
        file.write_text("")
        outcomes = slot.call_all(tools("die_at_1"), [(str(file), number) for number in range(3)])
    statuses = ["ok", "crashed", "ok"] if may_repeat else ["crashed"] * 3
    assert [outcome.status for outcome in outcomes] == statuses
    assert Counter(file.read_text().split()) == dict.fromkeys("012", times)
