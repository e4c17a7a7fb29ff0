"""When to save and what a checkpoint holds."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rltrain.config.schema import Config
from rltrain.errors import DiskError
from rltrain.trainer.callbacks import Callbacks
from rltrain.trainer.card import model_card
from rltrain.trainer.checkpoint import RunFolder
from rltrain.trainer.progress import Progress, Start
from rltrain.trainer.timing import StepTimer

log = logging.getLogger(__name__)


class Role(Protocol):
    """A model with state of its own: it goes into a folder of the checkpoint under the role's name."""

    def save(self, folder: str) -> None:
        """Write it."""

    def load(self, folder: str, weights_only: bool) -> None:
        """Read it back."""


class Exporter(Role, Protocol):
    """The policy, which can also be written as a Hugging Face folder."""

    def export(self, folder: str, card: str) -> list[str]:
        """Write that folder, with ``card`` as README.md. Returns what is wrong with it."""


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
        callbacks: Callbacks | None = None,
    ) -> None:
        self._cfg = cfg
        self._callbacks = callbacks or Callbacks()
        self._folder = folder
        self._actor = actor
        self._roles: dict[str, Role] = {"actor": actor, **others}
        self._fingerprint = dataset_fingerprint
        # Trained weights and two moments in float32, and the exported model; the next one is as large as the last.
        self._bytes_needed = 12 * num_trained + (4 + 12 * len(others)) * num_parameters
        self.last_step = 0

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
            self.last_step = step
            self._bytes_needed = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
            self._folder.prune(self._cfg.trainer.max_actor_ckpt_to_keep)
        return timer.metrics() | self._callbacks.on_save(step, final)

    def rescue(self, step: int, progress: Progress) -> None:
        """Save step ``step`` if it is not saved yet: an error that is not the workers' leaves their state whole."""
        if step > self.last_step and self._cfg.trainer.save_at_end:
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
            for problem in self._actor.export(str(temporary / "huggingface"), model_card(self._cfg, step)):
                log.warning("step %d, huggingface/: %s. The checkpoint beside it is whole.", step, problem)
        progress.write(temporary, step, self._cfg, self._fingerprint)

    def load(self, start: Start) -> None:
        """Bring every role to where the run starts."""
        if start.folder:
            for name, role in self._roles.items():
                role.load(str(start.folder / name), self._cfg.trainer.resume_weights_only)
        self.last_step = start.step
