"""Rewards in complete steps: reward model, penalties, weighted sums, failed scores."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rltrain.common.columns.names import COLUMNS, SCORER
from rltrain.common.errors import ConfigError, RewardError
from rltrain.common.stop import Stop
from rltrain.config.schema.model import OverlongBufferConfig
from rltrain.trainer.metrics.timing import StepTimer
from rltrain.trainer.rewards import overlong_penalty
from rltrain.trainer.validation import Validation
from tests.trainer.steps import VARIANTS, actor_weights, numbers_of, with_failures


@pytest.mark.parametrize(
    "budget", [{"forward_max_token_len_per_gpu": 24}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 5}]
)
def test_a_reward_model_has_its_own_template_and_a_weight(make, reward_model, budget):
    keys = {f"reward_model__{name}": value for name, value in budget.items()}
    trainer = make(reward_model__enable=True, reward_model__model__path=reward_model, reward_model__weight=0.5,
                   reward_model__rule_weight=2.0, **keys)  # fmt: skip
    answered = trainer.step(1)
    metrics, samples = answered.metrics, answered.samples
    plain = AutoModelForSequenceClassification.from_pretrained(reward_model)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
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


def test_a_token_that_the_reward_model_lacks_is_named(make, reward_model):
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    model.resize_token_embeddings(8)
    model.save_pretrained(reward_model)
    with pytest.raises(ConfigError, match="its tokenizer has the token id"):
        make(reward_model__enable=True, reward_model__model__path=reward_model).step(1)


def test_long_answers_pay_the_overlong_penalty(make):
    keys = {"enable": True, "len": 4, "penalty_factor": 2.0}
    keys = {f"reward_model__overlong_buffer__{name}": value for name, value in keys.items()}
    samples = make(reward_model__reward_manager="dapo", **keys).experience.collect(StepTimer())[0]
    lengths = samples["response_length"]
    assert (samples["overlong"][lengths == lengths.max()] == -2.0 * (lengths.max() - 4) / 4).all()
    assert (samples["overlong"][lengths <= 4] == 0.0).all()
    assert np.allclose(samples["score"], samples["rule_score"] + samples["overlong"])


@pytest.mark.smoke("A reward model scores responses")
def test_a_reward_model_alone_is_the_whole_score(make, reward_model):
    trainer = make(reward_model__enable=True, reward_model__model__path=reward_model, reward_model__weight=0.5)
    samples = trainer.experience.collect(StepTimer())[0]
    assert "rule_score" not in samples.numbers
    assert np.allclose(samples["score"], 0.5 * samples["model_score"])
    assert np.ptp(samples["score"]) > 0


def test_a_validation_is_judged_in_parts_like_steps(make, reward_model):
    """One call with all responses would take many times as long as a step's calls, and count as hung."""
    trainer = make(reward_model__enable=True, reward_model__model__path=reward_model)
    plan = replace(trainer.plan, samples_per_step=3, num_engine_replicas=0)
    rollout, data = trainer.cfg.actor_rollout_ref.rollout, trainer.cfg.data
    samples = Validation(rollout, data, plan, trainer.actor, trainer.rewards, "run").run(0, Stop()).samples
    assert trainer.group.calls.count("RewardModel.score") == math.ceil(len(samples) / 3) > 1
    together = trainer.rewards.score("val", samples)
    assert np.allclose(samples["model_score"], together["model_score"], rtol=0, atol=1e-6)


def test_the_overlong_penalty_by_hand():
    cfg = OverlongBufferConfig(enable=True, len=4, penalty_factor=2.0)
    lengths = np.array([0, 6, 7, 10, 12])
    # Of a limit of 10 the last 4 are the buffer: -2 at the limit, and on as steeply beyond it.
    assert overlong_penalty(lengths, 10, cfg).tolist() == [0.0, 0.0, -0.5, -2.0, -3.0]


def test_the_rule_reward_may_be_a_weighted_sum_of_numbers(make):
    trainer = make(reward__weights="{acc: 2.0, score: 0.5}", twist=lambda row, score: 0.25)
    score = trainer.pool.score
    with_failures(trainer, 0)
    samples = trainer.experience.collect(StepTimer())[0]
    failed = samples["reward_failed"] > 0
    assert samples["rule_score"][~failed] == pytest.approx(2.0 * samples["scorer/acc"][~failed] + 0.125)
    assert samples["rule_score"][failed].tolist() == [0.0], "what the failure is worth"
    trainer.pool.score = lambda *given: {k: v for k, v in score(*given).items() if k != "scorer/acc"}
    with pytest.raises(RewardError, match=r"reward.weights.acc: the scorer did not return the number"):
        trainer.step(2)


def test_numbers_of_the_scorer_never_replace_the_trainer_s(make):
    plain, named = make(), make()
    own = plain.experience.collect(StepTimer())[0].numbers.keys()
    score = named.pool.score
    names = {*own, *COLUMNS}

    def more(split, jobs):
        columns = score(split, jobs)
        return columns | {SCORER + name: np.full(len(columns["score"]), 3.0) for name in names if SCORER not in name}

    named.pool.score = more
    named.experience.collect(StepTimer())
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


def test_a_prompt_whose_answers_could_not_be_scored_is_not_called_unsolved(make):
    trainer = make(data__sampler__name="solve_rate")
    n = trainer.plan.answers_per_prompt
    with_failures(trainer, *range(n), n, acc=0.5)
    rows = trainer.step(1).samples["row"][::n]
    assert trainer.experience.sampler.state()["rates"][rows] == pytest.approx([np.nan, 0.5, 0.5, 0.5], nan_ok=True)
