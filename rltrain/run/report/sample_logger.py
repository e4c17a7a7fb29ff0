"""Selection of the samples to save: a parquet file per step, verl's JSON lines, and a table for trackers."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.common.columns import names as c
from rltrain.common.errors import DiskError
from rltrain.config.schema.trainer import TrainerConfig
from rltrain.run.callbacks.callback import Callback
from rltrain.run.report.sample_writer import SampleJob, WriterProcess, Written
from rltrain.run.report.tracking import Tracker
from rltrain.runtime.ray_watchdog import raise_if_lost
from rltrain.runtime.samples import Samples, driver_bytes
from rltrain.trainer.batching.balance import Ids
from rltrain.trainer.metrics.step import Answered, Metrics

log = logging.getLogger(__name__)

# Numbers of a response, if available. The scorer's numbers are added.
_NUMBERS = (
    c.SCORE, c.REWARD, c.ADVANTAGE, c.RULE_SCORE, c.MODEL_SCORE, c.OVERLONG, c.REWARD_FAILED, c.REWARD_TIMEOUT,
    c.REWARD_ERROR, c.PROMPT_LENGTH, c.RESPONSE_LENGTH, c.TRUNCATED, c.COMPLETE, *c.OF_TURNS, c.TOOL_S,
    c.ANSWER_IMAGES,
)  # fmt: skip
_TABLE = ("step", "data_source", "question", "answer", "ground_truth", "score", "finish_reason")
_EXAMPLE_EVERY = 10
_TABLE_WAIT_S, _LAST_WAIT_S = 60.0, 60.0
_LOOK_S = 1.0


def keeps_samples(trainer: TrainerConfig) -> bool:
    """Return whether any samples are to be saved."""
    folders = trainer.rollout_data_dir or trainer.validation_data_dir
    return trainer.samples_freq > 0 or bool(folders) or trainer.log_val_generations > 0


class SampleLogger(Callback):
    """Callback that sends samples to the writer by reference.

    Only the texts of ``log_val_generations`` are fetched into this process. Each kind of error is logged once, and
    steps with missing samples are listed at the end of the run.
    """

    def __init__(self, cfg: TrainerConfig, folder: Path, writer: WriterProcess, tracker: Tracker) -> None:
        self._cfg = cfg
        self._folder = folder / "samples"
        self._writer, self._tracker = writer, tracker
        self._bytes_through_driver = 0
        self._logged_problems: set[str] = set()
        self._missing: dict[str, list[int]] = {}

    def on_step(self, made: Answered) -> Metrics:
        """Submit the samples for writing, as configured."""
        before = self._bytes_through_driver
        self._submit("train", made)
        # References to the responses also pass through this process.
        per_sample = (self._bytes_through_driver - before) / len(made.samples)
        return {"perf/driver_bytes_per_sample": made.metrics["perf/driver_bytes_per_sample"] + per_sample}

    def on_validation(self, made: Answered) -> Metrics:
        """Submit the samples, and send ``log_val_generations`` of them to every tracker with tables."""
        self._submit("val", made)
        # The same prompts in every validation.
        prompts = _spread(len(made.samples) // made.answers_per_prompt, self._cfg.log_val_generations)
        if len(prompts):
            job = _job("val", made.step, made.samples, prompts, made.answers_per_prompt, most=1)
            self._report(self._writer.submit(replace(job, table=_TABLE)) + self._writer.flush(_TABLE_WAIT_S, made.step))
        return {}

    def _submit(self, split: str, answered: Answered) -> None:
        step, samples, answers_per_prompt = answered.step, answered.samples, answered.answers_per_prompt
        self._report(self._writer.flush(0.0))
        cfg = self._cfg
        data_dir = cfg.rollout_data_dir if split == "train" else cfg.validation_data_dir
        due = cfg.samples_freq > 0 and (split == "val" or step % cfg.samples_freq == 0)
        num_prompts = len(samples) // answers_per_prompt
        chosen = _spread(num_prompts, cfg.samples_max_prompts if due else 0)
        # verl's format has all responses, so all texts are fetched then; `kept` selects texts for the table.
        prompts = np.arange(num_prompts) if data_dir else chosen
        if not len(prompts):
            return
        job = _job(split, step, samples, prompts, answers_per_prompt)
        parquet = self._folder / f"{split}_{step:06d}.parquet" if due else None
        json_lines = Path(data_dir).expanduser().resolve() / f"{step}.jsonl" if data_dir else None
        kept = np.isin(prompts, chosen)
        self._report(self._writer.submit(replace(job, kept=kept, parquet=parquet, json_lines=json_lines)))
        numbers = [values.tolist() if values.dtype == object else values for values in job.numbers.values()]
        places = [place[1:] for place in job.texts]
        self._bytes_through_driver += driver_bytes([numbers, places, job.rows, job.kept])

    def write(self, answered: Answered, file: Path) -> None:
        """Write all samples to ``file``, and wait for it. Raises DiskError if that fails."""
        num_prompts = len(answered.samples) // answered.answers_per_prompt
        job = _job("val", answered.step, answered.samples, np.arange(num_prompts), answered.answers_per_prompt)
        outcomes = self._writer.submit(replace(job, parquet=file))
        while self._writer.has_unwritten():
            raise_if_lost()
            outcomes += self._writer.flush(_LOOK_S)
        if problems := [outcome.problem for outcome in outcomes if outcome.problem]:
            raise DiskError(f"{file} could not be written: {problems[0]}. Fix that and rerun the command.")

    def written(self, step: int, wait_s: float) -> bool:
        """Return whether the samples of steps up to ``step`` are written within ``wait_s``.

        A run that resumes from a checkpoint does not generate the earlier samples again.
        """
        self._report(self._writer.flush(wait_s, step))
        return not self._writer.has_unwritten(step)

    def close(self, wait: bool = True) -> None:
        """Wait at most a minute until everything is written, and log missing steps."""
        self._report(self._writer.close(_LAST_WAIT_S if wait else 0.0))
        if missing := self.closing_warning():
            log.warning("%s", missing)

    def closing_warning(self) -> str:
        """Return a sentence on the steps whose samples are missing; "" if none."""
        gaps = [f"{split} {_ranges(steps)}" for split, steps in self._missing.items()]
        return f"{self._folder}: the responses of these steps are missing: {', '.join(gaps)}" if gaps else ""

    def _report(self, results: list[Written]) -> None:
        for result in results:
            if result.problem:
                self._missing.setdefault(result.split, []).append(result.step)
                # Different numbers, as in file names and sizes, are not a new kind of error.
                if (kind := re.sub(r"\d+", "", result.problem)) not in self._logged_problems:
                    self._logged_problems.add(kind)
                    log.warning("step %d, %s: responses are not saved: %s", result.step, result.split, result.problem)
            elif result.table:
                self._tracker.log_table(result.step, "val/generations", list(_TABLE), result.table)
            elif result.example and (result.split == "val" or result.step == 1 or result.step % _EXAMPLE_EVERY == 0):
                # The line names its step, because it is logged after writing, perhaps after lines of later steps.
                log.info("a response of step %d, %s: %s", result.step, result.split, result.example)


def _ranges(steps: list[int]) -> str:
    """Return ascending numbers as ``1-3, 7``."""
    ordered = np.unique(steps)
    parts = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _spread(count: int, most: int) -> Ids:
    """Return at most ``most`` of ``count`` indices, spread evenly."""
    return np.unique(np.linspace(0, count - 1, max(0, min(count, most))).astype(np.int64))


def _job(
    split: str, step: int, samples: Samples, prompts: Ids, answers_per_prompt: int, most: int | None = None
) -> SampleJob:
    """Return a compact job for the responses (at most ``most`` each) to some prompts."""
    each = min(answers_per_prompt, most or answers_per_prompt)
    ids = (prompts[:, None] * answers_per_prompt + np.arange(each)).ravel()
    names = [name for name in _NUMBERS if name in samples.numbers]
    # Columns equal to the score are not sent.
    for name in {c.REWARD, c.RULE_SCORE} & set(names):
        if np.array_equal(samples[name], samples[c.SCORE]):
            names.remove(name)
    names += [name for name in samples.numbers if name.startswith(c.SCORER)]
    numbers = {name: _narrow(samples[name][ids], exact=name != c.ADVANTAGE) for name in names}
    # A constant column, such as failures of scoring, is sent as one value; `SampleJob.column` expands it.
    numbers = {name: values[:1] if (values == values[0]).all() else values for name, values in numbers.items()}
    parts = samples.request(ids, [c.TEXT]).parts
    texts = [([part.ref], _narrow(part.rows), _narrow(part.ids)) for part in parts]
    return SampleJob(split, step, samples[c.ROW][ids[::each]], each, texts, numbers, np.ones(len(prompts), dtype=bool))


def _narrow(values: NDArray[Any], *, exact: bool = True) -> NDArray[Any]:
    """Return the same numbers in fewer bytes: counts as unsigned integers, others as float32 if that is enough."""
    if values.dtype.kind == "i":
        # Counts, lengths and ids are never negative.
        return values.astype(np.min_scalar_type(int(values.max())))
    if values.dtype == np.float64:
        # A score beyond float32 becomes infinite, and so differs and is stored as float64.
        with np.errstate(over="ignore"):
            small = values.astype(np.float32)
        return small if not exact or np.array_equal(small, values, equal_nan=True) else values
    return values
