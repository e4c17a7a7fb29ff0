"""Settings that some version of verl writes otherwise, in our form: by another name, with other values, with other
numbers of keys, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.config.schema.algorithm import bounds
from rltrain.config.schema.engines import ENGINES

_A = "actor_rollout_ref."
_R = _A + "rollout."
# verl gives this section to the optimizer over what optim.* says.
OVERRIDES = ".override_optimizer_config."
_OF_ADAMW = ("lr", "weight_decay", "betas", "eps")

SHARDING = {
    _A + "actor.fsdp_config.": _A + "actor.fsdp_config.",
    "critic.fsdp.": "critic.model.fsdp_config.",
    "critic.model.fsdp_config.": "critic.model.fsdp_config.",
    "reward_model.model.fsdp_config.": "reward_model.model.fsdp_config.",
}

# Spelling of some version of verl -> ours. A prefix ends in a dot.
ALIASES = {
    "algorithm.rollout_correction.bypass_old_logprob_for_rollout": "algorithm.rollout_correction.bypass_mode",
    "algorithm.rollout_correction.use_policy_gradient": "algorithm.rollout_correction.loss_type",
    "algorithm.rollout_correction.use_pure_rollout_correction": "algorithm.rollout_correction.loss_type",
    "global_profiler.steps": "trainer.profile_steps",
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager": "reward_model.reward_manager",
    "reward_manager.name": "reward_model.reward_manager",
    "reward.reward_kwargs.overlong_buffer_cfg.": "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "reward_model.overlong_buffer.",
    "reward.reward_kwargs.max_resp_len": "reward_model.overlong_buffer.max_resp_len",
    "reward_model.reward_kwargs.max_resp_len": "reward_model.overlong_buffer.max_resp_len",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward_model.model_path": "reward_model.model.path",
    "reward.overlong_buffer.": "reward_model.overlong_buffer.",
    "reward.reward_model.model.": "reward_model.model.",
    "reward.reward_model.rollout.": "reward_model.rollout.",
    "reward_model.num_workers": "reward.num_workers",
    **{
        old + name: new + "compute_dtype"
        for old, new in SHARDING.items()
        for name in ("dtype", "mixed_precision.param_dtype")
    },
    **{
        f"distillation.{name}": "distillation.teacher.model.path"
        for name in ("teacher_models.teacher_model.model_path", "teacher_model.model_path", "teacher_model.path")
    },
    "critic.fsdp.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    "critic.fsdp.": "critic.model.fsdp_config.",
    "critic.model.fsdp_config.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    **{f"critic.optim{OVERRIDES}{name}": f"critic.optim.{name}" for name in _OF_ADAMW},
    "critic.grad_clip": "critic.optim.clip_grad",
    "ray_init.": "ray_kwargs.ray_init.",
    # Every process imports all modules that are named.
    "critic.model.external_lib": _A + "model.external_lib",
    "reward_model.model.external_lib": _A + "model.external_lib",
    _A + "actor.optim.warmup_style": _A + "actor.optim.lr_scheduler_type",
    _A + "actor.grad_clip": _A + "actor.optim.clip_grad",
    **{f"{_A}actor.optim{OVERRIDES}{name}": f"{_A}actor.optim.{name}" for name in _OF_ADAMW},
    _A + "actor.fsdp_config.ulysses_sequence_parallel_size": _A + "actor.ulysses_sequence_parallel_size",
    _A + "actor.policy_loss.tau_pos": _A + "actor.tau_pos",
    _A + "actor.policy_loss.tau_neg": _A + "actor.tau_neg",
    **{
        f"{_A}actor.{name}": f"{_A}actor.policy_loss.{name}"
        for name in ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    },
    **{
        f"{role}.optim.{old}": f"{role}.optim.{new}"
        for role in (_A + "actor", "critic")
        for old, new in (("min_lr_factor", "min_lr_ratio"), ("lr_scheduler_name", "lr_scheduler_type"))
    },
    _A + "actor.checkpoint.contents": _A + "actor.checkpoint.save_contents",
    _A + "ref.fsdp_config.ulysses_sequence_parallel_size": _A + "ref.ulysses_sequence_parallel_size",
    _R + "checkpoint_engine.update_weights_bucket_megabytes": _R + "update_weights_bucket_megabytes",
    _R + "cudagraph_capture_sizes": _R + "engine_kwargs.vllm.cudagraph_capture_sizes",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
}

# Switches of verl's -> the keys of the same section that they turn on, whatever else is said of those.
IMPLIES = {"*.fsdp_config.offload_policy": ("param_offload", "optimizer_offload")}

# Where verl has path and name of a class apart -> the key here, which holds PATH:NAME.
CLASSES = {
    ("data.custom_cls.path", "data.custom_cls.name"): "data.custom_cls",
    ("data.sampler.class_path", "data.sampler.class_name"): "data.sampler.name",
}

_C = "algorithm.rollout_correction."
_TIS = _A + "actor.tis_imp_ratio_cap"
_LOWER, _VETO = _C + "rollout_rs_threshold_lower", _C + "rollout_token_veto_threshold"
# Rejection before it was named after estimators of the KL.
_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}

# Key -> its values as they were once written (in small letters), with what they are called today and a word on it.
VALUES: dict[str, dict[str, tuple[str, str]]] = {
    _C + "loss_type": {"true": ("reinforce", ""), "false": ("ppo_clip", "")},
    # The default of verl 0.9.1: the rewards before the KL.
    "algorithm.filter_groups.metric": {"reward": ("seq_reward", "")},
    _R + "name": {"sglang_async": ("sglang", "every engine answers turn by turn, and none waits for the others")},
    "reward_model.reward_manager": {
        "gdpo": ("naive", "the numbers of gdpo_reward_keys are taken from every scorer"),
        "prime": ("naive", "scoring always runs in its own processes"),
        "remote": ("naive", "scoring always runs in its own processes"),
    },
}
# Importance weights as verl 0.6 wrote them, beside `rollout_correction` and not in it.
_IS = "algorithm.rollout_is"
_ENDS_OF_06 = ("", "_threshold", "_threshold_lower", "_level", "_mode", "_veto_threshold")
# Keys that `translate_old_keys` reads beside ours.
OLD_KEYS = (_TIS, _LOWER, _VETO, *(_IS + end for end in _ENDS_OF_06))
_MODE = ("trainer.v1.trainer_mode", "colocate_async")
_TAIL = _R + "tail"
_BATCH, _MINI = "data.train_batch_size", _A + "actor.ppo_mini_batch_size"
_BUDGET = _R + "max_num_batched_tokens"


def is_old(key: str, value: Any) -> bool:
    """Whether `translate_old_keys` reads a key that was written with a value."""
    return key in OLD_KEYS or (key, value) == _MODE


def translate_old_keys(old: Mapping[str, Any], value: Callable[[str], Any]) -> Iterator[tuple[str, str, str]]:
    """(our key, its value, what to say) for what was once written with other keys.

    old: what was written that `is_old`. value: that of a key of ours. Raises ConfigError.
    """
    if (cap := _number(old, _TIS, "such as 2.0")) > 0:
        yield _C + "rollout_is", "token", f"{_TIS}={cap} is {_C}rollout_is=token with rollout_is_threshold={cap} here"
        yield _C + "rollout_is_threshold", str(cap), ""
    yield from _importance_of_06(old)
    if _MODE[0] in old:
        if value(_TAIL) == "off":
            note = f"{'='.join(_MODE)} is {_TAIL}=carry_over here: what a step does not wait for goes on in the next"
            yield _TAIL, "carry_over", note
        if not value(_C + "bypass_mode") and not value(_C + "rollout_is"):
            note = f"{_C}rollout_is=token: each token is weighed by the policy that has sampled it, as it may be older"
            yield _C + "rollout_is", "token", note
    written, upper = value(_C + "rollout_rs"), value(_C + "rollout_rs_threshold")
    rule = _RULES.get(str(written))
    lower = _number(old, _LOWER, "such as 0.5", over=0)
    vetos = [_number(old, key, "such as 1e-4", over=0, under=1) for key in (_VETO, _IS + "_veto_threshold")]
    veto = max(vetos) if old.get(_IS + "_threshold") else vetos[0]
    if not (rule or lower or veto):
        return
    source = _C + ("rollout_rs_threshold" if upper else "rollout_is_threshold")
    limits = str(value(source))
    if rule:
        # Once the bounds were on pi_trainer / pi_engine, today they are on its inverse.
        low, high = _two_bounds(source, limits, lower)
        rules, limits = [rule], f"{1 / high:.6g}_{1 / low:.6g}"
    else:
        rules = [written] if written else []
    if veto:
        # The k2 of a token at the veto.
        limit = f"{math.log(veto) ** 2 / 2:.6g}"
        rules, limits = [*rules, "seq_max_k2"], f"{limits},{limit}" if rules else limit
    yield (
        _C + "rollout_rs",
        ",".join(rules),
        f"{_C}rollout_rs={','.join(rules)} with rollout_rs_threshold={limits} is what rejects here"
        + (f"; an answer is also rejected for a token whose ratio is over {1 / veto:g}" if veto else ""),
    )
    yield _C + "rollout_rs_threshold", limits, ""


def _importance_of_06(old: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """algorithm.rollout_is* of verl 0.6. Without a threshold nothing of it counts there."""
    high, level, mode = (_number(old, _IS + "_threshold", "such as 2.0", over=0), *_level_and_mode(old))
    low = _number(old, _IS + "_threshold_lower", "such as 0.5", over=0, under=high) if high else 0.0
    weighs = high > 0 and old.get(_IS) in (True, 1)
    if weighs and level == "geometric":
        raise ConfigError(f"{_IS}_level=geometric: {_C}rollout_is has weights per token or sequence. Use one of these.")
    if weighs:
        note = f"{_IS}=True with {_IS}_level={level} is {_C}rollout_is={level} with rollout_is_threshold={high:g} here"
        yield _C + "rollout_is", level, note
        yield _C + "rollout_is_threshold", f"{high:g}", ""
    elif old.get(_IS):
        yield _C + "rollout_is", "", f"{_IS}: no effect: {_IS}_threshold is null, as in verl"
    if high and mode == "mask":
        rule, limits = _RULES[level], f"{1 / high:.6g}_{(low and 1 / low) or high:.6g}"
        yield (
            _C + "rollout_rs",
            rule,
            f"{_IS}_mode=mask is {_C}rollout_rs={rule} with rollout_rs_threshold={limits} here",
        )
        yield _C + "rollout_rs_threshold", limits, ""


def _level_and_mode(old: Mapping[str, Any]) -> Iterator[str]:
    for end, usual, among in (("_level", "token", tuple(_RULES)), ("_mode", "truncate", ("truncate", "mask"))):
        word = old.get(_IS + end) or usual
        if word not in among:
            raise ConfigError(f"{_IS}{end}={word}: use one of {', '.join(among)}.")
        yield word


def _number(old: Mapping[str, Any], key: str, such: str, over: float = -math.inf, under: float = math.inf) -> float:
    """The value of an earlier key, 0 where it is off."""
    if not (text := old.get(key)):
        return 0.0
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = math.nan
    if not over < number < under:
        limits = f" over {over:g}" * (over >= 0) + f" and under {under:g}" * (under < math.inf)
        raise ConfigError(f"{key}={text}: it must be a number{limits}, {such}.")
    return number


def _two_bounds(key: str, limits: str, lower: float) -> tuple[float, float]:
    try:
        low, high = bounds(limits)
    except ValueError as error:
        raise ConfigError(f"{key}={limits}: {error}.") from None
    low = lower or (1 / high if low is None else low)
    if not 0 < low < high:
        raise ConfigError(f"{key}={limits}: the bounds are {low:g} and {high:g}; give two such as 0.5_2.0.")
    return low, high


def sizes_not_written(explicit: Collection[str], value: Callable[[str], Any]) -> Iterator[tuple[str, int, str]]:
    """Sizes that were not written, where verl runs a command and our default would not: (key, its value, what to say).

    explicit: the keys that were written. value: that of a key.
    """
    batch, mini = value(_BATCH), value(_MINI)
    if _MINI not in explicit and _are_whole(batch, mini) and 0 < batch < mini:
        # As older versions of verl do, which cut a batch into pieces of at most so many; today's asserts.
        yield (
            _MINI,
            batch,
            f"{_MINI} is not set and {_BATCH}={batch} is below its default, {mini}: one mini-batch a step",
        )
    engine, budget = ENGINES.get(str(value(_R + "name"))), value(_BUDGET)
    if (
        _BUDGET in explicit
        or not (engine and engine.strict_prefill)
        or value(_R + "enable_chunked_prefill") is not False
    ):
        return
    lengths = value("data.max_prompt_length"), value("data.max_response_length")
    longest = value(_R + "max_model_len") or (sum(lengths) if _are_whole(*lengths) else 0)
    if _are_whole(longest, budget) and longest > budget:
        yield (
            _BUDGET,
            longest,
            f"{_BUDGET} is not set: {longest}, the longest sequence, as enable_chunked_prefill=False",
        )


def _are_whole(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)
