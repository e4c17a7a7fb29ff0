"""Fast training on the stand-in device: what the host waits for, and what rests in its memory."""

import pytest

from tests.npu.standin import run


@pytest.mark.parametrize("promise", ["no_wait_per_micro_batch", "offloads", "fuses"])
def test_training_on_the_device(promise, tmp_path):
    run(f"tests.npu.training:{promise}", tmp_path, timeout=300)
