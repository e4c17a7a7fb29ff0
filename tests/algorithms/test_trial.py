"""User estimators are tried on the same kinds of inputs as in a run."""

import pytest

from rltrain.algorithms.trial import try_estimator
from rltrain.config.load import load_config

FILE = """
from rltrain.algorithms.advantages import TokenAdvantages, optimal_token_baseline, token_estimator


@token_estimator(sum_pi_squared=True)
def by_gradients(inputs, cfg):
    return optimal_token_baseline(inputs, cfg)


@token_estimator(values=True, greedy_baseline=True)
def by_values(inputs, cfg):
    above = inputs.rewards.values - inputs.values.values
    return TokenAdvantages(inputs.rewards.like(above - inputs.baselines.sum()), inputs.rewards)
"""


@pytest.mark.parametrize("name", ["by_gradients", "by_values"])
def test_an_estimator_is_tried_with_all_that_it_declares(tmp_path, name):
    (tmp_path / "mine.py").write_text(FILE)
    cfg = load_config([f"algorithm.adv_estimator={tmp_path / 'mine.py'}:{name}"]).config
    assert list(try_estimator(cfg.algorithm)) == []
