"""Detection of checkpoints of verl and its descendants by their files. They cannot be resumed from."""

from __future__ import annotations

from pathlib import Path

# Files next to the checkpoints of verl and of EasyR1.
TRACKERS = ("latest_checkpointed_iteration.txt", "checkpoint_tracker.json")


def describe_verl_checkpoint(folder: Path) -> str:
    """Return advice on a checkpoint ``folder`` written by verl or EasyR1; "" for any other."""
    has_tracker = any((folder.parent / tracker).is_file() for tracker in TRACKERS)
    inside = any(next(folder.glob(pattern), None) for pattern in ("actor/model_world_size_*", "actor/dist_ckpt"))
    if not (inside or (has_tracker and not (folder / "progress.json").exists())):
        return ""
    command = f"python -m rltrain.checkpoint export {folder}/actor FOLDER"
    if (folder / "actor" / "dist_ckpt").is_dir():
        command = f"python -m verl.model_merger merge --backend megatron --local_dir {folder}/actor --target_dir FOLDER"
    return (
        f"this is a checkpoint of verl. Only its weights can be read: {command}, then "
        "actor_rollout_ref.model.path=FOLDER and a new trainer.default_local_dir"
    )


def has_verl_checkpoints(folder: Path) -> bool:
    """Return whether ``folder`` contains checkpoints of verl or EasyR1."""
    return any((folder / tracker).is_file() for tracker in TRACKERS)
