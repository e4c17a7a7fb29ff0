"""Peaks are those of exactly the variant in the device's name."""

import pytest

from rltrain.common.chips import find_chip


@pytest.mark.parametrize(
    ("name", "tera_flops", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 3.35e12),
        ("NVIDIA H200", 989.4, 4.8e12),
        ("NVIDIA L40S", 362, 0.864e12),
        ("Ascend910B3", 20 * 8192 * 1.8e9 / 1e12, 1.6e12),
        ("Ascend910_9382", 24 * 8192 * 1.8e9 / 1e12, 1.6e12),
    ],
)
def test_a_chip_is_found_by_the_name_that_torch_gives(name, tera_flops, bandwidth):
    chip = find_chip(name)
    assert chip.peak_flops / 1e12 == pytest.approx(tera_flops, rel=1e-3)
    assert chip.peak_bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize("name", [
    "CPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA T4", "Ascend310P3", "Ascend910A", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti",
])  # fmt: skip
def test_an_unknown_chip_has_no_peak(name):
    assert find_chip(name) is None
