"""Rules between keys of the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator

from rltrain.config.engines import ENGINES, engines_with
from rltrain.config.schema import Config

_A = "actor_rollout_ref."


def tail_problems(config: Config) -> Iterator[str]:
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


def engine_problems(config: Config) -> Iterator[str]:
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
