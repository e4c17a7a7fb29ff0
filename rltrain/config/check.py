"""Rules between keys. All errors at once; each names key, value and way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rltrain.config.keys import get
from rltrain.config.load import LoadedConfig
from rltrain.config.lora import lora_problems
from rltrain.config.model_schema import OptimConfig
from rltrain.config.parallel import parallel_problems
from rltrain.config.passes import pass_problems, uneven_passes
from rltrain.config.rollout_check import engine_problems, tail_problems
from rltrain.config.schema import Config
from rltrain.config.values import (
    AT_LEAST,
    CHOICES,
    CONTENTS,
    DEFAULT_ROUNDS,
    LOGGERS,
    PLUGINS,
)
from rltrain.errors import ConfigError

_A = "actor_rollout_ref."
_LEAST_SCORER_MEMORY_MB = 256


def check(loaded: LoadedConfig) -> None:
    """Raise ConfigError with every rule that the config breaks."""
    config = loaded.config
    problems = [
        *_values(config),
        *_ranges(config),
        *uneven(config),
        *_answers(config),
        *tail_problems(config),
        *_algorithm(config),
        *parallel_problems(config),
        *_reward_model(config),
        *engine_problems(config),
        *pass_problems(config),
        *lora_problems(config),
        *_rest(config),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def unavailable(config: Config) -> list[str]:
    """What the config asks for that this version cannot run; each with what to use instead."""
    if not config.actor_rollout_ref.rollout.multi_turn.enable:
        return []
    return [f"{_A}rollout.multi_turn.enable=True is not in this version. Answers are single-turn: leave it out."]


def missing_files(config: Config) -> list[str]:
    """Local files and folders that the config names and that are not there."""
    lines = []
    named = [("data.train_files", path) for path in as_list(config.data.train_files)]
    named += [("data.val_files", path) for path in as_list(config.data.val_files)]
    named += [("custom_reward_function.path", path) for path in as_list(config.custom_reward_function.path)]
    named += [(key, get(config, key).rpartition(":")[0]) for key in PLUGINS if ":" in get(config, key)]
    named += [("trainer.callbacks", name.rpartition(":")[0]) for name in config.trainer.callbacks]
    if (adapter := config.actor_rollout_ref.model.lora_adapter_path or "").startswith(("/", ".", "~")):
        named.append((_A + "model.lora_adapter_path", adapter))
    if config.trainer.resume_mode == "resume_path":
        named.append(("trainer.resume_from_path", str(config.trainer.resume_from_path)))
    for key, path in named:
        if not Path(path).expanduser().exists():
            lines.append(f"{key}: {path} does not exist.{nearest_file(Path(path).expanduser())}")
    return lines


def as_list(value: Any) -> list[str]:
    """A list key that may be null or a bare string."""
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _values(config: Config) -> Iterator[str]:
    for key, values in CHOICES.items():
        value = get(config, key)
        if value not in values and not (key in PLUGINS and ":" in value):
            own = ", or a function of your own: FILE.py:NAME" if key in PLUGINS else ""
            yield f"{key}={value}: use one of {', '.join('null' if each is None else each for each in values)}{own}."
    for key, least in AT_LEAST.items():
        value = get(config, key)
        if value is not None and not value >= least:  # so that nan does not pass
            yield f"{key}={value}: it must be at least {least}."
    for logger in config.trainer.logger:
        if logger not in LOGGERS:
            yield f"trainer.logger={config.trainer.logger}: '{logger}' is not a tracker rltrain has. Use {', '.join(LOGGERS)}."
    for name in config.trainer.callbacks:
        if ":" not in name:
            yield f"trainer.callbacks={config.trainer.callbacks}: '{name}' names no class or function. Give FILE.py:NAME."
    contents = config.actor_rollout_ref.actor.checkpoint.save_contents
    for part in contents:
        if part not in CONTENTS:
            yield f"{_A}actor.checkpoint.save_contents={contents}: '{part}' is not a part of a checkpoint. Use {', '.join(CONTENTS)}."


def _ranges(config: Config) -> Iterator[str]:
    for key in ("rollout.top_p", "rollout.val_kwargs.top_p", "rollout.gpu_memory_utilization"):
        value = get(config, _A + key)
        if not 0 < value <= 1:
            yield f"{_A}{key}={value}: it must be over 0 and at most 1."
    ratio = config.actor_rollout_ref.rollout.oversample_ratio
    if not 1 <= ratio <= 2:
        yield f"{_A}rollout.oversample_ratio={ratio}: it must be between 1 and 2. Try 1.25."
    if not 0 <= config.data.sampler.revisit <= 1:
        yield f"data.sampler.revisit={config.data.sampler.revisit}: it must be between 0 and 1."
    for key in (_A + "actor.policy_loss.clip_cov_ratio", _A + "actor.policy_loss.kl_cov_ratio"):
        if not 0 <= get(config, key) <= 1:
            yield f"{key}={get(config, key)}: it must be between 0 and 1."
    for key in ("rollout.temperature", "actor.tau_pos", "actor.tau_neg"):
        value = get(config, _A + key)
        if not value > 0:
            yield f"{_A}{key}={value}: it must be over 0. Try 1.0."
    for section in (_A + "actor.optim", "critic.optim"):
        yield from _optimizer(section, get(config, section))


def _optimizer(section: str, optim: OptimConfig) -> Iterator[str]:
    for name in ("lr_warmup_steps_ratio", "min_lr_ratio"):
        if not 0 <= getattr(optim, name) <= 1:
            yield f"{section}.{name}={getattr(optim, name)}: it must be between 0 and 1."
    for name, usual in (("clip_grad", 1.0), ("eps", 1e-8)):
        if not getattr(optim, name) > 0:
            yield f"{section}.{name}={getattr(optim, name)}: it must be over 0. Try {usual}."
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"{section}.betas={optim.betas}: give two numbers from 0 to below 1, such as [0.9,0.999]."


def uneven(config: Config) -> Iterator[str]:
    """Everything that must divide and does not: nothing is ever rounded."""
    actor, ref, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.actor_rollout_ref.rollout
    prompts, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if min(prompts, mini) > 0 and prompts % mini:
        yield (
            f"data.train_batch_size={prompts} is not a multiple of {_A}actor.ppo_mini_batch_size={mini}, so "
            f"some prompts would be left out of every step. Try ppo_mini_batch_size={_largest_divisor(prompts, mini)}."
        )
    filtering = config.algorithm.filter_groups
    rounds, drawn = filtering.max_num_gen_batches or DEFAULT_ROUNDS, config.data.gen_batch_size or prompts
    if filtering.enable and rounds * drawn < prompts:
        yield (
            f"data.gen_batch_size={drawn} in at most {rounds} rounds (algorithm.filter_groups.max_num_gen_batches) cannot fill "
            f"data.train_batch_size={prompts}. Set gen_batch_size to at least {-(-prompts // rounds)}."
        )
    mini = config.critic.ppo_mini_batch_size
    if config.algorithm.needs_critic and min(prompts, mini) > 0 and prompts % mini:
        yield (
            f"data.train_batch_size={prompts} is not a multiple of critic.ppo_mini_batch_size={mini}. "
            f"Try critic.ppo_mini_batch_size={_largest_divisor(prompts, mini)}."
        )
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    for key, size in (
        ("actor.ulysses_sequence_parallel_size", actor.ulysses_sequence_parallel_size),
        ("ref.ulysses_sequence_parallel_size", ref.ulysses_sequence_parallel_size),
        ("critic.ulysses_sequence_parallel_size", config.critic.ulysses_sequence_parallel_size),
        ("rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size),
        ("actor.fsdp_config.fsdp_size", min(actor.fsdp_config.fsdp_size, devices)),
        ("critic.model.fsdp_config.fsdp_size", min(config.critic.model.fsdp_config.fsdp_size, devices)),
        ("reward_model.model.fsdp_config.fsdp_size", min(config.reward_model.model.fsdp_config.fsdp_size, devices)),
    ):
        key = key if key.startswith(("critic.", "reward_model.")) else _A + key
        if size > 0 and devices % size:
            yield f"{key}={size} does not divide the {devices} devices (trainer.nnodes x trainer.n_gpus_per_node)."
    size, here = rollout.tensor_model_parallel_size, config.trainer.n_gpus_per_node
    if 0 < size < here and here % size:
        yield (
            f"{_A}rollout.tensor_model_parallel_size={size} does not divide trainer.n_gpus_per_node={here}: an engine would lie across "
            "nodes. Use a divisor."
        )
    yield from uneven_passes(config, devices)


def _answers(config: Config) -> Iterator[str]:
    """What compares the answers to one prompt needs several that differ."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    needs = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if algorithm.filter_groups.enable:
        needs = "algorithm.filter_groups.enable=True"
    elif not algorithm.estimator.compares:
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
    by_terms, chosen = algorithm.estimator.reward_terms, f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if by_terms and not algorithm.gdpo_reward_keys:
        yield f"{chosen} needs algorithm.gdpo_reward_keys, the numbers a scorer returns, such as [acc,format]."
    weights = algorithm.gdpo_reward_weights
    if weights is not None and len(weights) != len(algorithm.gdpo_reward_keys):
        yield f"algorithm.gdpo_reward_weights={weights}: give one weight for each of gdpo_reward_keys={algorithm.gdpo_reward_keys}."
    if by_terms:
        beside = {
            "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
            "reward_model.enable": config.reward_model.enable,
            "reward.weights": bool(config.reward.weights),
            "reward_model.overlong_buffer.enable": config.reward_model.reward_manager == "dapo"
            and config.reward_model.overlong_buffer.enable,
        }
        for key in (key for key, on in beside.items() if on):
            yield f"{chosen} compares gdpo_reward_keys alone, and {key} would be lost. Leave it out, or use grpo."
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
    if model.enable and model.rule_weight == 0:
        if model.weight == 0:
            yield "reward_model.weight=0 and reward_model.rule_weight=0 leave no reward at all."
        metric = config.algorithm.filter_groups.metric
        algorithm = config.algorithm
        asked: list[tuple[str, Any, bool]] = [
            ("algorithm.adv_estimator", algorithm.adv_estimator, algorithm.estimator.reward_terms)
        ]
        asked += [("data.sampler.name", "solve_rate", config.data.sampler.name == "solve_rate")]
        own = config.algorithm.filter_groups.enable and metric not in ("acc", "score", "seq_reward")
        asked += [
            ("algorithm.filter_groups.metric", metric, own),
            ("reward.weights", config.reward.weights, bool(config.reward.weights)),
        ]
        for key, value, holds in asked:
            if holds:
                yield f"{key}={value} needs a scorer, and reward_model.rule_weight=0 runs none."
    yield from _scorers(config)
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


def _scorers(config: Config) -> Iterator[str]:
    reward = config.reward
    if 0 < reward.memory_limit_mb < _LEAST_SCORER_MEMORY_MB:
        least = f"0 (no limit) or at least {_LEAST_SCORER_MEMORY_MB}"
        yield f"reward.memory_limit_mb={reward.memory_limit_mb}: a scorer's process needs more. Use {least}."
    if reward.url is None:
        return
    if config.custom_reward_function.path:
        yield "reward.url and custom_reward_function.path both say how to score; give one of them."
    try:
        address = urlsplit(reward.url)
        usable = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    if not usable:
        yield f"reward.url={reward.url!r} is no address; write http://host:port/path."


def _rest(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if not config.actor_rollout_ref.model.path:
        yield f"{_A}model.path is not set. Give a Hugging Face folder or hub name."
    if not as_list(config.data.train_files):
        yield "data.train_files is not set. Give one or more parquet files (python -m rltrain.data_preprocess.jsonl makes them)."
    if trainer.val_only and not as_list(config.data.val_files):
        yield "trainer.val_only=True has nothing to do: data.val_files is not set."
    if (
        config.algorithm.needs_critic
        and trainer.total_training_steps is not None
        and trainer.critic_warmup > trainer.total_training_steps
    ):
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} is over trainer.total_training_steps={trainer.total_training_steps}, "
            "so the actor would never learn."
        )
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_N."


def _largest_divisor(number: int, limit: int) -> int:
    return next(size for size in range(min(limit, number), 0, -1) if number % size == 0)


def nearest_file(path: Path) -> str:
    """ " Did you mean …?" where something next to a path that is not there has almost its name, or nothing."""
    if not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""
