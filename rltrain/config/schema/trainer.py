"""Keys under trainer: devices, steps, validation, checkpoints and logging."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from rltrain.config.schema.algorithm import REWARDED
from rltrain.config.schema.fields import key

# Tracker -> the package it needs. "file" is metrics.jsonl.
LOGGERS = {
    "console": None, "file": None, "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow",
    "swanlab": "swanlab", "clearml": "clearml", "trackio": "trackio", "vemlp_wandb": "volcengine_ml_platform",
}  # fmt: skip

WITH_CRITIC = REWARDED | {"algorithm.needs_critic": "algorithm.adv_estimator has no critic"}
EPOCH = "epoch"
_SAVES = {
    "save_at_end or save_freq>0 or save_freq=epoch": "trainer.save_at_end and save_freq are off, so nothing is saved"
}
# Condition of keys that an evaluation does not use.
TRAINS = {"trainer.val_only=False": "trainer.val_only=True makes no step"}
_OWN_HISTORY = {"hang_timeout_s=null": "trainer.hang_timeout_s is the deadline of every call"}
_TIMED = {"hang_floor_s!=null": "trainer.hang_floor_s=null: no call is timed"}
VALIDATES = {"data.val_files": "data.val_files is not set"}
_BY_METRIC = {"keep_best": "trainer.keep_best is not set"}

_TRAIN, _VAL = "trainer.rollout_data_dir", "trainer.validation_data_dir"
# File names in the run folder that the run moves, counts or removes.
_OF_THE_RUN = (
    ".", "samples", "tensorboard", "logs", "incidents", "objects", "global_step_*", "damaged_global_step_*",
    "earlier_*", "evaluation_*",
)  # fmt: skip


@dataclass
class TrainerConfig:
    """Devices, steps, validation, saving, logging."""

    device: Literal["auto", "npu", "cuda", "cpu"] = "auto"
    """The accelerator; auto: the first of npu and cuda that exists, else the CPU."""
    device_memory_gb: float | None = key(None, over=0, only_with={"device!=cpu": "a CPU has the memory of the machine"})
    """Memory of one device in GiB, for a --dry-run on a machine without devices; null: that of the local device."""
    host_memory_gb: float | None = key(None, over=0, only_with={"device!=cpu": "a CPU has the memory of the machine"})
    """Memory of one node in GiB, for a --dry-run on a machine without devices; null: that of the local machine."""
    nnodes: int = key("${nodes_here:}", least=1)
    """Number of nodes. Default: the number that scripts/ray_start.sh has gathered, else 1."""
    n_gpus_per_node: int = key("${devices_here:${trainer.device}}", least=1)
    """Devices (and thus workers) per node; on a CPU the number of worker processes. Default: the devices of this
    machine, on a CPU 1."""
    total_epochs: int = key(30, least=1, only_with=TRAINS)
    """Passes over the training prompts; the run may end earlier, see total_training_steps."""
    total_training_steps: int | None = key(None, least=1, only_with=TRAINS)
    """Number of steps; null: the steps of total_epochs. The run ends with the earlier of the two. The learning rate
    schedule has this length if it is set.
    """
    critic_warmup: float = key(
        0,
        only_with={
            condition: f"{why}, so the actor learns from step 1 (in verl it waits)"
            for condition, why in WITH_CRITIC.items()
        }
        | TRAINS,
    )
    """First step that updates the actor; before it only the critic learns."""
    verl_version: Literal["0.5", "0.7", "0.9"] | None = None
    """Version of verl for which the settings were written, where versions differ: data.gen_batch_size and
    algorithm.filter_groups.metric, the mean of loss_mode=gspo, lr_warmup_steps=0; null: as docs/from-verl.md says."""
    val_before_train: bool = key(
        True, only_with={"val_before_train or val_only=False": "trainer.val_only=True validates"}
    )
    """Validate before the first step, and without a test_freq also after the last one."""
    val_only: bool = False
    """Stop after the validation before the first step."""
    test_freq: int | str = key(-1, only_with={"data.val_files or test_freq<1": "data.val_files is not set"} | TRAINS)
    """Validate every so many steps, or after every epoch (epoch), and after the last step; -1: only after the last
    step, and with val_before_train=False never.
    """
    save_freq: int | str = key(-1, only_with=TRAINS)
    """Save every so many steps, or after every epoch (epoch); -1: by save_every_s and at the end."""
    save_every_s: float | None = key(1800.0, least=-1, only_with=_SAVES | TRAINS)
    """Also save after a step if the last save is this many seconds ago. Without save_freq these checkpoints count for
    max_actor_ckpt_to_keep; with it they are kept separately until two newer ones exist. -1 or null: never."""
    save_at_end: bool = key(True, only_with=TRAINS)
    """Save when the run ends or is stopped by a signal."""
    stop_notice_s: float | None = key(None, least=1)
    """Seconds from the first SIGTERM or Ctrl-C to the kill: a step that does not fit is abandoned, and the previous
    step is saved; null: a step is always finished."""
    async_save: bool = True
    """Copy the state into host memory and write it during the next steps. If there is no room for the copy, training
    waits."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Run folder: checkpoints, metrics, logs. With several nodes it must be on shared storage."""
    max_actor_ckpt_to_keep: int | None = 3
    """Number of newest checkpoints to keep; null or -1: all, but only the newest two of save_every_s."""
    keep_best: str | None = key(None, only_with=VALIDATES)
    """A validation metric (val-core/…): the best checkpoint by it is kept in addition to the newest."""
    keep_best_mode: Literal["max", "min"] = key("max", only_with=_BY_METRIC)
    """Best value: the largest (max) or the smallest (min)."""
    patience: int | None = key(None, least=1, only_with=_BY_METRIC | TRAINS)
    """Early stopping: end after this number of validations in a row without a better keep_best; null: never."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto (the newest checkpoint in the run folder), disable, or resume_path. The last two apply to the first start
    only: rerunning the same command resumes from the newest checkpoint of its folder."""
    resume_from_path: str | None = key(None, only_with="resume_mode=resume_path")
    """Checkpoint folder (global_step_N) for resume_mode=resume_path."""
    resume_weights_only: bool = key(
        False, only_with={"resume_mode!=disable": "trainer.resume_mode=disable does not resume"}
    )
    """Load only the weights of the checkpoint and start at step 0."""
    project_name: str = "rltrain"
    """Name for trackers and the default run folder."""
    experiment_name: str = "run"
    """Name for trackers and the default run folder."""
    logger: list[str] = key(["console", "tensorboard"], among=tuple(LOGGERS))
    """Trackers. file is metrics.jsonl, which is always written."""
    callbacks: list[str] = key([])
    """The user's classes or functions that are called for steps, validations and checkpoints: [FILE.py:NAME]. See
    docs/plugins.md."""
    allow_unchecked_models: bool = False
    """Start even if the numbers of a model could not be compared with transformers on a small copy of it. Wrong
    log-probs would then show only as a gap to the engine's, or not at all."""
    on_nonfinite: Literal["stop", "skip"] = key("stop", only_with=TRAINS)
    """Reaction to a loss or gradient that is not finite: stop, or skip the optimizer step (three in a row stop)."""
    collapse_steps: int | None = key(None, least=1, only_with=TRAINS)
    """Stop if all rewards of a step were equal in this number of steps in a row; null: warn after ten."""
    hang_timeout_s: float | None = key(None, least=1)
    """Seconds after which every call to the workers, and work of the driver, counts as hung and ends the run; null: use
    hang_floor_s and hang_factor."""
    hang_floor_s: float | None = key(1800.0, least=1, only_with=_OWN_HISTORY)
    """End the run if a call to the workers takes longer than this and than hang_factor times the longest call of its
    kind so far; null: never."""
    hang_factor: float = key(5.0, least=1, only_with=_OWN_HISTORY | _TIMED)
    """See hang_floor_s. A kind of call without an earlier call counts as having taken hang_floor_s."""
    samples_freq: int = 1
    """Save the responses of every so many steps, and of every validation, in RUN/samples (python -m rltrain.view RUN);
    -1: never."""
    samples_max_prompts: int = key(100, least=1, only_with="samples_freq>0")
    """Number of prompts per step, and per validation, whose responses are saved in RUN/samples."""
    profile_steps: list[int] | None = key(None, only_with=TRAINS)
    """Steps whose phases are profiled into RUN/profile; null: none (docs/profiling.md)."""
    profile_phases: list[str] = key([], only_with="profile_steps")
    """Phases to profile, such as [gen,update_actor]; []: all phases in which models run except gen, whose trace may be
    huge.
    """
    profile_ranks: list[int] = key([0], only_with="profile_steps")
    """The ranks that are profiled."""
    report: bool = True
    """Write RUN/report.html at the end: a page of charts and responses that opens offline (docs/logging.md)."""
    log_val_generations: int = key(0, least=0, only_with=VALIDATES)
    """Responses of each validation that trackers show as a table."""
    rollout_data_dir: str | None = key(None, only_with=TRAINS)
    """Folder for all responses of every step as JSON lines, in verl's format (N.jsonl)."""
    validation_data_dir: str | None = key(None, only_with=VALIDATES)
    """Folder for all responses of validations in the same format."""

    def validates_after(self, step: int, total: int, steps_per_epoch: int | None) -> bool:
        """Return whether a validation is due after ``step``.

        If only val_before_train is set, a last validation is due, to compare with the first.
        """
        last = step == total
        regular = _steps_between(self.test_freq, steps_per_epoch)
        return last or (regular > 0 and step % regular == 0) if self.tests_regularly else last and self.val_before_train

    def saves_after(self, step: int, steps_per_epoch: int | None) -> bool:
        """Return whether a regular save is due after ``step``."""
        regular = _steps_between(self.save_freq, steps_per_epoch)
        return regular > 0 and step % regular == 0

    @property
    def tests_regularly(self) -> bool:
        """True if test_freq sets validations between the first step and the last."""
        return self.test_freq == EPOCH or _steps_between(self.test_freq, None) > 0

    @property
    def saves_regularly(self) -> bool:
        """True if save_freq sets saves, in addition to saves by time and at the end."""
        return self.save_freq == EPOCH or _steps_between(self.save_freq, None) > 0

    @property
    def saves_by_time(self) -> bool:
        """True if time makes a save due. A run without any other save does not save by time either."""
        return (self.save_every_s or 0) > 0 and (self.save_at_end or self.saves_regularly)


def _steps_between(freq: int | str, steps_per_epoch: int | None) -> int:
    """Return the steps between two events; 0 for never. Words other than epoch are refused earlier."""
    return (steps_per_epoch or 0) if freq == EPOCH else max(freq, 0) if isinstance(freq, int) else 0


def word_problems(trainer: TrainerConfig) -> Iterator[str]:
    """Yield errors for keys that take a number of steps or a word."""
    for name in ("test_freq", "save_freq"):
        if isinstance(freq := getattr(trainer, name), str) and freq != EPOCH:
            yield f"trainer.{name}={freq}: give a number of steps, {EPOCH}, or -1 for never."


def name_problems(trainer: TrainerConfig) -> Iterator[str]:
    """Yield errors for names that are not valid folder names, or that resolve to another name's folder."""
    for part in ("project_name", "experiment_name"):
        name = getattr(trainer, part)
        parts = name.split("/")
        problems = {
            "it begins or ends with white space": name != name.strip(),
            "it has a control character, such as the end of a line": any(
                unicodedata.category(sign) in ("Cc", "Cs") for sign in name
            ),
            "'.' and '..' are other folders": "." in parts or ".." in parts,
            "a folder's name has at most 255 bytes": any(len(os.fsencode(part)) > 255 for part in parts),
        }
        for why in [why for why, is_so in problems.items() if is_so][:1]:
            yield f"trainer.{part}={name!r}: {why}. The run folder is named after it. Give another name."


def profile_problems(trainer: TrainerConfig, phases: Sequence[str]) -> Iterator[str]:
    """Yield errors for steps, phases and ranks that a run does not have. phases: the phases of a step."""
    last = trainer.total_training_steps
    for step in trainer.profile_steps or ():
        if step < 1 or (last is not None and step > last):
            steps = f"from 1 to trainer.total_training_steps={last}" if last is not None else "counted from 1"
            yield f"trainer.profile_steps={trainer.profile_steps}: step {step} does not exist. Steps are {steps}."
    for name in trainer.profile_phases:
        if name not in phases:
            yield (
                f"trainer.profile_phases={trainer.profile_phases}: phase {name!r} does not exist. A step may have "
                f"{', '.join(phases)}."
            )
    devices = trainer.nnodes * trainer.n_gpus_per_node
    for rank in trainer.profile_ranks:
        if not 0 <= rank < devices:
            yield (
                f"trainer.profile_ranks={trainer.profile_ranks}: rank {rank} does not exist. With {devices} devices "
                f"(trainer.nnodes x trainer.n_gpus_per_node) ranks are 0 to {devices - 1}."
            )


def folder_problems(trainer: TrainerConfig, validates: bool) -> Iterator[str]:
    """Yield errors for folders of responses whose files would overwrite each other, or files of the run.

    Their files are named by the number of the step. validates: there are validation prompts.
    """
    named = {} if trainer.val_only or not trainer.rollout_data_dir else {_TRAIN: trainer.rollout_data_dir}
    if validates and trainer.validation_data_dir:
        named[_VAL] = trainer.validation_data_dir
    if len({_real(name) for name in named.values()}) < len(named):
        yield (
            f"{_TRAIN}={named[_TRAIN]} and {_VAL}={named[_VAL]} are the same folder, so N.jsonl of a step and of its "
            f"validation would be the same file. Use different folders, such as {_VAL}={named[_VAL].rstrip('/')}/val."
        )
        return
    run = _real(trainer.default_local_dir)
    for setting, name in named.items():
        # Compare the first path component below the run folder, because removing a checkpoint removes all files in it.
        inside = os.path.relpath(_real(name), run).split(os.sep)[0]
        if any(fnmatch(inside, pattern) for pattern in _OF_THE_RUN):
            yield (
                f"{setting}={name} is a folder that the run itself writes to "
                f"(trainer.default_local_dir={trainer.default_local_dir}). Use a separate folder, such as "
                f"{setting}={os.path.join(trainer.default_local_dir, setting.removeprefix('trainer.'))}."
            )


def _real(name: str) -> str:
    return os.path.realpath(os.path.expanduser(name))
