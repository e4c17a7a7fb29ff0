"""The passes of a step, from the configuration and the declarations of estimators and losses."""

import pytest

from rltrain.common.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.notes import without_effect
from rltrain.config.step_passes import make_step_passes, needs_all_old_log_probs
from rltrain.run.preflight.settings import check_plugins

A, CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
BASE = [
    "data.train_batch_size=8", f"{A}ppo_mini_batch_size=2", "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "actor_rollout_ref.model.path=model", "data.train_files=train",
]  # fmt: skip
PLUGIN = """
from rltrain.algorithms.advantages import TokenAdvantages, outcome_estimator, token_estimator
from rltrain.algorithms.policy_losses import PolicyLoss, Selection, policy_loss

@token_estimator(values=True)
def with_critic(inputs, cfg):
    returns = inputs.rewards
    return TokenAdvantages(returns.like(returns.values - inputs.values.values), returns)

@outcome_estimator(greedy_baseline=True)
def with_baseline(inputs, cfg):
    return inputs.scores - inputs.baselines

@outcome_estimator(compares=True)
def comparing(inputs, cfg):
    return inputs.scores

@policy_loss(selection=Selection(lambda inputs, noise, means, cfg: noise, lambda cfg: 0.5))
def half_of_the_tokens(inputs, cfg):
    return PolicyLoss((-inputs.advantages * inputs.log_probs).masked_fill(inputs.selected, 0.0), {})
"""


@pytest.fixture
def plugin(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    return tmp_path / "mine.py"


def steps_of(*overrides: str) -> str:
    config = load_config([*BASE, *overrides]).config
    return make_step_passes(config).describe(num_mini_batches=4)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], "gen, reward, OLD (3 of 4 mini-batches), adv, update_actor"),
        ([f"{A}ppo_epochs=2"], "gen, reward, OLD, adv, update_actor"),
        ([f"{CORRECTION}bypass_mode=True"], "gen, reward, adv, update_actor"),
        ([f"{A}use_kl_loss=True"], "gen, reward, OLD (3 of 4 mini-batches), ref, adv, update_actor"),
        ([f"{A}use_kl_loss=True", f"{A}kl_loss_type=full"],
         "gen, reward, OLD (3 of 4 mini-batches), adv, update_actor (exact KL)"),
        (["algorithm.use_kl_in_reward=True"], "gen, reward, OLD, ref, adv, update_actor"),
        (["algorithm.adv_estimator=gae"],
         "gen, reward, OLD (3 of 4 mini-batches), values, adv, update_critic, update_actor"),
        (["algorithm.adv_estimator=remax"],
         "gen, reward, gen_max (greedy responses), OLD (3 of 4 mini-batches), adv, update_actor"),
        ([f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_rs=token_k1", f"{CORRECTION}rollout_rs_threshold=2"],
         "gen, reward, OLD, adv, update_actor (importance weights, rejection)"),
    ],
)  # fmt: skip
def test_a_step_makes_the_passes_that_something_needs(overrides, steps):
    assert steps_of(*overrides) == steps.replace("OLD", "old_log_prob")


# Key that needs the old log-probs of all samples -> settings under which it does.
NEEDS_ALL = {
    "algorithm.use_kl_in_reward": ["algorithm.use_kl_in_reward=True"],
    "algorithm.adv_estimator": ["algorithm.adv_estimator=optimal_token_baseline"],
    f"{CORRECTION}rollout_rs": [f"{CORRECTION}rollout_rs=token_k1", f"{CORRECTION}rollout_rs_threshold=2"],
    f"{CORRECTION}rollout_is_batch_normalize": [
        f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_batch_normalize=True"
    ],
    f"{A}policy_loss.loss_mode": [f"{A}policy_loss.loss_mode=kl_cov"],
    f"{A}top_entropy_quantile": [f"{A}top_entropy_quantile=0.2"],
    f"{A}adaptive_entropy.target_entropy": [f"{A}adaptive_entropy.target_entropy=0.5"],
    f"{A}router_aux_loss_coef": [f"{A}router_aux_loss_coef=0.1", f"{A}router_replay.mode=R2"],
    f"{A}ppo_epochs": [f"{A}ppo_epochs=2"],
    "actor_rollout_ref.rollout.on_log_prob_gap": ["actor_rollout_ref.rollout.on_log_prob_gap=stop"],
}  # fmt: skip


@pytest.mark.parametrize("key", NEEDS_ALL)
def test_the_pass_covers_all_samples_and_a_note_names_the_key_that_needs_them(key):
    loaded = load_config([*BASE, *NEEDS_ALL[key], f"{A}recompute_old_log_prob=auto"])
    assert needs_all_old_log_probs(loaded.config) == [key]
    assert make_step_passes(loaded.config).old_log_probs == "all"
    assert any(f"covers all samples because of {key}" in note for note in without_effect(loaded))


def test_during_critic_warmup_the_pass_covers_every_sample():
    config = load_config([*BASE, "algorithm.adv_estimator=gae", "trainer.critic_warmup=3"]).config
    passes = make_step_passes(config)
    assert [passes.updates_actor(step) for step in (1, 2, 3)] == [False, False, True]
    assert [passes.waits_for_update(step) for step in (1, 2, 3)] == [False, False, True]


def test_a_comparing_plugin_refuses_a_single_answer_per_prompt(plugin):
    loaded = load_config([*BASE, f"algorithm.adv_estimator={plugin}:comparing", "actor_rollout_ref.rollout.n=1"])
    with pytest.raises(
        ConfigError, match=r"compares responses to one prompt, so actor_rollout_ref.rollout.n must be >= 2"
    ):
        check(loaded)


def test_what_a_plugin_declares_it_is_given(process_group, plugin, tiny_trainer):
    def metrics(**keys):
        trainer = tiny_trainer(**keys)
        assert not check_plugins(trainer.cfg)
        return trainer.step(1).metrics

    found = metrics(algorithm__adv_estimator=f"{plugin}:with_critic")
    assert found["actor/grad_norm"] > 0
    assert found["critic/grad_norm"] > 0
    assert "critic/values/mean" in found
    assert "timing_s/gen_max" in metrics(algorithm__adv_estimator=f"{plugin}:with_baseline")
    assert "old_log_prob, adv" in steps_of(f"{A}policy_loss.loss_mode={plugin}:half_of_the_tokens")
    loss = {"actor_rollout_ref__actor__policy_loss__loss_mode": f"{plugin}:half_of_the_tokens"}
    assert metrics(**loss)["actor/grad_norm"] > 0
