"""A step that does not fit between the signal and the kill is abandoned, if that loses nothing."""

import pytest

from rltrain.common.stop import StepLeft, Stop
from rltrain.run.callbacks.notice import Notice


class Asked(Stop):
    """The decision after SIGTERM, with this many seconds until the run is killed."""

    left_s = 90.0

    def __init__(self, notice_s: float | None = 100.0) -> None:
        super().__init__()
        self.requested, self.notice_s, self.finishing = True, notice_s, "finishing this step, saving"


@pytest.fixture
def asked(clock):
    """asked(steps=(step_s, updates_s)…, save_s, phase, saving_s, notice_s): the decision in the next step, after
    SIGTERM."""

    def asked(*steps, save_s=None, phase="gen", saving_s=None, notice_s=100.0, into_s=0.0):
        stop = Asked(notice_s)
        stop.requested = False
        notice = Notice(stop, lambda: saving_s, clock)
        for step, (step_s, updates_s) in enumerate(steps):
            notice.before_step(step)
            clock.advance(step_s - updates_s)
            notice.on_phase("update_actor")
            clock.advance(updates_s)
            notice.on_step(None)
            notice.after_step(step)
        if save_s is not None:
            notice.on_save(6, None, save_s)
        notice.before_step(7)
        notice.on_phase(phase)
        clock.advance(into_s)
        stop.requested = True
        notice.on_phase("next")
        notice.after_step(7)
        stop.raise_if_asked()  # what saves the step before is not cut short

    return asked


@pytest.mark.parametrize(
    ("steps", "more", "why"),
    [
        ((), {}, "the duration of step 7 is not known yet, and trainer.stop_notice_s=100 leaves 90 s"),
        ([(10.0, 1.0), (95.0, 20.0)], {"save_s": 1.0}, "step 7 needs about 95 s more, its save 1 s, and .* leaves 90"),
        ([(60.0, 20.0)], {"save_s": 40.0}, "step 7 needs about 60 s more, its save 40 s"),
        ([(70.0, 20.0)], {}, "step 7 needs about 70 s more, its save 25 s"),
        # A save that is under way is waited for first.
        ([(30.0, 10.0)], {"save_s": 50.0, "saving_s": 0.0}, "step 7 needs about 30 s more, its save 70 s"),
        # A step slower than usual has its updates before it all the same.
        ([(60.0, 20.0)], {"save_s": 75.0, "into_s": 500.0}, "step 7 needs about 20 s more, its save 75 s"),
    ],
)
def test_a_step_that_does_not_fit_is_left(asked, steps, more, why):
    with pytest.raises(StepLeft, match=why):
        asked(*steps, **more)


def test_a_step_that_fits_or_has_begun_to_learn_is_finished(asked):
    asked((60.0, 20.0), save_s=20.0)
    asked((30.0, 10.0), save_s=50.0, saving_s=20.0)  # what is left of that save goes on beside the step
    asked((200.0, 20.0), save_s=20.0, phase="update_critic")
    asked(notice_s=None)
