"""Rules between the sequence-parallel sizes of models that compute together."""

from __future__ import annotations

from collections.abc import Iterator

from rltrain.config.schema import Config

_KEY = "actor_rollout_ref.ref.ulysses_sequence_parallel_size"


def parallel_problems(config: Config) -> Iterator[str]:
    """Where actor and reference compute together, they cut sequences alike."""
    roles = config.actor_rollout_ref
    actor, ref = roles.actor.ulysses_sequence_parallel_size, roles.ref.ulysses_sequence_parallel_size
    together = {
        "actor_rollout_ref.actor.kl_loss_type=full": roles.actor.use_kl_loss and roles.actor.kl_loss_type == "full",
        "algorithm.kl_penalty=full": config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full",
        "LoRA": roles.model.uses_lora,
    }
    for why in (why for why, holds in together.items() if holds and actor != ref):
        yield f"{_KEY}={ref}: with {why} actor and reference share the devices of a sequence. Use {_KEY}={actor}, as the actor."
