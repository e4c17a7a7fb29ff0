"""Writing of samples to disk in a separate process, which fetches their texts.

Texts of a step can be many megabytes, and Parquet takes seconds, so neither passes through the driver. The driver sends
references and numbers, and never waits. If the writer cannot keep up, jobs are queued, then the oldest are dropped with
a warning. torch and other slow imports are avoided, because they would delay the start of the process.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rltrain.agents.content import with_texts
from rltrain.common.columns import names as c
from rltrain.common.columns.answer import AnswerText
from rltrain.common.errors import first_line, replace_surrogates
from rltrain.common.storage import swapping
from rltrain.data.prompts import PromptStore
from rltrain.data.rows import Rows
from rltrain.run.report.samples import one_line, text_of, without_middle

log = logging.getLogger(__name__)

Array = NDArray[Any]
# Maximum number of jobs in the process, and of queued jobs. Each keeps the texts of a step in Ray's store.
MOST_AT_ONCE, MOST_WAITING = 4, 12
_POLL_S = 0.2
# Maximum characters of a saved conversation, but at least this many per message. The response has the whole text.
_MOST_CHARS, _LEAST_CHARS = 200_000, 200
_WIDE = {"f": np.float64, "u": np.int64}


@dataclass(frozen=True)
class SampleJob:
    """Responses to p prompts, ``each`` responses per prompt."""

    split: str
    step: int
    rows: Array
    """[p]: row numbers in the data."""
    each: int
    texts: list[tuple[list[Any], Array, Array]]
    """References to lists of texts (in a list, so that Ray does not fetch them), their rows, and their indices among
    the responses.
    """
    numbers: dict[str, Array]
    """Scores, lengths and other numbers per response. An array of length 1 applies to all."""
    kept: Array
    parquet: Path | None = None
    """File for the prompts selected by ``kept`` [p]."""
    json_lines: Path | None = None
    """File for all prompts, in verl's format."""
    table: tuple[str, ...] = ()
    """Columns that `Written.table` returns."""
    repeated: bool = False
    """True if a writer died while it wrote this job."""

    def column(self, name: str) -> Array:
        """Return one number per response. If there are no rewards, the scores are used."""
        values = self.numbers[name if name in self.numbers else c.SCORE]
        values = values.astype(_WIDE.get(values.dtype.kind, values.dtype))
        return np.broadcast_to(values, len(self.rows) * self.each)


@dataclass(frozen=True)
class Written:
    """Outcome of a job: the problem (None: none), and one of its responses as a line."""

    split: str
    step: int
    problem: str | None = None
    example: str = ""
    table: list[list[Any]] | None = None
    """The rows of `SampleJob.table`."""


class SampleWriter:
    """Writer of the files of jobs. Texts may hold anything that a model, a scorer or a data file contains.

    rows, prompts: mappings by split. tokenizer: a tokenizer of the tokenizers package to decode prompts (None: messages
    are shown).
    """

    def __init__(
        self, rows: dict[str, Rows], prompts: dict[str, PromptStore], tokenizer: Any, fetch: Callable[[Any], Any]
    ) -> None:
        self._rows, self._prompts, self._tokenizer, self._fetch = rows, prompts, tokenizer, fetch

    def write(self, job: SampleJob) -> Written:
        """Write the files of a job atomically."""
        columns = self.columns(job)
        example = {name: values[0] for name, values in columns.items()}
        try:
            if job.parquet:
                table = pa.table(columns).filter(pa.array(job.kept.repeat(job.each)))
                with swapping(job.parquet) as file:
                    pq.write_table(table, file, compression="zstd")
            if job.json_lines:
                lines = self._as_verl_does(job, columns)
                with swapping(job.json_lines) as file:
                    file.write_text(lines, encoding="utf-8")
        except (OSError, pa.ArrowException) as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            where = (job.parquet or job.json_lines or Path()).parent
            problem = f"the disk of {where} is full" if full else f"{type(error).__name__}: {error}"
            return Written(job.split, job.step, problem)
        lists = [np.asarray(columns[name], dtype=object).tolist() for name in job.table]
        table = [list(row) for row in zip(*lists, strict=True)] if job.table else None
        return Written(job.split, job.step, None, "" if table else one_line(example), table)

    def columns(self, job: SampleJob) -> dict[str, Any]:
        """Return the columns of the table."""
        answers = np.empty(len(job.rows) * job.each, dtype=object)
        for reference, rows, places in job.texts:
            texts = self._fetch(reference[0])
            answers[places] = [texts[row] for row in rows.tolist()]
        prompts = [self._prompt(job.split, row) for row in job.rows.tolist()]
        of_prompts = {name: [prompt[name] for prompt in prompts for _ in range(job.each)] for name in prompts[0]}
        numbers = {name: job.column(name) for name in dict.fromkeys([c.SCORE, c.REWARD, *job.numbers])}
        truncated, complete = numbers.pop(c.TRUNCATED), numbers.pop(c.COMPLETE)
        reasons = np.where(truncated, "length", np.where(complete, "stop", "aborted")).tolist()
        columns: dict[str, Any] = {"step": np.full(len(answers), job.step), "row": job.rows.repeat(job.each)}
        columns |= {"sample": np.tile(np.arange(job.each), len(job.rows))} | of_prompts | {"answer": answers}
        columns |= _conversations(answers.tolist())
        columns |= {name: values for name, values in numbers.items() if not name.startswith(c.SCORER)}
        if c.NUM_TURNS in columns:
            # Metrics and extra_info count turns as verl does (including prompt and replies); this column counts the
            # policy's turns.
            columns["policy_turns"] = columns[c.NUM_TURNS]
        columns["finish_reason"] = reasons
        for name, values in numbers.items():
            short = name.removeprefix(c.SCORER)
            if name != short:
                # A scorer's number keeps its prefix if its short name is already a column.
                columns[name if short in columns else short] = values
        return {name: _storable(values) for name, values in columns.items()}

    def _prompt(self, split: str, row: int) -> dict[str, Any]:
        record = self._rows[split][row]
        message = next((turn for turn in reversed(record.prompt) if turn["role"] == "user"), record.prompt[-1])
        index = record.extra_info.get("index", record.extra_info.get("uid"))
        return {
            "data_source": record.data_source,
            "index": None if index is None else str(index),
            "question": text_of(message["content"]),
            "prompt": self._decoded(split, row, skip_special_tokens=False),
            **self._images(split, row),
            "ground_truth": None if record.ground_truth is None else text_of(record.ground_truth),
        }

    def _decoded(self, split: str, row: int, **options: bool) -> str:
        """Return the prompt as tokenized for the model, or its messages if there is no tokenizer."""
        if self._tokenizer is None:
            return "\n".join(f"{turn['role']}: {text_of(turn['content'])}" for turn in self._rows[split][row].prompt)
        return self._tokenizer.decode(self._prompts[split].short(row).tolist(), **options)

    def _images(self, split: str, row: int) -> dict[str, Any]:
        """Return the location of the images of a prompt; empty if the run has none."""
        store = self._prompts[split]
        if not store.stored_images:
            return {}
        number = int(store.num_images[row])
        return {"num_images": number, "images": store.stored_images.origin(row) if number else None}

    def _as_verl_does(self, job: SampleJob, columns: Mapping[str, Any]) -> str:
        names = [name for name in job.numbers if name.startswith(c.SCORER)]
        extras = {name.removeprefix(c.SCORER): job.column(name).tolist() for name in names}
        inputs = [self._decoded(job.split, row, skip_special_tokens=True) for row in job.rows.tolist()]
        lines = []
        for place, score in enumerate(job.column(c.SCORE).tolist()):
            line = {"input": inputs[place // job.each], "output": columns["answer"][place]}
            line |= {"gts": columns["ground_truth"][place], "score": score, "step": job.step}
            line |= {name: values[place] for name, values in extras.items() if name not in line}
            if "messages" in columns:
                line |= {"messages": json.loads(columns["messages"][place])}
                line |= {"agent_failed": columns[c.AGENT_FAILED][place]}
            lines.append(replace_surrogates(json.dumps(line, ensure_ascii=False)) + "\n")
        return "".join(lines)


def _conversations(answers: Sequence[str]) -> dict[str, list[str]]:
    """Return the messages after the prompt as JSON, and the errors of failed trajectories. Empty for single-turn
    responses."""
    told = [answer.trajectory_info if isinstance(answer, AnswerText) else {} for answer in answers]
    if not any("messages" in each for each in told):
        return {}
    return {
        "messages": [json.dumps(_bounded(each.get("messages", [])), ensure_ascii=False) for each in told],
        c.AGENT_FAILED: [each.get("agent_failed", "") for each in told],
    }


def _bounded(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the middle of long texts removed."""
    most = max(_LEAST_CHARS, _MOST_CHARS // max(1, len(messages)))
    return [
        {
            name: with_texts(value, lambda text: without_middle(text, most)) if isinstance(value, str | list) else value
            for name, value in message.items()
        }
        for message in messages
    ]


def _storable(values: Any) -> Any:
    """Return a column whose texts can be stored in every file format."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values
    return [replace_surrogates(value) if isinstance(value, str) else value for value in values]


class _WriterProcess(SampleWriter):
    """Writer in a process of low priority."""

    def __init__(self, rows: dict[str, Any], prompts: list[Any], tokenizer: Any) -> None:
        import ray

        os.nice(10)
        super().__init__({name: ray.get(part) for name, part in rows.items()}, ray.get(prompts[0]), tokenizer, ray.get)


class WriterProcess:
    """A `SampleWriter` in another process on this node, which is restarted if it dies.

    Only `flush` and `close` wait for it, with a timeout.
    """

    def __init__(self, rows: dict[str, Any], prompts: Any, tokenizer: Any) -> None:
        import ray

        self._ray: Any = ray
        self._given = (rows, [prompts], tokenizer)
        self._running: dict[Any, SampleJob] = {}
        self._waiting: list[SampleJob] = []
        self._start()

    def _start(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        this_node = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        # It takes no CPU slot, because workers may hold all slots of a local Ray. Ray does not restart it, because Ray
        # would not report lost jobs.
        actor = self._ray.remote(num_cpus=0, max_restarts=0)(_WriterProcess).options(scheduling_strategy=this_node)
        self._actor: Any = actor.remote(*self._given)

    def submit(self, job: SampleJob) -> list[Written]:
        """Queue ``job`` for writing, and drop the oldest queued job if there are too many.

        Returns the outcomes of earlier jobs so far.
        """
        outcomes = self._take(0)
        self._waiting.append(job)
        self._hand_out()
        dropped, self._waiting = self._waiting[:-MOST_WAITING], self._waiting[-MOST_WAITING:]
        return outcomes + [Written(late.split, late.step, "earlier ones are still being written") for late in dropped]

    def _hand_out(self) -> None:
        while self._waiting and len(self._running) < MOST_AT_ONCE:
            job = self._waiting.pop(0)
            self._running[self._actor.write.remote(job)] = job

    def _take(self, wait_s: float) -> list[Written]:
        calls, ray = list(self._running), self._ray
        ready = ray.wait(calls, num_returns=len(calls), timeout=wait_s)[0] if calls else []
        outcomes = []
        for call in [running for running in calls if running in ready]:
            job = self._running.pop(call)
            try:
                outcomes.append(ray.get(call))
            except ray.exceptions.RayActorError as error:
                log.warning("the process that writes samples died (%s) and is restarted", first_line(error))
                self._waiting, self._running = [*self._running.values(), *self._waiting], {}
                # The first of its jobs was being written and may have ended it.
                if job.repeated:
                    outcomes.append(Written(job.split, job.step, f"their writer died twice: {first_line(error)}"))
                else:
                    self._waiting.insert(0, replace(job, repeated=True))
                self._start()
                break
            except Exception as error:  # noqa: BLE001 - an error of the writer must not end training
                outcomes.append(Written(job.split, job.step, (str(error).splitlines() or [repr(error)])[-1]))
        self._hand_out()
        return outcomes

    def flush(self, wait_s: float, step: int | None = None) -> list[Written]:
        """Wait up to ``wait_s`` for the jobs of steps up to ``step`` (None: all). Return outcomes."""
        outcomes, deadline = self._take(0), time.monotonic() + wait_s
        while self.has_unwritten(step) and time.monotonic() < deadline:
            outcomes += self._take(min(_POLL_S, wait_s))
        return outcomes

    def has_unwritten(self, step: int | None = None) -> bool:
        """Return whether a job of the steps up to ``step`` (None: any) is not written."""
        return any(step is None or job.step <= step for job in [*self._running.values(), *self._waiting])

    def close(self, wait_s: float) -> list[Written]:
        """Flush, and end the process. Return the remaining outcomes."""
        outcomes = self.flush(wait_s)
        self._ray.kill(self._actor)
        left = [*self._running.values(), *self._waiting]
        return outcomes + [Written(job.split, job.step, f"not written within {wait_s:g} s") for job in left]
