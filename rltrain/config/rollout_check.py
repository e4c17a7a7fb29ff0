"""Rules between keys of the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator

from rltrain.config.schema import Config

_A = "actor_rollout_ref."


def tail_problems(config: Config) -> Iterator[str]:
    """What `rollout.tail` needs, and what it cannot stand beside."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    tail = f"{_A}rollout.tail={rollout.tail}"
    if rollout.tail == "exact" and rollout.name != "vllm":
        yield f"{tail} is speculative decoding, which {_A}rollout.name={rollout.name} has not. Use rollout.name=vllm, or leave tail out."
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
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        yield (
            f"{_A}rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: an engine of rollout.name=hf runs on one "
            "device. Use 1, or rollout.name=vllm."
        )
    for key, value in (
        ("temperature", rollout.temperature),
        ("val_kwargs.temperature", rollout.val_kwargs.temperature),
    ):
        if rollout.name == "vllm" and (value > 2 or 0 < value < 0.01):
            yield f"{_A}rollout.{key}={value}: vLLM takes 0.01 to 2. Use such a value, or rollout.name=hf."
    for name in rollout.engine_kwargs.keys() - {"vllm", "sglang"}:
        yield f"{_A}rollout.engine_kwargs.{name}: arguments stand under an engine: engine_kwargs.vllm or engine_kwargs.sglang."
    if rollout.max_model_len is not None and rollout.max_model_len <= data.max_prompt_length:
        yield (
            f"{_A}rollout.max_model_len={rollout.max_model_len} leaves no room for an answer to a prompt of data.max_prompt_length="
            f"{data.max_prompt_length} tokens. Leave it out, or set it to at least {data.max_prompt_length + data.max_response_length}."
        )
