"""The effect of a signal depends on whether a step is running."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from rltrain.common.attempt import ATTEMPT
from rltrain.common.errors import DiskError, Interrupted, WorkerLost
from rltrain.common.stop import ONE_REQUEST_S, Stop, listen
from rltrain.main_ppo import main
from tests.clock import PATIENCE_S, VirtualClock


@pytest.fixture
def clock():
    return VirtualClock(manual=True)


@pytest.fixture
def stop(clock):
    with listen(Stop(clock)) as stop:
        yield stop


def test_where_nothing_is_begun_the_first_signal_ends_the_run(stop):
    with pytest.raises(Interrupted, match="stopped before training began; the same command starts it again") as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 75
    signal.raise_signal(signal.SIGINT)  # on the way out nothing is torn any more
    assert stop.at_once


@pytest.mark.smoke("SIGTERM finishes the step; a second signal ends the run")
def test_one_signal_finishes_the_step_and_a_second_ends_it(stop, clock):
    stop.reached(2, 6, 2)
    stop.finishing = "finishing this step, saving"
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # the same request, sent to the process and to its group
    stop.raise_if_asked()
    assert stop.requested
    assert not stop.at_once
    clock.advance(ONE_REQUEST_S)
    with pytest.raises(Interrupted, match=r"stopped after step 2 of 6; the same command resumes$") as caught:
        signal.raise_signal(signal.SIGINT)
    assert caught.value.exit_code == 130


def test_once_all_is_finished_a_stop_that_was_asked_for_is_taken(stop):
    stop.finishing = "finishing this step, saving"
    signal.raise_signal(signal.SIGINT)
    stop.reached(5, 6, 3)
    stop.finishing = ""
    with pytest.raises(Interrupted, match="stopped after step 5 of 6; the same command resumes after step 3"):
        stop.raise_if_asked()


@pytest.mark.parametrize(
    ("reached", "kept", "stopped"),
    [
        (None, "", "before training began; the same command starts it again"),
        (
            (3, 6, 0),
            "Nothing is saved yet: the same command starts over, and steps 1 to 3 are repeated.",
            "after step 3 of 6; nothing is saved yet, so the same command starts over",
        ),
        (
            (3, 6, 3),
            "Step 3 of 6 is saved: the same command resumes after it.",
            "after step 3 of 6; the same command resumes",
        ),
    ],
)
def test_every_end_says_what_is_saved_and_what_the_same_command_does(stop, reached, kept, stopped):
    stop.reached(4, 6, 4)
    stop.searching()  # that checkpoint is damaged
    if reached:
        stop.reached(*reached)
    assert stop.kept() == kept
    assert str(stop.interrupted()).startswith(f"stopped {stopped}")
    with pytest.raises(WorkerLost) as lost, stop.telling():
        raise WorkerLost("actor rank 0: the process died.")
    assert str(lost.value) == f"actor rank 0: the process died.\n{kept}".strip()
    # What `command` would make of it is made of it here, so that Python and the supervisor hear the same.
    with pytest.raises(DiskError if reached else OSError) as full, stop.telling():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(full.value).splitlines()[1:] == ([kept] if reached else [])
    with pytest.raises(Interrupted) as interrupted, stop.telling():
        raise stop.interrupted()
    assert "\n" not in str(interrupted.value)


def test_nobody_takes_our_place_while_ray_starts(stop):
    starting = stop.keeping_handlers("starting Ray")
    starting.__enter__()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)  # Ray is not torn while it starts
    assert stop.requested
    with pytest.raises(Interrupted):
        starting.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == stop.handle


def test_handlers_are_given_back_and_other_threads_have_none():
    before = signal.getsignal(signal.SIGINT)
    with listen():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
    found = []

    def elsewhere() -> None:
        with listen() as stop:
            found.append(stop.requested)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]


def test_the_exit_code_is_right_whatever_ray_makes_of_a_signal(monkeypatch, capsys):
    def torn(arguments, stop: Stop) -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except Interrupted as error:
            raise SystemError("<cyfunction CoreWorker.wait> returned a result with an exception set") from error
        return 0

    monkeypatch.setattr("rltrain.main_ppo._run", torn)
    assert main([]) == 130
    assert capsys.readouterr().err == "stopped before training began; the same command starts it again\n"


def test_sigusr1_asks_for_a_save_and_the_run_goes_on(stop):
    signal.raise_signal(signal.SIGUSR1)
    assert stop.save_requested
    stop.raise_if_asked()
    assert not stop.requested


@pytest.mark.fault("What is not saved when trainer.stop_notice_s is over ends the run then, exit 75")
def test_the_end_of_the_notice_ends_the_run(stop, clock):
    stop.notice_s = 1.0
    stop.reached(3, 6, 2)
    stop.finishing = "finishing this step, saving"
    signal.raise_signal(signal.SIGTERM)
    assert stop.left_s == pytest.approx(0.9)  # the rest is for ending the workers
    clock.advance(1.0)
    assert stop.left_s < 0
    with pytest.raises(Interrupted, match=r"after step 2, .* saved \(trainer.stop_notice_s=1 is over\)$") as caught:
        signal.pause()
    assert caught.value.exit_code == 75


def test_a_clean_up_that_hangs_tells_the_supervisor_why(tmp_path):
    code = (
        "import signal; from rltrain.common.stop import listen; from tests.clock import hang\n"
        "with listen() as stop:\n"
        "    stop.notice_s = 0.2\n"
        "    stop.reached(3, 6, 2)\n"
        "    try: signal.raise_signal(signal.SIGTERM)\n"
        "    finally: hang()"
    )
    environment = os.environ | {ATTEMPT: str(tmp_path / "told")}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (process.returncode, process.stderr.startswith("stopped after step 3 of 6")) == (75, True)
    assert json.loads((tmp_path / "told").read_text())["error"].startswith("stopped after step 3 of 6")


def test_ray_starts_processes_that_sigusr1_does_not_end(stop):
    with stop.keeping_handlers("starting Ray"):
        child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGUSR1)
    assert child.poll() is None
    child.terminate()
    assert child.wait(PATIENCE_S) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGUSR1) == stop.ask_to_save
