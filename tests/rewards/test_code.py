"""Programs that a model wrote: their scores, and their restrictions."""

import json
import socket

import pytest

from rltrain.common.errors import RewardError
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.rewards.scorers.code import extract_code, same_text
from rltrain.runtime.slots.limits import descendants
from tests.clock import PATIENCE_S, eventually
from tests.faults.plug import alive

ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALL = {"inputs": [[1, 2], "3\n4"], "outputs": [3, "7"], "fn_name": "add"}
SUM = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def allowed():
    with ScoringSlot(timeout_s=PATIENCE_S, memory_limit_mb=1024, allow_code_execution=True) as slot:
        yield slot


@pytest.fixture(scope="module")
def brief():
    with ScoringSlot(timeout_s=2.0, memory_limit_mb=1024, allow_code_execution=True) as slot:
        yield slot


def run(slot, program, truth=ADD):
    score = slot.score("apps", f"Here it is:\n```python\n{program}\n```\nDone.", truth, {})
    assert score.status == "ok", score.error
    return score.value


def test_nothing_runs_unless_it_was_allowed():
    with ScoringSlot() as slot, pytest.raises(RewardError, match=r"reward\.allow_code_execution=True"):
        slot.score("apps", SUM, ADD, {})


@pytest.mark.parametrize(
    ("program", "truth", "score"),
    [
        (SUM, ADD, 1.0),
        (SUM, json.dumps(ADD), 1.0),
        ("print(3)", ADD, 0.5),
        (SUM + "\n1 / 0", ADD, 0.0),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", ADD, 1.0),
        ("import collections, heapq, itertools, bisect, math, re, functools, decimal\n" + SUM, ADD, 1.0),
        ("if __name__ == '__main__':\n    " + SUM, ADD, 1.0),
        ("def add(a, b):\n    print('noise')\n    return a + b", CALL, 1.0),
        ("class Solution:\n    def add(self, a: List[int], b) -> int:\n        return a + b", CALL, 1.0),
        ("def add(a, b): return a - b", CALL, 0.0),
        ("def add(a, b): return object()", CALL, 0.0),
        ("def add(a, b): return float('nan')", CALL, 0.0),
    ],
)
def test_the_share_of_tests_passed_is_the_score(allowed, program, truth, score):
    assert run(allowed, program, truth) == score


def test_a_scratch_file_is_fine_and_gone_for_the_next_test(allowed):
    program = (
        "import os\nassert not os.listdir('.')\nopen('notes', 'w').write('x')\nassert open('notes').read() == 'x'\n"
        + SUM
    )
    assert run(allowed, program) == 1.0


@pytest.mark.parametrize(
    "attempt",
    [
        "open({path!r}, 'w')",
        "import os; os.open({path!r}, os.O_CREAT | os.O_RDWR)",
        "import os; os.mkdir({path!r})",
        "import builtins, os; builtins.type = lambda x: int; open({path!r}, 'w')",
        "import os; os.symlink('/', 'root')",
        "open('../../../../../../../../..' + {path!r}, 'w')",
        "open('/etc/passwd')",
        "import os; os.posix = 1; os.path.realpath = lambda path: '.'; open({path!r}, 'w')",
        "class S(str):\n    startswith = lambda *_: True\nopen(S({path!r}), 'w')",
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "import os; os.system('touch ' + {path!r})",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.fork()",
        "import ctypes",
        "import os; os.kill(os.getppid(), 9)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "import sys; sys.modules['ctypes'].CDLL(None)",
        "import os; os.open({path!r}.rpartition('/')[2], os.O_CREAT | os.O_RDWR, dir_fd=os.open('/', os.O_RDONLY))",
        "import os; os.open('.', os.O_RDONLY)",
        "import gc; gc.get_objects()",
        "import gc; gc.get_referents(gc)",
        "import _posixshmem",
        "import importlib.machinery as m, os\n"
        "file = [os.path.dirname(os.__file__) + '/lib-dynload/' + n for n in os.listdir(os.path.dirname(os.__file__) + "
        "'/lib-dynload') if n.startswith('_ctypes.')][0]\n"
        "loader = m.ExtensionFileLoader('x.y', file)\n"
        "loader.create_module(m.ModuleSpec('x.' + '_ctypes', loader, origin=file))",
        # The hook's own frame, by the traceback of its refusal: its cells are replaced, and the kernel still refuses.
        "try: open('/etc/passwd')\n"
        "except PermissionError as error: trace = error.__traceback__\n"
        "while trace.tb_next: trace = trace.tb_next\n"
        "for name in ('may_read', 'may_write'):\n"
        "    trace.tb_frame.f_locals[name].__closure__[3].cell_contents = ('/',)\n"
        "open({path!r}, 'w')",
    ],
)
def test_files_sockets_and_processes_are_out_of_reach(allowed, tmp_path, attempt):
    path = tmp_path / "outside"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        line = attempt.format(path=str(path), port=server.getsockname()[1])
        program = f"caught = False\ntry:\n    exec({line!r})\nexcept BaseException: caught = True\nassert caught\n{SUM}"
        assert run(allowed, program, {"inputs": ["1 2"], "outputs": ["3"]}) == 1.0
        assert not path.exists()
        with pytest.raises(BlockingIOError):
            server.accept()


# A program without an end runs until its deadline, so that is early.
ENDLESS = [
    "while True: pass",
    "import signal; signal.pause()",
    "x = [0]\nwhile True: x += x",
    "while True: print('x' * 100000)",
    "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "9 ** 9 ** 9 ** 9",
    "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\nwhile True: pass",
    "import threading\nwhile True: threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
]
ENDING = [
    "x = 'x' * (4 << 30)",
    "open('big', 'wb').write(bytes(1 << 28))",
    "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "(" * 100000,
    "import os; os._exit(0)",
    "\x00",
    "\ud800",
]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("length", "program"), [*(("brief", each) for each in ENDLESS), *(("allowed", each) for each in ENDING)]
)
def test_a_program_that_misbehaves_leaves_nothing_running(request, length, program):
    slot = request.getfixturevalue(length)
    pid = slot.pid
    assert run(slot, program) == 0.0
    assert slot.pid == pid
    eventually(lambda: len(alive(descendants(pid))) == 1, "the slot's own process is alone")


def test_expected_outputs_are_not_in_the_program_s_reach(allowed):
    secret = "secret-expected-output"
    program = (
        "import sys\nframe, found = getattr(sys, '_getframe')(), 'none'\nwhile frame:\n"
        "    found = 'found' if 'outputs' in str(frame.f_locals) else found\n    frame = frame.f_back\nprint(found)"
    )
    assert run(allowed, program.replace("'outputs'", "'out' + 'puts'"), {"inputs": [""], "outputs": ["none"]}) == 1.0
    assert run(allowed, f"print('{secret}'[::-1])", {"inputs": [""], "outputs": [secret]}) == 0.0


def test_unit_tests_beyond_the_deadline_count_as_failed(brief):
    truth = {"inputs": ["1", *[""] * 50], "outputs": ["1", *["2"] * 50]}
    program = "import signal, sys\nline = sys.stdin.read()\nprint(line) if line else signal.pause()"
    score = brief.score("apps", f"```\n{program}\n```", truth, {})
    assert (score.status, score.extras) == ("ok", {"acc": 0.0})
    assert score.value <= 1 / 51


def test_the_last_block_is_the_program():
    assert extract_code("```python\n1\n```\nbetter:\n```python3\n2\n```").strip() == "2"
    assert extract_code("```\n1\n```").strip() == "1"
    assert extract_code("```python\ncut off").strip() == "cut off"
    assert extract_code("print(1)") == "print(1)"
    assert len(extract_code("x" * 10**6)) == 65_536
    extract_code("```" * 100_000)


def test_output_is_compared_word_by_word():
    assert same_text("1 2\n3\n\n", "1 2 3")
    assert same_text("0.33333333", "0.3333333333")
    assert not same_text("0.33", "0.3333333333")
    assert not same_text("1 2", "1 2 3")
    assert not same_text("10", "11")
    assert not same_text("9" * 100_000, "1.5")
