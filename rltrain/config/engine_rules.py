"""Rules of `actor_rollout_ref.rollout`: limits of the chosen engine, and requirements of `tail`."""

from __future__ import annotations

from collections.abc import Iterator

from rltrain.common.plugin import is_plugin
from rltrain.config.agents import LOOPS_KEY, NAMES, SINGLE_TURN, several_turns, who_answers
from rltrain.config.budgets import longest_text
from rltrain.config.schema import Config
from rltrain.config.schema.conditions import as_text
from rltrain.config.schema.engines import ENGINES, engines_with
from rltrain.config.schema.keys import get

_R = "actor_rollout_ref.rollout."


def engine_problems(config: Config) -> Iterator[str]:
    """Yield one line for each setting that the chosen engine does not support."""
    rollout, engine = config.actor_rollout_ref.rollout, ENGINES.get(config.actor_rollout_ref.rollout.name)
    if rollout.tail == "exact" and engine and not engine.speculation:
        yield (
            f"{_R}tail=exact is speculative decoding, which {_R}name={rollout.name} does not support. Use "
            f"{engines_with('speculation')}, or leave tail out."
        )
    if config.actor_rollout_ref.model.fp32_head and engine and not engine.fp32_head:
        yield (
            f"actor_rollout_ref.model.fp32_head=True: rollout.name={rollout.name} computes its head in half precision, "
            f"so its log-probs would differ more from the trainer's. Use {engines_with('fp32_head')}, or leave it out."
        )
    if not config.actor_rollout_ref.model.merges and engine and not engine.adapters:
        yield (
            f"actor_rollout_ref.model.lora.merge=False: rollout.name={rollout.name} accepts full weights only. Use "
            f"{engines_with('adapters')}, or leave merge out: adapters are then merged into the weights."
        )
    yield from _engine(config)
    yield from _turns(config)


def _ways_to_sample(config: Config) -> Iterator[str]:
    """Yield errors for penalties and stop texts that the engine or another setting does not allow."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_response_length
    engine = ENGINES[rollout.name]
    for section, keys in ((_R, rollout), (f"{_R}val_kwargs.", rollout.val_kwargs)):
        named, penalty = f"{section}stop={as_text(keys.stop)}", keys.repetition_penalty
        if "" in (keys.stop or ()):
            yield f"{named}: an empty text would end every response at once. Leave it out."
        if keys.stop and not engine.stops:
            yield (
                f"{named}: rollout.name={rollout.name} has no tokenizer, so no text ends its responses. Use "
                f"{engines_with('stops')}, or leave it out."
            )
        if penalty != 1 and not engine.penalises:
            yield (
                f"{section}repetition_penalty={penalty}: rollout.name={rollout.name} would return log-probs with the "
                f"penalty in them. Use {engines_with('penalises')}, or leave it out."
            )
        elif penalty != 1 and rollout.tail == "exact":
            yield (
                f"{section}repetition_penalty={penalty}: {_R}tail=exact proposes several tokens at once, and each "
                "would change the penalty of the next. Leave one of the two out."
            )
    most = rollout.val_kwargs.max_tokens or 0
    if most > longest and config.reward_model.enable:
        yield (
            f"{_R}val_kwargs.max_tokens={most}: reward_model.enable=True judges responses of at most "
            f"data.max_response_length={longest} tokens. Use at most {longest}, or leave it out."
        )


def _turns(config: Config) -> Iterator[str]:
    """Yield errors for settings of several turns."""
    rollout, turns = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.multi_turn
    path, loop = f"{_R}multi_turn.function_tool_path", f"{_R}agent.default_agent_loop"
    name = rollout.agent.default_agent_loop
    if name is not None and name not in NAMES and not is_plugin(name):
        yield f"{loop}={name}: unknown agent. Use {', '.join(NAMES)}, or your own as FILE.py:NAME."
    for own in rollout.agent.agent_loops:
        if not is_plugin(own):
            yield f"{LOOPS_KEY}: {own!r} is not FILE.py:NAME. Only your own agents need an entry."
    if name in NAMES and name != SINGLE_TURN and not turns.place:
        yield f"{loop}={name} needs tools. Set {path}=tools.py to the file of their functions, or leave it out."
    if not several_turns(rollout):
        return
    tools = who_answers(rollout)
    if config.reward_model.classifies:
        yield f"{tools} and reward_model.enable=True: it would also score the text of tools. Keep one of them."


def tail_problems(config: Config) -> Iterator[str]:
    """Yield errors for the requirements of `rollout.tail`."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    tail = f"{_R}tail={rollout.tail}"
    if rollout.stops_early and config.algorithm.filter_groups.enable:
        yield f"{tail} and algorithm.filter_groups.enable=True both choose the prompts of a step. Keep one of them."
    # With bypass_mode and ppo_clip, the ratio of the loss is relative to the policy that sampled the token, so each
    # token is already weighted.
    weighted = (correction.bypass_mode and correction.loss_type == "ppo_clip") or correction.rollout_is == "token"
    if rollout.tail == "carry_over" and not weighted:
        yield (
            f"{tail} trains on tokens that earlier policies sampled, so each needs an importance weight. Set "
            f"algorithm.rollout_correction.rollout_is=token (got {as_text(correction.rollout_is)})."
        )


def replay_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that exclude `router_replay`."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    mode, engine = actor.router_replay.mode, ENGINES.get(rollout.name)
    key = f"actor_rollout_ref.actor.router_replay.mode={mode}"
    if mode != "disabled" and actor.fsdp_config.use_torch_compile:
        yield f"{key}: compiled layers do not expose their routing. Leave fsdp_config.use_torch_compile out."
    for name in ("router_aux_loss_coef", "router_bias_update_rate"):
        if (value := getattr(actor, name)) and actor.fsdp_config.use_torch_compile:
            yield (
                f"actor_rollout_ref.actor.{name}={value:g}: compiled layers do not expose their router logits. Leave "
                "fsdp_config.use_torch_compile out."
            )
    if actor.router_bias_update_rate and config.actor_rollout_ref.model.uses_lora:
        yield (
            f"actor_rollout_ref.actor.router_bias_update_rate={actor.router_bias_update_rate:g}: the bias belongs to "
            "the base model under the adapters, which is the reference and does not change. Leave it out, or train all "
            "weights (model.lora_rank=0)."
        )
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        yield (
            f"{key} replays the old_log_prob pass, but algorithm.rollout_correction.bypass_mode=True skips it. Use R3, "
            "which replays the engine."
        )
    if mode != "R3" or not engine:
        return
    if not engine.tells_experts:
        yield (
            f"{key}: rollout.name={rollout.name} does not return router indices. Use {engines_with('tells_experts')}, "
            "or R2."
        )
    if rollout.tail == "carry_over":
        yield (
            f"{key}: with {_R}tail=carry_over the experts of one response come from two policies. Use R2, or leave "
            "tail out."
        )
    if engine.package:
        if rollout.enable_prefix_caching:
            yield (
                f"{key}: {rollout.name} does not return router indices of tokens from its prefix cache. Set "
                f"{_R}enable_prefix_caching=False."
            )
        if not rollout.enforce_eager:
            yield f"{key}: CUDA graphs of {rollout.name} do not return router indices. Set {_R}enforce_eager=True."


def _experts_of_engine(config: Config) -> Iterator[str]:
    """Yield errors for experts that are distributed over the devices of an engine."""
    rollout = config.actor_rollout_ref.rollout
    experts, devices = rollout.expert_parallel_size, rollout.tensor_model_parallel_size
    key = f"{_R}expert_parallel_size={experts}"
    if experts == 1:
        return
    if not ENGINES[rollout.name].expert_parallel:
        others = engines_with("expert_parallel")
        yield f"{key}: rollout.name={rollout.name} has no expert parallelism. Leave it out, or use {others}."
    elif experts != devices:
        yield (
            f"{key}: experts are divided over the devices of an engine, {_R}tensor_model_parallel_size={devices}. Set "
            "both to the same value, or leave it out."
        )
    elif config.trainer.device == "cpu":
        yield f"{key}: vLLM's CPU kernel does not support expert parallelism and crashes. Leave it out."


def _engine(config: Config) -> Iterator[str]:
    """Yield errors for values that the chosen engine does not support."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    engine = ENGINES.get(rollout.name)
    if engine is None:
        return  # an unknown name is refused elsewhere
    size, (least, most) = rollout.tensor_model_parallel_size, engine.temperatures
    if size > 1 and not engine.tensor_parallel:
        yield (
            f"{_R}tensor_model_parallel_size={size}: an engine of rollout.name={rollout.name} runs on one device. "
            f"Use 1, or {engines_with('tensor_parallel')}."
        )
    yield from _experts_of_engine(config)
    here = config.trainer.n_gpus_per_node
    if size > here and engine.tensor_parallel and not engine.over_nodes:
        yield (
            f"{_R}tensor_model_parallel_size={size} is more than trainer.n_gpus_per_node={here}, but an engine of "
            f"rollout.name={rollout.name} cannot span nodes. Use a divisor of {here}, or {engines_with('over_nodes')}."
        )
    for key in (_R + "temperature", _R + "val_kwargs.temperature"):
        value = get(config, key)
        # 0 means greedy, which every engine supports.
        if value > 0 and not least <= value <= most:
            yield f"{key}={value}: {rollout.name} takes {least:g} to {most:g}. Use such a value, or rollout.name=hf."
    yield from _ways_to_sample(config)
    taking = [f"engine_kwargs.{name}" for name, traits in ENGINES.items() if "engine_kwargs" not in traits.unused_keys]
    for name in rollout.engine_kwargs:
        if f"engine_kwargs.{name}" not in taking:
            yield f"{_R}engine_kwargs.{name}: arguments belong under the name of an engine: {' or '.join(taking)}."
        elif not isinstance(given := rollout.engine_kwargs[name], dict | type(None)):
            form = f"such as {_R}engine_kwargs.{name}.NAME={as_text(given)}"
            yield f"{_R}engine_kwargs.{name}={as_text(given)}: arguments of the engine have names, {form}."
    arguments = rollout.engine_kwargs.get(rollout.name)
    for name, value in (arguments if isinstance(arguments, dict) else {}).items():
        # vLLM turns arguments off with null, 1 or false.
        off = value is None or value is False or (value == 1 and value is not True)
        if name in engine.refused_arguments and not off:
            key = f"{_R}engine_kwargs.{rollout.name}.{name}"
            yield f"{key}={as_text(value)}: {engine.refused_arguments[name]}. Leave it out."
    if rollout.max_model_len is not None and rollout.max_model_len <= data.max_prompt_length:
        yield (
            f"{_R}max_model_len={rollout.max_model_len} leaves no room for a response to a prompt of "
            f"data.max_prompt_length={data.max_prompt_length} tokens. Leave it out, or set it to at least "
            f"{data.max_prompt_length + data.max_response_length}."
        )


def supervised_problems(config: Config) -> Iterator[str]:
    """Yield errors for settings that need generated responses, in supervised fine-tuning."""
    rollout, data, enabled = config.actor_rollout_ref.rollout, config.data, "sft.enabled=True"
    if not config.sft.enabled:
        return
    if rollout.n > 1 or rollout.val_kwargs.n > 1:
        key = f"{_R}n={rollout.n}" if rollout.n > 1 else f"{_R}val_kwargs.n={rollout.val_kwargs.n}"
        yield f"{key}: with {enabled} a row has one response. Leave it out."
    if data.truncation not in ("error", "right"):
        yield f"data.truncation={data.truncation}: with {enabled} use right, or data.filter_overlong_prompts=True."
    refused = {
        "distillation.enabled": config.distillation.enabled, "data.custom_cls": data.custom_cls is not None,
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
        f"{_R}tail": rollout.tail != "off", "reward_model.enable": config.reward_model.enable,
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
    }  # fmt: skip
    for key in (key for key, is_set in refused.items() if is_set):
        why = f"it needs generated responses, and {enabled} learns from the data"
        yield f"{key}={as_text(get(config, key))}: {why}. Leave it out."


def position_problems(cfg: Config, limit: int | None, notes: list[str]) -> Iterator[str]:
    """Yield problems of sequences longer than the model's positions. Only vLLM refuses them; for other engines the
    problem is added to ``notes``. limit: the positions of the model.
    """
    rollout = cfg.actor_rollout_ref.rollout
    longest = rollout.max_model_len or longest_text(cfg)
    keys = f"{_R}max_model_len" if rollout.max_model_len else "data.max_prompt_length + data.max_response_length"
    budget = rollout.max_num_batched_tokens
    if ENGINES[rollout.name].strict_prefill and not rollout.enable_chunked_prefill and budget < longest:
        yield (
            f"{_R}enable_chunked_prefill=False: {rollout.name} then computes a sequence at once, and refuses "
            f"{_R}max_num_batched_tokens={budget} below the longest, {longest}. Remove it, or set "
            f"max_num_batched_tokens={longest}."
        )
    if limit and longest > limit:
        statement = f"{keys} = {longest:,} tokens, but the model has {limit:,} positions"
        if not ENGINES[rollout.name].beyond_positions:
            yield (
                f"{statement}, which {rollout.name} refuses. "
                "Lower it, or raise actor_rollout_ref.model.override_config.max_position_embeddings."
            )
        else:
            notes.append(f"{statement}: it was not trained on longer sequences")
