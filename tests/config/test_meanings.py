"""Keys with the same meaning as in verl, and the notes on the others."""

import numpy as np
import pytest

from rltrain.common.errors import ConfigError, RewardError
from rltrain.config.load import load_config
from rltrain.config.schema.model import OptimConfig
from rltrain.config.step_passes import make_step_passes
from rltrain.models.optim import learning_rate
from rltrain.rewards.processes.score import Score
from rltrain.run.checkpoints.resume import frozen_values
from rltrain.run.report.plan import describe
from rltrain.run.scorers import check_columns
from rltrain.runtime.samples import Samples
from rltrain.trainer.plan import make_plan
from rltrain.trainer.rewards import known_number
from tests.config.commands import A, load, meanings, notes, problems

JUDGE = "reward_model.enable=True reward_model.model.path=judge"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
C = "algorithm.rollout_correction."
RS = f"{C}rollout_rs=token_k1 {C}rollout_rs_threshold=0.5_2"
FLAT, GAE = "algorithm.norm_adv_by_std_in_grpo=False", "algorithm.adv_estimator=gae"
RATIO = "actor.optim.lr_warmup_steps_ratio=0.1"
GROUPS = "algorithm.filter_groups.enable=True"


def plan_of(*commands: str) -> str:
    config = load(*commands).config
    return describe(make_plan(config), config)


@pytest.mark.parametrize(
    ("loss", "own"),
    [("vanilla", "token-mean"), ("cispo", "token-mean"), ("gspo", "seq-mean-token-mean")],
)
def test_a_loss_takes_its_own_mean_unless_one_is_set(loss, own):
    mode = f"actor.policy_loss.loss_mode={loss}"
    for command, expected in (mode, own), (f"{mode} actor.loss_agg_mode=token-sum", "token-sum"):
        assert make_step_passes(load(command).config).aggregation == expected
        assert f"grpo advantages, {loss} loss, {expected}" in plan_of(command)
    assert meanings(f"{mode} actor.loss_agg_mode={own}") == []
    assert ["verl 0.9 uses token-mean" in line for line in meanings(mode)] == [True] * (loss == "gspo")


def test_the_reinforce_loss_of_the_bypass_has_a_token_mean():
    gspo = f"actor.policy_loss.loss_mode=gspo {BYPASS}"
    assert make_step_passes(load(gspo).config).aggregation == "seq-mean-token-mean"
    passes = make_step_passes(load(gspo, "algorithm.rollout_correction.loss_type=reinforce").config)
    assert (passes.policy_loss, passes.aggregation) == ("gpg", "token-mean")


@pytest.mark.parametrize(
    ("command", "note", "without"),
    [
        (
            "actor.policy_loss.loss_mode=gspo actor.loss_agg_mode=token-mean",
            "used as set",
            "actor.loss_agg_mode=token-mean",
        ),
        (f"actor.policy_loss.loss_mode=sapo {BYPASS}", "keeps it, as verl's workers do", BYPASS),
        (f"{BYPASS} {C}loss_type=reinforce", "workers do not receive it", f"{C}loss_type=reinforce"),
        (f"{BYPASS} {RS}", "nothing is rejected", RS),
        (f"{FLAT} algorithm.adv_estimator=grpo_vectorized", "divides", FLAT),
        (f"actor.optim.lr_warmup_steps=0 {RATIO}", "do not warm up", f"actor.optim.lr_warmup_steps=-1 {RATIO}"),
        (f"critic.optim.lr_warmup_steps=0 critic.optim.lr_warmup_steps_ratio=0.1 {GAE}", "do not warm up", GAE),
        ("actor.optim.clip_grad=0.5", "read only actor.grad_clip", "actor.grad_clip=0.5"),
        (f"critic.optim.clip_grad=0.5 {GAE}", "read only critic.grad_clip", "critic.optim.clip_grad=0.5"),
        ("actor.shuffle=True", "samples within a rank", "actor.shuffle=False"),
        (f"critic.shuffle=True {GAE}", "samples within a rank", "critic.shuffle=True"),
        (GROUPS, "seq_reward here", f"{GROUPS} algorithm.filter_groups.metric=acc"),
        ("data.reward_fn_key=kind", "use the column data_source", "data.reward_fn_key=data_source"),
        ("data.truncation=right", "truncates on the left", "data.truncation=right data.filter_overlong_prompts=True"),
        ("rollout.top_k=20", "does not send it", "rollout.top_k=1000000"),
        ("rollout.val_kwargs.top_k=20", "does not send it", "rollout.val_kwargs.top_k=-1"),
        ("rollout.repetition_penalty=1.1", "always generate with 1", "rollout.repetition_penalty=1.0"),
        ("actor.clip_ratio=0.1", "both bounds", "actor.clip_ratio=0.1 actor.clip_ratio_high=0.3"),
        *(
            (f"algorithm.adv_estimator={estimator} rollout.n=1", "ONE RESPONSE PER PROMPT", "rollout.n=2")
            for estimator in ("grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
        ),
    ],
)
def test_a_key_that_means_something_else_than_in_verl_is_noted(command, note, without):
    (line,) = meanings(command)
    assert note in line
    assert "verl" in line
    assert meanings(without) == []


def test_one_answer_to_a_prompt_is_said_in_the_plan():
    assert "grpo advantages (ONE RESPONSE PER PROMPT: THE SCORE ITSELF)" in plan_of("rollout.n=1")
    load("rollout.n=1 rollout.do_sample=False")  # greedy responses differ only between prompts
    assert "ONE RESPONSE" not in plan_of()
    for estimator in ("grpo_passk", "rloo_vectorized", "gpg_paper"):
        (line,) = problems(f"algorithm.adv_estimator={estimator} rollout.n=1")
        assert "actor_rollout_ref.rollout.n must be >= 2 (got 1)" in line
    assert any("a prompt has one response, which is kept" in note for note in notes(f"{GROUPS} rollout.n=1"))


def test_a_reward_model_alone_decides_unless_rules_have_a_weight():
    assert "1 x the reward model's score (the only score" in plan_of(JUDGE)
    assert "scoring" not in plan_of(JUDGE)
    both = plan_of(JUDGE, "reward_model.rule_weight=0.5 reward_model.weight=2")
    assert "2 x the reward model's score + 0.5 x the scorer's\n" in both
    assert "scoring" in both
    assert notes(JUDGE, "reward.timeout_s=3") == [
        "reward.timeout_s: no effect: only the reward model counts unless reward_model.rule_weight is set"
    ]
    assert notes(JUDGE, "reward.timeout_s=3 reward_model.rule_weight=1") == []
    for asking in ("reward.weights.acc=1", "data.sampler.name=solve_rate"):
        assert "unless reward_model.rule_weight is set (got null)" in problems(JUDGE, asking)[0]


def test_a_function_beside_a_reward_model_needs_a_decision():
    custom = "custom_reward_function.path=my.py"
    text = "\n".join(problems(JUDGE, custom))
    for weight in (0, 1):
        assert f"reward_model.rule_weight={weight}" in text
        load(JUDGE, custom, f"reward_model.rule_weight={weight}")
    served = "reward_model.rollout.dtype=bfloat16 custom_reward_function.path=my.py"
    assert any("a generative reward model" in line for line in problems(JUDGE, served))


@pytest.mark.parametrize("key", ["reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len"])
def test_the_limit_of_dapo_s_penalty_is_read(key):
    overlong = f"reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True {key}=100"
    settings = load(overlong, "reward_model.overlong_buffer.len=10")
    assert settings.config.reward_model.overlong_buffer.max_resp_len == 100
    assert f"at most {key}=100" in problems(overlong, "reward_model.overlong_buffer.len=101")[0]


@pytest.mark.parametrize(("rounds", "most"), [(0, 100), (-1, 100), (7, 7)])
def test_no_limit_of_rounds_is_a_stated_bound(rounds, most):
    text = plan_of(GROUPS, f"algorithm.filter_groups.max_num_gen_batches={rounds}")
    assert f"at most {most} rounds of 1,024 prompts" in text


def test_rewards_after_kl_cannot_filter_groups():
    metric = f"{GROUPS} algorithm.filter_groups.metric=seq_final_reward"
    load(metric)
    assert "metric=seq_reward" in problems(metric, "algorithm.use_kl_in_reward=True")[0]


@pytest.mark.parametrize(("steps", "warmup"), [(-1, 10), (0, 10), (3, 3)])
def test_no_warmup_steps_leave_it_to_the_ratio(steps, warmup):
    keys = f"actor.optim.lr_warmup_steps={steps} actor.optim.lr_warmup_steps_ratio=0.1"
    assert make_plan(load(keys, "trainer.total_training_steps=100").config).lr_warmup_steps == warmup


@pytest.mark.parametrize(
    ("version", "mean", "with_sum", "warmup", "prompts", "metric"),
    [
        (None, "seq-mean-token-mean", "token-sum", 10, 48, "acc"),
        ("0.5", "seq-mean-token-mean", "seq-mean-token-mean", 0, 48, "acc"),
        ("0.7", "seq-mean-token-mean", "seq-mean-token-mean", 0, 48, "acc"),
        ("0.9", "token-mean", "token-sum", 10, 16, "seq_reward"),
    ],
)
def test_versions_of_verl_differ(version, mean, with_sum, warmup, prompts, metric, tmp_path):
    gspo = "actor.policy_loss.loss_mode=gspo"
    sizes = "data.train_batch_size=16 data.gen_batch_size=48 actor.ppo_mini_batch_size=16"
    steps = f"actor.optim.lr_warmup_steps=0 {RATIO} trainer.total_training_steps=100"
    chosen = f"trainer.verl_version={version or 'null'}"
    plan = make_plan(load(chosen, gspo, sizes, steps).config)
    assert (plan.passes.aggregation, plan.lr_warmup_steps) == (mean, warmup)
    assert (plan.prompts_per_step, plan.prompts_per_round) == (prompts, prompts)
    assert make_step_passes(load(chosen, gspo, "actor.loss_agg_mode=token-sum").config).aggregation == with_sum
    # A checkpoint of this run is refused if the command now has another batch size.
    assert frozen_values(load(chosen, sizes).config)["prompts per round"] == prompts
    filtered = load(chosen, GROUPS, sizes).config
    assert (filtered.data.train_batch_size, filtered.algorithm.filter_groups.metric) == (16, metric)
    # Each difference is named.
    told = "\n".join(notes(chosen, sizes, f"{RS} rollout.calculate_log_probs={version == '0.9'}"))
    assert ("number of prompts in a step" in told) == (prompts == 48)
    assert ("data.gen_batch_size: no effect" in told) == (prompts == 16)
    assert ("before, it has none" in told) == (version != "0.9")
    assert bool(meanings(chosen, gspo)) == (version is None)
    assert bool(meanings(chosen, steps)) == (version is None)
    # In a file 0.9 is a number, and an error names the key that was written.
    (tmp_path / "run.yaml").write_text(f"trainer: {{verl_version: {version or 'null'}}}")
    assert load_config([], [str(tmp_path / "run.yaml")]).config.trainer.verl_version == version
    if prompts == 48:
        assert problems(sizes.replace("=16 data.gen", "=20 data.gen"), "actor.ppo_mini_batch_size=20")[0].startswith(
            "data.gen_batch_size=48 is not a multiple"
        )


@pytest.mark.parametrize(("warmup", "first"), [("0.05", 1), ("2.5", 3), ("3", 3), ("-1", -1)])
def test_a_critic_warms_up_for_any_number_of_steps(warmup, first):
    keys = f"trainer.critic_warmup={warmup}"
    assert make_step_passes(load(GAE, keys).config).first_actor_step == first
    assert "in verl it waits" in notes(keys)[0]


def test_the_first_step_of_a_warmup_already_learns():
    rates = [learning_rate(step, OptimConfig(lr=1.0), 3, 100) for step in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_weights_are_not_normalised_beside_the_bypass():
    correction = "algorithm.rollout_correction."
    keys = f"{correction}loss_type=reinforce {correction}rollout_is=token {correction}rollout_is_batch_normalize=True"
    (note,) = notes(BYPASS, keys)
    assert note.startswith(f"{correction}rollout_is_batch_normalize: no effect: with bypass_mode")


def test_adapters_are_merged_or_not_as_verl_s_key_says():
    for merge in (True, False):
        loaded = load(f"model.lora_rank=8 model.lora.merge={merge}")
        assert loaded.config.actor_rollout_ref.model.merges is merge
    assert notes("model.lora.merge=False")[0].startswith(f"{A}model.lora.merge: no effect")


def test_a_metric_that_no_scorer_returns_is_told_with_those_there_are():
    metric = f"{GROUPS} algorithm.filter_groups.metric=solved"
    with pytest.raises(ConfigError, match=r"metric=solved: .* It returns score, acc, format"):
        check_columns(load(metric).config.algorithm, {}, [Score(1.0, "ok", extras={"format": 1.0, "acc": 1.0})])
    weighed = load("trainer.val_only=True data.val_files=v.parquet reward.weights.fromat=1").config
    with pytest.raises(ConfigError, match=r"reward.weights=fromat: a scorer of data.val_files does not return"):
        check_columns(weighed.algorithm, weighed.reward.weights, [Score(1.0, "ok", extras={"format": 1.0})], "val")
    # The scorer returned it for the first rows, but not for others.
    samples = Samples(2)
    samples.update({"score": np.ones(2), "scorer/acc": np.ones(2), "reward_failed": np.zeros(2)})
    with pytest.raises(RewardError, match=r"the number 'solved' .* It returned acc"):
        known_number(samples, "solved", 0.0)
