"""LoRA's keys: rules between them, and where they change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rltrain.config.schema import Config

_M = "actor_rollout_ref.model."
_SHAPE = ("lora_alpha", "target_modules", "exclude_modules")
# As in `effects`: keys, the condition under which they change nothing, and why.
LORA_MODES: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (tuple(_M + name for name in _SHAPE), lambda cfg: not cfg.actor_rollout_ref.model.uses_lora, "lora_rank=0"),
    (
        tuple(_M + name for name in ("lora_rank", *_SHAPE)),
        lambda cfg: cfg.actor_rollout_ref.model.lora_adapter_path is not None,
        "lora_adapter_path says rank, scale and layers",
    ),
    (tuple(f"critic.model.{name}" for name in _SHAPE), lambda cfg: not cfg.critic.model.uses_lora, "lora_rank=0"),
    (
        ("actor_rollout_ref.ref.fsdp_config.",),
        lambda cfg: cfg.actor_rollout_ref.model.uses_lora,
        "with LoRA the reference is the actor without its adapters",
    ),
)


def lora_problems(config: Config) -> Iterator[str]:
    """What cannot be meant."""
    for section, model in (
        ("actor_rollout_ref.model", config.actor_rollout_ref.model),
        ("critic.model", config.critic.model),
    ):
        if not model.uses_lora:
            continue
        if not 0 < model.lora_alpha < float("inf"):
            yield f"{section}.lora_alpha={model.lora_alpha}: it must be over 0. Try {max(16, model.lora_rank)}."
        for key in ("target_modules", "exclude_modules"):
            value = getattr(model, key)
            if value is None and key == "exclude_modules":
                continue
            names = value if isinstance(value, list) else [value]
            if not names or not all(isinstance(name, str) and name for name in names):
                yield f"{section}.{key}={value}: give a name, a list of names such as [q_proj,v_proj], or a pattern of full names."
