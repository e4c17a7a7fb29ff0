"""``--dry-run``: checks whether a run would start and describes it, within seconds, without Ray or workers.

It calls the same functions as the start of a run (`preflight`, `load_data`, `make_plan`, `missing_room`,
`check_columns`, `find_resume_point`), so that the two cannot diverge. All problems are collected; the first one does
not end the check. It does not check other nodes, or rows after the first 20,000.
"""

from __future__ import annotations

from collections.abc import Sequence

from rltrain.common.errors import RltrainError, short
from rltrain.common.logs import count
from rltrain.common.storage import matching
from rltrain.config.check import as_list
from rltrain.config.loaded import LoadedConfig
from rltrain.config.schema import Config
from rltrain.data.chat import chat_encoder
from rltrain.data.files import files_of
from rltrain.data.prompts import PromptStore
from rltrain.data.rows import Rows, bad_rows, keys_of, scan_rows
from rltrain.data.tables import num_rows
from rltrain.data_preprocess.lint import check_rows
from rltrain.data_preprocess.lint import describe as describe_problems
from rltrain.rewards.custom import custom_reward
from rltrain.rewards.processes.remote_scorer import RemoteScorer
from rltrain.rewards.processes.score import Score
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.rewards.processes.trial import refuse_without_number, try_truths
from rltrain.rewards.processes.worker import make_scorer
from rltrain.run.assemble import sampler_of
from rltrain.run.changes import log_changes
from rltrain.run.checkpoints.folder import Checkpoints
from rltrain.run.checkpoints.resume import ResumePoint, find_resume_point
from rltrain.run.checkpoints.room import checkpoint_bytes, missing_room
from rltrain.run.preflight.judge import check_judge_server
from rltrain.run.preflight.memory_room import check_host, check_memory
from rltrain.run.preflight.models import PreflightResult, check_images
from rltrain.run.preflight.settings import preflight
from rltrain.run.report.plan import describe
from rltrain.run.report.tracking import missing_package
from rltrain.run.scorers import check_columns
from rltrain.run.splits import encode_split, load_data, splits_of
from rltrain.trainer.plan import ImageSizes, Plan, make_plan

# Rows per split that are read and tokenised as in a run, and rows whose ground truths the built-in scorers grade.
# `python -m rltrain.data_preprocess.lint` reads all rows.
MOST_ROWS, _GRADED_ROWS = 20_000, 100


def dry_run(loaded: LoadedConfig, notes: Sequence[str]) -> tuple[str, bool]:
    """Return the text to print, and whether a run would be refused or run out of memory.

    notes: notes on the settings.
    """
    cfg = loaded.config
    result = preflight(loaded)
    rows, num_prompts, num_too_long = _read(cfg, result)
    parts, too_large = [], ""
    try:
        plan = make_plan(cfg, num_prompts, num_too_long, images=result.images)
        parts.append(describe(plan, cfg))
        if "train" in rows and len(rows["train"]) == num_prompts:
            sampler_of(cfg, plan, rows["train"], trial=True)
        goes_on = _check_folder(loaded, rows if len(rows.get("train", ())) == num_prompts else {}, plan, result)
        parts += goes_on
        if result.models_found:  # else transformers would request each missing model repeatedly
            memory, too_large = check_memory(cfg, plan)
            host, warnings = check_host(cfg, plan)
            parts[1:1] = [*memory, *host]
            result.notes += warnings
    except RltrainError as error:
        result.problems.append(str(error))
    parts += try_reward(cfg, rows, result)
    parts += _check_rows(cfg, rows, result)
    packages = {name: missing_package(name) for name in cfg.trainer.logger}
    missing = "trainer.logger={}: not installed here, so it is left out (pip install {})"
    result.notes += [missing.format(*item) for item in packages.items() if item[1]]
    without_effect = [note for note in notes if ": no effect: " in note]
    read_as = [note for note in notes if note not in without_effect]
    for title, lines in (("read as", read_as), ("no effect", without_effect), ("worth a look", result.notes)):
        if lines:
            # The title already says "no effect".
            parts.append("\n  ".join([title, *(line.replace(": no effect: ", ": ", 1) for line in lines)]))
    # Duplicates are removed, because a file may be checked twice. Keys are named as the user wrote them, as in
    # `preflight`.
    problems = dict.fromkeys(loaded.as_written(problem, follow=False) for problem in result.problems)
    refused = f"a run would refuse: {count(len(problems), 'problem')}"
    lacking = [loaded.as_written(too_large, follow=False)] if too_large else []
    # A run does not check its memory, because the check takes seconds and is only an estimate.
    for title, lines in ((refused, list(problems)), ("a run would run out of memory", lacking)):
        if lines:
            parts.append("\n  ".join([title, *(line.replace("\n", "\n    ") for line in lines)]))
    ends = bool(problems or too_large)
    return "\n".join([*parts, *([] if ends else ["a run would start"])]) + "\n", ends


def _check_folder(loaded: LoadedConfig, rows: dict[str, Rows], plan: Plan, result: PreflightResult) -> list[str]:
    """Check access to the run folder, the checkpoint to resume from, and disk space for checkpoints.

    Returns a line on the checkpoint, if there is one. rows: the rows of the run; empty if not all were read.
    """
    cfg = loaded.config
    # `Checkpoints` instead of `RunFolder`, which would create the folder and take its lock.
    run, start = Checkpoints(cfg.trainer.default_local_dir), ResumePoint()
    refusal = run.problem()
    try:
        train = rows["train"] if rows else None
        images = train is None or plan.passes.images_in_training
        start = find_resume_point(cfg, run, train.identity() if train else None, images=images)
        log_changes(loaded, start)
    except RltrainError as error:
        result.problems.append(str(error))
    sizes = result.num_parameters, result.num_trained
    size = start.size or checkpoint_bytes(cfg.actor_rollout_ref.actor, plan.passes, *sizes)
    lacking, note = missing_room(cfg.trainer, run.path, size, start.step, plan.total_steps, plan.steps_per_epoch)
    result.problems += [problem for problem in (refusal, lacking) if problem]
    result.notes += [note] if note else []
    ending = "; all its steps are done" if start.step >= plan.total_steps else ""
    return [f"resumes from {start.folder}, step {start.step}{ending}"] if start.folder else []


def _read(cfg: Config, result: PreflightResult) -> tuple[dict[str, Rows], int | None, int]:
    """Return the rows by split, the number of training prompts (None: unknown), and the number of dropped prompts.

    Problems are added to ``result``.
    """
    data = cfg.data
    if data.custom_cls or cfg.sft.enabled:
        return _read_own(cfg, result)
    rows: dict[str, Rows] = {}
    stores: dict[str, PromptStore] = {}
    sizes: dict[str, int] = {}
    for split, files, limit in splits_of(cfg):
        number = _count(split, as_list(files), result)
        if number is None:
            continue
        sizes[split] = number if limit <= 0 else min(number, limit)
        if sizes[split] > MOST_ROWS:
            result.notes.append(f"data.{split}_files: the first {MOST_ROWS:,} of {sizes[split]:,} rows are checked")
        try:
            # At least one row is read, because `scan_rows` takes 0 as all rows. If there are more rows than are read,
            # these are the first ones instead of a random subset.
            seed = data.seed if data.shuffle and sizes[split] < MOST_ROWS else None
            most = min(sizes[split] or 1, MOST_ROWS)
            usable, problems = scan_rows(as_list(files), max_rows=most, seed=seed, keys=keys_of(data))
            if not len(usable):
                result.problems.append(bad_rows(problems or [f"no usable row in {usable.paths}."]))
                continue
            rows[split] = usable
            result.problems += [bad_rows(problems)] if problems else []
            # Valid rows may still have invalid prompts. A run would accept a split only without problems.
            if result.tokenizer_works:
                fitting, store = encode_split(cfg, split, usable, chat_encoder(cfg))
                if not problems:
                    rows[split], stores[split] = fitting, store
        except RltrainError as error:
            result.problems.append(str(error))
    reads_all = "train" in stores and sizes["train"] <= MOST_ROWS
    if data.filter_overlong_prompts and not reads_all:
        result.notes.append("prompts are counted before filter_overlong_prompts: a run may have fewer")
    if stores and (cfg.trainer.val_only or "train" in stores):
        result.images = ImageSizes.of(stores)
        check_images(cfg, result)
    # Only if all rows were read does the count after the filter equal the run's.
    if reads_all:
        return rows, len(stores["train"]), stores["train"].num_dropped
    return rows, sizes.get("train"), 0


def _read_own(cfg: Config, result: PreflightResult) -> tuple[dict[str, Rows], int | None, int]:
    """Return the same for data of which only the class, or the reader of demonstrations, knows the number of rows."""
    try:
        if result.tokenizer_works:
            read = load_data(cfg)
            result.images = read.images
            check_images(cfg, result)
            prompts = read.prompts.get("train")
            return read.rows, *((len(prompts), prompts.num_dropped) if prompts else (None, 0))
    except RltrainError as error:
        result.problems.append(str(error))
    return {}, None, 0


def _count(split: str, names: Sequence[str], result: PreflightResult) -> int | None:
    """Return the number of rows of the files; None without files, or if one cannot be read (added to ``result``)."""
    if not names or not all(map(matching, names)):  # `preflight` has reported missing files
        return None
    try:
        return sum(num_rows(file) for name in names for file in files_of(name))
    except RltrainError as error:
        result.problems.append(f"data.{split}_files: {error}")
        return None


def try_reward(cfg: Config, rows: dict[str, Rows], result: PreflightResult) -> list[str]:
    """Score one row per data source with the ground truth as the response, one call each. Return the report."""
    custom, judge, lines = custom_reward(cfg.scoring), cfg.reward.judge, []
    if not cfg.reward_model.runs_scorers or cfg.sft.enabled:
        return []
    judges = bool(judge.url) or cfg.reward_model.judges
    by_judge = check_judge_server(judge, result) if judges else []
    if not (rows or custom) or (judges and not judge.runs_rule):
        return by_judge
    scores: list[Score] = []
    # Reversed, so that for a data source in both splits the training row replaces the validation row.
    firsts = {source: (split, at) for split in reversed(rows.values()) for source, at in split.data_sources().items()}
    try:
        # The scorer runs in this process, because the pool would need Ray.
        scorer = ScoringSlot.of(cfg.scoring) if judges else make_scorer(cfg.scoring)
        assert isinstance(scorer, ScoringSlot | RemoteScorer)
        try:
            for split, at in firsts.values():
                for row, score, seconds in try_truths(scorer, split, [at]):
                    scores.append(score)
                    printed = "".join(f"\n    printed: {line}" for line in scorer.take_printed().splitlines())
                    how = f"{short(row.data_source)!r}, the ground truth as the response"
                    lines.append(f"{how}: {_said(score)} ({seconds:.2f} s){printed}")
            if custom and not firsts and isinstance(scorer, ScoringSlot):
                scorer.prepare("")  # import and signature are checked without a row
        finally:
            scorer.close()
        if not judges:  # with a judge, a column may come from the judge
            check_columns(cfg.algorithm, cfg.reward.weights, scores)
        refuse_without_number(custom, scores)
    except RltrainError as error:
        result.problems.append(str(error))
    return (["\n  ".join(["reward", *lines])] if lines else []) + by_judge


def _said(score: Score) -> str:
    if score.value is None:
        return f"{score.status}: {score.error}".replace("\n", "\n    ")
    return f"{score.value:g}" + (
        f" with {', '.join(f'{name}={value}' for name, value in score.extras.items())}" if score.extras else ""
    )


def _check_rows(cfg: Config, rows: dict[str, Rows], result: PreflightResult) -> list[str]:
    """Return the linter's result on the first rows.

    Only built-in scorers grade them, because a user's function may cost money.
    """
    first = [split.select(range(min(_GRADED_ROWS, len(split)))) for split in rows.values()]
    if not first or cfg.sft.enabled:
        return []
    by_rule = cfg.reward.judge.runs_rule or not (cfg.reward.judge.url or cfg.reward_model.judges)
    grade = cfg.reward_model.runs_scorers and by_rule and not (cfg.custom_reward_function.path or cfg.reward.url)
    text = describe_problems(
        check_rows(first, encoder=chat_encoder(cfg) if result.tokenizer_works else None, grade=grade)
    )
    shares = [f"{min(_GRADED_ROWS, len(split)):,} of {len(split):,} {name}" for name, split in rows.items()]
    return [f"data: checked {' and '.join(shares)} rows" + (f"\n{text.rstrip()}" if text else ", nothing found")]
