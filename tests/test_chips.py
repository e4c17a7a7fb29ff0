"""Peaks are those of the variant that the device's name says, and of no other."""

import pytest

from rltrain.chips import find_chip


@pytest.mark.parametrize(
    ("name", "tera_flops", "bandwidth", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 3.35e12, 79.6),
        ("NVIDIA H100 PCIe", 756, 2.0e12, 79.6),
        ("NVIDIA H100 NVL", 835, 3.9e12, 93.6),
        ("NVIDIA H200", 989.4, 4.8e12, 140.4),
        ("NVIDIA H20", 148, 4.0e12, 95.6),
        ("NVIDIA A100-SXM4-80GB", 312, 2.039e12, 80),
        ("NVIDIA A100 80GB PCIe", 312, 1.935e12, 80),
        ("NVIDIA A100-PCIE-40GB", 312, 1.555e12, 40),
        ("NVIDIA L40", 181, 0.864e12, 45),
        ("NVIDIA L40S", 362, 0.864e12, 45),
        ("Ascend910B1", 24 * 8192 * 1.85e9 / 1e12, 1.6e12, 60.97),
        ("Ascend910B2", 24 * 8192 * 1.8e9 / 1e12, 1.6e12, 60.97),
        ("Ascend910B3", 20 * 8192 * 1.8e9 / 1e12, 1.6e12, 60.97),
        ("Ascend910B4", 20 * 8192 * 1.5e9 / 1e12, 0.8e12, 29.49),
        ("Ascend910B4-1", 20 * 8192 * 1.5e9 / 1e12, 1.6e12, 60.97),
        ("Ascend910_9382", 24 * 8192 * 1.8e9 / 1e12, 1.6e12, 60.97),
    ],
)
def test_a_chip_is_found_by_the_name_that_torch_gives(name, tera_flops, bandwidth, gib):
    chip = find_chip(name)
    assert chip.peak_flops / 1e12 == pytest.approx(tera_flops, rel=1e-3)
    assert chip.peak_bandwidth == pytest.approx(bandwidth)
    assert chip.memory_bytes / 2**30 == pytest.approx(gib, rel=2e-3)


@pytest.mark.parametrize("name", ["CPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA T4", "Ascend310P3", "Ascend910A"])
def test_an_unknown_chip_has_no_peak(name):
    assert find_chip(name) is None
