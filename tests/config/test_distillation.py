"""Settings of a teacher: valid ones, and combinations that are refused with one sentence each."""

import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.notes import other_meanings, without_effect
from rltrain.config.step_passes import make_step_passes

A, LOSS = "actor_rollout_ref.actor.", "distillation.distillation_loss."
BASE = [
    "data.train_batch_size=8", f"{A}ppo_mini_batch_size=8", "algorithm.adv_estimator=grpo", "trainer.nnodes=1",
    "trainer.n_gpus_per_node=2", "actor_rollout_ref.model.path=model", "data.train_files=train",
    "actor_rollout_ref.rollout.n=2", "distillation.enabled=True",
]  # fmt: skip
TAUGHT = [*BASE, "distillation.teacher.model.path=teacher"]
ALONE = [*TAUGHT, f"{LOSS}use_task_rewards=False"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([f"{LOSS}loss_mode=k1"], "does not depend on the teacher"),
        ([f"{LOSS}loss_mode=reverse_kl", f"{LOSS}use_policy_gradient=True"], "is the same for every token"),
        ([f"{LOSS}loss_mode=forward_kl_topk"], f"use {LOSS}loss_mode=forward_kl."),
        ([f"{LOSS}loss_mode=jsd", f"{LOSS}jsd_beta=1.0"], "must be below 1"),
        ([f"{LOSS}loss_mode=jsd", f"{A}use_kl_loss=True", f"{A}kl_loss_type=full"], "Use kl_loss_type=k3+"),
        ([f"{LOSS}use_task_rewards=False", "algorithm.use_kl_in_reward=True"], "Use actor_rollout_ref.actor.use_kl"),
        ([f"{LOSS}loss_mode=jsd", "distillation.teacher.ulysses_sequence_parallel_size=2"], "share the devices"),
    ],
)  # fmt: skip
def test_what_a_teacher_cannot_is_refused_with_a_way_out(overrides, sentence):
    check(load_config([*TAUGHT, f"{LOSS}loss_mode=jsd"]))
    with pytest.raises(ConfigError) as refusal:
        check(load_config([*TAUGHT, *overrides]))
    assert sentence in str(refusal.value)


def test_alone_nothing_that_only_rewards_need_is_there():
    loaded = load_config([*ALONE, "algorithm.adv_estimator=gae"])
    check(loaded)
    passes = make_step_passes(loaded.config)
    assert "critic" not in passes.roles
    assert not passes.skips_silent
    said = f"algorithm.adv_estimator: no effect: {LOSS}use_task_rewards=False trains on the teacher only"
    assert said in without_effect(loaded)
    # With a single response the estimator compares nothing, so this is equal.
    assert not list(other_meanings(load_config([*ALONE, "actor_rollout_ref.rollout.n=1"])))


@pytest.mark.parametrize(
    ("mode", "steps", "needs"),
    [
        ("jsd", "gen, reward, adv, update_actor (teacher)", ("teacher", "update_actor")),
        ("k3", "gen, reward, teacher, adv, update_actor", ("teacher",)),
    ],
)
def test_the_plan_says_where_the_teacher_computes(mode, steps, needs):
    passes = make_step_passes(load_config([*TAUGHT, f"{LOSS}loss_mode={mode}"]).config)
    assert passes.describe(1) == steps
    assert passes.needs("teacher") == needs
