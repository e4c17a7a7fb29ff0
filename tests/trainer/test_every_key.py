"""Every key under algorithm and actor_rollout_ref.actor has a visible effect, or a message states why not."""

import dataclasses
import itertools

import pytest
import torch

from rltrain.common.errors import ConfigError
from rltrain.config.check import check
from rltrain.config.load import load_config
from rltrain.config.notes import without_effect
from rltrain.config.schema.keys import all_keys
from rltrain.models.weights import shard
from tests.local import local_trainer
from tests.tiny import small_run
from tests.trainer.steps import actor_weights, engine_is_off, numbers_of

pytestmark = pytest.mark.usefixtures("process_group")

ACTOR, ALGORITHM = "actor_rollout_ref.actor.", "algorithm."
CORRECTION = ALGORITHM + "rollout_correction."
# Steps large enough for every clip to bite.
BASE = {
    ACTOR + "use_kl_loss": False, ACTOR + "entropy_coeff": 0, ACTOR + "ppo_epochs": 3, ACTOR + "optim.lr": 0.01,
    "critic.optim.lr": 0.01, "trainer.total_training_steps": 4,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
}  # fmt: skip
COSINE = {ACTOR + "optim.lr_scheduler_type": "cosine"}
COUNTED = {ACTOR + "use_dynamic_bsz": False, ACTOR + "ppo_micro_batch_size_per_gpu": 4}
KL_LOSS, KL_REWARD = {ACTOR + "use_kl_loss": True}, {ALGORITHM + "use_kl_in_reward": True}
ADAPTIVE = KL_REWARD | {
    ALGORITHM + "kl_ctrl.type": "adaptive",
    ALGORITHM + "kl_ctrl.kl_coef": 0.5,
    ALGORITHM + "kl_ctrl.target_kl": 100,
}
GAE, GDPO = (
    {ALGORITHM + "adv_estimator": "gae"},
    {ALGORITHM + "adv_estimator": "gdpo", ALGORITHM + "gdpo_reward_keys": "[acc,rule_score]"},
)
CLIP_COV = {
    ACTOR + "policy_loss.loss_mode": "clip_cov", ACTOR + "policy_loss.clip_cov_lb": -9,
    ACTOR + "policy_loss.clip_cov_ub": 9, ACTOR + "policy_loss.clip_cov_ratio": 0.2,
}  # fmt: skip
KL_COV, SAPO, DRO, VESPO, TOPR, M2PO, FIPO, REAL = (
    {ACTOR + "policy_loss.loss_mode": name}
    for name in ("kl_cov", "sapo", "dro", "vespo", "topr", "m2po", "future_kl", "real")
)
# The entropy is that of a model that knows nothing, about 3.
BONUS = {
    ACTOR + "adaptive_entropy.target_entropy": 9.0,
    ACTOR + "adaptive_entropy.delta_ent_coef": 0.1, ACTOR + "adaptive_entropy.max_ent_coef": 1.0,
}  # fmt: skip
FILTER = {ALGORITHM + "filter_groups.enable": True}
IS, RS, BYPASS = (
    {CORRECTION + "rollout_is": "token"},
    {CORRECTION + "rollout_rs": "token_k1"},
    {CORRECTION + "bypass_mode": True},
)
# Keys with a value that is not their default, and the surroundings in which it must show (None: it never does).
OPTIM, FSDP, LOSS, KL_CTRL = ACTOR + "optim.", ACTOR + "fsdp_config.", ACTOR + "policy_loss.", ALGORITHM + "kl_ctrl."
GROUPS = [
    (OPTIM, {}, {"lr": 0.001, "lr_warmup_steps": 2, "lr_warmup_steps_ratio": 0.5, "lr_scheduler_type": "cosine"}),
    (OPTIM, {}, {"weight_decay": 0.9, "betas": "[0.5,0.6]", "clip_grad": 1e-6, "eps": 0.1, "moments": "bfloat16"}),
    (OPTIM, COSINE, {"min_lr_ratio": 0.5, "num_cycles": 2.0}),
    (FSDP, None, {"param_offload": True, "optimizer_offload": True, "fsdp_size": 1}),
    (FSDP, {}, {"model_dtype": "bfloat16", "compute_dtype": "bfloat16", "reshard_after_forward": False}),
    (LOSS, {}, {"loss_mode": "gspo"}),
    (LOSS, CLIP_COV, {"clip_cov_ratio": 0.5, "clip_cov_lb": 0.5, "clip_cov_ub": 0.0}),
    (LOSS, KL_COV, {"kl_cov_ratio": 0.5, "ppo_kl_coef": 5.0}),
    (LOSS, DRO, {"dro_beta": 50.0}),
    (LOSS + "vespo.", VESPO, {"k_pos": 9.0, "lambda_pos": 0.0, "k_neg": 9.0, "lambda_neg": 0.0}),
    (LOSS, TOPR, {"topr_negative_ratio_lower": 1.0, "topr_negative_ratio_upper": 0.5}),
    (LOSS, M2PO, {"m2_threshold": 1e-9}),
    (LOSS, REAL, {"real_tau": 5.0}),
    (LOSS, FIPO, {"decay_rate": 0.1, "future_kl_clip_ratio": 0.001}),
    (LOSS, FIPO, {"future_kl_clip_high_only": False, "safety_thresh": 0.5}),
    (ACTOR, SAPO, {"tau_pos": 5.0, "tau_neg": 5.0}),
    (ACTOR, None, {"checkpoint.save_contents": "[model]", "ulysses_sequence_parallel_size": 2}),
    (ACTOR, {}, {"off_policy_mask_threshold": 0.0, "top_entropy_quantile": 0.2, "ppo_mini_batch_size": 4}),
    (ACTOR, {}, {"ppo_max_token_len_per_gpu": 30, "ppo_epochs": 1, "shuffle": True, "clip_ratio": 0.01}),
    (ACTOR, {}, {"clip_ratio_low": 0.01, "clip_ratio_high": 0.01, "clip_ratio_c": 1.0, "entropy_coeff": 0.1}),
    (ACTOR, {}, {"loss_agg_mode": "seq-mean-token-sum", "use_kl_loss": True}),
    (ACTOR, {ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm"}, {"loss_scale_factor": 3}),
    (ACTOR, COUNTED, {"ppo_micro_batch_size_per_gpu": 2}),
    (ACTOR, {ACTOR + "ppo_micro_batch_size_per_gpu": 4}, {"use_dynamic_bsz": False}),
    (ACTOR, {ACTOR + "ppo_epochs": 1}, {"recompute_old_log_prob": "always"}),
    (ACTOR, KL_LOSS, {"kl_loss_coef": 0.5, "kl_loss_type": "full", "use_bias_correction_kl": True}),
    (ACTOR + "adaptive_entropy.", BONUS, {"target_entropy": 0.01, "delta_ent_coef": 0.01, "max_ent_coef": 0.05}),
    (ALGORITHM, {}, {"mask_truncated": True, "adv_estimator": "rloo", "norm_adv_by_std_in_grpo": False}),
    (ALGORITHM, {}, {"adv_norm.mean_level": "batch", "adv_norm.std_level": "batch", "filter_groups.enable": True}),
    (ALGORITHM, {}, {"reward_scaling": 3.0, "reward_bias": 1.0, "use_kl_in_reward": True}),
    (ALGORITHM, GAE, {"gamma": 0.5, "lam": 0.5}),
    (ALGORITHM, GDPO, {"gdpo_reward_keys": "[acc]", "gdpo_reward_weights": "[1,5]"}),
    (ALGORITHM, None, {"gigpo.step_advantage_w": 5.0}),  # there are no turns here: algorithms/test_turn_advantages.py
    (ALGORITHM, KL_REWARD, {"kl_penalty": "abs"}),
    (KL_CTRL, KL_REWARD, {"type": "adaptive", "kl_coef": 0.9}),
    (KL_CTRL, ADAPTIVE, {"horizon": 32, "target_kl": 1e-6}),
    (ALGORITHM + "filter_groups.", FILTER, {"metric": "score", "max_num_gen_batches": 3}),
    (CORRECTION, {}, {"rollout_is": "token", "bypass_mode": True}),
    (CORRECTION, IS, {"rollout_is_threshold": "1.05", "rollout_is_batch_normalize": True}),
    (CORRECTION, {CORRECTION + "rollout_rs_threshold": "0.005"}, {"rollout_rs": "token_k2"}),
    (CORRECTION, RS | {CORRECTION + "rollout_rs_threshold": "1.1"}, {"rollout_rs_threshold": "1.05"}),
    (CORRECTION, BYPASS, {"loss_type": "reinforce"}),
]
CASES = {prefix + name: (value, around) for prefix, around, values in GROUPS for name, value in values.items()}


@pytest.fixture(scope="module")
def traces(tiny_model, arithmetic_files, tmp_path_factory):
    """traces(keys, steps): return everything that a run's first steps show, except times."""
    folder, runs, kept = tmp_path_factory.mktemp("runs"), {}, {}

    def arguments(keys: dict) -> list[str]:
        changes = {name.replace(".", "__"): value for name, value in keys.items()}
        return small_run(tiny_model, arithmetic_files, folder, **changes)

    def trace(keys: dict, steps: int):
        marks = tuple(sorted((name, str(value)) for name, value in keys.items()))
        if marks not in runs:
            runs[marks], kept[marks] = run(arguments(keys)), []
        while len(kept[marks]) < steps:
            kept[marks].append(next(runs[marks]))
        return kept[marks][steps - 1]

    trace.arguments = arguments
    return trace


def run(arguments: list[str]):
    """Yield, after each step, everything that the steps have shown so far."""
    handed = []
    original = shard.fully_shard
    shard.fully_shard = lambda module, **kwargs: (
        handed.append(kwargs["reshard_after_forward"]) or original(module, **kwargs)
    )
    try:
        count = iter(range(10**6))
        trainer = local_trainer(arguments, lambda row, score: score + (next(count) * 7 % 5) / 5)
    finally:
        shard.fully_shard = original
    engine_is_off(trainer)
    plan, metrics = dataclasses.asdict(trainer.plan), []
    for step in itertools.count(1):
        metrics.append(numbers_of(trainer.step(step).metrics))
        drawn = trainer.progress.batches_drawn, trainer.progress.kl_coef
        yield actor_weights(trainer), list(metrics), plan, handed, drawn


def differ(one, other) -> bool:
    return not torch.equal(one[0], other[0]) or one[1:] != other[1:]


def shows(traces, one: dict, other: dict) -> bool:
    """Return whether the runs differ in their first step or, for keys that act later, in their second."""
    return any(differ(traces(one, steps), traces(other, steps)) for steps in (1, 2))


def notes(arguments: list[str], key: str) -> list[str]:
    loaded = load_config(arguments)
    try:
        check(loaded)
    except ConfigError as error:
        return [str(error)]
    lines = [*loaded.warnings, *without_effect(loaded)]
    return [line for line in lines if line.startswith(key)]


def test_the_cases_are_all_keys():
    keys = {key for key in all_keys() if key.startswith((ACTOR, ALGORITHM))}
    # The first shows where prompts have images (test_vision_steps.py), and the command says so where none has; the
    # next three where a model has experts (test_expert_balance.py, test_router_replay.py), and the command refuses
    # others. The rest make steps faster and change no number (test_kernels.py, test_ranks.py).
    silent = (
        "freeze_vision_tower",
        "router_aux_loss_coef",
        "router_bias_update_rate",
        "router_replay.mode",
        "fsdp_config.expert_parallel_size",
        "fsdp_config.tensor_parallel_size",
        "ring_attention_size",
        "fsdp_config.use_torch_compile",
        "fsdp_config.use_no_sync_for_gradient_accumulation",
    )
    assert keys - {ACTOR + name for name in silent} == set(CASES)


def test_two_runs_of_the_same_keys_do_not_differ(traces):
    for steps, shown in zip((1, 2), run(traces.arguments(BASE)), strict=False):
        assert not differ(traces(BASE, steps), shown)


# Other tests hold what these compute, tests/config/test_keys_are_read.py that they are read, and `make test-long` that
# each has an effect: with surroundings of its own it takes two runs more.
LONG = [
    key
    for key, (_, surroundings) in CASES.items()
    if surroundings or key.startswith((ACTOR + "optim.", ACTOR + "policy_loss.", CORRECTION))
]


@pytest.mark.few(6)
@pytest.mark.parametrize("key", [pytest.param(key, marks=[pytest.mark.long] * (key in LONG)) for key in CASES])
def test_a_key_has_an_effect_or_a_line_says_why_not(traces, key):
    value, surroundings = CASES[key]
    said = notes(traces.arguments(BASE | {key: value}), key)
    if surroundings is None:
        assert said, "the key never shows, and nothing says so"
        return
    if not said:
        assert shows(traces, BASE, BASE | {key: value}), "no effect, and no word about it"
    if surroundings:
        alive = BASE | surroundings
        assert not notes(traces.arguments(alive | {key: value}), key)
        assert shows(traces, alive, alive | {key: value}), "no effect in the mode it is for"
