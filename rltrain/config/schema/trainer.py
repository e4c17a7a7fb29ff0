"""The keys under ``trainer``; see schema.py, which joins all sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rltrain.config.schema.algorithm import REWARDED
from rltrain.config.schema.fields import key

# tracker -> the package it needs. The file is metrics.jsonl.
LOGGERS = {
    "console": None, "file": None, "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow",
    "swanlab": "swanlab", "clearml": "clearml", "trackio": "trackio", "vemlp_wandb": "volcengine_ml_platform",
}  # fmt: skip

WITH_CRITIC = REWARDED | {"algorithm.needs_critic": "there is no critic: algorithm.adv_estimator needs none"}
EPOCH = "epoch"
_SAVES = {
    "save_at_end or save_freq>0 or save_freq=epoch": "trainer.save_at_end and save_freq are off, so nothing is saved"
}
# Of a run that only validates.
TRAINS = {"trainer.val_only=False": "trainer.val_only=True makes no step"}
_OWN_HISTORY = {"hang_timeout_s=null": "trainer.hang_timeout_s is the deadline of every call"}
_TIMED = {"hang_floor_s!=null": "trainer.hang_floor_s=null: no call is timed"}
VALIDATES = {"data.val_files": "data.val_files is not set"}
_BY_METRIC = {"keep_best": "trainer.keep_best names no metric"}


@dataclass
class TrainerConfig:
    """Devices, steps, validation, saving, logging."""

    device: Literal["auto", "npu", "cuda", "cpu"] = "auto"
    """The accelerator; auto: the first of npu and cuda that is there, else the CPU."""
    device_memory_gb: float | None = key(None, over=0, only_with={"device!=cpu": "a CPU has the memory of the machine"})
    """Memory of one device in GiB, for a --dry-run where there is none; null: asked of the device here."""
    nnodes: int = key("${nodes_here:}", least=1)
    """Nodes. Default: those that scripts/ray_start.sh has gathered, else 1."""
    n_gpus_per_node: int = key("${devices_here:${trainer.device}}", least=1)
    """Devices (and so workers) per node; on a CPU the number of worker processes. Default: as many as this machine has,
    on a CPU 1."""
    total_epochs: int = key(30, least=1, only_with=TRAINS)
    """Passes over the training prompts; the run may end earlier, see total_training_steps."""
    total_training_steps: int | None = key(None, least=1, only_with=TRAINS)
    """Steps; null: as many as total_epochs has. The run ends with the earlier of the two; a learning rate's schedule
    has this length where it is set."""
    critic_warmup: float = key(
        0,
        only_with={
            condition: f"{why}, so the actor learns from step 1 (in verl it waits)"
            for condition, why in WITH_CRITIC.items()
        }
        | TRAINS,
    )
    """The actor learns from this step on; before it only the critic does."""
    verl_version: Literal["0.5", "0.7", "0.9"] | None = None
    """Version of verl that the settings were written for, where versions differ: data.gen_batch_size and
    algorithm.filter_groups.metric, the mean of loss_mode=gspo, lr_warmup_steps=0; null: as docs/from-verl.md says."""
    val_before_train: bool = key(
        True, only_with={"val_before_train or val_only=False": "trainer.val_only=True validates"}
    )
    """Validate before the first step; without a test_freq after the last one too."""
    val_only: bool = False
    """Stop after that validation."""
    test_freq: int | str = key(-1, only_with={"data.val_files or test_freq<1": "data.val_files is not set"} | TRAINS)
    """Validate every so many steps, or after every epoch (epoch), and after the last step; -1: after the last, and with
    val_before_train=False never."""
    save_freq: int | str = key(-1, only_with=TRAINS)
    """Save every so many steps, or after every epoch (epoch); -1: by save_every_s and at the end."""
    save_every_s: float | None = key(1800.0, least=-1, only_with=_SAVES | TRAINS)
    """Save after a step too where the last save is so many seconds ago. Without save_freq these are the checkpoints of
    max_actor_ckpt_to_keep; with it they are kept beside its own until two newer ones are there; -1 or null: never."""
    save_at_end: bool = key(True, only_with=TRAINS)
    """Save when the run ends or is stopped by a signal."""
    stop_notice_s: float | None = key(None, least=1)
    """Seconds from the first SIGTERM or Ctrl-C to the kill: a step that does not fit is left, and the one before it is
    saved; null: a step is always finished."""
    async_save: bool = True
    """Copy what is to be saved into the hosts' memory and write it while training goes on; where there is no room for
    the copy, training waits."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Run folder: checkpoints, metrics, logs. On several nodes it must be storage that all of them see."""
    max_actor_ckpt_to_keep: int | None = 3
    """Newest checkpoints to keep; null or -1: all, but of those of save_every_s the newest two."""
    keep_best: str | None = key(None, only_with=VALIDATES)
    """A metric of the validations (val-core/…): the checkpoint that is best by it is kept beside the newest."""
    keep_best_mode: Literal["max", "min"] = key("max", only_with=_BY_METRIC)
    """Whether the largest or the smallest is the best."""
    patience: int | None = key(None, least=1, only_with=_BY_METRIC | TRAINS)
    """Stop after so many validations in a row without a better keep_best; null: never."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto (the newest checkpoint in the run folder), disable, or resume_path. The other two hold for the first
    start: the same command then goes on from the newest checkpoint of its own folder."""
    resume_from_path: str | None = key(None, only_with="resume_mode=resume_path")
    """Checkpoint folder (global_step_N) for resume_mode=resume_path."""
    resume_weights_only: bool = key(
        False, only_with={"resume_mode!=disable": "trainer.resume_mode=disable begins from no checkpoint"}
    )
    """Take only the weights from the checkpoint and start at step 0."""
    project_name: str = "rltrain"
    """Name for trackers and the default run folder."""
    experiment_name: str = "run"
    """Name for trackers and the default run folder."""
    logger: list[str] = key(["console", "tensorboard"], among=tuple(LOGGERS))
    """Trackers. file is metrics.jsonl, which is always written."""
    callbacks: list[str] = key([])
    """Classes or functions of your own that are told of steps, validations and checkpoints: [FILE.py:NAME]. See
    docs/plugins.md."""
    allow_unchecked_models: bool = False
    """Start although the numbers of a model could not be compared with transformers' on a small copy of it. Wrong
    log-probs would then show only as a gap to the engine's, or not at all."""
    on_nonfinite: Literal["stop", "skip"] = key("stop", only_with=TRAINS)
    """When a loss or gradient is not finite: stop, or skip the optimizer step (three in a row stop)."""
    collapse_steps: int | None = key(None, least=1, only_with=TRAINS)
    """Stop when all rewards of a step were the same number in so many steps in a row; null: warn after ten."""
    hang_timeout_s: float | None = key(None, least=1)
    """Seconds after which every call to the workers, and work of the driver, counts as hung and ends the run; null:
    hang_floor_s and hang_factor say so, by the calls so far."""
    hang_floor_s: float | None = key(1800.0, least=1, only_with=_OWN_HISTORY)
    """A call to the workers that takes longer than hang_factor times the longest of its kind, and than this, ends the
    run; null: never."""
    hang_factor: float = key(5.0, least=1, only_with=_OWN_HISTORY | _TIMED)
    """See hang_floor_s, which also stands for the longest of a kind that is called for the first time."""
    samples_freq: int = 1
    """Keep the answers of every so many steps, and of every validation, in RUN/samples (python -m rltrain.view RUN);
    -1: never."""
    samples_max_prompts: int = key(100, least=1, only_with="samples_freq>0")
    """Prompts per step, and per validation, whose answers are kept there, all answers of each."""
    profile_steps: list[int] | None = key(None, only_with=TRAINS)
    """Steps whose phases are profiled into RUN/profile; null: none (docs/profiling.md)."""
    profile_phases: list[str] = key([], only_with="profile_steps")
    """Those phases, such as [gen,update_actor]; []: all in which models run but gen, whose trace may be huge."""
    profile_ranks: list[int] = key([0], only_with="profile_steps")
    """The ranks that profile."""
    report: bool = True
    """Write RUN/report.html at the end, a page of charts and answers that opens offline (docs/logging.md)."""
    log_val_generations: int = key(0, least=0, only_with=VALIDATES)
    """Answers of each validation that trackers show as a table."""
    rollout_data_dir: str | None = key(None, only_with=TRAINS)
    """Folder for all answers of every step as JSON lines, as verl writes them (N.jsonl)."""
    validation_data_dir: str | None = key(None, only_with=VALIDATES)
    """The same for validations."""

    def validates_after(self, step: int, total: int, steps_per_epoch: int | None) -> bool:
        """Whether a validation is due after ``step``. Asked for before the first step alone, it has one to compare with
        after the last."""
        last = step == total
        regular = _steps_between(self.test_freq, steps_per_epoch)
        return last or (regular > 0 and step % regular == 0) if self.tests_regularly else last and self.val_before_train

    def saves_after(self, step: int, steps_per_epoch: int | None) -> bool:
        """Whether a regular save is due after ``step``."""
        regular = _steps_between(self.save_freq, steps_per_epoch)
        return regular > 0 and step % regular == 0

    @property
    def tests_regularly(self) -> bool:
        """Whether test_freq asks for validations between the first step and the last."""
        return self.test_freq == EPOCH or _steps_between(self.test_freq, None) > 0

    @property
    def saves_regularly(self) -> bool:
        """Whether save_freq asks for saves, beside those by time and at the end."""
        return self.save_freq == EPOCH or _steps_between(self.save_freq, None) > 0

    @property
    def saves_by_time(self) -> bool:
        """Whether time alone makes a save due. A run that is to save nothing at its end either saves nothing at all."""
        return (self.save_every_s or 0) > 0 and (self.save_at_end or self.saves_regularly)


def _steps_between(freq: int | str, steps_per_epoch: int | None) -> int:
    """0: never. Another word than epoch is refused before anybody asks."""
    return (steps_per_epoch or 0) if freq == EPOCH else max(freq, 0) if isinstance(freq, int) else 0
