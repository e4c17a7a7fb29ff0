"""The model of a role, as a rank has it: its shard, registered with what moves memory."""

from __future__ import annotations

from typing import Any

from rltrain.config.passes import Role, updates_of
from rltrain.config.schema import Config
from rltrain.config.step_passes import StepPasses, rests_on_host
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import specs_of
from rltrain.workers.residency import Residency


def load_role(role: Role, cfg: Config, passes: StepPasses, residency: Residency) -> Any:
    """Load the model of ``role``, of the class that `specs_of` says (a collective). One that never learns is frozen."""
    kind, spec = specs_of(cfg, residency.device, passes)[role]
    model = sharded_model(kind, spec, residency.device)
    if not updates_of(role):
        model.requires_grad_(False).eval()
    residency.add_model(role, model, *passes.needs(role), offload=rests_on_host(cfg, role))
    return model
