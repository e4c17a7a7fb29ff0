"""Check parquet files before a run: schema, duplicates, lengths, images, and whether reference answers earn full score.

Exit code 0: nothing found; 2: problems, or nothing could be read.
"""

import argparse
import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from rltrain.data.chat import ChatEncoder
from rltrain.data.rows import MEDIA_COLUMNS, PromptRow, Rows, scan_rows
from rltrain.data_preprocess.common import IMAGE_SLOT, at_least
from rltrain.errors import DataError, RewardError, command
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.processes.slot import Slot
from rltrain.rewards.registry import FORMS, check_sources

Findings = dict[str, list[str]]

NUM_SHOWN = 3
FULL_SCORE = 1.0
# Every form is tried after a thinking block too.
THOUGHT = "<think>\nThe reference.\n</think>\n"
_SLOTS = {"images": IMAGE_SLOT, "videos": "<video>"}
_MAGIC = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|BM|II\*\0|MM\0\*", re.DOTALL)
_OPEN_TAG = re.compile(r"<(\w+)>\s*\Z")


def lint(
    files: Sequence[str],
    *,
    encoder: ChatEncoder | None = None,
    max_prompt_length: int | None = None,
    custom: CustomReward | None = None,
    max_rows: int | None = None,
) -> tuple[int, Findings]:
    """Number of usable rows, and what is wrong, by kind: one line for each row (or file) concerned.

    ``max_rows``: look at the first rows of each file only (its schema is read whole).
    """
    findings: Findings = defaultdict(list)
    if encoder is not None:
        encoder.encode([{"role": "user", "content": "?"}])  # a folder without a tokenizer fails here, not row by row
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
    for kind, lines in look_at(tables, encoder=encoder, custom=custom).items():
        findings[kind] += lines
    return sum(map(len, tables)), {kind: lines for kind, lines in findings.items() if lines}


def look_at(
    tables: Sequence[Rows], *, encoder: ChatEncoder | None, custom: CustomReward | None = None, grade: bool = True
) -> Findings:
    """What is wrong with rows that a run can read. ``grade``: whether their reference answers are scored."""
    findings: Findings = defaultdict(list)
    _check_duplicates(tables, findings)
    for rows in tables:
        _check_media(rows, findings)
    if grade:
        _check_answers(tables, encoder, custom, findings)
    return {kind: lines for kind, lines in findings.items() if lines}


def _check_duplicates(tables: Sequence[Rows], findings: Findings) -> None:
    first: dict[bytes, str] = {}
    for rows, position, row in _each(tables):
        key = hashlib.sha256(repr((row.prompt, rows.media(position))).encode()).digest()
        if key in first:
            findings["prompts that came before"].append(f"{rows.origin(position)}: as {first[key]}")
        first.setdefault(key, rows.origin(position))


def _check_media(rows: Rows, findings: Findings) -> None:
    for _, position, row in _each([rows]):
        media, text = rows.media(position), str([message["content"] for message in row.prompt])
        for name in MEDIA_COLUMNS:
            # written into the text, or a part of its own: {"type": "image"}
            num_slots = text.count(_SLOTS[name]) + text.count(f"'type': '{name.removesuffix('s')}'")
            num_given = len(media.get(name, []))
            if num_slots != num_given:
                said = f"{rows.origin(position)}: {num_slots} {_SLOTS[name]} in the prompt, {num_given} {name}"
                findings["media slots that do not fit"].append(said)
        for image in media.get("images", []):
            problem = _image_problem(image)
            if problem:
                findings["images that cannot be read"].append(f"{rows.origin(position)}: {problem}")


def _image_problem(image: Any) -> str | None:
    """What is wrong with an image: decoded where PIL is installed, else by its first bytes."""
    entry: dict[str, Any] = (
        image if isinstance(image, dict) else {"bytes": image} if isinstance(image, bytes) else {"path": image}
    )
    try:
        data: bytes = entry.get("bytes") or Path(entry.get("path") or "").read_bytes()
        from PIL import Image
    except ImportError:
        return None if _MAGIC.match(data) else "not the beginning of an image file"
    except OSError as error:
        return f"neither bytes nor a readable path ({error})"
    try:
        with Image.open(BytesIO(data)) as opened:
            opened.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return str(error)
    return None


def _check_lengths(rows: Rows, encoder: ChatEncoder, limit: int, findings: Findings) -> None:
    for _, position, row in _each([rows]):
        try:
            length = len(encoder.encode(row.prompt))
        except DataError as error:
            findings["prompts the chat template refuses"].append(f"{rows.origin(position)}: {error}")
            continue
        if length > limit:  # what images add depends on the model's processor and is not counted
            findings["prompts over the limit"].append(f"{rows.origin(position)}: {length} text tokens, limit {limit}")


def _check_answers(
    tables: Sequence[Rows], encoder: ChatEncoder | None, custom: CustomReward | None, findings: Findings
) -> None:
    """Every reference answer, written down in some form, must earn its scorer's full score."""
    form: dict[str, str] = {}
    unscored: dict[str, int] = defaultdict(int)
    passed: set[str] = set()
    with Slot(custom) as slot:
        for rows, position, row in _each(tables):
            source = row.data_source
            if row.reward_style == "model":
                continue
            try:
                if custom is None:
                    check_sources([source])
                if _is_tests(row.ground_truth):
                    continue
                best, form[source] = _best(slot, row, form.get(source))
            except RewardError as error:
                unscored[f"{source!r}: {error}"] += 1
                continue
            if best < FULL_SCORE:
                said = f"answer {str(row.ground_truth)[:60]!r} earns {best:g} at best"
                findings["answers their own scorer refuses"].append(f"{rows.origin(position)}: {said}")
            elif source not in passed and encoder is not None:
                findings["format rewards out of reach"] += _unreachable(slot, row, form[source], encoder)
                passed.add(source)
        sys.stderr.write(slot.take_printed())
    findings["data sources without a scorer"] += [
        f"{_count(number, 'row')} of {said}" for said, number in unscored.items()
    ]


def _is_tests(truth: Any) -> bool:
    return isinstance(truth, str) and truth.lstrip().startswith("{") and '"inputs"' in truth


def _best(slot: Slot, row: PromptRow, form: str | None) -> tuple[float, str]:
    """The best score of the reference answer (of several: of the worst), and the form that earns it."""
    forms = [one for one in (form, *FORMS, *(THOUGHT + each for each in FORMS)) if one is not None]
    best = (float("-inf"), forms[0])
    for one in forms:
        score = min((_score(slot, row, one.format(truth)) for truth in _truths(row)), default=float("-inf"))
        best = max(best, (score, one), key=lambda pair: pair[0])
        if score >= FULL_SCORE:
            break
    return best


def _truths(row: PromptRow) -> list[Any]:
    return row.ground_truth if isinstance(row.ground_truth, list) else [row.ground_truth]


def _score(slot: Slot, row: PromptRow, answer: str) -> float:
    value = slot.score(row.data_source, answer, row.ground_truth, row.extra_info).value
    return float("-inf") if value is None else value


def _unreachable(slot: Slot, row: PromptRow, form: str, encoder: ChatEncoder) -> list[str]:
    """Whether the chat template opens a tag that the scorer looks for in the answer, which then never holds it."""
    prompt = encoder.tokenizer.apply_chat_template(
        row.prompt, tokenize=False, add_generation_prompt=True, **encoder.template_kwargs
    )
    opened = _OPEN_TAG.search(prompt)
    if opened is None or not form.startswith(f"<{opened[1]}>"):
        return []
    score = _score(slot, row, form.format(_truths(row)[0]).removeprefix(f"<{opened[1]}>"))
    said = f"the chat template opens <{opened[1]}> itself, so an answer of {row.data_source!r} earns {score:g} at best"
    return [said] if score < FULL_SCORE else []


def _each(tables: Sequence[Rows]) -> Iterator[tuple[Rows, int, PromptRow]]:
    for rows in tables:
        for position, row in enumerate(rows):
            yield rows, position, row


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def describe(findings: Findings) -> str:
    """The report: every kind with its count and its first rows."""
    text = ""
    for kind, lines in findings.items():
        more = [f"… and {len(lines) - NUM_SHOWN} more"] if len(lines) > NUM_SHOWN else []
        text += "\n  ".join([f"{kind}: {len(lines)}", *lines[:NUM_SHOWN], *more]) + "\n"
    return text


@command
def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="parquet files of one run, so that duplicates are seen"
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="model folder: lengths and chat template are checked too")
    parser.add_argument("--max-prompt-length", type=at_least(1), metavar="N", help="data.max_prompt_length of the run")
    parser.add_argument("--reward-file", metavar="FILE", help="custom_reward_function.path of the run")
    parser.add_argument("--reward-name", default="compute_score", help="custom_reward_function.name (%(default)s)")
    options = parser.parse_args(argv)
    if options.max_prompt_length and not options.tokenizer:
        parser.error("--max-prompt-length counts tokens; give --tokenizer FOLDER too")
    encoder = ChatEncoder(options.tokenizer) if options.tokenizer else None
    custom = CustomReward(options.reward_file, options.reward_name) if options.reward_file else None
    limit = options.max_prompt_length
    num_rows, findings = lint(options.files, encoder=encoder, max_prompt_length=limit, custom=custom)
    sys.stdout.write(describe(findings))
    num_problems = sum(map(len, findings.values()))
    sys.stdout.write(
        f"{_count(num_rows, 'usable row')}, {_count(num_problems, 'problem') if findings else 'no problems'}\n"
    )
    return 2 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
