"""Rewards in whole steps: reward model, penalties, weighted sums, scores that fail."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rltrain.base.columns.names import COLUMNS, SCORER
from rltrain.base.errors import ConfigError, RewardError
from rltrain.base.stop import Stop
from rltrain.config.schema.model import OverlongBufferConfig
from rltrain.controller.samples import Samples
from rltrain.trainer import validation
from rltrain.trainer.rewards import overlong_penalty
from rltrain.trainer.timing import StepTimer
from tests.trainer.steps import (
    VARIANTS,
    actor_weights,
    numbers_of,
    with_failures,
)


@pytest.mark.parametrize(
    "budget", [{"forward_max_token_len_per_gpu": 24}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 5}]
)
def test_a_reward_model_has_its_own_template_and_a_weight(make, reward_model, budget):
    keys = {f"reward_model__{name}": value for name, value in budget.items()}
    trainer = make(reward_model__enable=True, reward_model__model__path=reward_model, reward_model__weight=0.5,
                   reward_model__rule_weight=2.0, **keys)  # fmt: skip
    seen = []
    estimate = trainer.advantages.estimate
    trainer.advantages.estimate = lambda samples, *rest: seen.append(samples) or estimate(samples, *rest)
    metrics = trainer.step(1).metrics
    samples = seen[0]
    plain, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(reward_model),
        AutoTokenizer.from_pretrained(reward_model),
    )
    (part,) = samples.parts_with("text")
    for sample in range(0, 16, 5):
        prompt = trainer.data.rows["train"][int(samples["row"][sample])].prompt[0]["content"]
        ids = tokenizer(f"={prompt}={part.ref[sample]}", return_tensors="pt").input_ids
        with torch.no_grad():
            assert samples["model_score"][sample] == pytest.approx(float(plain(ids).logits), abs=1e-5)
    assert np.allclose(samples["score"], 0.5 * samples["model_score"] + 2.0 * samples["rule_score"])
    assert metrics["reward/model/mean"] == pytest.approx(samples["model_score"].mean())


def test_only_a_classifier_with_one_label_is_a_reward_model(make, reward_model, tiny_model):
    with pytest.raises(ConfigError, match="has no classification head"):
        make(reward_model__enable=True, reward_model__model__path=tiny_model)
    weights_file = reward_model / "model.safetensors"
    state = load_file(weights_file)
    save_file(state | {"score.weight": state["score.weight"].repeat(2, 1)}, weights_file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="2 labels"):
        make(reward_model__enable=True, reward_model__model__path=reward_model)


def test_long_answers_pay_the_overlong_penalty(make):
    trainer = make(
        reward_model__reward_manager="dapo",
        reward_model__overlong_buffer__enable=True,
        reward_model__overlong_buffer__len=4,
        reward_model__overlong_buffer__penalty_factor=2.0,
    )
    samples = trainer.experience.collect(StepTimer())[0]
    at_limit = samples["response_length"] == 8
    assert at_limit.any()
    assert (samples["overlong"][at_limit] == -2.0).all()
    assert (samples["overlong"][samples["response_length"] <= 4] == 0.0).all()
    assert np.allclose(samples["score"], samples["rule_score"] + samples["overlong"])


def test_a_reward_model_alone_is_the_whole_score(make, reward_model):
    trainer = make(reward_model__enable=True, reward_model__model__path=reward_model, reward_model__weight=0.5)
    samples = trainer.experience.collect(StepTimer())[0]
    assert "rule_score" not in samples.numbers
    assert np.allclose(samples["score"], 0.5 * samples["model_score"])
    assert np.ptp(samples["score"]) > 0


def test_a_validation_is_judged_in_parts_like_steps(make, reward_model, monkeypatch):
    """All answers in one call would take many times as long as those of a step, and count as hung."""
    monkeypatch.setattr(validation, "_BUSY_ENGINE", 1)
    trainer = make(reward_model__enable=True, reward_model__model__path=reward_model)
    parts = trainer.validation
    parts._plan = replace(parts._plan, samples_per_step=3)
    samples = parts.run(0, Stop()).samples
    assert trainer.group.calls.count("RewardModel.score") == math.ceil(len(samples) / 3) > 1
    together = trainer.rewards.score("val", samples)
    assert np.allclose(samples["model_score"], together["model_score"], rtol=0, atol=1e-6)


def test_the_overlong_penalty_by_hand():
    cfg = OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0)
    lengths = np.array([0, 6, 7, 10, 12])
    # Of a limit of 10 the last 4 are the buffer: -2 at the limit, and on as steeply beyond it.
    assert overlong_penalty(lengths, 10, cfg).tolist() == [0.0, 0.0, -0.5, -2.0, -3.0]


def test_the_overlong_limit_may_be_below_the_longest_answer(make):
    trainer = make(reward_model__reward_manager="dapo", reward_model__overlong_buffer__enable=True,
                   reward_model__overlong_buffer__len=2, reward_model__overlong_buffer__max_resp_len=4)  # fmt: skip
    samples = trainer.experience.collect(StepTimer())[0]
    assert np.allclose(samples["overlong"], -np.maximum(samples["response_length"] - 2, 0) / 2)
    assert samples["overlong"].min() == -3.0


def test_the_rule_reward_may_be_a_weighted_sum_of_numbers(make):
    trainer = make(reward__weights="{acc: 2.0, score: 0.5}")
    samples = trainer.experience.collect(StepTimer())[0]
    metrics = trainer.step(2).metrics
    assert set(samples["rule_score"] - 2.0 * samples["scorer/acc"]) != {0.0}
    assert metrics["reward/acc/mean"] >= 0
    scores = np.array([1.0, 0.25])
    failed = {
        "score": np.array([0.25, -7.0]),
        "scorer/acc": np.array([1.0, np.nan]),
        "reward_failed": np.array([0.0, 1.0]),
    }
    assert trainer.rewards._weigh(failed, np.zeros(2, dtype=bool)).tolist() == [2.0 + 0.125, -7.0]
    with pytest.raises(RewardError, match=r"reward.weights.acc: the scorer returned no number"):
        trainer.rewards._weigh({"score": scores, "reward_failed": np.zeros(2)}, np.zeros(2, dtype=bool))


def test_numbers_of_the_scorer_never_replace_the_trainer_s(make):
    plain, named = make(), make()
    own = plain.experience.collect(StepTimer())[0].numbers.keys()
    score = named.pool.score
    names = {*own, *COLUMNS}

    def more(split, jobs):
        columns = score(split, jobs)
        return columns | {SCORER + name: np.full(len(columns["score"]), 3.0) for name in names if SCORER not in name}

    named.pool.score = more
    named.experience._round(StepTimer())
    shown = {f"reward/{name}/mean" for name in names}
    found = {name: value for name, value in numbers_of(named.step(1).metrics).items() if name not in shown}
    assert found == numbers_of(plain.step(1).metrics)
    assert torch.equal(actor_weights(named), actor_weights(plain))
    assert named.validation.run(1, Stop()).metrics["val-core/rltrain/arithmetic/acc/mean@1"] <= 1


def test_one_failed_score_costs_gdpo_one_answer_only(make):
    trainer = make(**VARIANTS["gdpo"])
    with_failures(trainer, 0)
    metrics = trainer.step(1).metrics
    assert math.isfinite(metrics["actor/pg_loss"])
    assert metrics["reward/error_rate"] == 1 / 16


def test_a_baseline_is_shaped_as_the_rewards_that_it_is_taken_off(make, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rltrain.algorithms.advantages import outcome_estimator\n"
        "@outcome_estimator(greedy_baseline=True)\n"
        "def above(inputs, cfg):\n"
        "    return inputs.scores - inputs.baselines\n"
    )
    name = f"{tmp_path / 'mine.py'}:above"
    plain = make(algorithm__adv_estimator=name).step(1).samples["advantage"]
    shaped = make(algorithm__adv_estimator=name, algorithm__reward_scaling=10.0, algorithm__reward_bias=-0.5)
    assert np.abs(plain).max() > 0.1
    assert shaped.step(1).samples["advantage"] == pytest.approx(10 * plain)


def test_what_greedy_answers_cost_to_score_is_among_the_costs_of_the_step(make, monkeypatch):
    trainer = make(algorithm__adv_estimator="remax")
    score = trainer.rewards.score

    def costly(*given):
        columns = score(*given)
        trainer.rewards.seconds, trainer.rewards.judged = 2.0, {"judge/calls": 5.0}
        return columns

    monkeypatch.setattr(trainer.rewards, "score", costly)
    metrics = trainer.step(1).metrics
    assert (metrics["reward/compute_s"], metrics["judge/calls"]) == (4.0, 10.0)


def test_a_prompt_whose_answers_could_not_be_scored_is_not_called_unsolved(make):
    trainer = make(data__sampler__name="solve_rate")
    n = trainer.plan.answers_per_prompt
    with_failures(trainer, *range(n), n, acc=0.5)
    rows = trainer.step(1).samples["row"][::n]
    assert trainer.experience.sampler.state()["rates"][rows] == pytest.approx([np.nan, 0.5, 0.5, 0.5], nan_ok=True)


def test_a_number_that_some_rounds_lack_is_kept_for_the_others():
    one, other = Samples(2), Samples(2)
    one.update({"score": np.array([1.0, 2.0]), "scorer/acc": np.array([0.0, 1.0])})
    other.update({"score": np.array([3.0, 4.0])})
    for pair in ([(one, np.array([1])), (other, np.array([0, 1]))], [(other, np.array([0, 1])), (one, np.array([1]))]):
        joined = Samples.join(pair)
        assert sorted(joined["score"]) == [2.0, 3.0, 4.0]
        assert np.isnan(joined["scorer/acc"]).sum() == 2
