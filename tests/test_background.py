import os
import signal
import threading

import pytest

from rltrain.common.background import PATIENCE_S, Appender, BackgroundJob, heartbeat, running
from tests.clock import VirtualClock, eventually


class Rang(Exception):
    pass


def ring(*_):
    raise Rang


def test_work_is_done_aside_and_tells_what_came_of_it():
    gate = threading.Event()
    work = BackgroundJob("work", lambda: gate.wait(10) and "done")
    assert not work.ready(0.01)
    assert work in running()
    gate.set()
    assert work.result() == "done"
    assert work.ready()
    assert work not in running()
    failed = BackgroundJob("work", lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()


def test_a_signal_cuts_the_wait_short_and_not_the_work():
    gate = threading.Event()
    work = BackgroundJob("work", lambda: gate.wait(10))
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Rang):
            work.ready(10)
    finally:
        signal.signal(signal.SIGALRM, before)
    gate.set()
    assert work.result()


def test_work_that_comes_further_is_not_taken_for_one_that_hangs():
    steps = [threading.Event() for _ in range(2)]
    work = BackgroundJob("work", lambda: [heartbeat() or step.wait(10) for step in steps])
    began = work.beat
    steps[0].set()
    eventually(lambda: work.beat != began)
    steps[1].set()
    work.result()
    heartbeat()  # outside of such work it means nothing


def test_lines_wait_for_storage_that_does_not_answer_and_nobody_waits_for_them(tmp_path):
    clock = VirtualClock()
    os.mkfifo(file := tmp_path / "lines")  # nobody opens it, so whoever would write hangs
    lines = Appender(file, clock)
    assert "does not respond" in lines.add("1\n").strerror
    for number in range(2, 1000):
        assert lines.add(f"{number}\n")
    assert sum(clock.asked) == PATIENCE_S  # for the first line alone
    assert lines.num_late == 999
    assert lines.close(0.01)
    with file.open() as read:
        eventually(lambda: not lines.num_late)
        assert lines.close(0) is None
        os.set_blocking(read.fileno(), False)
        assert read.read().split() == [str(number) for number in range(1, 1000)]
