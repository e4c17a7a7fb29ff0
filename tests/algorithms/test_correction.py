import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.aggregation import Denominators
from rltrain.algorithms.correction import accepted, correction, importance_weights, keeps, mismatch
from rltrain.algorithms.losses import actor_loss
from rltrain.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.algorithm import RolloutCorrectionConfig
from rltrain.config.schema.model import OverlongBufferConfig
from rltrain.trainer.metrics.step import mismatch_metrics
from rltrain.trainer.rewards import overlong_penalty
from tests.algorithms import references as slow

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")
ROWS = st.lists(st.lists(st.floats(-2, 2), max_size=5), min_size=1, max_size=5)
RULES = [f"token_{k}" for k in ("k1", "k2", "k3")] + [
    f"seq_{how}_{k}" for how in ("sum", "mean") for k in ("k1", "k2", "k3")
]
RULES += ["seq_max_k2", "seq_max_k3", "token_binary_kl", "seq_mean_binary_kl", "seq_max_binary_kl"]


def ragged(rows):
    return Ragged.from_rows([torch.tensor(row, dtype=torch.float64) for row in rows])


def accepted_ratios(rows, cfg):
    """log ratios of the trainer to the engine, whose probability of every token is exp(-5)."""
    ratios = ragged(rows)
    engine = ratios.like(torch.full_like(ratios.values, -5.0))
    return accepted(ratios.like(ratios.values - 5), engine, cfg.rejection_rules())


def flat(rows):
    return pytest.approx([value for row in rows for value in row], abs=1e-9)


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize(("threshold", "low", "high"), [("1.5", None, 1.5), ("0.5_1.5", 0.5, 1.5)])
@given(rows=ROWS)
def test_importance_weights_equal_their_loop(kind, threshold, low, high, rows):
    cfg = RolloutCorrectionConfig(rollout_is=kind, rollout_is_threshold=threshold)
    assert importance_weights(ragged(rows), cfg).values.tolist() == flat(slow.importance(rows, kind, low, high))


@pytest.mark.parametrize("name", RULES)
@given(rows=ROWS)
def test_rejection_equals_its_loop(name, rows):
    measure = "binary_kl" if name.endswith("binary_kl") else name[-2:]
    over = name.removesuffix(f"_{measure}")
    high = 0.01 if measure == "binary_kl" else 0.3
    limit = "0.7_1.6" if measure == "k1" else str(high)
    cfg = RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=limit)
    bounds = (math.log(0.7), math.log(1.6)) if measure == "k1" else (-math.inf, high)
    assert accepted_ratios(rows, cfg).values.tolist() == flat(slow.accepted(rows, [(over, measure, *bounds)]))
    both = RolloutCorrectionConfig(rollout_rs=f"{name},token_k2", rollout_rs_threshold=f"{limit},0.1")
    rules = [(over, measure, *bounds), ("token", "k2", -math.inf, 0.1)]
    assert accepted_ratios(rows, both).values.tolist() == flat(slow.accepted(rows, rules))


def test_the_binary_kl_by_hand():
    """KPop: the larger of the two directions. 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.2231, and the other way
    0.8 log(0.8 / 0.5) + 0.2 log(0.2 / 0.5) = 0.1927."""
    train, engine = (ragged([[math.log(p), math.log(q)]]) for p, q in ((0.8, 0.5), (0.5, 0.8)))
    for limit, kept in ("0.223", [False, False]), ("0.224", [True, True]):
        cfg = RolloutCorrectionConfig(rollout_rs="token_binary_kl", rollout_rs_threshold=limit)
        assert accepted(train, engine, cfg.rejection_rules()).values.tolist() == kept


def test_bad_answers_that_the_policy_has_left_are_passed_over():
    """DeepSeek-V3.2: A < 0 and a mean gap above the threshold. The gap of the fourth response is 2, over its two
    unmasked tokens."""
    engine = ragged([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0, -1.0], []])
    current = ragged([[-3.0, -2.0], [-3.0, -2.0], [-1.5, -1.5], [-2.0, -2.0, 5.0], []])
    mask = engine.like(torch.tensor([1.0] * 8 + [0.0]))
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 0.0])
    found = keeps(mask, current.values, engine.values, advantages, 0.9)
    assert found.tolist() == [False, False, True, True, True, True, False, False, True]
    assert keeps(mask, current.values, engine.values, advantages, 1.5).all()  # this is its only effect


def test_the_unbiased_kl_has_the_gradient_of_the_policy_that_is_trained():
    """The mean of r KL over tokens of the old policy is the KL of the new policy, and so is its gradient."""
    old, ref = (torch.tensor(probs, dtype=torch.float64) for probs in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    logits = torch.tensor([0.3, 0.9, -0.2], dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref.log())).sum(), logits, retain_graph=True)
    cfg = ActorConfig(kl_loss_coef=1.0, use_kl_loss=True, use_bias_correction_kl=True)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        mask = ragged([[1.0]])
        inputs = PolicyLossInputs(log_probs[token : token + 1], old[token : token + 1].log(), torch.zeros(1), mask)
        log_r = ref[token].log() - log_probs[token]
        share = actor_loss(
            inputs, Denominators(1, 1, 8), cfg, POLICY_LOSSES["vanilla"].function, "token-mean",
            kl=(log_r.exp() - 1 - log_r)[None],
        )  # fmt: skip
        total = total + old[token] * share.loss
    (found,) = torch.autograd.grad(total, logits)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": "1"}, "'token_k4' is not a rule"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": "2"}, "seq_max needs k2 or k3"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "2 rules and 3 thresholds"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5"}, "must be above 1"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.3"}, "takes a single upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_1"}, "lower bound first"),
    ],
)
def test_a_wrong_rule_says_what_is_wrong(keys, words):
    with pytest.raises(ValueError, match=words):
        RolloutCorrectionConfig(**keys).rejection_rules()


def test_the_mismatch_by_hand():
    """Two responses: the trainer's probability of the first token is e times the engine's; the others are equal."""
    train, engine = ragged([[-1.0, -1.0], [-2.0], []]), ragged([[-2.0, -1.0], [-2.0], []])
    metrics = mismatch_metrics(mismatch(train, engine))
    assert metrics["rollout/log_prob_gap/mean"] == pytest.approx(1 / 3)
    assert metrics["rollout/log_prob_gap/max"] == 1.0
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(math.exp(-1) - math.exp(-2))
    train_probs, engine_probs = (np.exp([first, -1.0, -2.0]) for first in (-1.0, -2.0))
    gaps = train_probs - engine_probs
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(gaps.std())
    correlation = np.corrcoef(train_probs, engine_probs)[0, 1]
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(correlation)
    assert metrics["rollout_corr/kl"] == pytest.approx(-1 / 3)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((math.e - 2) / 3)
    assert metrics["rollout_corr/training_ppl"] == pytest.approx((math.e + math.e**2) / 2)
    assert metrics["rollout_corr/rollout_ppl"] == pytest.approx((math.exp(1.5) + math.e**2) / 2)
    assert metrics["rollout_corr/log_ppl_diff"] == pytest.approx(0.25)
    assert metrics["rollout_corr/log_ppl_abs_diff"] == pytest.approx(0.25)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((math.e**2 - 1) / 3)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx((math.e**2 - 1) / 2)


def test_the_correction_by_hand():
    log_ratio = ragged([[math.log(4), 0.0], [math.log(0.25)]])
    cfg = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="2")
    engine = ragged([[0.0, 0.0], [0.0]])
    weights, mask = importance_weights(log_ratio, cfg), accepted(log_ratio, engine, cfg.rejection_rules())
    moments = mismatch(engine.like(log_ratio.values), engine) | correction(weights, mask, log_ratio, cfg)
    metrics = mismatch_metrics(moments)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((2 + 1 + 0.25) / 3)
    assert (metrics["rollout_corr/rollout_is_max"], metrics["rollout_corr/rollout_is_min"]) == (2.0, 0.25)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(3.25**2 / (3 * (4 + 1 + 0.0625)))
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 20))
def test_the_overlong_penalty_equals_its_loop(lengths, buffer):
    penalties = overlong_penalty(np.array(lengths), 20, OverlongBufferConfig(len=buffer, penalty_factor=0.5))
    assert penalties.tolist() == pytest.approx([slow.overlong(length, 20, buffer, 0.5) for length in lengths])
