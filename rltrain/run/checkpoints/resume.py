"""The checkpoint that a run starts from, and the progress stored in checkpoints.

A resumed run must continue as if it had never stopped. So a checkpoint records the values that affect this, and a run
with other values or training data is refused before any worker starts. The checkpoint also records the version of
rltrain and the kind of its data digest, so that a run of another version is not refused because of changed data.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from rltrain.common import __version__
from rltrain.common.device import get_device, resolve_dtype
from rltrain.common.errors import CheckpointError
from rltrain.common.logs import count, waiting
from rltrain.common.storage import patiently
from rltrain.config.passes import ROLES, Role, has_critic, has_reference
from rltrain.config.schema import Config
from rltrain.config.schema.keys import get
from rltrain.models.files.digest import digest_of_weights
from rltrain.models.files.safe import METADATA, read_metadata
from rltrain.models.optim import moments_dtype
from rltrain.run.checkpoints.folder import Checkpoints
from rltrain.run.checkpoints.manifest import THINNED, has_digests, large_files, read_record, size_of
from rltrain.runtime.group import WorkerGroup
from rltrain.trainer.progress import Progress
from rltrain.workers.diagnostics.node import checksum_mismatches

log = logging.getLogger(__name__)

_EXPERTS = "experts.npz"
# The version of checkpoints that do not record one.
_FIRST_VERSION = "0.1.0"
# With LoRA a checkpoint holds only the adapters. These keys define the base weights.
_LORA_KEYS = ("path", "lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
# A resumed run must have the same values of these keys.
_FREEZE = "actor_rollout_ref.actor.freeze_vision_tower"
_CRITIC = "critic.model.path"
_MOVING_KEYS = ("actor_rollout_ref.ref.update_every_steps", "actor_rollout_ref.ref.update_mix")
_OF_IMAGES = (_FREEZE, "data.min_pixels", "data.max_pixels")
FROZEN_KEYS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
    "data.train_batch_size",
    "data.seed",
    "data.shuffle",
    "data.sampler.name",
    "data.max_prompt_length",
    *_OF_IMAGES,
)


@dataclass(frozen=True)
class ResumePoint:
    """The start of a run: after ``step`` steps, with the weights of checkpoint ``folder``.

    If ``folder`` is None, the run starts with the model's weights.
    """

    step: int = 0
    progress: Progress = field(default_factory=Progress)
    folder: Path | None = None
    weights_only: bool = False
    """True if only the weights in ``folder`` are loaded."""

    @property
    def size(self) -> int:
        """Bytes of the checkpoint, as an estimate of the next; 0 if unknown."""
        return size_of(self.folder) if self.folder and not self.weights_only else 0

    def is_of(self, run: Path) -> bool:
        """Return whether ``folder`` is a checkpoint in the run folder ``run``."""
        return bool(self.folder and self.folder.parent == run)


def files_of(progress: Progress, step: int, cfg: Config, dataset: str, by_time: bool = False) -> dict[str, bytes]:
    """Return the files of a checkpoint of ``step`` with ``progress`` and the values that `find_resume_point` compares.

    dataset: `Rows.identity`. by_time: the save is due by time only.
    """
    record = {"global_step": step, "version": __version__, "digest": _digest_kind(dataset), "by_time": by_time}
    record |= {"dataset": dataset, "frozen": frozen_values(cfg), "origin": _origin(cfg)}
    record |= {"batches_drawn": progress.batches_drawn, "kl_coef": progress.kl_coef, "in_flight": progress.in_flight}
    record |= {"metrics": progress.metrics, "entropy_coef": progress.entropy_coef, RECORD: base_weights(cfg)}
    files = {"progress.json": json.dumps(record, indent=1).encode()}
    arrays_of: dict[str, dict[str, Any]] = {"sampler.npz": progress.sampler, "lengths.npz": progress.lengths}
    arrays_of |= {_EXPERTS: progress.expert_load} if progress.expert_load else {}
    for name, arrays in arrays_of.items():
        np.savez(content := io.BytesIO(), **arrays)
        files[name] = content.getvalue()
    return files


def find_resume_point(cfg: Config, run: Checkpoints, dataset: str | None, *, images: bool = True) -> ResumePoint:
    """Return the start that ``trainer.resume_mode`` selects, or the newest checkpoint if this same command has already
    started the run.

    dataset: identity of the training rows (None: unknown, not compared). images: whether the rows may have images.
    Raises CheckpointError if this run cannot resume from the checkpoint.
    """
    trainer = cfg.trainer
    base_weights(cfg)  # computed now, in case the files change before the first save
    continued = _begun_before(cfg, run)
    weights_only, searched = trainer.resume_weights_only and not continued, continued or trainer.resume_mode == "auto"
    folder = continued or (run.newest() if searched else None)
    if trainer.resume_mode == "resume_path" and not continued:
        folder = _named(cfg)
    start = ResumePoint(folder=folder, weights_only=weights_only)
    if folder is not None:
        if problem := run.damage(folder):
            raise CheckpointError(
                f"{folder} cannot be resumed from: {problem}. Copy it again, or name another checkpoint."
            )
        record = read_record(folder)
        # Weights may be loaded into any run, so the old run's settings are not compared.
        if not weights_only:
            _refuse_thinned(cfg, folder, record)
            _refuse_other_version(folder, record, dataset)
            try:
                start = ResumePoint(record["global_step"], _read_progress(folder, record), folder)
            except CheckpointError as error:
                if not searched:
                    raise
                run.distrust(folder, str(error))
                return find_resume_point(cfg, run, dataset, images=images)
            _refuse_other_run(cfg, folder, record, dataset, images)
            if problem := other_weights(record, cfg):
                raise CheckpointError(f"{folder} cannot be resumed from: {problem}")
            _report_converted_moments(cfg, folder)
        # Check here, because the workers would detect the problem only after the models are loaded.
        needs_critic = has_critic(cfg) and not cfg.trainer.val_only
        if needs_critic and not patiently(folder, (folder / "critic").is_dir):
            raise CheckpointError(
                f"{folder} has no critic: it was saved by a run without one. Restore algorithm.adv_estimator, "
                "or choose another trainer.default_local_dir."
            )
    if not trainer.val_only:
        _refuse_later_checkpoints(run, start.step)
    if folder is not None:
        if not has_digests(folder):
            log.warning("note: %s was saved without digests, so only the sizes of its files are compared", folder)
        content = "weights only" if weights_only else f"{start.step} steps are done"
        content += f", saved by rltrain {_version(record)}" if _version(record) != __version__ else ""
        why = f", by the same command (trainer.resume_mode={trainer.resume_mode})" if continued else ""
        log.info("%s %s: %s%s", "weights:" if trainer.val_only else "resuming from", folder, content, why)
    return start


def _report_converted_moments(cfg: Config, folder: Path) -> None:
    """Log a note for each role whose moments in ``folder`` have another dtype than in this run."""
    trained: tuple[Role, ...] = ("actor", "critic") if has_critic(cfg) else ("actor",)
    for role in trained if not cfg.trainer.val_only else ():
        if not patiently(file := folder / role / METADATA, file.exists):
            continue
        weights = resolve_dtype(get(cfg, f"{ROLES[role].fsdp}.model_dtype"), get_device(cfg.trainer.device))
        key = f"{ROLES[role].section}.optim"
        now = moments_dtype(get(cfg, key), weights)
        saved: dict[str, Any] = read_metadata(folder / role).state_dict_metadata
        for then in {value.properties.dtype for name, value in saved.items() if name.endswith(".exp_avg")} - {now}:
            name = str(then).removeprefix("torch.")
            log.warning(
                "note: %s.moments=%s: the moments in %s are in %s, and are converted to %s. To keep them, set "
                "%s.moments=%s.", key, get(cfg, key).moments, folder / role, name, str(now).removeprefix("torch."),
                key, name,
            )  # fmt: skip


def _refuse_thinned(cfg: Config, folder: Path, record: dict[str, Any]) -> None:
    if THINNED in record and not cfg.trainer.val_only:
        raise CheckpointError(
            f"{folder} has no optimizer state (rltrain checkpoint thin), so it cannot be resumed. "
            "Start a new run from its weights with another trainer.default_local_dir: trainer.resume_mode=resume_path "
            f"trainer.resume_from_path={folder} trainer.resume_weights_only=True."
        )


def verified(start: ResumePoint, group: WorkerGroup, run: Checkpoints, find: Callable[[], ResumePoint]) -> ResumePoint:
    """Return ``start`` if the large files of its checkpoint are intact. Otherwise return the result of ``find``
    (`find_resume_point` with this run's arguments): an older checkpoint, or an error.
    """
    while start.folder and (files := large_files(start.folder)):
        with waiting(f"comparing {start.folder} with its digests on {count(group.world, 'worker')}"):
            shares = [files[rank :: group.world] for rank in range(group.world)]
            problems = [problem for share in group.ask(checksum_mismatches, shares).collect() for problem in share]
        if not problems:
            break
        run.distrust(start.folder, problems[0])
        start = find()
    return start


def _read_progress(folder: Path, record: dict[str, Any]) -> Progress:
    sampler = _read_arrays(folder / "sampler.npz")
    # Older checkpoints have no lengths, metrics or entropy_coef.
    lengths, experts = (
        _read_arrays(file) if patiently(file := folder / name, file.exists) else {}
        for name in ("lengths.npz", _EXPERTS)
    )
    numbers = (record["batches_drawn"], record["kl_coef"])
    others: Any = {"metrics": record.get("metrics", {}), "entropy_coef": record.get("entropy_coef")}
    return Progress(*numbers, sampler, record["in_flight"], lengths=lengths, expert_load=experts, **others)


def _read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    try:
        # Pickles are refused, because they could run code of the checkpoint's author.
        with np.load(io.BytesIO(patiently(file, file.read_bytes)), allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error


def _origin(cfg: Config) -> dict[str, Any]:
    """Return the start that the config selects for a new run."""
    trainer = cfg.trainer
    path = str(_named(cfg)) if trainer.resume_mode == "resume_path" else None
    return {"mode": trainer.resume_mode, "path": path, "weights_only": trainer.resume_weights_only}


def _named(cfg: Config) -> Path:
    """Return the absolute path of ``trainer.resume_from_path``, as `Checkpoints` has it, to compare folders."""
    return Path(cfg.trainer.resume_from_path or "").expanduser().resolve()


def _begun_before(cfg: Config, run: Checkpoints) -> Path | None:
    """Return the newest complete checkpoint of the run folder if its run was interrupted and had the same origin as
    this run. Return None with the default settings, which resume from the newest checkpoint anyway.
    """
    if cfg.trainer.resume_mode == "auto" and not cfg.trainer.resume_weights_only:
        return None
    try:
        newest = run.newest()
    except CheckpointError:  # none is complete, and the settings do not require one
        return None
    return newest if newest and read_record(newest).get("origin") == _origin(cfg) else None


def _refuse_later_checkpoints(run: Checkpoints, step: int) -> None:
    """Raise CheckpointError if the run starts before a checkpoint in its folder, because it would collide with it hours
    later.
    """
    later = [number for number in run.steps() if number > step and not run.damage(run.step_folder(number))]
    if later:
        raise CheckpointError(
            f"{run.path} already holds a checkpoint of step {later[-1]}, and this run would start after step {step}. "
            "Choose another trainer.default_local_dir, remove the folder, "
            "or resume from the newest with trainer.resume_mode=auto trainer.resume_weights_only=False."
        )


def _version(record: dict[str, Any]) -> str:
    return str(record.get("version", _FIRST_VERSION))


def _digest_kind(dataset: str) -> str:
    """Return the source of the digest of ``dataset``: "rows", or "files" in the first versions."""
    kind, colon, _ = dataset.partition(" ")[0].partition(":")
    return kind if colon else "files"


def _refuse_other_version(folder: Path, record: dict[str, Any], dataset: str | None) -> None:
    """Raise CheckpointError if the record lacks values, or has a different kind of data digest."""
    kinds: dict[str, Any] = {"batches_drawn": int, "kl_coef": (float, int, type(None)), "in_flight": list}
    kinds |= {"frozen": dict, "dataset": str}
    lacking = [name for name, kind in kinds.items() if name not in record or not isinstance(record[name], kind)]
    why = f"its progress.json lacks {', '.join(lacking)}" if lacking else ""
    if not why and dataset and (then := _digest_kind(record["dataset"])) != (now := _digest_kind(dataset)):
        why = f"it identifies its training data by a digest of {then}, and this version by one of {now}, so it is "
        why += "unknown whether the data is the same"
    if why:
        raise CheckpointError(
            f"{folder} was saved by another version of rltrain ({_version(record)}; this is {__version__}): {why}. "
            "Resume with that version, or start from its weights, under another trainer.default_local_dir: "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={folder} trainer.resume_weights_only=True."
        )


def _refuse_other_run(cfg: Config, folder: Path, record: dict[str, Any], dataset: str | None, images: bool) -> None:
    # Older checkpoints do not record these keys: the tower was not frozen, and the critic's path is assumed to be
    # unchanged.
    now = frozen_values(cfg)
    then = {_FREEZE: False, **({_CRITIC: now[_CRITIC]} if _CRITIC in now else {})} | record["frozen"]
    # Compare the keys of both runs, because LoRA keys exist only in runs with adapters.
    keys = sorted((now.keys() | then.keys()) - (set() if images else set(_OF_IMAGES)))
    if cfg.trainer.val_only:  # an evaluation does not train, so only the model must be the same
        keys = [key for key in keys if key.startswith("actor_rollout_ref.model.")]
    changed = [f"{key}: {then.get(key)} then, {now.get(key)} now" for key in keys if then.get(key) != now.get(key)]
    digest, _, described = record["dataset"].partition(" ")
    # The text after the digest is only for messages and may change.
    if dataset and digest != dataset.partition(" ")[0]:
        changed.append(
            f"training data: {described or 'rows without a name'} then, {dataset.partition(' ')[2]} now, and the rows "
            "are not the same"
        )
    if changed:
        saved_by = f", saved by rltrain {_version(record)}" if _version(record) != __version__ else ""
        raise CheckpointError(
            f"{folder} belongs to another run{saved_by} ({'; '.join(changed)}). Restore the values, or name a new "
            "run with trainer.experiment_name (or another trainer.default_local_dir); a new run starts from these "
            "weights "
            f"with trainer.resume_mode=resume_path trainer.resume_from_path={folder} trainer.resume_weights_only=True."
        )


def frozen_values(cfg: Config) -> dict[str, Any]:
    """Return the values that a resumed run must share: `FROZEN_KEYS` and some that depend on the settings."""
    values = {key: get(cfg, key) for key in FROZEN_KEYS}
    # The data position is counted in rounds of this many prompts.
    rounds = cfg.data.gen_batch_size if cfg.algorithm.filter_groups.enable else None
    values |= {"prompts per round": rounds or cfg.data.train_batch_size}
    # A moving reference is in the checkpoint, and changing its keys would be a different experiment.
    moving = {key: get(cfg, key) for key in _MOVING_KEYS}
    values |= {"data.mixing": dict(cfg.data.mixing)} if cfg.data.mixing else {}
    values |= moving if moving[_MOVING_KEYS[0]] and has_reference(cfg) else {}
    for section, model in (("actor_rollout_ref", cfg.actor_rollout_ref.model), ("critic", cfg.critic.model)):
        if model.uses_lora:
            values |= {f"{section}.model.{key}": getattr(model, key) for key in _LORA_KEYS if hasattr(model, key)}
    return values


RECORD = "base weights"
_POLICY = "actor_rollout_ref.model.path"


def base_weights(cfg: Config) -> dict[str, dict[str, str]]:
    """Return path and digest of the models that a checkpoint of this run needs in addition to its weights, by key.

    These are the weights under adapters, and of a reference, a teacher or a reward model. A checkpoint keeps their
    digests, because a folder may get other weights under the same name. An evaluation needs only the weights under
    adapters.
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
