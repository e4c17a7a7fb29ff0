"""Fast training on the stand-in device: when the host waits for the device, and the contents of host memory."""

import pytest

from tests.npu.standin import run


@pytest.mark.parametrize("promise", ["no_wait_per_micro_batch", "offloads", "streams", "fuses"])
def test_training_on_the_device(promise, tmp_path):
    run(f"tests.npu.training:{promise}", tmp_path, timeout=300)


def test_vllm_sleeps_during_training_and_wakes_up_in_order(tmp_path):
    run("tests.npu.sleeping:sleeps_and_wakes", tmp_path, timeout=300)


@pytest.mark.long
@pytest.mark.fault("A device that is full, in whatever phase, is told with the phase and what to type")
def test_a_device_that_is_full_in_any_phase_is_told(tmp_path):
    run("tests.npu.training:tells_a_full_device", tmp_path, timeout=300)
