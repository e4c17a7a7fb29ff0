"""A distance between two results that does not depend on the rounding of a processor's kernels."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def distance(found, expected) -> float:
    """||found - expected|| / ||expected||, over all numbers of tensors, or of lists or dicts of tensors.

    A single number next to 0 may be rounding and nothing else. Beside the norm of all numbers rounding stays near 1e-6
    on every processor, and what is wrong does not: a denominator, a sample left out, a mask.
    """
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        found, expected = [found[name] for name in expected], list(expected.values())
    one, other = _flat(found), _flat(expected)
    assert one.shape == other.shape
    return float((one - other).norm() / other.norm())


def _flat(tensors: Tensor | Iterable[Tensor]) -> Tensor:
    parts = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return torch.cat([part.detach().double().flatten() for part in parts])
