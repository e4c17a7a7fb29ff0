"""Rules between keys. All errors at once; each names key, value and way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rltrain.config.budgets import budget_problems
from rltrain.config.engines import ENGINES, engines_with
from rltrain.config.keys import all_keys, get, plugin_keys
from rltrain.config.load import LoadedConfig
from rltrain.config.renames import shown
from rltrain.config.schema import Config
from rltrain.errors import ConfigError

_A = "actor_rollout_ref."
_LEAST_SCORER_MEMORY_MB = 256


def check(loaded: LoadedConfig) -> None:
    """Raise ConfigError with every rule that the config breaks."""
    rules = (
        _each_key, _lists, uneven, _answers, _tail, _algorithm, _parallel, _reward_model, _scorers, _engine, budget_problems, _lora, _rest,
    )  # fmt: skip
    if problems := [problem for rule in rules for problem in rule(loaded.config)]:
        raise ConfigError("\n".join(problems))


def missing_files(config: Config) -> list[str]:
    """Local files and folders that the config names and that are not there."""
    lines = []
    named = [("data.train_files", path) for path in as_list(config.data.train_files)]
    named += [("data.val_files", path) for path in as_list(config.data.val_files)]
    named += [("custom_reward_function.path", path) for path in as_list(config.custom_reward_function.path)]
    named += [(key, get(config, key).rpartition(":")[0]) for key in plugin_keys() if ":" in get(config, key)]
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


def _each_key(config: Config) -> Iterator[str]:
    """Names and bounds that stand at the fields."""
    for key in all_keys().values():
        value, rules = get(config, key.name), key.rules
        for item in value if isinstance(value, list) else [value]:
            if rules.among and item not in rules.among and not (rules.plugin and ":" in item):
                own = ", or a function of your own: FILE.py:NAME" if rules.plugin else ""
                yield f"{key.name}={shown(value)}: '{item}' is not known; use one of {', '.join(rules.among)}{own}."
        if isinstance(value, int | float) and not rules.within(value):
            usual = f" Try {key.default:g}." if isinstance(key.default, int | float) else ""
            yield f"{key.name}={value}: it must be {rules.bounds() or 'a number'}.{usual}"


def _lists(config: Config) -> Iterator[str]:
    """Lists whose items have rules of their own."""
    for name in config.trainer.callbacks:
        if ":" not in name:
            yield f"trainer.callbacks={config.trainer.callbacks}: '{name}' names no class or function. Give FILE.py:NAME."
    for section, optim in (
        (_A + "actor.optim", config.actor_rollout_ref.actor.optim),
        ("critic.optim", config.critic.optim),
    ):
        if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
            yield f"{section}.betas={optim.betas}: give two numbers from 0 to below 1, such as [0.9,0.999]."
    for name, weight in config.reward.weights.items():
        if not isinstance(weight, int | float):
            yield f"reward.weights.{name}={weight}: give a number, such as reward.weights.{name}=0.5."


def uneven(config: Config) -> Iterator[str]:
    """Everything that must divide and does not: nothing is ever rounded."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if min(prompts, mini) > 0 and prompts % mini:
        yield (
            f"data.train_batch_size={prompts} is not a multiple of {_A}actor.ppo_mini_batch_size={mini}, so "
            f"some prompts would be left out of every step. Try ppo_mini_batch_size={_largest_divisor(prompts, mini)}."
        )
    filtering = config.algorithm.filter_groups
    rounds, drawn = filtering.most_rounds, config.data.gen_batch_size or prompts
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
    for key in all_keys():
        if not key.endswith(("ulysses_sequence_parallel_size", "tensor_model_parallel_size", "fsdp_size")):
            continue
        size = get(config, key)
        size = min(size, devices) if key.endswith("fsdp_size") else size  # more than there are means all
        if size > 0 and devices % size:
            yield f"{key}={size} does not divide the {devices} devices (trainer.nnodes x trainer.n_gpus_per_node)."
    size, here = rollout.tensor_model_parallel_size, config.trainer.n_gpus_per_node
    if 0 < size < here and here % size:
        yield (
            f"{_A}rollout.tensor_model_parallel_size={size} does not divide trainer.n_gpus_per_node={here}: an engine would lie across "
            "nodes. Use a divisor."
        )


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
    for name, read in (
        ("rollout_is_threshold", correction.importance_bounds),
        ("rollout_rs", correction.rejection_rules),
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
        algorithm, metric = config.algorithm, config.algorithm.filter_groups.metric
        own_metric = algorithm.filter_groups.enable and metric not in ("acc", "score", "seq_reward")
        asked = (
            ("algorithm.adv_estimator", algorithm.adv_estimator, algorithm.estimator.reward_terms),
            ("data.sampler.name", "solve_rate", config.data.sampler.name == "solve_rate"),
            ("algorithm.filter_groups.metric", metric, own_metric),
            ("reward.weights", config.reward.weights, bool(config.reward.weights)),
        )
        for key, value, holds in asked:
            if holds:
                yield f"{key}={value} needs a scorer, and reward_model.rule_weight=0 runs none."
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


def _tail(config: Config) -> Iterator[str]:
    """What `rollout.tail` needs, and what it cannot stand beside."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    tail = f"{_A}rollout.tail={rollout.tail}"
    engine = ENGINES.get(rollout.name)
    if rollout.tail == "exact" and engine and not engine.speculation:
        yield (
            f"{tail} is speculative decoding, which {_A}rollout.name={rollout.name} does not have. "
            f"Use {engines_with('speculation')}, or leave tail out."
        )
    if rollout.stops_early and config.algorithm.filter_groups.enable:
        yield f"{tail} and algorithm.filter_groups.enable=True both choose the prompts of a step. Keep one of them."
    # With bypass_mode and ppo_clip the ratio of the loss is taken against the policy that sampled the token: weight enough.
    weighted = (correction.bypass_mode and correction.loss_type == "ppo_clip") or correction.rollout_is == "token"
    if rollout.tail == "carry_over" and not weighted:
        yield (
            f"{tail} learns from tokens that earlier policies have sampled, and needs a weight for each: set "
            f"algorithm.rollout_correction.rollout_is=token (got {correction.rollout_is or 'null'})."
        )


def _engine(config: Config) -> Iterator[str]:
    """What the chosen engine cannot do."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    engine = ENGINES.get(rollout.name)
    if engine is None:
        return  # the name itself is refused elsewhere
    if rollout.tensor_model_parallel_size > 1 and not engine.tensor_parallel:
        yield (
            f"{_A}rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: an engine of rollout.name={rollout.name} "
            f"runs on one device. Use 1, or {engines_with('tensor_parallel')}."
        )
    least, most = engine.temperatures
    for key, value in (
        ("temperature", rollout.temperature),
        ("val_kwargs.temperature", rollout.val_kwargs.temperature),
    ):
        if value != 0 and not least <= value <= most:
            yield f"{_A}rollout.{key}={value}: {rollout.name} takes {least:g} to {most:g}. Use such a value, or rollout.name=hf."
    taking = [f"engine_kwargs.{name}" for name, one in ENGINES.items() if "engine_kwargs" not in one.unused_keys]
    for name in rollout.engine_kwargs:
        if f"engine_kwargs.{name}" not in taking:
            yield f"{_A}rollout.engine_kwargs.{name}: arguments stand under an engine: {' or '.join(taking)}."
    if rollout.max_model_len is not None and rollout.max_model_len <= data.max_prompt_length:
        yield (
            f"{_A}rollout.max_model_len={rollout.max_model_len} leaves no room for an answer to a prompt of data.max_prompt_length="
            f"{data.max_prompt_length} tokens. Leave it out, or set it to at least {data.max_prompt_length + data.max_response_length}."
        )


def _lora(config: Config) -> Iterator[str]:
    """Names of layers are text."""
    for section, model in (
        ("actor_rollout_ref.model", config.actor_rollout_ref.model),
        ("critic.model", config.critic.model),
    ):
        if not model.uses_lora:
            continue
        for key in ("target_modules", "exclude_modules"):
            value = getattr(model, key)
            if value is None and key == "exclude_modules":
                continue
            names = value if isinstance(value, list) else [value]
            if not names or not all(isinstance(name, str) and name for name in names):
                yield f"{section}.{key}={value}: give a name, a list of names such as [q_proj,v_proj], or a pattern of full names."


def _parallel(config: Config) -> Iterator[str]:
    """Where actor and reference compute together, they cut sequences alike."""
    roles = config.actor_rollout_ref
    actor, ref = roles.actor.ulysses_sequence_parallel_size, roles.ref.ulysses_sequence_parallel_size
    together = {
        "actor_rollout_ref.actor.kl_loss_type=full": roles.actor.use_kl_loss and roles.actor.kl_loss_type == "full",
        "algorithm.kl_penalty=full": config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full",
        "LoRA": roles.model.uses_lora,
    }
    key = _A + "ref.ulysses_sequence_parallel_size"
    for why in (why for why, holds in together.items() if holds and actor != ref):
        yield f"{key}={ref}: with {why} actor and reference share the devices of a sequence. Use {key}={actor}, as the actor."


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
