"""The stand-in device fulfils these promises on exactness and strictness."""

import pytest

from tests.npu.standin import run


def test_what_is_an_error_on_hardware_is_one_here():
    run("tests.npu.checks:is_strict")


def test_a_save_takes_the_host_memory_of_one_tensor(tmp_path):
    run("tests.npu.checks:is_written_one_tensor_at_a_time", str(tmp_path))


@pytest.mark.smoke("The stand-in for an NPU moves weights bit for bit as the CPU does")
@pytest.mark.parametrize(
    "some",
    [
        ("grpo", "reward model", "tis"),
        pytest.param(("exact kl in reward, gae", "adapters"), marks=pytest.mark.long),
        pytest.param(("half precision", "carry over", "exact kl"), marks=pytest.mark.long),
        pytest.param((), marks=pytest.mark.long),
    ],
    ids=lambda some: " and ".join(some) or "all",
)
def test_steps_move_weights_as_on_the_cpu_bit_for_bit(some):
    run("tests.npu.variants:texts", *some, timeout=280)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_tower_learns_on_the_device_as_on_the_cpu(family):
    run("tests.npu.variants:pictures", family)
