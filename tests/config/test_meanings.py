"""Keys that mean what they mean in verl, and the notes on those that do not."""

import pytest

from rltrain.base.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.notes import other_meanings, without_effect
from rltrain.config.schema.model import OptimConfig
from rltrain.config.step_passes import make_step_passes
from rltrain.models.optim import learning_rate
from rltrain.run.report.plan import describe
from rltrain.trainer.plan import make_plan

A, CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
BASE = [
    "actor_rollout_ref.model.path=m", "data.train_files=t.parquet", "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4", "trainer.n_gpus_per_node=1",
]  # fmt: skip
JUDGE = ["reward_model.enable=True", "reward_model.model.path=judge"]


def loaded(*overrides: str):
    found = load_config([*BASE, *overrides])
    check(found)
    return found


def notes(*overrides: str) -> list[str]:
    return list(other_meanings(loaded(*overrides)))


def plan_of(*overrides: str) -> str:
    config = loaded(*overrides).config
    return describe(make_plan(config), config)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        loaded(*overrides)
    return str(error.value)


# -- aggregation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "own"),
    [
        ("vanilla", "token-mean"),
        ("cispo", "token-mean"),
        ("gspo", "seq-mean-token-mean"),
        ("sapo", "seq-mean-token-mean"),
        ("geo_mean", "seq-mean-token-mean"),
    ],
)
def test_a_loss_takes_its_own_mean_unless_one_is_set(loss, own):
    mode = f"{A}policy_loss.loss_mode={loss}"
    for overrides, expected in ([mode], own), ([mode, f"{A}loss_agg_mode=token-sum"], "token-sum"):
        assert make_step_passes(loaded(*overrides).config).aggregation == expected
        assert f"grpo advantages, {loss} loss, {expected}" in plan_of(*overrides)
    assert notes(mode) == notes(mode, f"{A}loss_agg_mode={own}") == []


def test_an_aggregation_that_verl_would_not_take_is_noted():
    gspo = f"{A}policy_loss.loss_mode=gspo"
    (note,) = notes(gspo, f"{A}loss_agg_mode=token-mean")
    assert note.startswith(f"{A}loss_agg_mode=token-mean: followed")
    assert "seq-mean-token-mean" in note
    assert notes(f"{A}loss_agg_mode=seq-mean-token-mean") == []


def test_the_reinforce_loss_of_the_bypass_has_a_token_mean():
    gspo = [f"{A}policy_loss.loss_mode=gspo", f"{CORRECTION}bypass_mode=True"]
    assert make_step_passes(loaded(*gspo).config).aggregation == "seq-mean-token-mean"
    passes = make_step_passes(loaded(*gspo, f"{CORRECTION}loss_type=reinforce").config)
    assert (passes.policy_loss, passes.aggregation) == ("gpg", "token-mean")


def test_a_loss_beside_the_bypass_is_noted():
    (note,) = notes(f"{A}policy_loss.loss_mode=gspo", f"{CORRECTION}bypass_mode=True")
    assert note.startswith(f"{A}policy_loss.loss_mode=gspo: ")
    assert "verl replaces it by vanilla" in note
    assert notes(f"{CORRECTION}bypass_mode=True") == []


def test_weights_are_not_normalised_beside_the_bypass():
    keys = [f"{CORRECTION}{key}" for key in ("bypass_mode=True", "loss_type=reinforce", "rollout_is=token")]
    (note,) = without_effect(loaded(*keys, f"{CORRECTION}rollout_is_batch_normalize=True"))
    assert "rollout_is_batch_normalize: no effect: with bypass_mode" in note


def test_a_clip_ratio_alone_is_noted():
    (note,) = notes(f"{A}clip_ratio=0.1")
    assert "both bounds" in note
    assert notes(f"{A}clip_ratio=0.2") == notes(f"{A}clip_ratio=0.1", f"{A}clip_ratio_high=0.3") == []


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_a_reward_model_alone_decides_unless_rules_have_a_weight():
    assert "1 x the reward model's score (it alone decides" in plan_of(*JUDGE)
    assert "scoring" not in plan_of(*JUDGE)
    both = plan_of(*JUDGE, "reward_model.rule_weight=0.5", "reward_model.weight=2")
    assert "2 x the reward model's score + 0.5 x the scorer's\n" in both
    assert "scoring" in both
    assert "reward " not in plan_of()


def test_scoring_keys_beside_a_reward_model_have_no_effect():
    lines = without_effect(loaded(*JUDGE, "reward.timeout_s=3"))
    assert lines == [
        "reward.timeout_s: no effect: the reward model alone decides unless reward_model.rule_weight is set"
    ]
    assert without_effect(loaded(*JUDGE, "reward.timeout_s=3", "reward_model.rule_weight=1")) == []


def test_a_function_beside_a_reward_model_needs_a_decision():
    custom = "custom_reward_function.path=my.py"
    text = refusal(*JUDGE, custom)
    assert "reward_model.rule_weight=0" in text
    assert "reward_model.rule_weight=1" in text
    for weight in (0, 1):
        loaded(*JUDGE, custom, f"reward_model.rule_weight={weight}")


def test_what_asks_for_a_scorer_names_the_rule_weight():
    for asking in ("reward.weights.acc=1", "data.sampler.name=solve_rate"):
        assert "unless reward_model.rule_weight is set (got null)" in refusal(*JUDGE, asking)


@pytest.mark.parametrize("key", ["reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len"])
def test_the_limit_of_dapo_s_penalty_is_read(key):
    overlong = ["reward_model.reward_manager=dapo", "reward_model.overlong_buffer.enable=True"]
    settings = loaded(*overlong, "reward_model.overlong_buffer.len=10", f"{key}=100")
    assert settings.config.reward_model.overlong_buffer.max_resp_len == 100
    assert without_effect(settings) == []
    text = refusal(*overlong, "reward_model.overlong_buffer.len=101", f"{key}=100")
    assert f"at most {key}=100" in text


# -- dynamic sampling, warm-up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_one_answer_to_a_prompt_is_said_in_capitals(estimator):
    alone = [f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=1"]
    (note,) = notes(*alone)
    assert "ONE ANSWER TO A PROMPT" in note
    assert "as in verl" in note
    assert f"{estimator} advantages (ONE ANSWER TO A PROMPT: THE SCORE ITSELF)" in plan_of(*alone)
    # Greedy answers differ from prompt to prompt.
    loaded(*alone, "actor_rollout_ref.rollout.do_sample=False")
    assert notes(f"algorithm.adv_estimator={estimator}") == []
    assert "ONE ANSWER" not in plan_of(f"algorithm.adv_estimator={estimator}")
    assert notes("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1") == []


@pytest.mark.parametrize("estimator", ["grpo_passk", "rloo_vectorized", "gpg_paper"])
def test_an_estimator_that_would_learn_nothing_from_one_answer_is_refused(estimator):
    text = refusal(f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=1")
    assert "actor_rollout_ref.rollout.n must be >= 2 (got 1)" in text


def test_dynamic_sampling_of_single_answers_keeps_all_of_them():
    alone = loaded("algorithm.filter_groups.enable=True", "actor_rollout_ref.rollout.n=1")
    assert "algorithm.filter_groups.enable: no effect: a prompt has one answer, and all are kept" in without_effect(
        alone
    )


@pytest.mark.parametrize(("rounds", "most"), [(0, 100), (-1, 100), (7, 7)])
def test_no_limit_of_rounds_is_a_stated_bound(rounds, most):
    text = plan_of("algorithm.filter_groups.enable=True", f"algorithm.filter_groups.max_num_gen_batches={rounds}")
    assert f"at most {most} rounds of 1,024 prompts" in text


def test_rewards_after_kl_cannot_filter_groups():
    metric = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_final_reward"]
    loaded(*metric)
    assert "metric=seq_reward" in refusal(*metric, "algorithm.use_kl_in_reward=True")


@pytest.mark.parametrize(("steps", "warmup"), [(-1, 10), (0, 10), (3, 3)])
def test_no_warmup_steps_leave_it_to_the_ratio(steps, warmup):
    keys = [f"{A}optim.lr_warmup_steps={steps}", f"{A}optim.lr_warmup_steps_ratio=0.1"]
    assert make_plan(loaded(*keys, "trainer.total_training_steps=100").config).lr_warmup_steps == warmup


def test_the_first_step_of_a_warmup_already_learns():
    rates = [learning_rate(step, OptimConfig(lr=1.0), 3, 100) for step in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]
