"""Complete steps of the real trainer in this process, for every algorithm."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.algorithms.advantages import ESTIMATORS, TokenInputs
from rltrain.common.columns.ragged import Ragged
from rltrain.common.errors import ConfigError
from rltrain.common.stop import Stop
from rltrain.config.schema.algorithm import AlgorithmConfig
from rltrain.models.attention.packing import pack
from rltrain.models.weights import shard
from rltrain.run.preflight.settings import check_plugins
from rltrain.trainer.advantage import regroup_by_prompt
from rltrain.trainer.batching.balance import Layout
from rltrain.trainer.batching.mini_batches import cut_prompts
from rltrain.trainer.progress import Progress
from tests.batches import prompt_lengths, rows_of
from tests.distance import distance
from tests.trainer.steps import (
    ACTOR,
    ESTIMATOR,
    LOSS,
    NO_KL,
    VARIANTS,
    Moved,
    numbers_of,
)

pytestmark = pytest.mark.usefixtures("process_group")


# Every run of the suite has the usual loss, one of a whole answer, and those that choose among the tokens of a whole
# mini-batch; for all, without a trainer: test_any_cut_and_order_give_the_same_loss.
LOSSES = [f"loss {name}" for name in ("vanilla", "gspo", "clip_cov", "kl_cov", "m2po", "real")]
# Nor does the driver cut what it makes of whole answers: tests/algorithms/test_advantages.py.
OF_ANSWERS = ["rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline", "maxrl", "agg seq-mean-token-sum"]
LONG = {name for name in VARIANTS if name.startswith("loss ")}.difference(LOSSES).union(OF_ANSWERS)


@pytest.mark.smoke("The loss does not depend on how micro-batches are cut")
@pytest.mark.few(9)
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in VARIANTS]
)
def test_weights_and_metrics_do_not_depend_on_the_cut(make, variant):
    found = []
    cuts = (
        {ACTOR + "ppo_max_token_len_per_gpu": 25},
        {ACTOR + "use_dynamic_bsz": False, ACTOR + "ppo_micro_batch_size_per_gpu": 3},
    )
    for cut in ({}, cuts[list(VARIANTS).index(variant) % 2]):
        trainer = make(**VARIANTS[variant], **cut)
        moved = Moved(trainer)
        # With a loss of its own a step makes four optimizer steps.
        steps = (1,) if variant.startswith("loss ") else (1, 2)
        metrics = [numbers_of(trainer.step(step).metrics) for step in steps]
        found.append((moved.by_role(), metrics))
    assert all(float(moved.norm()) > 0.02 for moved in found[0][0]), "the steps must do something"
    for moved, metrics in found[1:]:
        for mine, theirs in zip(found[0][0], moved, strict=True):
            assert distance(theirs, mine) < 1e-4
        for mine, theirs in zip(found[0][1], metrics, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(math.isfinite(value) for value in mine.values())
            assert mine == pytest.approx(theirs, abs=2e-4, rel=2e-4)


def test_mini_batches_and_epochs_are_shuffled_independently(make):
    trainer = make(**VARIANTS["shuffle"])
    same = []
    for step in range(1, 21):
        shuffled = [int(ids[0]) // 4 for ids in cut_prompts(trainer.plan, 1, 1, step, trainer.cfg.data.seed)]
        same.append(shuffled == [row for row in trainer.experience.sampler.permutation(step) if row < 4])
    assert sum(same) < 5, "one in 24 by chance"


def test_without_a_kl_there_is_no_reference_and_no_pass(make):
    for keys, calls in ((NO_KL, 0), ({}, 1), ({ACTOR + "kl_loss_type": "full"}, 0)):
        trainer = make(**keys)
        trainer.step(1)
        assert trainer.group.calls.count("Actor.ref_log_probs") == calls
        assert ("ref" in trainer.worker.offloader.models) == (keys != NO_KL)


def test_remax_compares_with_the_greedy_answer_to_the_prompt(make):
    trainer = make(**{ESTIMATOR: "remax"}, actor_rollout_ref__rollout__n=2)
    answered = trainer.step(1)
    metrics, samples = answered.metrics, answered.samples
    baseline = samples["baseline"].reshape(-1, 2)
    assert (baseline[:, 0] == baseline[:, 1]).all()
    expected = np.average(samples["score"] - samples["baseline"], weights=samples["response_length"])
    assert metrics["critic/advantages/mean"] == pytest.approx(expected, abs=1e-6)
    assert "timing_s/gen_max" in metrics


def test_the_kl_is_taken_out_of_the_reward_and_its_weight_adapts(make):
    trainer = make(
        **NO_KL, algorithm__use_kl_in_reward=True, algorithm__kl_penalty="abs", algorithm__kl_ctrl__type="adaptive",
        algorithm__kl_ctrl__kl_coef=0.5, algorithm__kl_ctrl__target_kl=1e-9, algorithm__kl_ctrl__horizon=160,
    )  # fmt: skip
    first, second = trainer.step(1).metrics, trainer.step(2).metrics
    assert first["critic/rewards/mean"] == first["critic/score/mean"]  # the policy is still the reference
    assert second["critic/rewards/mean"] < second["critic/score/mean"]
    # KL of 0 lowers the weight by at most 20 % x 16 samples / 160, a KL far over the target raises it by as much.
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * 0.98)
    assert trainer.advantages.kl_coef == pytest.approx(0.5 * 0.98 * 1.02)
    assert (trainer.progress.batches_drawn, trainer.progress.kl_coef) == (2, trainer.advantages.kl_coef)


def test_the_exact_kl_equals_the_sum_over_the_vocabulary(make, tiny_model):
    trainer = make(**{ACTOR + "kl_loss_type": "full"}, actor_rollout_ref__rollout__temperature=0.7)
    trainer.step(1)
    actor = trainer.worker.actor
    batch, *_ = trainer.worker.rollout.generate(trainer.experience_task())
    inputs = pack(batch, torch.device("cpu"))
    with torch.no_grad():
        found = actor.policy(inputs, 0.7, False, actor._exact_reference.states(inputs)).kl
    shard.reshard(actor.policy)
    plain, theirs = AutoModelForCausalLM.from_pretrained(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model)
    state = {name.removeprefix("model."): p.full_tensor() for name, p in actor.policy.named_parameters()}
    plain.load_state_dict(state, strict=False)
    expected = []
    for row, prompt_length in zip(rows_of(batch), prompt_lengths(batch), strict=True):
        with torch.no_grad():
            logs = [
                torch.log_softmax(each(row[None].long()).logits[0, prompt_length - 1 : -1] / 0.7, -1)
                for each in (plain, theirs)
            ]
        expected.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1))
    assert float(found.max()) > 1e-4
    assert distance(found, torch.cat(expected)) < 1e-3


PLUGIN = """
import torch
from rltrain.algorithms.policy_losses import PolicyLoss

def half(inputs, cfg):
    return inputs.scores / 2

def plain(inputs, cfg):
    return PolicyLoss(-inputs.advantages * inputs.log_probs, {"seen": torch.ones_like(inputs.advantages)})

def detached(inputs, cfg):
    return PolicyLoss(inputs.advantages, {})

def broken(inputs, cfg):
    return inputs.no_such_field
"""


def test_estimators_and_losses_of_the_users_own(make, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    trainer = make(**{ESTIMATOR: f"{file}:half", LOSS: f"{file}:plain"})
    metrics = trainer.step(1).metrics
    assert metrics["critic/advantages/max"] == pytest.approx(metrics["critic/score/max"] / 2)
    assert metrics["actor/seen"] == 1.0
    assert not check_plugins(trainer.cfg)
    for name, words in (("detached", "depend on inputs.log_probs"), ("broken", "no_such_field")):
        trainer.cfg.actor_rollout_ref.actor.policy_loss.loss_mode = f"{file}:{name}"
        assert words in check_plugins(trainer.cfg)[0]
    trainer.cfg.actor_rollout_ref.actor.policy_loss.loss_mode = f"{file}:nothing"
    with pytest.raises(ConfigError, match="defines"):
        check_plugins(trainer.cfg)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_token_advantages_are_whitened_where_they_enter_the_loss(make, estimator):
    one_step = {ESTIMATOR: estimator, ACTOR + "ppo_mini_batch_size": 4, **NO_KL}
    metrics = make(**one_step).step(1).metrics
    assert metrics["critic/returns/mean"] > 0.1
    assert metrics["actor/pg_loss"] == pytest.approx(0.0, abs=1e-5)  # the ratio is 1 and the mean advantage 0
    ten_times = make(**one_step, twist=lambda row, score: 10 * score).step(1).metrics
    assert ten_times["critic/returns/mean"] == pytest.approx(10 * metrics["critic/returns/mean"], rel=1e-4)
    assert ten_times["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)


def test_a_fixed_kl_weight_follows_the_config_after_a_resume(make):
    for kind, expected in (("fixed", 0.01), ("adaptive", 0.5)):
        kl = {"use_kl_in_reward": True, "kl_ctrl__kl_coef": 0.01, "kl_ctrl__type": kind}
        trainer = make(**{f"algorithm__{name}": value for name, value in kl.items()})
        trainer.restore(Progress(3, 0.5))
        assert trainer.advantages.kl_coef == expected


VALIDATION = "actor_rollout_ref__rollout__val_kwargs__"


@pytest.mark.parametrize(
    ("keys", "temperature", "num_samples"),
    [
        ({"n": 3}, None, 1),  # greedy where nothing is written, as verl's temperature of validations is 0
        ({"temperature": 0.7, "n": 3}, 0.7, 3),
        ({"temperature": 0.7, "n": 3, "do_sample": False}, None, 1),
        ({"do_sample": True}, None, 1),
    ],
)
def test_a_validation_temperature_samples(make, keys, temperature, num_samples):
    trainer = make(**{VALIDATION + name: value for name, value in keys.items()})
    tasks, generate = [], trainer.actor.generate
    trainer.actor.generate = lambda task: tasks.append(task) or generate(task)
    metrics = trainer.validation.run(1, Stop()).metrics
    assert {None if task.sampling.greedy else task.sampling.temperature for task in tasks} == {temperature}
    assert {task.num_samples for task in tasks} == {num_samples}
    assert f"val-core/rltrain/arithmetic/acc/mean@{num_samples}" in metrics


def test_whole_groups_lie_on_one_rank_each_and_their_baselines_are_those_of_one_rank():
    groups = np.array([0, 0, 0, 1, 1, 2, 2])
    layout = Layout([np.array([0, 3, 5]), np.array([1, 4, 2]), np.array([6])], [[(2, 1)], [(3,)], [(1,)]])
    regrouped = regroup_by_prompt(layout, groups)
    assert [sorted(ids.tolist()) for ids in regrouped.ids] == [[3, 4, 5, 6], [0, 1, 2], []]
    assert regrouped.micro_sizes == [[(4,)], [(3,)], [(0,)]]
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 0, 2, 4, 1, 2, 5])
    columns = [
        Ragged(torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64), lengths) for _ in range(3)
    ]

    def estimated(ids):
        rewards, probs, squares = (column.select(torch.from_numpy(ids)) for column in columns)
        of_group = torch.from_numpy(groups[ids])
        inputs = TokenInputs(rewards, groups=of_group, log_probs=probs.like(-probs.values), sum_pi_squared=squares)
        return ESTIMATORS["optimal_token_baseline"](inputs, AlgorithmConfig()).advantages.rows()

    together = list(estimated(np.arange(7)))
    for ids in regrouped.ids[:2]:
        for number, row in zip(ids, estimated(ids), strict=True):
            assert row.tolist() == pytest.approx(together[number].tolist(), abs=1e-12)
