"""Functions other than scorers, such as tools, in a slot: results, deadlines, repeated calls, and remaining processes.
Hangs, deaths and floods: tests/rewards/test_slot.py."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

import rltrain.runtime.slots
from rltrain.common.errors import ConfigError
from rltrain.common.plugin import load_plugin
from rltrain.runtime.slots.limits import PROGRAMS_FOLDER, Limits
from rltrain.runtime.slots.proc import descendants
from rltrain.runtime.slots.process import run_within
from rltrain.runtime.slots.service import Service
from rltrain.runtime.slots.slot import Slot
from tests.clock import PATIENCE_S, eventually
from tests.faults.plug import alive, ended

TOOLS = """
    import asyncio, os, signal, subprocess, sys
    from rltrain.runtime.slots.program import run_program

    history = []

    def search(arguments):
        print("searching for", arguments["query"])
        return {"hits": [arguments["query"].upper(), 1.5, None], "pages": {"1": True}}

    def remember(word):
        history.append(word)
        if word == "hang": signal.pause()
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

    def echo(word, interrupt=0):
        if interrupt: os.kill(interrupt, signal.SIGALRM)
        return word

    def imported():
        return sorted({"torch", "ray", "numpy", "rltrain.rewards"} & set(sys.modules))

    def leave(file, command="exec sleep inf", code=None):
        process = subprocess.Popen(["sh", "-c", command], start_new_session=True)
        with open(file, "w") as opened: opened.write(str(process.pid))
        if code is not None: os._exit(code)

    def program(file):
        if os.path.exists(file): return "again"
        open(file, "w").close()
        return run_program("import signal; signal.pause()", seconds=PATIENCE)

    def children(number):
        for _ in range(number): subprocess.run(["sh", "-c", "(sleep 0.1 &) ; exit 0"])
        return subprocess.Popen(["sh", "-c", "exit 3"]).wait()

    def fork():
        if os.fork() == 0: signal.pause()
        os._exit(5)

    def note(file, number):
        with open(file, "a") as opened: opened.write(f"{number}\\n")

    def die(file, number):
        note(file, number)
        os.kill(os.getpid(), signal.SIGKILL)

    async def die_at_1(file, number):
        note(file, number)
        for _ in range(10): await asyncio.sleep(0)  # the others note theirs
        if number == 1: os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0)
        return number
"""


@pytest.fixture
def tools(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(textwrap.dedent(TOOLS).replace("PATIENCE", str(PATIENCE_S)))
    return lambda name: f"{file}:{name}"


@pytest.fixture
def make():
    made = []

    def slot(timeout_s=PATIENCE_S, **keys):
        service = Service(partial(load_plugin, "my.tools"), "the tool", "my.timeout_s", "my.memory_limit_mb", **keys)
        made.append(Slot(service, Limits(timeout_s, memory_mb=2048, allow_code_execution=True)))
        return made[-1]

    yield slot
    for each in made:
        each.close()


@pytest.fixture
def slot(make):
    return make()


def test_the_example_in_the_docs_of_the_room_runs(tools, tmp_path, monkeypatch):
    """Authors of a tool loop may copy it."""
    example = re.search(r"\n\n(    from functools.*?)\n\n- ", rltrain.runtime.slots.__doc__, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(textwrap.dedent(example), names)
    assert names["text"] == {"hits": ["CAPITAL OF FRANCE", 1.5, None], "pages": {"1": True}}
    assert names["log"] == "searching for capital of France\n"


def test_a_result_that_is_no_json_or_too_long_is_rejected_alone_with_the_reason(slot, tools):
    slot.prepare(tools("long"))
    pid = slot.pid
    outcome = slot.call(tools("no_json"))
    assert (outcome.status, outcome.value) == ("rejected", None)
    assert "the tool returned set, which is not JSON" in outcome.error
    assert "the tool returned 2,000,0" in slot.call(tools("long"), 2_000_000).error
    assert slot.call(tools("long"), 1_000_000).value == "x" * 1_000_000
    outcomes = slot.call_all(tools("page"), [(100_000,)] * 16)
    assert [outcome.value for outcome in outcomes] == ["x" * 100_000] * 16
    outcomes = slot.call_all(tools("page"), [(10,)] * 15 + [(2_000_000,)])
    assert [outcome.status for outcome in outcomes] == ["ok"] * 15 + ["rejected"]
    assert slot.call(tools("deep"), 100).status == "ok"
    assert slot.call(tools("deep"), 50_000).error == "the tool returned a too deeply nested value"
    assert slot.call_all(tools("page"), []) == []
    assert slot.pid == pid
    assert slot.call(tools("imported")).value == [], "the process has nothing heavy"


def test_the_late_reply_of_an_interrupted_call_is_not_the_next_ones(slot, tools):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        slot.prepare(tools("echo"))
        with pytest.raises(KeyboardInterrupt):
            slot.call(tools("echo"), "first", os.getpid())
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [slot.call(tools("echo"), word).value for word in ("second", "third")] == ["second", "third"]


def test_a_process_keeps_its_state_until_a_call_is_late(slot, tools):
    """A caller that keeps state in the process notices by the process id that it is lost."""
    assert [outcome.value for outcome in slot.call_all(tools("remember"), ["a", "b"])] == [["a"], ["a", "b"]]
    pid = slot.pid
    with pytest.raises(ConfigError, match=r"my\.tools=.*tools\.py:nothing: the file has no function 'nothing'"):
        slot.call(tools("nothing"))
    assert slot.call(tools("remember"), "c").value == ["a", "b", "c"]
    assert slot.pid == pid
    # A call may have another deadline than the limits say.
    assert slot.call(tools("remember"), "hang", timeout_s=0.3).error == "no result after 0.3 s (my.timeout_s)"
    assert slot.pid != pid
    assert slot.call(tools("remember"), "d").value == ["d"]


def test_a_process_in_another_session_ends_with_the_one_that_died(slot, tools, tmp_path):
    outcome = slot.call(tools("leave"), str(tmp_path / "pid"), "exec sleep inf", 3)
    assert outcome.error == "the tool's process ended with exit code 3"
    ended([int((tmp_path / "pid").read_text())])


def test_programs_end_with_a_slot_whose_processes_were_killed(slot, tools, tmp_path):
    """Kill the subreaper and its child at the same time, so neither can end the remaining descendants."""
    slot.prepare(tools("program"))
    pid = slot.pid
    with ThreadPoolExecutor(1) as threads:
        outcome = threads.submit(slot.call, tools("program"), str(tmp_path / "once"))
        below = eventually(lambda: [*descendants(pid)][1:] and descendants(pid), "a program below the process")
        for killed in (pid, below[0]):
            with suppress(ProcessLookupError):  # the second may have gone with the first
                os.kill(killed, signal.SIGKILL)
        assert outcome.result().value == "again"
    ended(below)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_files_of_programs_are_removed_with_a_process_that_was_killed(slot, tools, tmp_path, number):
    slot.prepare(tools("program"))
    variables = Path(f"/proc/{slot.pid}/environ").read_bytes().split(b"\0")
    folder = Path(next(v.partition(b"=")[2] for v in variables if v.startswith(PROGRAMS_FOLDER.encode())).decode())
    with ThreadPoolExecutor(1) as threads:
        outcome = threads.submit(slot.call, tools("program"), str(tmp_path / "once"))
        eventually(lambda: list(folder.glob("*/work")), "a folder of a program")
        os.kill(slot.pid, number)
        assert outcome.result().value == "again"
    assert not folder.exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="capabilities of Linux")
def test_folders_that_their_owner_may_not_list_are_removed(tmp_path):
    """This includes root without the capabilities that allow listing them."""
    code = """
import os, sys
from rltrain.runtime.slots.jail import drop_capabilities
from rltrain.runtime.slots.limits import remove_folder
drop_capabilities()
os.makedirs(sys.argv[1] + "/work")
for place in ("/work/a", "/work/a/b"):
    os.mkdir(sys.argv[1] + place, 0o300)
    open(sys.argv[1] + place + "/file", "w").close()
remove_folder(sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "folder")], check=True)
    assert not (tmp_path / "folder").exists()


def test_a_process_that_outlives_its_slots_process_does_not_print_into_later_calls(slot, tools, tmp_path):
    """Such a process is in another session, and the subreaper was killed."""
    slot.call(tools("leave"), str(tmp_path / "pid"), "trap '' PIPE; while echo FLOOD; do :; done")
    os.kill(slot.pid, signal.SIGKILL)
    ended([slot.pid])
    slot.prepare(tools("echo"))
    slot.take_printed()
    assert slot.call(tools("echo"), "quiet").value == "quiet"
    assert slot.take_printed() == ""
    ended([int((tmp_path / "pid").read_text())])


def test_orphans_of_functions_are_reaped_and_exit_codes_are_theirs(slot, tools):
    assert slot.call(tools("children"), 10).value == 3
    eventually(lambda: len(descendants(slot.pid)) == 1, "no zombie is left")


def test_the_end_of_a_process_is_noticed_though_a_fork_has_its_connection(slot, tools):
    assert slot.call(tools("fork")).error == "the tool's process ended with exit code 5"


@pytest.mark.parametrize(("may_repeat", "times"), [(True, 2), (False, 1)])
def test_a_call_is_made_twice_at_most_and_once_where_it_must_not_be_repeated(make, tools, tmp_path, may_repeat, times):
    file, slot = tmp_path / "calls", make(may_repeat=may_repeat)
    assert slot.call(tools("die"), str(file), 0).error == "the tool's process was killed by SIGKILL"
    assert file.read_text().split() == ["0"] * times
    file.write_text("")
    outcomes = slot.call_all(tools("die_at_1"), [(str(file), number) for number in range(3)])
    statuses = ["ok", "crashed", "ok"] if may_repeat else ["crashed"] * 3
    assert [outcome.status for outcome in outcomes] == statuses
    assert Counter(file.read_text().split()) == dict.fromkeys("012", times)


@pytest.mark.parametrize(("rest", "seconds", "code"), [("exit 3", PATIENCE_S, 3), ("sleep 1000", 1, None)])
def test_a_command_leaves_no_process_after_its_end_or_its_time(rest, seconds, code):
    mark = f"MARK={uuid4()}"  # in the environment of all its processes
    environment = os.environ | dict([mark.split("=")])
    assert run_within(seconds, ["sh", "-c", f"sleep 1000 & {rest}"], environment=environment) == code
    eventually(lambda: not alive(with_variable(mark)), "the end of all processes")


def with_variable(text: str) -> list[int]:
    """Return the processes of this machine with this variable."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [int(folder.name)] if text.encode() in (folder / "environ").read_bytes().split(b"\0") else []
    return found
