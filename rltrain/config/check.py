"""Rules between keys. All errors at once; each names key, value and way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rltrain.config.load import LoadedConfig
from rltrain.config.schema import Config
from rltrain.errors import ConfigError

_A = "actor_rollout_ref."
_DEVICES = ("auto", "npu", "cuda", "cpu")
_LOGGERS = ("console", "tensorboard", "wandb")
_DTYPES = ("auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16")
_CONTENTS = ("model", "optimizer", "extra", "hf_model")
TOKEN_ESTIMATORS = ("gae", "reinforce_plus_plus", "remax")
COMPARING_ESTIMATORS = ("grpo", "rloo", "opo", "grpo_passk", "gpg", "gdpo", "reinforce_plus_plus_baseline")
POLICY_LOSSES = (
    "vanilla", "gspo", "gpg", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl",
)  # fmt: skip
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+", "full")
_AGGREGATION = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# Keys that may also be FILE.py:NAME.
PLUGINS = ("algorithm.adv_estimator", _A + "actor.policy_loss.loss_mode", "data.sampler.name")
# key -> its allowed values
_CHOICES = {
    "data.sampler.name": ("shuffle", "solve_rate"),
    "data.truncation": ("error", "left", "right", "middle"),
    _A + "actor.strategy": ("fsdp2", "fsdp"),
    _A + "actor.fsdp_config.model_dtype": _DTYPES,
    _A + "actor.fsdp_config.compute_dtype": _DTYPES,
    _A + "rollout.dtype": _DTYPES,
    _A + "actor.optim.lr_scheduler_type": ("constant", "cosine"),
    _A + "actor.policy_loss.loss_mode": POLICY_LOSSES,
    _A + "actor.kl_loss_type": _KL,
    _A + "actor.loss_agg_mode": _AGGREGATION,
    "critic.loss_agg_mode": _AGGREGATION,
    "critic.strategy": ("fsdp2", "fsdp"),
    "critic.optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.model.fsdp_config.model_dtype": _DTYPES,
    "critic.model.fsdp_config.compute_dtype": _DTYPES,
    "algorithm.adv_estimator": TOKEN_ESTIMATORS + COMPARING_ESTIMATORS,
    "algorithm.kl_penalty": _KL,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.rollout_is": (None, "token", "sequence"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
    "trainer.device": _DEVICES,
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.on_nonfinite": ("stop", "skip"),
}
# key -> smallest value
_AT_LEAST = {
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    _A + "actor.ppo_mini_batch_size": 1,
    _A + "actor.ppo_epochs": 1,
    _A + "actor.ppo_micro_batch_size": 1,
    _A + "actor.ppo_micro_batch_size_per_gpu": 1,
    _A + "actor.ppo_max_token_len_per_gpu": 1,
    _A + "actor.ulysses_sequence_parallel_size": 1,
    _A + "actor.optim.lr": 0,
    _A + "actor.optim.weight_decay": 0,
    _A + "actor.optim.num_cycles": 0,
    _A + "actor.kl_loss_coef": 0,
    _A + "actor.clip_ratio": 0,
    _A + "actor.clip_ratio_low": 0,
    _A + "actor.clip_ratio_high": 0,
    _A + "actor.clip_ratio_c": 1,
    _A + "actor.loss_scale_factor": 1,
    _A + "actor.policy_loss.clip_cov_ratio": 0,
    _A + "actor.policy_loss.kl_cov_ratio": 0,
    _A + "actor.policy_loss.ppo_kl_coef": 0,
    "algorithm.kl_ctrl.kl_coef": 0,
    "algorithm.kl_ctrl.horizon": 1,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "critic.ppo_mini_batch_size": 1,
    "critic.ppo_epochs": 1,
    "critic.ppo_micro_batch_size_per_gpu": 1,
    "critic.forward_micro_batch_size_per_gpu": 1,
    "critic.cliprange_value": 0,
    "critic.optim.lr": 0,
    "critic.optim.weight_decay": 0,
    "data.gen_batch_size": 1,
    "reward_model.micro_batch_size_per_gpu": 1,
    "reward_model.overlong_buffer.penalty_factor": 0,
    _A + "ref.log_prob_micro_batch_size": 1,
    _A + "ref.log_prob_micro_batch_size_per_gpu": 1,
    _A + "ref.ulysses_sequence_parallel_size": 1,
    _A + "rollout.log_prob_micro_batch_size": 1,
    _A + "rollout.log_prob_micro_batch_size_per_gpu": 1,
    _A + "rollout.n": 1,
    _A + "rollout.max_num_seqs": 1,
    _A + "rollout.tensor_model_parallel_size": 1,
    _A + "rollout.val_kwargs.n": 1,
    _A + "rollout.val_kwargs.temperature": 0,
    "ray_kwargs.ray_init.num_cpus": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 1,
    "reward.num_workers": 1,
    "reward.timeout_s": 0.01,
}
# key -> the values this version can run, and what to do instead
_AVAILABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "reward_model.reward_manager": (("naive", "dapo", "batch"), "Use reward_model.reward_manager=naive."),
    _A + "actor.ulysses_sequence_parallel_size": ((1,), "Use 1, and a token budget that holds the longest sequence."),
    _A + "ref.ulysses_sequence_parallel_size": ((1,), "Use 1."),
    _A + "model.lora_rank": ((0,), "Use lora_rank=0: all weights are trained."),
    _A + "rollout.multi_turn.enable": ((False,), "Answers are single-turn: leave it out."),
    _A + "rollout.name": (("hf",), "Use rollout.name=hf."),
    _A + "rollout.tensor_model_parallel_size": ((1,), "Use 1 with rollout.name=hf."),
}


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def check(loaded: LoadedConfig) -> None:
    """Raise ConfigError with every rule that the config breaks."""
    config = loaded.config
    problems = [
        *_values(config),
        *_ranges(config),
        *uneven(config),
        *_answers(config),
        *_algorithm(config),
        *_reward_model(config),
        *_budgets(config),
        *_sizes(config),
        *_rest(config),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def unavailable(config: Config) -> list[str]:
    """What the config asks for that this version cannot run; each with what to use instead."""
    lines = []
    for key, (values, advice) in _AVAILABLE.items():
        value = get(config, key)
        if value not in values:
            lines.append(f"{key}={value} is not in this version. {advice}")
    return lines


def missing_files(config: Config) -> list[str]:
    """Local files and folders that the config names and that are not there."""
    lines = []
    named = [("data.train_files", path) for path in as_list(config.data.train_files)]
    named += [("data.val_files", path) for path in as_list(config.data.val_files)]
    named += [("custom_reward_function.path", path) for path in as_list(config.custom_reward_function.path)]
    named += [(key, get(config, key).rpartition(":")[0]) for key in PLUGINS if ":" in get(config, key)]
    for key in (_A + "model.path", "critic.model.path", "reward_model.model.path"):
        if (model := get(config, key) or "").startswith(("/", ".", "~")):
            named.append((key, model))
    if config.trainer.resume_mode == "resume_path":
        named.append(("trainer.resume_from_path", str(config.trainer.resume_from_path)))
    for key, path in named:
        if not Path(path).expanduser().exists():
            lines.append(f"{key}: {path} does not exist.{_nearest_file(Path(path).expanduser())}")
    return lines


def as_list(value: Any) -> list[str]:
    """A list key that may be null or a bare string."""
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _values(config: Config) -> Iterator[str]:
    for key, values in _CHOICES.items():
        value = get(config, key)
        if value not in values and not (key in PLUGINS and ":" in value):
            own = ", or a function of your own: FILE.py:NAME" if key in PLUGINS else ""
            yield f"{key}={value}: use one of {', '.join('null' if each is None else each for each in values)}{own}."
    for key, least in _AT_LEAST.items():
        value = get(config, key)
        if value is not None and not value >= least:  # so that nan does not pass
            yield f"{key}={value}: it must be at least {least}."
    for logger in config.trainer.logger:
        if logger not in _LOGGERS:
            yield f"trainer.logger={config.trainer.logger}: '{logger}' is not a tracker rltrain has. Use {', '.join(_LOGGERS)}."
    contents = config.actor_rollout_ref.actor.checkpoint.save_contents
    for part in contents:
        if part not in _CONTENTS:
            yield f"{_A}actor.checkpoint.save_contents={contents}: '{part}' is not a part of a checkpoint. Use {', '.join(_CONTENTS)}."


def _ranges(config: Config) -> Iterator[str]:
    for key in ("rollout.top_p", "rollout.val_kwargs.top_p", "rollout.gpu_memory_utilization"):
        value = get(config, _A + key)
        if not 0 < value <= 1:
            yield f"{_A}{key}={value}: it must be over 0 and at most 1."
    if not 0 <= config.data.sampler.revisit <= 1:
        yield f"data.sampler.revisit={config.data.sampler.revisit}: it must be between 0 and 1."
    for key in ("lr_warmup_steps_ratio", "min_lr_ratio"):
        value = get(config, f"{_A}actor.optim.{key}")
        if not 0 <= value <= 1:
            yield f"{_A}actor.optim.{key}={value}: it must be between 0 and 1."
    for key in ("rollout.temperature", "actor.optim.clip_grad"):
        value = get(config, _A + key)
        if not value > 0:
            yield f"{_A}{key}={value}: it must be over 0. Try 1.0."
    betas = config.actor_rollout_ref.actor.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"{_A}actor.optim.betas={betas}: give two numbers from 0 to below 1, such as [0.9,0.999]."


def uneven(config: Config) -> Iterator[str]:
    """Everything that must divide and does not: nothing is ever rounded."""
    actor, ref, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.actor_rollout_ref.rollout
    prompts, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if min(prompts, mini) > 0 and prompts % mini:
        yield (
            f"data.train_batch_size={prompts} is not a multiple of {_A}actor.ppo_mini_batch_size={mini}, so "
            f"some prompts would be left out of every step. Try ppo_mini_batch_size={_largest_divisor(prompts, mini)}."
        )
    mini = config.critic.ppo_mini_batch_size
    if config.algorithm.adv_estimator == "gae" and min(prompts, mini) > 0 and prompts % mini:
        yield (
            f"data.train_batch_size={prompts} is not a multiple of critic.ppo_mini_batch_size={mini}. "
            f"Try critic.ppo_mini_batch_size={_largest_divisor(prompts, mini)}."
        )
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    for key, size in (
        ("actor.ulysses_sequence_parallel_size", actor.ulysses_sequence_parallel_size),
        ("ref.ulysses_sequence_parallel_size", ref.ulysses_sequence_parallel_size),
        ("rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size),
        ("actor.fsdp_config.fsdp_size", min(actor.fsdp_config.fsdp_size, devices)),
    ):
        if size > 0 and devices % size:
            yield f"{_A}{key}={size} does not divide the {devices} devices (trainer.nnodes x trainer.n_gpus_per_node)."
    ranks = max(1, devices // max(1, actor.ulysses_sequence_parallel_size))
    for key, dynamic, total in (
        ("actor.ppo_micro_batch_size", actor.use_dynamic_bsz, actor.ppo_micro_batch_size),
        ("ref.log_prob_micro_batch_size", ref.log_prob_use_dynamic_bsz, ref.log_prob_micro_batch_size),
        ("rollout.log_prob_micro_batch_size", rollout.log_prob_use_dynamic_bsz, rollout.log_prob_micro_batch_size),
    ):
        if not dynamic and total is not None and total % ranks:
            yield f"{_A}{key}={total} is for all {ranks} data-parallel ranks and does not divide. Use {_A}{key}_per_gpu."


def _answers(config: Config) -> Iterator[str]:
    """What compares the answers to one prompt needs several that differ."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    needs = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if algorithm.filter_groups.enable:
        needs = "algorithm.filter_groups.enable=True"
    elif algorithm.adv_estimator not in COMPARING_ESTIMATORS:
        return
    if rollout.n < 2:
        yield f"{needs} compares answers to one prompt, so {_A}rollout.n must be >= 2 (got {rollout.n}). Try {_A}rollout.n=8."
    if not rollout.do_sample:
        yield f"{_A}rollout.do_sample=False makes all answers to a prompt alike, and nothing is learnt from them. Leave it out."


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    for key in ("gamma", "lam"):
        if not 0 <= getattr(algorithm, key) <= 1:
            yield f"algorithm.{key}={getattr(algorithm, key)}: it must be between 0 and 1."
    if algorithm.adv_estimator == "gdpo" and not algorithm.gdpo_reward_keys:
        yield "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, the numbers a scorer returns, such as [acc,format]."
    weights = algorithm.gdpo_reward_weights
    if weights is not None and len(weights) != len(algorithm.gdpo_reward_keys):
        yield f"algorithm.gdpo_reward_weights={weights}: give one weight for each of gdpo_reward_keys={algorithm.gdpo_reward_keys}."
    if not algorithm.kl_ctrl.target_kl > 0:
        yield f"algorithm.kl_ctrl.target_kl={algorithm.kl_ctrl.target_kl}: it must be over 0."
    for read, name in (
        (correction.importance_bounds, "rollout_is_threshold"),
        (correction.rejection_rules, "rollout_rs"),
    ):
        try:
            read()
        except ValueError as error:
            value = getattr(correction, name)
            yield f"algorithm.rollout_correction.{name}={value}: {error}. See --help algorithm.rollout_correction."


def _reward_model(config: Config) -> Iterator[str]:
    model, buffer = config.reward_model, config.reward_model.overlong_buffer
    for name, weight in config.reward.weights.items():
        if not isinstance(weight, int | float):
            yield f"reward.weights.{name}={weight}: give a number, such as reward.weights.{name}=0.5."
    if model.reward_manager == "batch" and not config.custom_reward_function.path:
        yield "reward_model.reward_manager=batch needs custom_reward_function.path, a function that takes lists. Or use naive."
    if model.enable and not model.model.path:
        yield "reward_model.enable=True needs reward_model.model.path, a sequence classifier with one label."
    if model.reward_manager == "dapo" and buffer.enable and not 0 < buffer.len <= config.data.max_response_length:
        yield (
            f"reward_model.overlong_buffer.len={buffer.len}: it must be at least 1 and at most "
            f"data.max_response_length={config.data.max_response_length}."
        )


def _budgets(config: Config) -> Iterator[str]:
    actor, ref, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.actor_rollout_ref.rollout
    critic = config.critic
    longest = config.data.max_prompt_length + config.data.max_response_length
    for key, dynamic, tokens, group in (
        ("actor.ppo_max_token_len_per_gpu", actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ulysses_sequence_parallel_size),
        ("rollout.log_prob_max_token_len_per_gpu", rollout.log_prob_use_dynamic_bsz, rollout.log_prob_max_token_len_per_gpu,
         actor.ulysses_sequence_parallel_size),
        ("ref.log_prob_max_token_len_per_gpu", ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu,
         ref.ulysses_sequence_parallel_size),
        ("critic.ppo_max_token_len_per_gpu", critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu, 1),
        ("critic.forward_max_token_len_per_gpu", critic.use_dynamic_bsz, critic.forward_max_token_len_per_gpu, 1),
    ):  # fmt: skip
        if key.startswith("critic."):
            if config.algorithm.adv_estimator != "gae":
                continue
        else:
            key = _A + key
        if dynamic and tokens * group < longest:
            yield (
                f"{key}={tokens} cannot hold the longest sequence: data.max_prompt_length + data.max_response_length = {longest} tokens"
                + (f" over {group} devices" if group > 1 else "")
                + f". Set it to at least {-(-longest // group)}."
            )


def _sizes(config: Config) -> Iterator[str]:
    """Micro-batches by count: one size each; the log-prob passes may leave theirs out and take the update's."""
    actor, ref, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.actor_rollout_ref.rollout
    update = (actor.ppo_micro_batch_size, actor.ppo_micro_batch_size_per_gpu)
    for key, dynamic, switch, pair in (
        ("actor.ppo_micro_batch_size", actor.use_dynamic_bsz, "actor.use_dynamic_bsz", update),
        ("ref.log_prob_micro_batch_size", ref.log_prob_use_dynamic_bsz, "ref.log_prob_use_dynamic_bsz",
         (ref.log_prob_micro_batch_size, ref.log_prob_micro_batch_size_per_gpu)),
        ("rollout.log_prob_micro_batch_size", rollout.log_prob_use_dynamic_bsz, "rollout.log_prob_use_dynamic_bsz",
         (rollout.log_prob_micro_batch_size, rollout.log_prob_micro_batch_size_per_gpu)),
    ):  # fmt: skip
        if None not in pair:
            yield f"{_A}{key} and …_per_gpu are both set. Keep {_A}{key}_per_gpu."
        # Where the update cuts by samples too, its own missing size is the one error to mend.
        if (
            not dynamic
            and pair == (None, None)
            and update == (None, None)
            and (pair is update or actor.use_dynamic_bsz)
        ):
            yield f"{_A}{switch}=False needs {_A}{key}_per_gpu (samples per forward on one device). Try 4."


def _rest(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if not config.actor_rollout_ref.model.path:
        yield f"{_A}model.path is not set. Give a Hugging Face folder or hub name."
    if not as_list(config.data.train_files):
        yield "data.train_files is not set. Give one or more parquet files (see data_preprocess/)."
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_N."


def _largest_divisor(number: int, limit: int) -> int:
    return next(size for size in range(min(limit, number), 0, -1) if number % size == 0)


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""
