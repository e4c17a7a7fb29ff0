"""``--dry-run``: what a run would do and whether it would start, within seconds and without Ray or a worker.

Choice: it calls the functions that a run calls at its start (`preflight`, `load_data`, `make_plan`, `missing_room`,
`check_columns`, `find_start`), so that the two do not drift apart; every problem is collected instead of ending at the
first. Left out: what only a start can show, such as other nodes and rows beyond the first 20,000.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pyarrow.parquet as pq

from rltrain.config.check import as_list
from rltrain.config.load import LoadedConfig
from rltrain.config.schema import Config
from rltrain.data.chat import chat_encoder
from rltrain.data.rows import Rows, keys_of, read_rows
from rltrain.data_preprocess.lint import describe as describe_findings
from rltrain.data_preprocess.lint import look_at
from rltrain.errors import RltrainError
from rltrain.logs import count
from rltrain.rewards.custom import custom_reward
from rltrain.rewards.processes.pool import make_scorer
from rltrain.rewards.processes.score import Score
from rltrain.rewards.processes.slot import Slot
from rltrain.trainer.build import Data, check_columns, load_data, sampler_of
from rltrain.trainer.changes import tell_changes
from rltrain.trainer.checkpoint import Checkpoints
from rltrain.trainer.memory_room import look_at_memory
from rltrain.trainer.plan import Plan, describe, make_plan
from rltrain.trainer.preflight import preflight
from rltrain.trainer.preflight_models import Findings, look_at_images
from rltrain.trainer.progress import Start, find_start
from rltrain.trainer.saving import checkpoint_bytes, missing_room
from rltrain.trainer.tracking import missing_package

# Rows of a split that are read and tokenised as in a run, and those whose answers the built-in scorers grade;
# `python -m rltrain.data_preprocess.lint` looks at all.
_MOST_ROWS, _GRADED_ROWS = 20_000, 100


def dry_run(loaded: LoadedConfig, notes: Sequence[str]) -> tuple[str, bool]:
    """What to print, and whether a run would refuse or run out of memory. notes: what is said of the settings."""
    cfg = loaded.config
    found = preflight(loaded)
    rows, num_prompts, num_too_long = _read(cfg, found)
    parts, too_large = [], ""
    try:
        plan = make_plan(cfg, num_prompts, num_too_long, images=found.images)
        parts.append(describe(plan, cfg))
        if "train" in rows and len(rows["train"]) == num_prompts:
            sampler_of(cfg, plan, rows["train"], trial=True)
        goes_on = _look_at_folder(loaded, rows if len(rows.get("train", ())) == num_prompts else {}, plan, found)
        parts += goes_on
        # A validation without a checkpoint loads no more than it needs.
        memory, too_large = look_at_memory(cfg, plan, bool(goes_on) or not cfg.trainer.val_only)
        parts[1:1] = memory
    except RltrainError as error:
        found.problems.append(str(error))
    parts += _try_reward(cfg, rows, found)
    parts += _look_at(cfg, rows, found)
    found.notes += [
        f"trainer.logger={name}: not installed here, so it is left out (pip install {package})"
        for name in cfg.trainer.logger
        if (package := missing_package(name))
    ]
    without_effect = [note for note in notes if ": no effect: " in note]
    read_as = [note for note in notes if note not in without_effect]
    for title, lines in (("read as", read_as), ("no effect", without_effect), ("worth a look", found.notes)):
        if lines:
            # The title says it already.
            parts.append("\n  ".join([title, *(line.replace(": no effect: ", ": ", 1) for line in lines)]))
    # A file may be looked at twice, and `preflight` names keys as they were written.
    told = dict.fromkeys(loaded.as_written(problem, follow=False) for problem in found.problems)
    refused = f"a run would refuse: {count(len(told), 'problem')}"
    lacking = [loaded.as_written(too_large, follow=False)] if too_large else []
    # A run does not look: this takes seconds, and is foretold and not known.
    for title, lines in ((refused, list(told)), ("a run would run out of memory", lacking)):
        if lines:
            parts.append("\n  ".join([title, *(line.replace("\n", "\n    ") for line in lines)]))
    ends = bool(told or too_large)
    return "\n".join([*parts, *([] if ends else ["a run would start"])]) + "\n", ends


def _look_at_folder(loaded: LoadedConfig, rows: dict[str, Rows], plan: Plan, found: Findings) -> list[str]:
    """Whether the run folder can be had, what a run would go on from, and whether there is room for checkpoints.

    rows: those of a run, or none where they are not known.
    """
    cfg = loaded.config
    # Not a `RunFolder`, which would create the folder and take its lock.
    run, start = Checkpoints(cfg.trainer.default_local_dir), Start()
    taken = run.problem()
    try:
        train = rows["train"] if rows else None
        images = train is None or bool(train.num_images.any())
        start = find_start(cfg, run, train.identity() if train else None, images=images)
        tell_changes(loaded, start)
    except RltrainError as error:
        found.problems.append(str(error))
    size = start.size or checkpoint_bytes(cfg, found.num_parameters, found.num_trained)
    lacking, note = missing_room(cfg.trainer, run.path, size, start.step, plan.total_steps)
    found.problems += [problem for problem in (taken, lacking) if problem]
    found.notes += [note] if note else []
    done = "; all its steps are made" if start.step >= plan.total_steps else ""
    return [f"goes on from {start.folder}, step {start.step}{done}"] if start.folder else []


def _read(cfg: Config, found: Findings) -> tuple[dict[str, Rows], int | None, int]:
    """Rows by split, number of training prompts (None: unknown), number of prompts left out.

    Problems are added to ``found``.
    """
    data = cfg.data
    if data.custom_cls:  # it alone can say how many rows it makes
        try:
            read = _load(cfg, found) if found.tokenizer_works else None
        except RltrainError as error:
            found.problems.append(str(error))
            read = None
        prompts = read and read.prompts["train"]
        return (read.rows, len(prompts), prompts.num_dropped) if read and prompts else ({}, None, 0)
    splits = {"train": data.train_files, "val": data.val_files}
    numbers = {split: _count(as_list(files)) for split, files in splits.items()}
    limits = {"train": data.train_max_samples, "val": data.val_max_samples}
    wanted = {
        split: number if limits[split] <= 0 else min(number, limits[split])
        for split, number in numbers.items()
        if number is not None
    }
    if data.filter_overlong_prompts and not (found.tokenizer_works and wanted.get("train", 0) <= _MOST_ROWS):
        found.notes.append("prompts are counted before filter_overlong_prompts: a run may have fewer")
    found.notes += [
        f"data.{split}_files: the first {_MOST_ROWS:,} of {number:,} rows are looked at"
        for split, number in wanted.items()
        if number > _MOST_ROWS
    ]
    # A file that cannot be read; `preflight` has named it.
    if len(wanted) < len(splits):
        return {}, wanted.get("train"), 0
    looked_at = {split: min(number, _MOST_ROWS) for split, number in wanted.items()}
    # Of more rows than are looked at, the first ones and not some of them.
    shuffle = data.shuffle and looked_at == wanted
    short = replace(data, train_max_samples=looked_at["train"], val_max_samples=looked_at["val"], shuffle=shuffle)
    try:
        if found.tokenizer_works:
            read = _load(replace(cfg, data=short), found)
            rows, prompts = read.rows, read.prompts["train"]
            # Only then the count after the filter is that of the run.
            if looked_at["train"] == wanted["train"]:
                return rows, len(prompts), prompts.num_dropped
        else:
            rows = {
                split: read_rows(files, max_rows=looked_at[split], **keys_of(data))
                for split, files in splits.items()
                if files
            }
    except RltrainError as error:
        found.problems.append(str(error))
        rows = {}
    return rows, wanted["train"], 0


def _load(cfg: Config, found: Findings) -> Data:
    read = load_data(cfg)
    found.images = read.images
    look_at_images(cfg, found)
    return read


def _count(files: Sequence[str]) -> int | None:
    """Rows, from the files' footers. None where one cannot be read."""
    try:
        return sum(pq.ParquetFile(file).metadata.num_rows for file in files)
    except (OSError, ValueError):
        return None


def _try_reward(cfg: Config, rows: dict[str, Rows], found: Findings) -> list[str]:
    """What the scorers say of one row of each data source, with the ground truth as the answer: one call each."""
    custom, lines = custom_reward(cfg), []
    if not (rows or custom) or not cfg.reward_model.runs_scorers:
        return []
    scores: list[Score] = []
    # Reversed, so that a source of both splits is tried with its row of the training data, which comes last.
    firsts = {source: split[at] for split in reversed(rows.values()) for source, at in split.data_sources().items()}
    try:
        # What each worker of the pool has, in this process: the pool itself would need Ray.
        scorer = make_scorer(cfg)
        try:
            for source, row in firsts.items():
                started = time.perf_counter()
                score = scorer.check((source, str(row.ground_truth), row.ground_truth, row.extra_info))
                seconds = time.perf_counter() - started
                scores.append(score)
                printed = "".join(f"\n    printed: {line}" for line in scorer.take_printed().splitlines())
                lines.append(f"{source!r}, the ground truth as the answer: {_said(score)} ({seconds:.2f} s){printed}")
            if custom and not firsts and isinstance(scorer, Slot):
                scorer.prepare("")  # an import and a signature need no row
        finally:
            scorer.close()
        check_columns(cfg, scores)
    except RltrainError as error:
        found.problems.append(str(error))
    if custom and scores and all(score.status in ("crashed", "rejected") for score in scores):
        found.problems.append(
            f"{custom.name!r} in {custom.path!r} gives no number for any answer it was tried on, see above."
        )
    return ["\n  ".join(["reward", *lines])] if lines else []


def _said(score: Score) -> str:
    if score.value is None:
        return f"{score.status}: {score.error}".replace("\n", "\n    ")
    return f"{score.value:g}" + (
        f" with {', '.join(f'{name}={value}' for name, value in score.extras.items())}" if score.extras else ""
    )


def _look_at(cfg: Config, rows: dict[str, Rows], found: Findings) -> list[str]:
    """What the linter finds in the first rows. Only built-in scorers grade them: a user's function may cost money."""
    first = [split.select(range(min(_GRADED_ROWS, len(split)))) for split in rows.values()]
    if not first:
        return []
    grade = cfg.reward_model.runs_scorers and not (cfg.custom_reward_function.path or cfg.reward.url)
    said = describe_findings(look_at(first, encoder=chat_encoder(cfg) if found.tokenizer_works else None, grade=grade))
    number = sum(map(len, first))
    return [
        f"data: the first {number} rows (up to {_GRADED_ROWS} of a split)"
        + (f"\n{said.rstrip()}" if said else ", nothing found")
    ]
