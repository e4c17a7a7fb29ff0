"""What a run calls at its end, where Ray may be gone."""

import pytest
from ray.exceptions import GetTimeoutError

from rltrain.controller.lifeline import unless_lost


def test_ray_that_does_not_answer_hides_no_error(caplog):
    def free():
        raise GetTimeoutError("GCS server is dead")

    with caplog.at_level("WARNING"):
        unless_lost(free)()
    assert "GCS server is dead" in caplog.text
    with pytest.raises(ZeroDivisionError):
        unless_lost(lambda: 1 / 0)()
