"""Tensor parallelism: the size of each role, and the rules between its keys and others."""

from __future__ import annotations

from collections.abc import Iterator

from rltrain.config.budgets import ranks_per_sequence
from rltrain.config.passes import PASSES, ROLES, BudgetKeys, Role
from rltrain.config.schema import Config
from rltrain.config.schema.keys import get
from rltrain.config.step_passes import roles_of


def tensor_size(config: Config, role: Role) -> int:
    """Return the number of ranks that share each matrix of the model of ``role``."""
    # A judge is an engine on one device. An evaluation has no actor, but its policy is the actor's model.
    if role == "judge":
        return 1
    own, actor = (get(config, f"{section}.tensor_parallel_size") for section in (ROLES[role].fsdp, ROLES["actor"].fsdp))
    return own or actor or 1


def ranks_per_sample(config: Config, role: Role, keys: BudgetKeys) -> int:
    """Return the number of ranks that get the same samples in a pass of ``role`` with ``keys``."""
    return ranks_per_sequence(config, keys) * tensor_size(config, role)


def tensor_problems(config: Config) -> Iterator[str]:
    """Yield errors for tensor parallelism that does not fit other keys, or the model that a role computes with."""
    roles, devices = config.actor_rollout_ref, config.trainer.nnodes * config.trainer.n_gpus_per_node
    actor = tensor_size(config, "actor")
    for role in roles_of(config):
        row, size = ROLES[role], tensor_size(config, role)
        if size == 1:
            continue
        own = get(config, f"{row.fsdp}.tensor_parallel_size") is not None
        key = f"{row.fsdp if own else ROLES['actor'].fsdp}.tensor_parallel_size"
        sharing = next((step.keys.sharing for step in PASSES.values() if step.role == role and step.keys.sharing), None)
        sequences = get(config, f"{sharing}.ulysses_sequence_parallel_size") if sharing else 1
        if sequences > 0 and devices % (size * sequences) and not devices % size:
            yield (
                f"{key}={size} x {sharing}.ulysses_sequence_parallel_size={sequences} does not divide the {devices} "
                "devices. Lower one of them."
            )
        fsdp = get(config, row.fsdp if hasattr(get(config, row.fsdp), "fsdp_size") else ROLES["actor"].fsdp)
        if 0 < fsdp.fsdp_size < devices and fsdp.fsdp_size % size:
            yield f"{key}={size} does not divide fsdp_size={fsdp.fsdp_size}, the ranks of a copy. Use a divisor."
        if getattr(fsdp, "use_torch_compile", False):
            yield f"{key}={size}: layers that share matrices are not compiled. Leave {row.fsdp}.use_torch_compile out."
    together: dict[Role, dict[str, bool]] = {
        "ref": {
            "actor_rollout_ref.actor.kl_loss_type=full": roles.actor.use_kl_loss and roles.actor.kl_loss_type == "full",
            "algorithm.kl_penalty=full": config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full",
            "actor_rollout_ref.ref.update_every_steps": bool(roles.ref.update_every_steps),
            "LoRA": roles.model.uses_lora,
        },
        "teacher": {
            f"loss_mode={config.distillation.distillation_loss.loss_mode}": config.distillation.compares_all,
        },
    }  # fmt: skip
    for name, reasons in together.items():
        key = f"{ROLES[name].fsdp}.tensor_parallel_size"
        for why in (why for why, holds in reasons.items() if holds and tensor_size(config, name) != actor):
            yield f"{key}={get(config, key)}: with {why} it must divide weights like the actor. Use {key}={actor}."
