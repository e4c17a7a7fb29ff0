"""Functions that a run calls at its end, when Ray may be lost."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from ray.exceptions import GetTimeoutError

from rltrain.runtime.hang import Deadlines
from rltrain.runtime.ray_watchdog import RayWatchdog, unless_lost


def test_ray_that_does_not_answer_hides_no_error(caplog):
    def free():
        raise GetTimeoutError("GCS server is dead")

    with caplog.at_level("WARNING"):
        unless_lost(free)()
    assert "GCS server is dead" in caplog.text
    with pytest.raises(ZeroDivisionError):
        unless_lost(lambda: 1 / 0)()


def test_a_driver_that_reads_or_computes_does_not_hang(tmp_path):
    watch = RayWatchdog([], "", "", Deadlines(), reads=True)
    watch.is_busy()
    assert not watch.is_busy()
    (tmp_path / "data").write_bytes(bytes(1 << 20))
    (tmp_path / "data").read_bytes()
    assert watch.is_busy()
    assert not watch.is_busy()

    with ThreadPoolExecutor(1) as aside:
        aside.submit(sum, range(30_000_000)).result()
    assert watch.is_busy()
