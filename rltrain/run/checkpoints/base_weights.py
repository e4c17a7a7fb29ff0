"""Digests of the weights that a run uses and its checkpoints do not contain.

These are the weights under adapters, and of a reference, a teacher or a reward model. A checkpoint keeps their digests,
because a folder may get other weights under the same name.
"""

from __future__ import annotations

from typing import Any

from rltrain.config.passes import ROLES, has_reference
from rltrain.config.schema import Config
from rltrain.config.schema.keys import get
from rltrain.models.files.digest import digest_of_weights

RECORD = "base weights"
_POLICY = "actor_rollout_ref.model.path"


def base_weights(cfg: Config) -> dict[str, dict[str, str]]:
    """Return path and digest of the models that a checkpoint of this run needs in addition to its weights, by key.

    An evaluation needs only the weights under adapters.
    """
    keys = {f"{role.section}.model.path" for name, role in ROLES.items() if name != "actor" and role.is_needed(cfg)}
    if not cfg.critic.model.uses_lora:
        keys.discard("critic.model.path")  # all its weights are in the checkpoint
    if cfg.actor_rollout_ref.model.uses_lora or has_reference(cfg):
        keys.add(_POLICY)
    if cfg.actor_rollout_ref.ref.update_every_steps and not cfg.actor_rollout_ref.model.uses_lora:
        keys -= {_POLICY, "actor_rollout_ref.ref.model.path"}  # a moving reference is in the checkpoint
    if cfg.trainer.val_only:
        keys = {_POLICY} if cfg.actor_rollout_ref.model.uses_lora else set()
    paths = {key: get(cfg, key) for key in sorted(keys)}
    return {
        key: {"path": path, "digest": digest}
        for key, path in paths.items()
        if path and (digest := digest_of_weights(path))
    }


def other_weights(record: dict[str, Any], cfg: Config) -> str:
    """Return a sentence about a model of a checkpoint whose weights have changed under the same path, or "". record:
    the checkpoint's progress.json. cfg: the settings of the resuming run, which may name other models on purpose.
    """
    now = base_weights(cfg)
    for key, model in record.get(RECORD, {}).items():
        if key in now and now[key]["path"] == model["path"] and now[key]["digest"] != model["digest"]:
            return (
                f"{model['path']} ({key}) has other weights than when the checkpoint was saved, which needs the old "
                "ones. Put them back, or name a folder that has them."
            )
    return ""
