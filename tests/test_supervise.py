"""The supervisor with commands that end in all possible ways. Tests with real runs are in tests/faults."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from rltrain.common.attempt import ATTEMPT
from rltrain.runtime.launch.supervise import Attempt, crash_loop, stalled
from tests.clock import PATIENCE_S, eventually

# A run as the supervisor sees it: it tells where it is, has metrics, and ends as `ends` says for each of its starts.
RUN = f"""
import json, os, pathlib, signal, sys
folder, ends = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
starts = folder / "starts"
number = len(starts.read_text()) if starts.exists() else 0
starts.open("a").write("x")
def tell(**facts):
    with open(os.environ["{ATTEMPT}"], "a") as told:
        told.write(json.dumps(facts) + "\\n")
def heard(signum, frame):
    (folder / f"heard_{{signal.Signals(signum).name}}").touch()
    if signum != signal.SIGUSR1:
        sys.exit(130 if signum == signal.SIGINT else 75)
end = ends[min(number, len(ends) - 1)]
for each in (signal.SIGTERM, signal.SIGINT, *([] if end.get("deaf") else [signal.SIGUSR1])):
    signal.signal(each, heard)
tell(pid=os.getpid(), **({{}} if end.get("early") else {{"folder": str(folder)}}))
(folder / "metrics.jsonl").write_text(json.dumps({{"step": end.get("step", 0), "x": 1.5}}) + "\\n" + '{{"step": 9')
(folder / f"up_{{number}}").touch()
if "error" in end:
    tell(error=end["error"].format(pid=os.getpid()), passing=end.get("passing", False))
if "signal" in end:
    signal.signal(end["signal"], signal.SIG_DFL) if end["signal"] != 9 else None
    os.kill(os.getpid(), end["signal"])
if not end.get("silent"):
    tell(ended=end.get("code", 0))
if end.get("sleeps"):
    while True:
        signal.pause()
sys.exit(end.get("code", 0))
"""


@pytest.fixture
def supervise(tmp_path):
    """supervise(ends, *options, shell=False): start a supervisor of a run with these ends; it is killed after
    the test."""
    (tmp_path / "run.py").write_text(RUN)
    started = []

    def start(ends, *options, before=()):
        command = [*before, sys.executable, str(tmp_path / "run.py"), str(tmp_path), json.dumps(ends)]
        words = [sys.executable, "-m", "rltrain.supervise", "--wait-s", "0", *options, "--", *command]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_signals)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def _hear_signals():
    """Reset signals: processes started in the background of a script ignore SIGINT, and with nohup SIGHUP."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def ended(process):
    said = process.communicate(timeout=PATIENCE_S)[1]
    return process.returncode, said


def attempts(folder):
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


@pytest.mark.smoke("The supervisor restarts a run until it is done")
@pytest.mark.fault("Under the supervisor a run that was killed, or ended with exit code 75, goes on by itself")
def test_it_runs_again_what_may_be_run_again_until_it_ends(supervise, tmp_path):
    ends = [{"code": 75, "step": 3, "error": "a worker died.\nmore"}, {"signal": 9, "step": 5}, {"signal": 11}, {}]
    code, said = ended(supervise(ends))
    assert code == 0
    lines = attempts(tmp_path)
    assert [(line["attempt"], line["exit_code"], line["step"], line["cause"]) for line in lines] == [
        (1, 75, 3, "a worker died."), (2, 137, 5, "killed by SIGKILL"), (3, 139, 0, "killed by SIGSEGV"), (4, 0, 0, ""),
    ]  # fmt: skip
    told = [line.partition("supervise: ")[2] for line in said.splitlines()]
    end = r"attempt 1 ended with exit code 75 after \d+ s at step 3 \(newest checkpoint: none\): a worker died\. \| "
    ended_first = rf"{end}again in 0 s"
    assert re.fullmatch(ended_first, told[0])
    assert told[3].startswith("attempt 4 finished")
    assert len(told) == 4


@pytest.mark.parametrize("code", [1, 2, 70, 74, 130])
def test_what_would_end_the_same_way_is_not_run_again(supervise, tmp_path, code):
    assert ended(supervise([{"code": code}]))[0] == code
    assert len(attempts(tmp_path)) == 1
    assert attempts(tmp_path)[0]["then"] == "stopped: a restart would not help"


@pytest.mark.fault("A run that ends again and again by the same cause without a new checkpoint is not started for ever")
def test_the_same_end_without_a_new_checkpoint_stops_with_its_code(supervise, tmp_path):
    looping = {"code": 75, "step": 7, "error": "rank 0 (pid {pid}) died"}
    code, said = ended(supervise([{**looping, "error": "another"}, looping, {**looping, "step": 8}], "--give-up", "3"))
    assert code == 75
    assert [line["step"] for line in attempts(tmp_path)] == [7, 7, 8, 8]
    assert "ended 3 times with the same cause and no new checkpoint" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "code", "stopped"),
    [
        ("exit 75", 75, "ended 5 times with the same cause and no new checkpoint"),
        # A node that is not the head reports itself, but knows neither step nor cause: the head decides.
        (f"""echo '{{"pid": 1}}' >> "${ATTEMPT}"; exit 75""", 75, "5 restarts are used up (--max-restarts)"),
    ],
)
def test_a_command_that_says_nothing_is_no_endless_loop(command, code, stopped):
    words = ["--wait-s", "0", "--max-restarts", "5", "--", "bash", "-c", command]
    process = subprocess.run([sys.executable, "-m", "rltrain.supervise", *words], capture_output=True, text=True)
    assert process.returncode == code
    assert stopped in process.stderr.splitlines()[-1]


def test_restarts_are_counted_and_attempts_without_a_new_checkpoint_too(supervise, tmp_path):
    ends = [{"code": 75, "error": f"another {'x' * number}"} for number in range(5)]
    code, said = ended(supervise(ends, "--max-restarts", "3", "--wait-s", "0.05"))
    assert code == 75
    assert len(attempts(tmp_path)) == 4
    assert "3 restarts are used up (--max-restarts)" in said
    made = [attempt(step, saved) for step, saved in enumerate((1, 1, 1, 2, 2, None, *[0] * 9))]
    assert [len(stalled(made[: number + 1])) for number in range(7)] == [1, 2, 3, 1, 2, 3, 4]


def attempt(step, checkpoint, cause="", passing=False, uptime=0.0):
    return Attempt(1, "", 0, 75, step, checkpoint, cause, passing, uptime)


def ends_until_given_up(*, passing=False, apart_s=100.0, saves_after=()):
    """Return the number of ends with one cause after which the supervisor stops."""
    made, saved = [], 100
    for number in range(50):
        saved += number in saves_after
        made.append(attempt(7, saved, f"rank {number} died", passing, number * apart_s))
        if crash_loop(made, 3):
            return number + 1
    return 50


def test_what_waiting_may_mend_is_given_up_after_half_an_hour():
    assert ends_until_given_up() == 3
    assert ends_until_given_up(passing=True) == 19
    assert ends_until_given_up(passing=True, apart_s=900.0) == 3


def test_a_new_checkpoint_starts_the_count_anew(supervise, tmp_path):
    assert ends_until_given_up(saves_after=(2, 4)) == 7
    for name in ("global_step_20", "global_step_100", ".tmp_global_step_110_1"):
        (tmp_path / name).mkdir()
    assert ended(supervise([{"code": 75, "error": "storage", "passing": True}, {}]))[0] == 0
    assert [(line["checkpoint"], line["passing"]) for line in attempts(tmp_path)] == [(100, True), (100, False)]


@pytest.mark.fault("SIGTERM, Ctrl-C and a closed terminal let the run save under the supervisor too, and end it")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_a_signal_reaches_the_run_and_is_the_end(supervise, tmp_path, number, code):
    # The shell around the run stays, as one does that has more to do.
    process = supervise([{"sleeps": True}], before=("bash", "-c", '"$@"; exit $?', "bash"))
    eventually((tmp_path / "up_0").exists)
    process.send_signal(signal.SIGUSR1)
    eventually((tmp_path / "heard_SIGUSR1").exists)
    process.send_signal(number)
    assert ended(process)[0] == code
    assert (tmp_path / ("heard_SIGINT" if number == signal.SIGINT else "heard_SIGTERM")).exists()
    assert attempts(tmp_path)[0]["then"] == f"stopped by {signal.Signals(number).name}"


def test_sigusr1_reaches_only_programs_with_a_handler(supervise, tmp_path):
    """SIGUSR1 would kill others, such as a run that is about to end, and the supervisor would restart them."""
    process = supervise([{"sleeps": True, "deaf": True}])
    eventually((tmp_path / "up_0").exists)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 75
    assert len(attempts(tmp_path)) == 1
    assert attempts(tmp_path)[0]["exit_code"] == 75
    assert attempts(tmp_path)[0]["cause"] == ""


def test_a_full_disk_does_not_stop_the_supervisor(supervise, tmp_path):
    (tmp_path / "attempts.jsonl").symlink_to("/dev/full")
    code, said = ended(supervise([{"code": 75}, {}]))
    assert code == 0
    assert f"{tmp_path}/attempts.jsonl cannot be written: [Errno 28]" in said


def test_a_signal_while_it_waits_ends_the_supervisor(supervise, tmp_path):
    process = supervise([{"code": 75}], "--wait-s", "300")
    eventually((tmp_path / "attempts.jsonl").exists)
    process.terminate()
    code, said = ended(process)
    assert code == 75
    assert "stopped by SIGTERM before attempt 2" in said


@pytest.mark.fault("What a killed run leaves behind is ended before it is started again")
def test_what_a_killed_command_leaves_behind_is_ended(supervise, tmp_path):
    """The processes are in a separate session and without a parent, as Ray's are."""
    left = f'[ -e {tmp_path}/left ] || (setsid sleep 1000 & echo $! >{tmp_path}/left); exec "$@"'
    assert ended(supervise([{"signal": 9}, {}], before=("bash", "-c", left, "bash")))[0] == 0
    assert not os.path.exists(f"/proc/{(tmp_path / 'left').read_text().strip()}")


# What nobody else's SIGKILL takes away, as a process in the kernel's uninterruptible sleep.
PTRACE_SEIZE = 0x4206


@pytest.mark.fault(
    "A process left behind that cannot even be killed is named, and holds the supervisor up for a minute"
)
def test_what_cannot_be_killed_does_not_hold_it_up(tmp_path):
    """A killed process that is traced stays until its tracer has seen its end."""
    left, go = tmp_path / "left", tmp_path / "go"
    os.mkfifo(go)
    command = f"[ -e {left} ] && exit; sleep 1000 & echo $! >{left}_; mv {left}_ {left}; read <{go}; exit 75"
    limits = "each._LEAVE_S, each._LEFT_S = 0.2, 1"
    code = f"import sys, rltrain.runtime.launch.supervise as each; {limits}; sys.exit(each.main())"
    words = [sys.executable, "-c", code, "--wait-s", "0", "--", "bash", "-c", command]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    eventually(left.exists, str(left))
    pid = int(left.read_text())
    try:
        if ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_SEIZE, pid, None, None):
            pytest.skip(f"tracing is not allowed here: {os.strerror(ctypes.get_errno())}")
        go.write_text("")
        code, said = ended(process)
    finally:
        process.kill()
        process.communicate()
        os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # it was not traced
            os.waitpid(pid, 0)
    assert code == 0
    assert said.splitlines()[0].endswith(f"hangs?): pid {pid}")
    assert "attempt 2 finished" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the command after --"),
        (["--max-restarts", "-1", "--", "true"], "--max-restarts -1: it must be at least 0"),
        (["--wait-s", "nan", "--", "true"], "--wait-s nan: it must be at least 0"),
        (["--", "/no/such/program"], "the command cannot be started"),
    ],
)
def test_a_line_that_is_mistyped_is_told_and_exits_2(words, said):
    process = subprocess.run([sys.executable, "-m", "rltrain.supervise", *words], capture_output=True, text=True)
    assert process.returncode == 2
    assert said in process.stderr
    assert "Traceback" not in process.stderr
