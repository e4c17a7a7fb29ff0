"""Layers with other attention than plainly causal, on the stand-in device."""

from tests.npu.standin import run


def test_every_kind_of_layer_is_computed_on_the_device():
    # Sinks go to the kernel; soft-capped scores and gated delta nets have none there.
    run("tests.npu.kinds:main", "gpt_oss, sinks", "gemma2, capped", "qwen3_5, gated delta net", timeout=300)
