"""A step that does not fit between the signal and the kill is left, as long as that loses nothing."""

import signal
import time

import pytest

from rltrain.base.stop import StepLeft, listen
from rltrain.run.watchers.notice import Notice


@pytest.fixture
def asked():
    """asked(notice_s, (step_s, updates_s) of each, save_s, phase, saving_s): inside a step, after SIGTERM."""
    with listen() as stop:

        def asked(notice_s, took=(), save_s=None, phase="gen", saving_s=None):
            stop.notice_s = notice_s
            notice = Notice(stop, lambda: saving_s)
            notice._took.extend(took)
            if save_s is not None:
                notice.on_save(6, None, save_s)
            stop.finishing = "finishing this step, saving"
            notice.before_step(7)
            notice.on_phase(phase)
            signal.raise_signal(signal.SIGTERM)
            notice.on_phase("next")

        yield asked


@pytest.mark.parametrize(
    ("took", "save_s", "why"),
    [
        ((), None, "how long step 7 takes is not known yet, and trainer.stop_notice_s=100 leaves 90 s"),
        ([(10.0, 1.0), (95.0, 20.0)], 1.0, "step 7 needs about 95 s more, its save 1 s, and .* leaves 90 s"),
        ([(60.0, 20.0)], 40.0, "step 7 needs about 60 s more, its save 40 s"),
        ([(70.0, 20.0)], None, "step 7 needs about 70 s more, its save 25 s"),
    ],
)
def test_a_step_that_does_not_fit_is_left(asked, took, save_s, why):
    with pytest.raises(StepLeft, match=why):
        asked(100.0, took, save_s)


def test_a_save_under_way_is_waited_for_first(asked):
    asked(100.0, [(30.0, 10.0)], 50.0, saving_s=20.0)  # what is left of it goes on beside the step
    with pytest.raises(StepLeft, match="step 7 needs about 30 s more, its save 70 s"):
        asked(100.0, [(30.0, 10.0)], 50.0, saving_s=0.0)


def test_a_step_that_fits_or_learns_already_is_finished(asked):
    asked(100.0, [(60.0, 20.0)], 20.0)


def test_a_step_that_has_begun_to_learn_is_finished(asked):
    asked(100.0, [(200.0, 20.0)], 20.0, phase="update_critic")


def test_without_a_notice_every_step_is_finished(asked):
    asked(None)


def checked_to_the_end(stop) -> None:
    while stop.left_s > 0:
        time.sleep(0.05)
        stop.raise_if_asked()


def test_a_step_slower_than_usual_keeps_time_for_its_updates():
    with listen() as stop:
        stop.notice_s = 2.0
        notice = Notice(stop)
        notice._took.append((0.2, 0.1))
        notice.on_save(2, None, 1.0)
        stop.finishing = "finishing this step, saving"
        notice.before_step(3)
        signal.raise_signal(signal.SIGTERM)
        stop.raise_if_asked()
        with pytest.raises(StepLeft, match="step 3 needs about 0 s more, its save 1 s"):
            checked_to_the_end(stop)
        assert stop.left_s > 0.9
        notice.after_step(3)
        stop.raise_if_asked()  # what saves the step before is not cut short
