"""Whole steps of the real trainer in this process, for every algorithm."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from rltrain.algorithms import policy_losses
from rltrain.batch import Batch
from rltrain.columns import COLUMNS, SCORER
from rltrain.config import declarations
from rltrain.config.declarations import LossTraits
from rltrain.controller.samples import Samples
from rltrain.errors import ConfigError, NonFiniteError, RewardError
from rltrain.models import shard
from rltrain.models.packing import pack
from rltrain.ragged import Ragged
from rltrain.stop import Stop
from rltrain.trainer.advantage import check_plugins
from rltrain.trainer.mini_batches import cut_prompts
from rltrain.trainer.progress import Progress
from rltrain.trainer.timing import StepTimer
from rltrain.workers import actor_ref
from rltrain.workers.results import UpdateNumbers
from rltrain.workers.selection import noise
from tests.batches import prompt_lengths, rows_of
from tests.distance import distance
from tests.tiny import save_tiny_tokenizer

pytestmark = pytest.mark.usefixtures("process_group")

ESTIMATOR, LOSS = "algorithm__adv_estimator", "actor_rollout_ref__actor__policy_loss__loss_mode"
ACTOR, CORRECTION = "actor_rollout_ref__actor__", "algorithm__rollout_correction__"
NO_KL = {ACTOR + "use_kl_loss": False, ACTOR + "entropy_coeff": 0}
COV = {
    ACTOR + "policy_loss__clip_cov_lb": -100, ACTOR + "policy_loss__clip_cov_ub": 100, ACTOR + "policy_loss__clip_cov_ratio": 0.1,
    ACTOR + "policy_loss__kl_cov_ratio": 0.1, ACTOR + "ppo_epochs": 2,
}  # fmt: skip
# As in `small_run`.
GAE = {ESTIMATOR: "gae", "critic__optim__lr": 5e-3, "critic__optim__eps": 1e-2}
VARIANTS = {
    **{name: {ESTIMATOR: name} for name in (
        "grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "remax",
    )},
    "gae": GAE,
    "gdpo": {ESTIMATOR: "gdpo", "algorithm__gdpo_reward_keys": "[acc,rule_score]"},
    **{f"loss {name}": {LOSS: name, **COV} for name in policy_losses.POLICY_LOSSES},
    # Against the engine: |log ratio| has a kink where a policy has not moved, and rounding would decide on which side of it.
    "loss kl_cov": {LOSS: "kl_cov", **COV, CORRECTION + "bypass_mode": True},
    **{f"agg {name}": {ACTOR + "loss_agg_mode": name} for name in (
        "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm",
    )},
    "exact kl": {ACTOR + "kl_loss_type": "full"},
    "k3+": {ACTOR + "kl_loss_type": "k3+"},
    "kl in reward": {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
    "exact kl in reward, gae": {"algorithm__use_kl_in_reward": True, "algorithm__kl_penalty": "full", **GAE},
    "tis": {CORRECTION + "rollout_is": "token", CORRECTION + "rollout_is_threshold": "1.1"},
    "sequence is": {CORRECTION + "rollout_is": "sequence", CORRECTION + "rollout_is_batch_normalize": True},
    "rejection": {**GAE, CORRECTION + "rollout_rs": "token_k1,seq_mean_k2", CORRECTION + "rollout_rs_threshold": "1.2,0.01"},
    "bypass": {CORRECTION + "bypass_mode": True, CORRECTION + "rollout_rs": "seq_max_k3", CORRECTION + "rollout_rs_threshold": "0.02"},
    "bypass reinforce": {CORRECTION + "bypass_mode": True, CORRECTION + "loss_type": "reinforce", CORRECTION + "rollout_is": "token"},
    "filter": {"algorithm__filter_groups__enable": True},
    "shuffle": {ACTOR + "shuffle": True, ACTOR + "ppo_epochs": 2},
}  # fmt: skip


@pytest.fixture
def make(twisted_trainer):
    """make(**changes): a trainer whose scores differ from answer to answer, and whose engine is a little off."""

    def trainer(**changes):
        made = twisted_trainer(**changes)
        engine_is_off(made)
        return made

    return trainer


def engine_is_off(trainer) -> None:
    """The engine reports log-probs that are not the trainer's, a different amount for every token."""
    rollout = trainer.worker.rollout
    generate = rollout.generate

    def off(task):
        batch, texts, numbers = generate(task)
        exact = batch.ragged("rollout_log_probs")
        batch.update({"rollout_log_probs": exact.like(exact.values + 0.2 * torch.sin(7 * exact.values))})
        return batch, texts, numbers

    rollout.generate = off


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()]).detach().clone()


def actor_weights(trainer) -> torch.Tensor:
    return weights(trainer.worker.actor._policy)


class Moved:
    """How far the weights of actor and critic have moved since this was made."""

    def __init__(self, trainer) -> None:
        self._models = [trainer.worker.actor._policy] + ([trainer.worker.critic._model] if trainer.critic else [])
        self._before = [weights(model) for model in self._models]

    def by_role(self) -> list[torch.Tensor]:
        return [weights(model) - before for model, before in zip(self._models, self._before, strict=True)]


def numbers_of(metrics: dict[str, float]) -> dict[str, float]:
    """What must not depend on how the batch was cut."""
    return {
        name: value for name, value in metrics.items() if not name.startswith(("timing", "perf/", "global_seqlen/"))
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_metrics_do_not_depend_on_the_cut(make, variant):
    found = []
    cuts = (
        {ACTOR + "ppo_max_token_len_per_gpu": 25},
        {ACTOR + "use_dynamic_bsz": False, ACTOR + "ppo_micro_batch_size_per_gpu": 3},
    )
    for cut in ({}, cuts[list(VARIANTS).index(variant) % 2]):
        trainer = make(**VARIANTS[variant], **cut)
        moved = Moved(trainer)
        metrics = [numbers_of(trainer.step(step)) for step in (1, 2)]
        found.append((moved.by_role(), metrics))
    assert all(float(moved.norm()) > 0.02 for moved in found[0][0]), "the steps must do something"
    for moved, metrics in found[1:]:
        for mine, theirs in zip(found[0][0], moved, strict=True):
            assert distance(theirs, mine) < 1e-4
        for mine, theirs in zip(found[0][1], metrics, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(math.isfinite(value) for value in mine.values())
            assert mine == pytest.approx(theirs, abs=2e-4, rel=2e-4)


ALWAYS = {ACTOR + "recompute_old_log_prob": "always"}
ONE_STEP = {ACTOR + "ppo_mini_batch_size": 4}
WITHOUT_PASS = {
    "two steps": {}, "one step": ONE_STEP, "no kl": ONE_STEP | NO_KL, "gae": GAE, "exact kl": VARIANTS["exact kl"],
    "shuffle": {ACTOR + "shuffle": True}, "cispo": {LOSS: "cispo"}, "tis": VARIANTS["tis"],
    "sequence is, one step": ONE_STEP | {CORRECTION + "rollout_is": "sequence"}, "filter": VARIANTS["filter"],
    "cut": {ACTOR + "ppo_max_token_len_per_gpu": 25},
}  # fmt: skip


def scored_samples(trainer) -> list[int]:
    """Grows by the number of samples of every old_log_prob pass."""
    sizes: list[int] = []
    log_probs = trainer.worker.actor.log_probs
    trainer.worker.actor.log_probs = lambda batch, cut: sizes.append(len(batch)) or log_probs(batch, cut)
    return sizes


@pytest.mark.parametrize("variant", WITHOUT_PASS)
def test_old_log_probs_may_come_from_the_updates_own_forward(make, variant):
    keys = WITHOUT_PASS[variant]
    found = []
    for choice in ({}, ALWAYS):
        trainer = make(**keys, **choice)
        sizes, moved = scored_samples(trainer), Moved(trainer)
        found.append(([numbers_of(trainer.step(step)) for step in (1, 2)], moved.by_role(), sizes))
    (metrics, mine, few), (all_metrics, theirs, many) = found
    assert many == [16, 16]
    assert few == ([] if keys.get(ACTOR + "ppo_mini_batch_size") == 4 else [8, 8])
    assert all(distance(*pair) < 1e-4 for pair in zip(mine, theirs, strict=True))
    for one, other in zip(metrics, all_metrics, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, abs=2e-5, rel=2e-4)


def test_a_selection_draws_anew_for_every_mini_batch_of_every_step(make, monkeypatch):
    trainer, seen = make(**VARIANTS["loss clip_cov"]), []
    monkeypatch.setattr(actor_ref, "noise", lambda *arguments: seen.append(noise(*arguments)) or seen[-1])
    for step in (1, 2):
        trainer.step(step)
    assert len({float(each[0]) for each in seen}) == len(seen) >= 2 * 4, "two mini-batches, each in two epochs"


def test_mini_batches_are_not_shuffled_as_the_prompts_of_an_epoch_are(make):
    trainer = make(**VARIANTS["shuffle"])
    same = []
    for step in range(1, 21):
        shuffled = [int(ids[0]) // 4 for ids in cut_prompts(trainer.plan, 1, 1, step, trainer.cfg.data.seed)]
        same.append(shuffled == [row for row in trainer.experience.sampler.permutation(step) if row < 4])
    assert sum(same) < 5, "one in 24 by chance"


def test_with_one_optimizer_step_the_ratio_is_exactly_one_and_the_phase_costs_nothing(make):
    metrics = make(**ONE_STEP, **NO_KL).step(1)
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/entropy"] > 0
    assert "timing_s/old_log_prob" in metrics
    assert "perf/old_log_prob_throughput" not in metrics


@pytest.mark.parametrize("needs", [
    {"algorithm__use_kl_in_reward": True}, {LOSS: "kl_cov"}, {ACTOR + "ppo_epochs": 2}, VARIANTS["rejection"],
    VARIANTS["sequence is"], {ESTIMATOR: "gae", "trainer__critic_warmup": 2},
])  # fmt: skip
def test_all_old_log_probs_are_computed_where_something_needs_them_before_the_update(make, needs):
    trainer = make(**needs)
    sizes = scored_samples(trainer)
    trainer.step(1)
    assert sizes == [16]


def test_what_has_no_signal_is_neither_updated_nor_measured(make):
    trainer = make(**ONE_STEP, **NO_KL, twist=lambda row, score: 1.0 if row < 6 else score)
    metrics = [trainer.step(step) for step in (1, 2, 3)]
    assert any(each["perf/update_tokens_skipped"] for each in metrics)
    assert all(("actor/entropy" in each) == (each["actor/grad_norm"] > 0) for each in metrics)


def test_without_a_kl_there_is_no_reference_and_no_pass(make):
    for keys, calls in ((NO_KL, 0), ({}, 1), ({ACTOR + "kl_loss_type": "full"}, 0)):
        trainer = make(**keys)
        trainer.step(1)
        assert trainer.group.calls.count("Actor.ref_log_probs") == calls
        assert hasattr(trainer.worker.actor, "_reference") == (keys != NO_KL)


def test_work_without_signal_is_not_done_and_changes_nothing(make, monkeypatch):
    """Rows below 3 score alike: whole groups, and whole mini-batches, have no advantage."""

    def run(**extra):
        trainer = make(**NO_KL, **extra, twist=lambda row, score: 1.0 if row < 6 else score)
        computed = []
        update = trainer.worker.actor.update
        trainer.worker.actor.update = lambda batch, task: computed.append(len(batch)) or update(batch, task)
        moved = Moved(trainer)
        metrics = [trainer.step(step) for step in (1, 2, 3)]
        return *moved.by_role(), metrics, sum(computed)

    skipping, metrics, few = run()
    monkeypatch.setitem(declarations.POLICY_LOSSES, "vanilla", LossTraits(silent_at_zero=False))
    complete, all_metrics, many = run()
    assert few < many == 48
    assert sum(each["perf/update_tokens_skipped"] for each in metrics) > 0
    assert all(each["perf/update_tokens_skipped"] == 0 for each in all_metrics)
    assert distance(skipping, complete) < 1e-4
    for one, other in zip(metrics, all_metrics, strict=True):
        assert one["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-6)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], abs=1e-5)


@pytest.mark.parametrize("needs", [{ACTOR + "use_kl_loss": True}, {ACTOR + "entropy_coeff": 0.01}, {LOSS: "kl_cov"}])
def test_samples_without_advantage_are_kept_where_something_else_needs_them(make, needs):
    trainer = make(**(NO_KL | needs), twist=lambda row, score: 1.0)
    assert trainer.step(1)["perf/update_tokens_skipped"] == 0


def test_dynamic_sampling_draws_on_until_the_batch_is_full_of_groups_that_differ(make):
    trainer = make(algorithm__filter_groups__enable=True, algorithm__filter_groups__metric="score",
                   twist=lambda row, score: score if row % 2 else 1.0)  # fmt: skip
    kept = []
    collect = trainer.experience.collect
    trainer.experience.collect = lambda timer: kept.append(collect(timer)) or kept[-1]
    metrics = trainer.step(1)
    samples = kept[0][0]
    assert metrics["filter_groups/rounds"] >= 2
    assert metrics["filter_groups/prompts_filled_up"] == 0
    assert set(samples["row"] % 2) == {1}
    assert all(np.ptp(group) > 0 for group in samples["score"].reshape(-1, 4))
    assert metrics["filter_groups/prompts_generated"] - metrics["filter_groups/prompts_thrown_away"] == 4
    assert trainer.progress.batches_drawn == metrics["filter_groups/rounds"]


def test_dynamic_sampling_is_bounded_and_fills_up_with_what_it_threw_away(make):
    trainer = make(algorithm__filter_groups__enable=True, algorithm__filter_groups__max_num_gen_batches=2,
                   algorithm__filter_groups__metric="score", twist=lambda row, score: 1.0)  # fmt: skip
    metrics = trainer.step(1)
    assert (metrics["filter_groups/rounds"], metrics["filter_groups/prompts_filled_up"]) == (2, 4)
    assert metrics["actor/pg_loss"] == pytest.approx(0.0, abs=1e-6)


def test_remax_compares_with_the_greedy_answer_to_the_same_prompt(make):
    trainer = make(**{ESTIMATOR: "remax"}, actor_rollout_ref__rollout__n=2)
    seen = []
    estimate = trainer.advantages.estimate
    trainer.advantages.estimate = lambda samples, *rest: seen.append(samples) or estimate(samples, *rest)
    metrics = trainer.step(1)
    samples = seen[0]
    baseline = samples["baseline"].reshape(-1, 2)
    assert (baseline[:, 0] == baseline[:, 1]).all()
    expected = np.average(samples["score"] - samples["baseline"], weights=samples["response_length"])
    assert metrics["critic/advantages/mean"] == pytest.approx(expected, abs=1e-6)
    assert "timing_s/gen_max" in metrics


def test_the_kl_is_taken_out_of_the_reward_and_its_weight_adapts(make):
    trainer = make(**NO_KL, algorithm__use_kl_in_reward=True, algorithm__kl_penalty="abs", algorithm__kl_ctrl__type="adaptive",
                   algorithm__kl_ctrl__kl_coef=0.5, algorithm__kl_ctrl__target_kl=1e-9, algorithm__kl_ctrl__horizon=160)  # fmt: skip
    first, second = trainer.step(1), trainer.step(2)
    assert first["critic/rewards/mean"] == first["critic/score/mean"]  # the policy is still the reference
    assert second["critic/rewards/mean"] < second["critic/score/mean"]
    # KL of 0 lowers the weight by at most 20 % x 16 samples / 160, a KL far over the target raises it by as much.
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * 0.98)
    assert trainer.advantages.kl_coef == pytest.approx(0.5 * 0.98 * 1.02)
    assert trainer.progress == Progress(2, trainer.advantages.kl_coef)


def test_before_critic_warmup_only_the_critic_learns(make):
    trainer = make(**{ESTIMATOR: "gae"}, trainer__critic_warmup=2, critic__optim__lr=1e-3)
    actor, critic = actor_weights(trainer), weights(trainer.worker.critic._model)
    metrics = trainer.step(1)
    assert torch.equal(actor, actor_weights(trainer))
    assert not torch.equal(critic, weights(trainer.worker.critic._model))
    assert "timing_s/update_actor" not in metrics
    assert "actor/pg_loss" in trainer.step(2)
    assert not torch.equal(actor, actor_weights(trainer))


def test_the_critic_learns_to_explain_the_returns(make):
    trainer = make(**{ESTIMATOR: "gae"}, trainer__critic_warmup=1000, trainer__total_training_steps=1000,
                   critic__optim__lr=3e-3, critic__ppo_epochs=4, twist=lambda row, score: float(row % 2))  # fmt: skip
    explained = [trainer.step(step)["critic/vf_explained_var"] for step in range(1, 21)]
    assert explained[0] == pytest.approx(0.0, abs=0.05)
    # The median: a batch whose returns are all alike has next to no variance to explain.
    assert np.median(explained[-5:]) > 0.9


def test_actor_and_critic_go_on_from_a_checkpoint_bit_for_bit(make, tmp_path):
    whole = make(**{ESTIMATOR: "gae"})
    for step in (1, 2):
        whole.step(step)
    for name in ("actor", "critic"):
        getattr(whole, name).save(str(tmp_path / name))
    expected = whole.step(3)
    resumed = make(**{ESTIMATOR: "gae"})
    for name in ("actor", "critic"):
        getattr(resumed, name).load(str(tmp_path / name), False)
    resumed.restore(Progress(2, None))
    # The twist counts answers, so it is brought to where the first trainer was.
    for _ in range(32):
        resumed.rewards._pool.twist(0, 0.0)
    found = resumed.step(3)
    assert numbers_of(found) == numbers_of(expected)
    assert torch.equal(weights(whole.worker.critic._model), weights(resumed.worker.critic._model))
    assert torch.equal(actor_weights(whole), actor_weights(resumed))


@pytest.fixture
def reward_model(tmp_path):
    folder = tmp_path / "reward_model"
    save_tiny_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}={{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=None, num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "budget", [{"forward_max_token_len_per_gpu": 24}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 5}]
)
def test_a_reward_model_reads_the_conversation_its_own_way_and_is_added_by_weight(make, reward_model, budget):
    keys = {f"reward_model__{name}": value for name, value in budget.items()}
    trainer = make(reward_model__enable=True, reward_model__model__path=reward_model, reward_model__weight=0.5,
                   reward_model__rule_weight=2.0, **keys)  # fmt: skip
    seen = []
    estimate = trainer.advantages.estimate
    trainer.advantages.estimate = lambda samples, *rest: seen.append(samples) or estimate(samples, *rest)
    metrics = trainer.step(1)
    samples = seen[0]
    plain, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(reward_model),
        AutoTokenizer.from_pretrained(reward_model),
    )
    (part,) = samples.parts_with("text")
    for sample in range(0, 16, 5):
        prompt = trainer.rewards._rows["train"][int(samples["row"][sample])].prompt[0]["content"]
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


def test_a_critic_may_start_from_a_reward_model(make, reward_model):
    trainer = make(**{ESTIMATOR: "gae"}, critic__model__path=reward_model)
    found = weights(trainer.worker.critic._model)
    assert torch.equal(found[-16:], load_file(reward_model / "model.safetensors")["score.weight"].flatten())


def test_long_answers_pay_the_overlong_penalty(make):
    trainer = make(reward_model__reward_manager="dapo", reward_model__overlong_buffer__enable=True, reward_model__overlong_buffer__len=4,
                   reward_model__overlong_buffer__penalty_factor=2.0)  # fmt: skip
    samples = trainer.experience._round(StepTimer()).samples
    at_limit = samples["response_length"] == 8
    assert at_limit.any()
    assert (samples["overlong"][at_limit] == -2.0).all()
    assert (samples["overlong"][samples["response_length"] <= 4] == 0.0).all()
    assert np.allclose(samples["score"], samples["rule_score"] + samples["overlong"])


def test_the_exact_kl_equals_the_sum_over_the_vocabulary(make, tiny_model):
    trainer = make(**{ACTOR + "kl_loss_type": "full"}, actor_rollout_ref__rollout__temperature=0.7)
    trainer.step(1)
    actor = trainer.worker.actor
    batch, *_ = trainer.worker.rollout.generate(trainer.experience_task())
    inputs = pack(batch, torch.device("cpu"))
    with torch.no_grad():
        found = actor._policy(inputs, 0.7, False, actor._reference_states(inputs)).kl
    shard.reshard(actor._policy)
    plain, theirs = AutoModelForCausalLM.from_pretrained(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model)
    state = {name.removeprefix("model."): p.full_tensor() for name, p in actor._policy.named_parameters()}
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


def scored(trainer) -> tuple[Batch, Batch, dict]:
    """A generated batch, what the old_log_prob pass makes of it, and its numbers."""
    actor = trainer.worker.actor
    batch, *_ = trainer.worker.rollout.generate(trainer.experience_task())
    columns, numbers = actor.log_probs(batch, [len(batch)])
    return batch, columns, numbers


def test_importance_weights_are_the_truncated_ratio_of_trainer_and_engine(make):
    trainer = make(**{CORRECTION + "rollout_is": "token", CORRECTION + "rollout_is_threshold": "1.1"})
    batch, columns, numbers = scored(trainer)
    ratio = (columns.ragged("old_log_probs").values - batch.ragged("rollout_log_probs").values).exp()
    assert torch.allclose(columns.ragged("is_weights").values, ratio.clamp(max=1.1))
    assert numbers.moments["is_high"].total == int((ratio > 1.1).sum()) > 0


def test_rejected_tokens_leave_loss_and_denominators(make):
    trainer = make(**NO_KL, **{CORRECTION + "rollout_rs": "token_k1", CORRECTION + "rollout_rs_threshold": "1.1"})
    _, columns, numbers = scored(trainer)
    mask = columns.ragged("loss_mask")
    assert 0 < int(mask.values.sum()) < len(mask.values)
    assert numbers.per_sample["loss_tokens"].tolist() == mask.sum().long().tolist()
    tasks, seen = [], []
    update, trainer.callbacks = (
        trainer.worker.actor.update,
        SimpleNamespace(on_step=lambda step, metrics, numbers: seen.append(numbers) or {}),
    )
    trainer.worker.actor.update = lambda batch, task: tasks.append(task) or update(batch, task)
    metrics, (samples,) = trainer.step(1), seen
    counted = sum(mini.denominators.tokens for mini in tasks[0].mini_batches)
    assert counted == samples["loss_tokens"].sum() < samples["response_length"].sum()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        1 - samples["loss_tokens"].sum() / samples["response_length"].sum()
    )


def test_bypass_mode_takes_the_ratio_against_the_engine_and_makes_no_pass(make):
    trainer = make(**{CORRECTION + "bypass_mode": True})
    metrics = trainer.step(1)
    assert "Actor.log_probs" not in trainer.group.calls
    assert "timing_s/old_log_prob" not in metrics
    # log r is what the engine is off, which is anything but 0.
    assert metrics["actor/pg_clipfrac"] > 0
    assert metrics["rollout/log_prob_gap/mean"] > 0.05


def test_without_correction_the_mismatch_is_measured_and_changes_nothing(make):
    trainer = make()
    metrics = trainer.step(1)
    assert metrics["rollout/log_prob_gap/mean"] > 0.05
    assert metrics["rollout_corr/k3_kl"] > 0
    # Both ratios of the first mini-batch are 1 whatever the engine said; only the second moves.
    assert "rollout_corr/rollout_is_mean" not in metrics


PLUGIN = """
import torch
from rltrain.algorithms.advantages import TokenAdvantages, token_estimator
from rltrain.algorithms.policy_losses import PolicyLoss

def half(inputs, cfg):
    return inputs.scores / 2

@token_estimator(whitens=True)
def by_token(inputs, cfg):
    return TokenAdvantages(inputs.rewards, inputs.rewards)

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
    metrics = trainer.step(1)
    assert metrics["critic/advantages/max"] == pytest.approx(metrics["critic/score/max"] / 2)
    assert metrics["actor/seen"] == 1.0
    by_token = make(**{ESTIMATOR: f"{file}:by_token"})
    assert by_token.plan.passes.token_advantages
    assert by_token.step(1)["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-6)
    assert not check_plugins(trainer.cfg)
    for name, words in (("detached", "depend on inputs.log_probs"), ("broken", "no_such_field")):
        trainer.cfg.actor_rollout_ref.actor.policy_loss.loss_mode = f"{file}:{name}"
        assert words in check_plugins(trainer.cfg)[0]
    trainer.cfg.actor_rollout_ref.actor.policy_loss.loss_mode = f"{file}:nothing"
    with pytest.raises(ConfigError, match="defines"):
        check_plugins(trainer.cfg)


def test_rows_of_answers_without_tokens_do_no_harm(make):
    trainer = make(**{ESTIMATOR: "gae"})
    batch = Batch({"policy_tokens": torch.tensor([0, 2]), "score": torch.tensor([1.0, 1.0]),
                   "values": Ragged(torch.zeros(2), torch.tensor([0, 2]))})  # fmt: skip
    found, numbers = trainer.worker.advantages(batch, 0.0)
    assert found.ragged("advantages").values.tolist() == [1.0, 1.0]
    assert numbers.per_sample["signal"].tolist() == [False, True]


def test_the_rule_reward_may_be_a_weighted_sum_of_what_the_scorer_returns(make):
    trainer = make(reward__weights="{acc: 2.0, score: 0.5}")
    samples = trainer.experience._round(StepTimer()).samples
    metrics = trainer.step(2)
    assert set(samples["rule_score"] - 2.0 * samples["scorer/acc"]) != {0.0}
    assert metrics["reward/acc/mean"] >= 0
    scores = np.array([1.0, 0.25])
    failed = {
        "score": np.array([0.25, -7.0]),
        "scorer/acc": np.array([1.0, np.nan]),
        "reward_failed": np.array([0.0, 1.0]),
    }
    assert trainer.rewards._weigh(failed).tolist() == [2.0 + 0.125, -7.0]
    with pytest.raises(RewardError, match=r"reward.weights.acc: the scorer returned no number"):
        trainer.rewards._weigh({"score": scores, "reward_failed": np.zeros(2)})


def test_importance_weights_may_be_divided_by_their_mean(make):
    one_step = {ACTOR + "ppo_mini_batch_size": 4, CORRECTION + "rollout_is": "token", **NO_KL}
    plain = make(**one_step).step(1)
    divided = make(**one_step, **{CORRECTION + "rollout_is_batch_normalize": True}).step(1)
    mean = plain["rollout_corr/rollout_is_mean"]
    assert abs(mean - 1) > 1e-3
    assert divided["actor/pg_loss"] == pytest.approx(plain["actor/pg_loss"] / mean, rel=1e-4)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_token_advantages_are_whitened_where_they_enter_the_loss(make, estimator):
    one_step = {ESTIMATOR: estimator, ACTOR + "ppo_mini_batch_size": 4, **NO_KL}
    metrics = make(**one_step).step(1)
    assert metrics["critic/returns/mean"] > 0.1
    assert metrics["actor/pg_loss"] == pytest.approx(0.0, abs=1e-5)  # the ratio is 1 and the mean advantage 0
    ten_times = make(**one_step, twist=lambda row, score: 10 * score).step(1)
    assert ten_times["critic/returns/mean"] == pytest.approx(10 * metrics["critic/returns/mean"], rel=1e-4)
    assert ten_times["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("metric", ["acc", "score"])
def test_dynamic_sampling_with_a_reward_model_alone_looks_at_its_scores(make, reward_model, metric):
    trainer = make(reward_model__enable=True, reward_model__model__path=reward_model, reward_model__rule_weight=0,
                   algorithm__filter_groups__enable=True, algorithm__filter_groups__metric=metric)  # fmt: skip
    trainer.rewards._pool = None  # as the real run has it
    metrics = trainer.step(1)
    assert metrics["filter_groups/rounds"] == 1
    assert "reward/rule/mean" not in metrics


def with_failures(trainer, *samples: int, acc: float | None = None) -> None:
    """The given answers of every generation fail to be scored: no number of theirs is known. acc: what all others get."""
    score = trainer.rewards._pool.score

    def failing(split, jobs):
        columns = score(split, jobs)
        columns["scorer/acc"][:] = columns["scorer/acc"] if acc is None else acc
        for sample in samples:
            columns["scorer/acc"][sample], columns["score"][sample], columns["reward_failed"][sample] = np.nan, 0.0, 1.0
        return columns

    trainer.rewards._pool.score = failing


def test_numbers_of_the_scorer_never_replace_the_trainer_s(make):
    plain, named = make(), make()
    own = plain.experience._round(StepTimer()).samples.numbers.keys()
    score = named.rewards._pool.score
    names = {*own, *COLUMNS}

    def more(split, jobs):
        columns = score(split, jobs)
        return columns | {SCORER + name: np.full(len(columns["score"]), 3.0) for name in names if SCORER not in name}

    named.rewards._pool.score = more
    named.experience._round(StepTimer())
    shown = {f"reward/{name}/mean" for name in names}
    found = {name: value for name, value in numbers_of(named.step(1)).items() if name not in shown}
    assert found == numbers_of(plain.step(1))
    assert torch.equal(actor_weights(named), actor_weights(plain))
    assert named.validate(1, Stop())["val-core/rltrain/arithmetic/acc/mean@1"] <= 1


def test_one_answer_that_could_not_be_scored_costs_gdpo_nothing_else(make):
    trainer = make(**VARIANTS["gdpo"])
    with_failures(trainer, 0)
    metrics = trainer.step(1)
    assert math.isfinite(metrics["actor/pg_loss"])
    assert metrics["reward/error_rate"] == 1 / 16


def test_a_failed_answer_does_not_make_a_group_useful(make):
    trainer = make(
        algorithm__filter_groups__enable=True,
        algorithm__filter_groups__max_num_gen_batches=1,
        twist=lambda row, score: 0.0,
    )
    with_failures(trainer, 0, 5, acc=0.0)
    assert trainer.step(1)["filter_groups/prompts_filled_up"] == 4


def test_a_number_that_some_rounds_lack_is_kept_for_the_others():
    one, other = Samples(2), Samples(2)
    one.update({"score": np.array([1.0, 2.0]), "scorer/acc": np.array([0.0, 1.0])})
    other.update({"score": np.array([3.0, 4.0])})
    for pair in ([(one, np.array([1])), (other, np.array([0, 1]))], [(other, np.array([0, 1])), (one, np.array([1]))]):
        joined = Samples.join(pair)
        assert sorted(joined["score"]) == [2.0, 3.0, 4.0]
        assert np.isnan(joined["scorer/acc"]).sum() == 2


def test_a_fixed_weight_of_the_kl_follows_the_configuration_after_a_resume(make):
    fixed = make(algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__kl_coef=0.01)
    fixed.restore(Progress(3, 0.5))
    assert fixed.advantages.kl_coef == 0.01
    adaptive = make(
        algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__kl_coef=0.01, algorithm__kl_ctrl__type="adaptive"
    )
    adaptive.restore(Progress(3, 0.5))
    assert adaptive.advantages.kl_coef == 0.5


def test_a_critic_that_is_never_finite_stops_the_run(make):
    trainer = make(**{ESTIMATOR: "gae"}, trainer__on_nonfinite="skip")
    with torch.no_grad():
        trainer.worker.critic._model.score.weight.to_local().fill_(float("nan"))
    trainer.actor.update = lambda *arguments, **named: [UpdateNumbers(np.zeros(1), np.zeros(1))]
    trainer.step(1)
    trainer.step(2)
    with pytest.raises(NonFiniteError, match="critic: 3 steps in a row"):
        trainer.step(3)


def test_rejection_under_bypass_is_seen(make):
    metrics = make(
        **{
            CORRECTION + "bypass_mode": True,
            CORRECTION + "rollout_rs": "token_k1",
            CORRECTION + "rollout_rs_threshold": "1.1",
        }
    ).step(1)
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
