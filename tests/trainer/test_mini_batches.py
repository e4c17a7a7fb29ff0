"""Denominators of mini-batches, and which share of the old log-probs a pass covers."""

import numpy as np

from rltrain.algorithms.aggregation import Denominators
from rltrain.trainer.batching.mini_batches import denominators


def test_samples_without_a_loss_token_are_no_sequences():
    assert denominators(np.array([3, 0, 2, 4]), np.array([0, 0, 1, 1]), 5) == Denominators(9, 3, 5, 2)
    assert denominators(np.array([3, 0, 0, 1]), np.array([6, 7, 7, 6]), 5) == Denominators(4, 2, 5, 1)
