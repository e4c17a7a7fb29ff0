"""When to save and what a checkpoint holds."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from rltrain.config.schema import Config
from rltrain.controller.group import WorkerGroup
from rltrain.errors import CheckpointError, DiskError
from rltrain.trainer.checkpoint import RunFolder, find_damage, read_progress
from rltrain.trainer.timing import StepTimer

log = logging.getLogger(__name__)

# A resumed run must agree on these, or "continues as if never stopped" would be a lie.
FROZEN_KEYS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.n",
    "data.train_batch_size",
    "data.seed",
    "data.shuffle",
    "data.max_prompt_length",
)


class Saver:
    """Writes a checkpoint of the whole run: shards, progress, and a Hugging Face folder."""

    def __init__(self, cfg: Config, folder: RunFolder, group: WorkerGroup, dataset_fingerprint: str, num_parameters: int) -> None:
        self._cfg = cfg
        self._folder = folder
        self._group = group
        self._fingerprint = dataset_fingerprint
        # Master weights and two moments in float32, and the exported model; the next one is as large as the last.
        self._bytes_needed = 16 * num_parameters
        self._last_step = 0

    def due(self, step: int, stopping: bool) -> bool:
        """Every ``save_freq`` steps, and when the run ends unless ``save_at_end`` is off."""
        freq = self._cfg.trainer.save_freq
        return (freq > 0 and step % freq == 0) or (stopping and self._cfg.trainer.save_at_end)

    def save(self, step: int) -> dict[str, float]:
        """Save step ``step``; returns its timing. Raises DiskError naming needed and free space."""
        timer = StepTimer()
        with timer("save_checkpoint"):
            self._check_space(step)
            temporary = self._folder.begin_save(step)
            try:
                self._write(temporary, step)
                final = self._folder.commit(temporary, step)
            except OSError as error:
                shutil.rmtree(temporary, ignore_errors=True)
                raise DiskError(f"checkpoint of step {step} could not be written: {error}. {self._space()}") from error
            self._last_step = step
            self._bytes_needed = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
            self._folder.prune(self._cfg.trainer.max_actor_ckpt_to_keep)
        return timer.metrics()

    def rescue(self, step: int) -> None:
        """Save step ``step`` if it is not saved yet: an error that is not the workers' leaves their state whole."""
        if step > self._last_step and self._cfg.trainer.save_at_end:
            self.save(step)

    def _check_space(self, step: int) -> None:
        if shutil.disk_usage(self._folder.path).free < self._bytes_needed:
            raise DiskError(f"there is no room for the checkpoint of step {step}. {self._space()}")

    def _space(self) -> str:
        free = shutil.disk_usage(self._folder.path).free / 2**30
        return (
            f"{self._folder.path} has {free:.2f} GiB free and a checkpoint takes about {self._bytes_needed / 2**30:.2f} GiB. Older "
            "checkpoints are intact. Free space (or set trainer.max_actor_ckpt_to_keep) and run the same command again."
        )

    def _write(self, temporary: Path, step: int) -> None:
        self._group.call("save", [str(temporary / "actor")])
        if "hf_model" in self._cfg.actor_rollout_ref.actor.checkpoint.save_contents:
            self._group.call("export", [str(temporary / "huggingface")])
        progress = {"global_step": step, "dataset": self._fingerprint, "frozen": frozen_values(self._cfg)}
        (temporary / "progress.json").write_text(json.dumps(progress, indent=1))

    def resume(self) -> int:
        """Load what ``trainer.resume_mode`` points at; returns the step it was saved after (0: start from scratch)."""
        trainer = self._cfg.trainer
        folder = self._choose()
        step = 0
        if folder is not None:
            progress = read_progress(folder)
            step = 0 if trainer.resume_weights_only else int(progress["global_step"])
            if not trainer.resume_weights_only:
                self._refuse_other_run(folder, progress)
        self._refuse_later_checkpoints(step)
        if folder is not None:
            log.info("resuming from %s%s", folder, ", weights only" if trainer.resume_weights_only else f": {step} steps are done")
            self._group.call("load", [str(folder / "actor"), trainer.resume_weights_only])
        self._last_step = step
        return step

    def _choose(self) -> Path | None:
        trainer = self._cfg.trainer
        if trainer.resume_mode == "resume_path":
            return Path(trainer.resume_from_path or "")
        return self._folder.newest() if trainer.resume_mode == "auto" else None

    def _refuse_later_checkpoints(self, step: int) -> None:
        """A run that starts below a checkpoint of its own folder would meet it hours later, when it saves."""
        later = [each for each in self._folder.steps() if each > step and not find_damage(self._folder.step_folder(each))]
        if later:
            raise CheckpointError(
                f"{self._folder.path} already holds a checkpoint of step {later[-1]}, and this run would start after step {step}. "
                "Choose another trainer.experiment_name (or trainer.default_local_dir), remove the folder, or go on from the newest "
                "with trainer.resume_mode=auto trainer.resume_weights_only=False."
            )

    def _refuse_other_run(self, folder: Path, progress: dict[str, Any]) -> None:
        now = frozen_values(self._cfg) | {"dataset": self._fingerprint}
        then = progress["frozen"] | {"dataset": progress["dataset"]}
        changed = [f"{key}: {then.get(key)} then, {now[key]} now" for key in now if then.get(key) != now[key]]
        if changed:
            raise CheckpointError(
                f"{folder} belongs to another run ({'; '.join(changed)}). Put the values back, choose another "
                "trainer.experiment_name, or set trainer.resume_weights_only=True to start a new run from these weights."
            )


def frozen_values(cfg: Config) -> dict[str, Any]:
    """The values of `FROZEN_KEYS`."""
    values = {}
    for key in FROZEN_KEYS:
        value: Any = cfg
        for name in key.split("."):
            value = getattr(value, name)
        values[key] = value
    return values
