"""Saved samples of a run, and their text for terminals and pages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.agents.content import as_text
from rltrain.common.errors import DataError, host_error, sanitize
from rltrain.common.storage import run_folder

if TYPE_CHECKING:
    import pandas as pd

_FILE = re.compile(r"(train|val)_(\d+)\.parquet")
# Columns shown in the header of a sample, and texts; all others are numbers.
HEAD = ("step", "data_source", "row", "index", "sample")
_TEXTS = ("question", "prompt", "answer", "messages", "ground_truth", "reward_error", "agent_failed")
# Maximum number of parts of a conversation on one line. The first and the last are shown.
_MOST_PARTS = 6
POLICY = "policy, turn"
# Maximum number of characters of a call that the label of its result quotes.
_LABEL_CHARS = 500


def is_right(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample is right, by ``acc`` if the scorer returns it, else by the score."""
    acc = sample.get("acc")
    # A missing number in a table is NaN, which differs from itself. Texts are ignored.
    return float(sample["score"] if acc is None or isinstance(acc, str) or acc != acc else acc) > 0


def one_line(sample: Mapping[str, Any], width: int = 120) -> str:
    """Return ``47+9=? -> 56 ✓``; after a wrong response, also the right one.

    A conversation shows the texts of its turns: ``17*23? -> I calculate. <tool_call>… -> 391 -> 391 ✓``.
    """
    parts = [as_text(message["content"]) for message in conversation(sample)] or [sample["answer"]]
    if len(parts) > _MOST_PARTS:
        parts = [*parts[: _MOST_PARTS // 2], "…", *parts[-(_MOST_PARTS // 2 - 1) :]]
    question = shorten(sample["question"], width // 2)
    room = width // 2 if len(parts) == 1 else max(12, (width - len(question) - width // 8) // len(parts) - len(" -> "))
    answer = " -> ".join(shorten(part, room) for part in parts)
    mark = "✓" if is_right(sample) else f"✗ ({shorten(str(sample['ground_truth']), width // 4)})"
    return f"{question} -> {answer} {mark}"


def conversation(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages after the prompt: of the assistant (the policy), of tools and of users.

    Empty for a response of one turn.
    """
    return json.loads(sample.get("messages") or "[]")


def text_of(value: Any) -> str:
    """Return a text unchanged, and other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def shorten(text: str, width: int) -> str:
    """Return one line of at most ``width`` characters, with the start and the end of the text."""
    text = sanitize(" ".join(text.split()))
    head = (width - 3) // 2
    return text if len(text) <= width else f"{text[:head]} … {text[len(text) - (width - 3 - head) :]}"


def without_middle(text: str, most: int, how: str = "") -> str:
    """Return start and end of ``text`` (``most`` characters in total), with the number of omitted characters in
    between.

    how: hint on how to see the rest.
    """
    cut = len(text) - most
    middle = f"\n… {cut:,} characters left out{how} …\n"
    return text if cut <= 0 else text[: most // 2] + middle + text[len(text) - (most - most // 2) :]


def sample_steps(run: Path, split: str) -> dict[int, Path]:
    """Return the steps with saved samples, ascending, and their files."""
    matches = [
        (match, file)
        for file in run_folder(run).glob("samples/*")
        if (match := _FILE.fullmatch(file.name)) and match[1] == split
    ]
    if not matches:
        if split == "train" and any(run_folder(run).glob("samples/val_*")):
            raise DataError(f"{run}/samples has responses of validations only: add --val.")
        kind = "validation" if split == "val" else "training"
        hint = "data.val_files and " if split == "val" else ""
        raise DataError(
            f"{run}/samples has no responses from {kind}. Give the folder of a run with {hint}trainer.samples_freq=1."
        )
    return dict(sorted((int(match[2]), file) for match, file in matches))


def read_samples(run: Path | str, step: int | None = None, split: str = "train") -> pd.DataFrame:
    """Return the saved samples of one step (None: the newest), one row per response. split: train or val."""
    import pandas as pd
    import pyarrow as pa

    files = sample_steps(Path(run), split)
    if step is None:
        step = max(files)
    if step not in files:
        near = sorted(sorted(files, key=lambda kept_step: abs(kept_step - step))[:6])
        raise DataError(f"{run}/samples has no {split} step {step}. Near it: {', '.join(map(str, near))}.")
    try:
        return pd.read_parquet(files[step])
    except (OSError, pa.ArrowException) as error:
        raise host_error(error) or DataError(f"{files[step]} cannot be read: {error}") from error


def different_prompts_first(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in order, but with the first row of every prompt before any second row."""
    return frame.loc[frame.groupby("row").cumcount().sort_values(kind="stable").index]


def texts_of(sample: Mapping[str, Any], most: int, how: str = "") -> list[tuple[str, str]]:
    """Return prompt, response (or messages) and ground truth, each with its label.

    Texts of more than ``most`` characters lose their middle. how: hint on how to see the rest.
    """

    def columns(*names: str) -> list[tuple[str, str]]:
        return [(name, sample[name]) for name in names if sample.get(name)]

    texts = _labelled(conversation(sample)) or columns("answer")
    after = columns("ground_truth", "reward_error", "agent_failed")
    return [(label, without_middle(text, most, how)) for label, text in [*columns("prompt"), *texts, *after]]


def numbers_of(sample: Mapping[str, Any]) -> str:
    """Return all numbers of a sample on one line."""
    numbers = {name: value for name, value in sample.items() if name not in (*HEAD, *_TEXTS)}
    parts = (f"{name} {each:.4g}" if isinstance(each, float) else f"{name} {each}" for name, each in numbers.items())
    return "  ".join(parts)


def _labelled(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the texts of messages with labels: ``policy, turn 1``, ``add {"a": 2} (0.003 s)``, ``user``."""
    labelled, turn = [], 0
    for message in messages:
        if message["role"] == "assistant":
            turn += 1
            label = f"{POLICY} {turn}"
        else:
            call = [str(message[key]) for key in ("name", "arguments") if key in message]
            seconds = [f"({message['seconds']:.3g} s)"] if "seconds" in message else []
            label = shorten(" ".join([message["role"], *call, *seconds]), _LABEL_CHARS)
        labelled.append((label, as_text(message["content"])))
    return labelled
