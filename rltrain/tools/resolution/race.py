"""Which settings cannot win any more: a test by betting on paired differences.

Problem: whoever looks after every few answers, and stops at the first bad look, is wrong far more often than each look
says. Choice: a bound that holds at all looks together (Waudby-Smith and Ramdas 2024, section 5: sampling without
replacement). Prompts come in a random order that all settings share. A gambler bets, prompt by prompt, that a setting
answers worse than the best so far; were it at least as good on all prompts, the bets would be fair or bad, and the
gambler would ever own 1 / a times what he began with by a chance of at most a (Ville's inequality).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rltrain.tools.evaluate.statistics import SEED, Floats

# Chance that the search stops the setting that would have been best on all prompts, at most.
ERROR_RATE = 0.05
RULE = (
    "a setting is stopped where a test by betting on paired differences, prompt by prompt, says that it cannot be the "
    f"best on all of dev; the best one is stopped with a chance of at most {ERROR_RATE:.0%}"
)
# Of what may be bet: all of it could be lost at once, and never come back.
_MOST_BET = 0.75
# One difference of 1/2 that was never seen, so that the first bets are small.
_PRIOR = 0.25


def random_order(num_prompts: int) -> NDArray[np.int32]:
    """The order [p] of prompts that all settings share (int32)."""
    return np.random.default_rng(SEED).permutation(num_prompts).astype(np.int32)


def cannot_win(differences: Floats, num_prompts: int, num_settings: int) -> bool:
    """Whether a setting is to be stopped.

    differences [t]: its values minus those of the best so far, in the random order, each from -1 to 1. The best of all
    settings may meet any of the others, hence the division of the error rate among them (Bonferroni).
    """
    return wealth(differences, num_prompts) >= (num_settings - 1) / ERROR_RATE


def wealth(differences: Floats, num_prompts: int) -> float:
    """The most that a gambler who begins with 1 owns at any time; infinite where nothing is left to hope for.

    m_t = -S_{t-1} / (N - t + 1): the least mean of the prompts that are left with which the sum S_N is not negative.
    W_t = W_{t-1} (1 - b_t (d_t - m_t)), the bet b_t by the mean and second moment of what came before.
    """
    owned = most = 1.0
    total, surplus, squares = 0.0, 0.0, _PRIOR
    for seen, difference in enumerate(differences.tolist()):
        needed = -total / (num_prompts - seen)
        if needed > 1:
            return float("inf")
        lost = difference - needed
        bet = min(max(-surplus / squares, 0.0), _MOST_BET / max(1 - needed, 1e-9))
        owned *= 1 - bet * lost
        most = max(most, owned)
        total, surplus, squares = total + difference, surplus + lost, squares + lost**2
    return float("inf") if total < -(num_prompts - len(differences)) else most
