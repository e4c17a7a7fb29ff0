"""Check parquet files before a run: schema, duplicates, lengths, images, and whether reference answers earn full score.

Exit code 0: no problems; 2: problems, or no readable data.
"""

import argparse
import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rltrain.common.errors import DataError, RewardError, command
from rltrain.data.chat import ChatEncoder
from rltrain.data.rows import PromptRow, Rows, scan_rows
from rltrain.data_preprocess.common import IMAGE_SLOT, at_least
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.grading.truths import solutions, why_unmatchable
from rltrain.rewards.processes.slot import ScoringSlot
from rltrain.rewards.scorers.registry import FORMS, OWN_SCORER, check_sources, find_scorer

Findings = dict[str, list[str]]

NUM_SHOWN = 3
FULL_SCORE = 1.0
# Every form is also tried after a thinking block.
THOUGHT = "<think>\nThe reference.\n</think>\n"
_OPEN_TAG = re.compile(r"<(\w+)>\s*\Z")


def lint(
    files: Sequence[str],
    *,
    encoder: ChatEncoder | None = None,
    max_prompt_length: int | None = None,
    custom: CustomReward | None = None,
    max_rows: int | None = None,
) -> tuple[int, Findings]:
    """Return the number of usable rows, and the problems by kind, one line per row (or file).

    ``max_rows``: check only the first rows of each file (its schema is checked completely).
    """
    findings: Findings = defaultdict(list)
    if encoder is not None:
        encoder.try_template([[{"role": "user", "content": "?"}]])
        # raises an error here, instead of for every row, if there is no tokenizer
        encoder.encode([{"role": "user", "content": "?"}])
    tables = []
    for file in files:
        try:
            rows, problems = scan_rows(file)
        except DataError as error:
            findings["files that cannot be read"].append(str(error))
            continue
        findings["rows with schema errors"] += problems
        tables.append(rows if max_rows is None else rows.select(range(min(max_rows, len(rows)))))
    if encoder is not None and max_prompt_length is not None:
        for rows in tables:
            _check_lengths(rows, encoder, max_prompt_length, findings)
    for kind, lines in check_rows(tables, encoder=encoder, custom=custom).items():
        findings[kind] += lines
    return sum(map(len, tables)), {kind: lines for kind, lines in findings.items() if lines}


def check_rows(
    tables: Sequence[Rows], *, encoder: ChatEncoder | None, custom: CustomReward | None = None, grade: bool = True
) -> Findings:
    """Return the problems of valid rows. ``grade``: also score their reference answers."""
    findings: Findings = defaultdict(list)
    _check_duplicates(tables, findings)
    for rows in tables:
        _check_slots(rows, findings)
        _check_ends(rows, findings)
    if grade:
        _check_answers(tables, encoder, custom, findings)
    return {kind: lines for kind, lines in findings.items() if lines}


def _check_duplicates(tables: Sequence[Rows], findings: Findings) -> None:
    first: dict[bytes, str] = {}
    for rows, position, row in _each(tables):
        key = hashlib.sha256(repr((row.prompt, rows.images(position))).encode()).digest()
        if key in first:
            findings["repeated prompts"].append(f"{rows.origin(position)}: as {first[key]}")
        first.setdefault(key, rows.origin(position))


def _check_slots(rows: Rows, findings: Findings) -> None:
    num_images = rows.num_images.tolist()
    for _, position, row in _each([rows]):
        text, num_given = str([message["content"] for message in row.prompt]), num_images[position]
        # in the text, or as a separate part
        num_slots = text.count(IMAGE_SLOT) + text.count("'type': 'image'")
        if num_slots != num_given:
            sentence = f"{rows.origin(position)}: {num_slots} {IMAGE_SLOT} in the prompt, {num_given} images"
            findings["image slots that do not match the images"].append(sentence)


def _check_ends(rows: Rows, findings: Findings) -> None:
    for _, position, row in _each([rows]):
        if row.prompt[-1]["role"] == "assistant":
            sentence = "its last message is the assistant's: it is closed, and the answer is a new turn, as in verl"
            findings["prompts that end with an assistant message"].append(f"{rows.origin(position)}: {sentence}")


def _check_lengths(rows: Rows, encoder: ChatEncoder, limit: int, findings: Findings) -> None:
    for _, position, row in _each([rows]):
        try:
            sizes = [encoder.bounded_size(size) for size in rows.image_sizes(position)]
            length = len(encoder.expand([row.prompt], [sizes], encoder.row_tools.of(row))[0][0])
        except DataError as error:
            findings["prompts that the chat template rejects"].append(f"{rows.origin(position)}: {error}")
            continue
        if length > limit:
            findings["prompts over the limit"].append(f"{rows.origin(position)}: {length} tokens, limit {limit}")


def _check_answers(
    tables: Sequence[Rows], encoder: ChatEncoder | None, custom: CustomReward | None, findings: Findings
) -> None:
    """Check that every reference answer, in some form, earns its scorer's full score."""
    form: dict[str, str] = {}
    unscored: dict[str, int] = defaultdict(int)
    passed: set[str] = set()
    with ScoringSlot(custom) as slot:
        for rows, position, row in _each(tables):
            source = row.data_source
            if row.reward_style == "model":
                continue
            try:
                if custom is None:
                    check_sources([source])
                if _is_tests(row.ground_truth):
                    continue
                if custom is None and (why := _unmatchable(row)):
                    sentence = f"ground truth {str(row.ground_truth)[:60]!r}: {why}"
                    findings["ground truths that no response can match"].append(f"{rows.origin(position)}: {sentence}")
                    continue
                best, form[source] = best_form(slot, row, form.get(source))
            except RewardError as error:
                unscored[f"{source!r}: {error}"] += 1
                continue
            if best < FULL_SCORE:
                sentence = f"answer {str(row.ground_truth)[:60]!r} earns {best:g} at best"
                findings["ground truths that their scorer rejects"].append(f"{rows.origin(position)}: {sentence}")
            elif source not in passed and encoder is not None:
                findings["format rewards out of reach"] += _unreachable(slot, row, form[source], encoder)
                passed.add(source)
        sys.stderr.write(slot.take_printed())
    findings["data sources without a scorer"] += [
        f"{_count(number, 'row')} of {source}" for source, number in unscored.items()
    ]


def _unmatchable(row: PromptRow) -> str | None:
    """Return why no response can match the row's ground truth, or None. Only ground truths of maths must be values."""
    kind = find_scorer(row.data_source).__module__.rpartition(".")[2]
    return None if kind in ("code", "qa", "reasoning_gym") else why_unmatchable(row.ground_truth)


def _is_tests(truth: Any) -> bool:
    return isinstance(truth, str) and truth.lstrip().startswith("{") and '"inputs"' in truth


def best_form(slot: ScoringSlot, row: PromptRow, form: str | None = None) -> tuple[float, str]:
    """Return the best score of the reference answer (of several: of the worst), and the form that earns it."""
    forms = [
        candidate
        for candidate in (form, *FORMS, *(THOUGHT + base_form for base_form in FORMS))
        if candidate is not None
    ]
    best = (float("-inf"), forms[0])
    for candidate in forms:
        for truths in _truths(row):
            score = min((_score(slot, row, candidate.format(truth)) for truth in truths), default=float("-inf"))
            best = max(best, (score, candidate), key=lambda pair: pair[0])
        if best[0] >= FULL_SCORE:
            break
    return best


def _truths(row: PromptRow) -> list[list[Any]]:
    """Return the reference answers as stored, and as a scorer of values reads them if that differs."""
    written = row.ground_truth if isinstance(row.ground_truth, list) else [row.ground_truth]
    read: list[Any] = solutions(row.ground_truth)
    return [written] if read == [str(truth) for truth in written] else [written, read]


def _score(slot: ScoringSlot, row: PromptRow, answer: str) -> float:
    value = slot.score(row.data_source, answer, row.ground_truth, row.extra_info).value
    return float("-inf") if value is None else value


def _unreachable(slot: ScoringSlot, row: PromptRow, form: str, encoder: ChatEncoder) -> list[str]:
    """Return a note if the scorer requires a tag that it never sees: special, or opened by the chat template."""
    answer = form.format(_truths(row)[-1][0])
    special = {token.content for token in encoder.tokenizer.added_tokens_decoder.values() if token.special}
    if dropped := sorted(token for token in special if token in answer):
        visible = re.sub("|".join(map(re.escape, dropped)), "", answer)
        if (score := _score(slot, row, visible)) < FULL_SCORE:
            return [
                f"{', '.join(dropped)}: special tokens, which are left out of the text that is scored, so an answer of "
                f"{row.data_source!r} earns {score:g} at best"
            ]
    try:
        prompt = encoder.tokenizer.apply_chat_template(
            row.prompt, tokenize=False, add_generation_prompt=True, **encoder.template_kwargs
        )
    except Exception:  # noqa: BLE001 - a template may raise anything; it is reported where rows are tokenised
        return []
    opened = _OPEN_TAG.search(prompt)
    if opened is None or not form.startswith(f"<{opened[1]}>"):
        return []
    score = _score(slot, row, answer.removeprefix(f"<{opened[1]}>"))
    note = f"the chat template opens <{opened[1]}> itself, so a response of {row.data_source!r} earns {score:g} at best"
    return [note] if score < FULL_SCORE else []


def _each(tables: Sequence[Rows]) -> Iterator[tuple[Rows, int, PromptRow]]:
    for rows in tables:
        for position, row in enumerate(rows):
            yield rows, position, row


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def describe(findings: Findings) -> str:
    """Return the report: every kind with its count and its first rows."""
    text = ""
    for kind, lines in findings.items():
        remainder = [f"… and {len(lines) - NUM_SHOWN} more"] if len(lines) > NUM_SHOWN else []
        text += "\n  ".join([f"{kind}: {len(lines)}", *lines[:NUM_SHOWN], *remainder]) + "\n"
    return text


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rltrain lint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="parquet files of one run, to find duplicates")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="model folder: lengths and chat template are checked too")
    parser.add_argument("--max-prompt-length", type=at_least(1), metavar="N", help="data.max_prompt_length of the run")
    parser.add_argument("--reward-file", metavar="FILE", help="custom_reward_function.path of the run")
    parser.add_argument("--reward-name", default="compute_score", help="custom_reward_function.name (%(default)s)")
    options = parser.parse_args(argv)
    if keys := [word for word in options.files if re.match(r"[\w.]+=", word)]:
        parser.error(
            f"{keys[0]}: lint takes flags instead of keys (see --help); a dry run with the keys checks data too"
        )
    if options.max_prompt_length and not options.tokenizer:
        parser.error("--max-prompt-length counts tokens; give --tokenizer FOLDER too")
    encoder = ChatEncoder(options.tokenizer) if options.tokenizer else None
    custom = CustomReward(options.reward_file, options.reward_name) if options.reward_file else None
    limit = options.max_prompt_length
    num_rows, findings = lint(options.files, encoder=encoder, max_prompt_length=limit, custom=custom)
    sys.stdout.write(describe(findings).replace(OWN_SCORER, "--reward-file my_reward.py --reward-name compute_score"))
    num_problems = sum(map(len, findings.values()))
    sys.stdout.write(
        f"{_count(num_rows, 'usable row')}, {_count(num_problems, 'problem') if findings else 'no problems'}\n"
    )
    return 2 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
