"""Output of earlier attempts in a run folder: completed if the run resumes, else moved aside. A run that starts over,
or resumes from an earlier checkpoint, repeats steps, and its output would overwrite existing files, which may be all
that is left of hours of work. So before anything is written, these files are moved into ``earlier_1``, ``earlier_2``
and so on. `view` and `report` read these folders like run folders. Checkpoints are not moved, because they are never
overwritten; neither are logs, which are appended to.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from pathlib import Path

from rltrain.common.storage import disk_errors, lines_of, patiently
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.report.page import PAGE
from rltrain.run.report.table import METRICS
from rltrain.trainer.plan import Plan

log = logging.getLogger(__name__)
# Files that a new run would overwrite. Trackers keep runs apart themselves.
_RUN_FILES = (
    METRICS, PAGE, "profile", "samples", "tensorboard", "tracking.json", "plan*.json", "env*.json",
    "config*.yaml",
)  # fmt: skip
_SAMPLES, _VAL_SAMPLES, _DATA = (re.compile(each) for each in (
    r"train_(\d+)\.parquet", r"val_(\d+)\.parquet", r"(\d+)\.jsonl"
))  # fmt: skip


def archive_outputs(cfg: TrainerConfig, run: Path, step: int, *, anew: bool = False, validates: bool = False) -> None:
    """Move the files that the run starting after ``step`` would overwrite into ``earlier_N`` in their folder.

    anew: nothing in ``run`` belongs to this run, even if it starts from another run's checkpoint. validates: the run
    starts with a validation of ``step``. Raises DiskError or StorageError if a file cannot be moved.
    """
    anew = anew or not step
    # Step 0 consists only of a validation, which a run from step 0 always repeats.
    first = {"train": step + 1, "val": step + 1 - (validates or not step)}
    with disk_errors(run):
        aside = _free(run)
        if anew:
            for file in [file for pattern in _RUN_FILES for file in run.glob(pattern)]:
                _move(file, aside)
        else:
            for pattern, split in ((_SAMPLES, "train"), (_VAL_SAMPLES, "val")):
                for file in _repeated_files(run / "samples", pattern, first[split]):
                    _move(file, aside / "samples")
            _cut(run / METRICS, step, aside)
        _log_archived(run, aside, step if not anew else None)
    _archive_data(cfg.rollout_data_dir, first["train"], step)
    _archive_data(cfg.validation_data_dir, first["val"], step)


def evaluation_folder(cfg: TrainerConfig, run: RunFolder, step: int) -> RunFolder:
    """Return the folder for the output of an evaluation of ``step``.

    It is ``evaluation_1``, ``evaluation_2`` and so on in the folder of ``run``, because its results do not belong to
    the run whose weights it loads. If the folder holds no run, it is the folder itself. Files of ``step`` in
    ``trainer.validation_data_dir`` are moved aside.
    """
    _archive_data(cfg.validation_data_dir, step, step, last=step)
    if not any(file for pattern in _RUN_FILES for file in run.path.glob(pattern)):
        return run
    folder = RunFolder(str(_free(run.path, "evaluation")))
    log.info("%s holds a run: metrics, responses and settings of this evaluation are in %s", run.path, folder.path.name)
    return folder


def _archive_data(name: str | None, first: int, step: int, last: float = math.inf) -> None:
    if not name:
        return
    with disk_errors(folder := Path(name).expanduser().resolve()):
        aside = _free(folder)
        for file in _repeated_files(folder, _DATA, first, last):
            _move(file, aside)
        _log_archived(folder, aside, step)


def _repeated_files(folder: Path, pattern: re.Pattern[str], first: int, last: float = math.inf) -> list[Path]:
    """Return the files in ``folder`` of the steps from ``first`` to ``last``."""
    try:
        names = patiently(folder, lambda: sorted(os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in names if (match := pattern.fullmatch(name)) and first <= int(match[1]) <= last]


def _free(folder: Path, kind: str = "earlier") -> Path:
    number = 1
    while (free := folder / f"{kind}_{number}").exists():
        number += 1
    return free


def _move(path: Path, aside: Path) -> None:
    aside.mkdir(parents=True, exist_ok=True)
    os.rename(path, aside / path.name)


def _cut(file: Path, step: int, aside: Path) -> None:
    lines = _lines(file)
    head = [line for line in lines if _step_of(line) <= step]
    # A line cut off by a kill has no step and is moved too. `append_last_line` leaves empty lines.
    if later := [line for line in lines if line.strip() and _step_of(line) > step]:
        aside.mkdir(exist_ok=True)
        (aside / file.name).write_text("".join(f"{line}\n" for line in later), encoding="utf-8")
    # Write to a second file, because a kill during the write would lose the lines of all steps.
    anew = file.with_suffix(".tmp")
    anew.write_text("".join(f"{line}\n" for line in head), encoding="utf-8")
    anew.replace(file)


def _log_archived(folder: Path, aside: Path, step: int | None) -> None:
    if aside.exists():
        content = "the output of an earlier start" if step is None else f"the output of steps after {step}"
        log.info("%s: %s was moved to %s, because this run writes it again", folder, content, aside.name)


def append_last_line(file: Path, step: int, metrics: dict[str, float]) -> None:
    """Append the line of ``step`` if it is missing because the run was killed between checkpoint and line."""
    if metrics and not any(_step_of(line) == step for line in _lines(file)):
        with disk_errors(file), file.open("a", encoding="utf-8") as lines:
            # Begin with a newline, because the kill may have truncated the last line.
            lines.write("\n" + json.dumps({"step": step, **metrics}) + "\n")


def pending_validation(cfg: TrainerConfig, validates: bool, run: Path, step: int, plan: Plan) -> bool:
    """Return whether the run must validate ``step`` first.

    This is the case for an evaluation, and if a signal interrupted the validation of the step that the run resumes
    from. validates: there are validation prompts.
    """
    due = cfg.validates_after(step, plan.total_steps, plan.steps_per_epoch)
    due = validates and step > 0 and due
    # A checkpoint of another run has no line in this file.
    lines = [line for line in _lines(run / METRICS) if _step_of(line) == step] if due else []
    return cfg.val_only or (bool(lines) and not any('"val-core/' in line for line in lines))


def _lines(file: Path) -> list[str]:
    with disk_errors(file):
        return lines_of(file)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        # Larger than any step, so that such a line is never kept.
        return sys.maxsize
