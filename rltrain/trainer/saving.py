"""When to save and what a checkpoint holds."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rltrain.config.schema import Config
from rltrain.errors import CheckpointError, DiskError
from rltrain.trainer.checkpoint import RunFolder, find_damage, read_progress
from rltrain.trainer.timing import StepTimer

log = logging.getLogger(__name__)

# With LoRA a checkpoint holds the adapters alone: these say what they are adapters to.
_LORA_KEYS = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
# A resumed run must agree on these, or "continues as if never stopped" would be a lie.
FROZEN_KEYS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
    "data.train_batch_size",
    "data.seed",
    "data.shuffle",
    "data.sampler.name",
    "data.max_prompt_length",
)


@dataclass(frozen=True)
class Progress:
    """The driver's own state.

    batches_drawn: rounds of prompts taken so far. kl_coef: weight of the KL in the reward. sampler: what the sampler keeps.
    in_flight: row, draw and age of the prompts that were drawn and not yet learnt from (`PromptLine.state`).
    """

    batches_drawn: int = 0
    kl_coef: float | None = None
    sampler: dict[str, NDArray[Any]] = field(default_factory=dict)
    in_flight: list[list[int]] = field(default_factory=list)


class Role(Protocol):
    """A model with state of its own: it goes into a folder of the checkpoint under the role's name."""

    def save(self, folder: str) -> None:
        """Write it."""

    def load(self, folder: str, weights_only: bool) -> None:
        """Read it back."""


class Exporter(Role, Protocol):
    """The policy, which can also be written as a Hugging Face folder."""

    def export(self, folder: str) -> None:
        """Write that folder."""


class Saver:
    """Writes a checkpoint of the whole run: shards of every role, progress, and a Hugging Face folder."""

    def __init__(
        self,
        cfg: Config,
        folder: RunFolder,
        actor: Exporter,
        others: Mapping[str, Role],
        dataset_fingerprint: str,
        num_parameters: int,
        num_trained: int,
    ) -> None:
        self._cfg = cfg
        self._folder = folder
        self._actor = actor
        self._roles: dict[str, Role] = {"actor": actor, **others}
        self._fingerprint = dataset_fingerprint
        # Trained weights and two moments in float32, and the exported model; the next one is as large as the last.
        self._bytes_needed = 12 * num_trained + (4 + 12 * len(others)) * num_parameters
        self._last_step = 0

    def due(self, step: int, stopping: bool) -> bool:
        """Every ``save_freq`` steps, and when the run ends unless ``save_at_end`` is off."""
        freq = self._cfg.trainer.save_freq
        return (freq > 0 and step % freq == 0) or (stopping and self._cfg.trainer.save_at_end)

    def save(self, step: int, progress: Progress) -> dict[str, float]:
        """Save step ``step``; returns its timing. Raises DiskError naming needed and free space."""
        timer = StepTimer()
        with timer("save_checkpoint"):
            self._check_space(step)
            temporary = self._folder.begin_save(step)
            try:
                self._write(temporary, step, progress)
                final = self._folder.commit(temporary, step)
            except OSError as error:
                shutil.rmtree(temporary, ignore_errors=True)
                raise DiskError(f"checkpoint of step {step} could not be written: {error}. {self._space()}") from error
            self._last_step = step
            self._bytes_needed = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
            self._folder.prune(self._cfg.trainer.max_actor_ckpt_to_keep)
        return timer.metrics()

    def rescue(self, step: int, progress: Progress) -> None:
        """Save step ``step`` if it is not saved yet: an error that is not the workers' leaves their state whole."""
        if step > self._last_step and self._cfg.trainer.save_at_end:
            self.save(step, progress)

    def _check_space(self, step: int) -> None:
        if shutil.disk_usage(self._folder.path).free < self._bytes_needed:
            raise DiskError(f"there is no room for the checkpoint of step {step}. {self._space()}")

    def _space(self) -> str:
        free = shutil.disk_usage(self._folder.path).free / 2**30
        return (
            f"{self._folder.path} has {free:.2f} GiB free and a checkpoint takes about {self._bytes_needed / 2**30:.2f} GiB. Older "
            "checkpoints are intact. Free space (or set trainer.max_actor_ckpt_to_keep) and run the same command again."
        )

    def _write(self, temporary: Path, step: int, progress: Progress) -> None:
        for name, role in self._roles.items():
            role.save(str(temporary / name))
        if "hf_model" in self._cfg.actor_rollout_ref.actor.checkpoint.save_contents:
            self._actor.export(str(temporary / "huggingface"))
        record = {"global_step": step, "dataset": self._fingerprint, "frozen": frozen_values(self._cfg)}
        record |= {"batches_drawn": progress.batches_drawn, "kl_coef": progress.kl_coef}
        record["in_flight"] = progress.in_flight
        np.savez(temporary / "sampler.npz", **progress.sampler)  # type: ignore[arg-type]
        (temporary / "progress.json").write_text(json.dumps(record, indent=1))

    def resume(self) -> tuple[int, Progress]:
        """Load what ``trainer.resume_mode`` points at; returns the step it was saved after (0: start from scratch), and progress."""
        trainer = self._cfg.trainer
        folder = self._choose()
        step, progress = 0, Progress()
        if folder is not None:
            record = read_progress(folder)
            if not trainer.resume_weights_only:
                step = int(record["global_step"])
                with np.load(folder / "sampler.npz", allow_pickle=False) as arrays:
                    # Older checkpoints have none in flight.
                    in_flight = record.get("in_flight", [])
                    progress = Progress(record["batches_drawn"], record["kl_coef"], dict(arrays), in_flight)
                self._refuse_other_run(folder, record)
        self._refuse_later_checkpoints(step)
        if folder is not None:
            log.info(
                "resuming from %s%s",
                folder,
                ", weights only" if trainer.resume_weights_only else f": {step} steps are done",
            )
            for name, role in self._roles.items():
                if not (folder / name).is_dir():
                    raise CheckpointError(
                        f"{folder} holds no {name}: it was saved by a run without one. Set algorithm.adv_estimator as it was, or choose "
                        "another trainer.experiment_name."
                    )
                role.load(str(folder / name), trainer.resume_weights_only)
        self._last_step = step
        return step, progress

    def _choose(self) -> Path | None:
        trainer = self._cfg.trainer
        if trainer.resume_mode == "resume_path":
            return Path(trainer.resume_from_path or "")
        return self._folder.newest() if trainer.resume_mode == "auto" else None

    def _refuse_later_checkpoints(self, step: int) -> None:
        """A run that starts below a checkpoint of its own folder would meet it hours later, when it saves."""
        later = [
            each for each in self._folder.steps() if each > step and not find_damage(self._folder.step_folder(each))
        ]
        if later:
            raise CheckpointError(
                f"{self._folder.path} already holds a checkpoint of step {later[-1]}, and this run would start after step {step}. "
                "Choose another trainer.experiment_name (or trainer.default_local_dir), remove the folder, or go on from the newest "
                "with trainer.resume_mode=auto trainer.resume_weights_only=False."
            )

    def _refuse_other_run(self, folder: Path, progress: dict[str, Any]) -> None:
        now = frozen_values(self._cfg) | {"dataset": self._fingerprint}
        then = progress["frozen"] | {"dataset": progress["dataset"]}
        keys = sorted(now.keys() | then.keys())
        changed = [f"{key}: {then.get(key)} then, {now.get(key)} now" for key in keys if then.get(key) != now.get(key)]
        if changed:
            raise CheckpointError(
                f"{folder} belongs to another run ({'; '.join(changed)}). Put the values back, or choose another "
                f"trainer.experiment_name; a new run starts from these weights with trainer.resume_mode=resume_path "
                f"trainer.resume_from_path={folder} trainer.resume_weights_only=True."
            )


def frozen_values(cfg: Config) -> dict[str, Any]:
    """The values of `FROZEN_KEYS`."""
    values = {}
    for key in FROZEN_KEYS:
        value: Any = cfg
        for name in key.split("."):
            value = getattr(value, name)
        values[key] = value
    # The data position is counted in rounds of this many prompts.
    rounds = cfg.data.gen_batch_size if cfg.algorithm.filter_groups.enable else None
    values |= {"prompts per round": rounds or cfg.data.train_batch_size}
    for section, model in (("actor_rollout_ref", cfg.actor_rollout_ref.model), ("critic", cfg.critic.model)):
        if model.uses_lora:
            values |= {f"{section}.model.{key}": getattr(model, key) for key in _LORA_KEYS if hasattr(model, key)}
    return values
