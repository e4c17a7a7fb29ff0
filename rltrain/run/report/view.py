"""``python -m rltrain.view RUN``: shows the saved samples of a run on the terminal."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.agents.content import as_text
from rltrain.common.errors import DataError, command, host_error, sanitize
from rltrain.common.storage import run_folder

if TYPE_CHECKING:
    import pandas as pd

_FILE = re.compile(r"(train|val)_(\d+)\.parquet")
_ORDERS = {
    "worst": "lowest score first",
    "best": "highest score first",
    "longest": "most tokens first",
    "mixed": "answers to prompts that some answered right and some wrong",
    "failed": "answers that could not be scored, conversations that could not go on",
    "most_turns": "most turns of the policy first",
    "failed_tools": "answers whose calls failed, or could not be read or run; most of them first",
}
_TEXTS = ("question", "prompt", "answer", "messages", "ground_truth", "reward_error", "agent_failed")
_TROUBLES = ("tool_errors", "unreadable_calls", "calls_not_run")
# Maximum number of parts of a conversation on one line. The first and the last are shown.
_MOST_PARTS = 6
_POLICY = "policy, turn"
# Characters of a call in the label of its result.
_LABEL_CHARS = 500
_HEAD = ("step", "data_source", "row", "index", "sample")


def is_right(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample is right, by ``acc`` if the scorer returns it, else by the score."""
    acc = sample.get("acc")
    # In a table, a number that a row lacks is NaN, which differs from itself. A text has no meaning here.
    return float(sample["score"] if acc is None or isinstance(acc, str) or acc != acc else acc) > 0


def one_line(sample: Mapping[str, Any], width: int = 120) -> str:
    """Return ``47+9=? -> 56 ✓``; after a wrong response, also the right one.

    A conversation shows calls with their results and the other messages: ``17*23? -> [mul 17, 23 = 391] -> 391 ✓``.
    """
    parts = _parts(sample)
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


def _parts(sample: Mapping[str, Any]) -> list[str]:
    messages = conversation(sample)
    parts = []
    for message, following in zip(messages, [*messages[1:], {}], strict=False):
        if message["role"] != "assistant":
            call = " ".join(filter(None, [message.get("name"), _values(message.get("arguments", ""))]))
            said = as_text(message["content"])
            parts.append(f"[{call} = {said}]" if call else f"[{said}]")
        elif following.get("role") != "tool":  # otherwise the call is shown with its result
            parts.append(message["content"])
    return parts or [sample["answer"]]


def shorten(text: str, width: int) -> str:
    """Return one line of at most ``width`` characters, with the start and the end of the text."""
    text = sanitize(" ".join(text.split()))
    head = (width - 3) // 2
    return text if len(text) <= width else f"{text[:head]} … {text[len(text) - (width - 3 - head) :]}"


def without_middle(text: str, most: int, how: str = "") -> str:
    """Return start and end of ``text``, ``most`` characters in all, around the number of omitted characters.

    how: a hint on how to see them.
    """
    cut = len(text) - most
    middle = f"\n… {cut:,} characters left out{how} …\n"
    return text if cut <= 0 else text[: most // 2] + middle + text[len(text) - (most - most // 2) :]


def _values(arguments: str) -> str:
    """Return the values of a call's arguments, without their names."""
    try:
        return ", ".join(
            value if isinstance(value, str) else json.dumps(value) for value in json.loads(arguments).values()
        )
    except (ValueError, AttributeError):  # not JSON, or its middle was cut
        return arguments


def sample_steps(run: Path, split: str) -> dict[int, Path]:
    """Return the steps with saved samples, ascending, and their files."""
    matches = [
        (match, file)
        for file in run_folder(run).glob("samples/*")
        if (match := _FILE.fullmatch(file.name)) and match[1] == split
    ]
    if not matches:
        if split == "train" and any(run_folder(run).glob("samples/val_*")):
            raise DataError(f"{run}/samples holds answers of validation only: add --val.")
        kind = "validation" if split == "val" else "training"
        hint = "data.val_files and " if split == "val" else ""
        raise DataError(
            f"{run}/samples holds no answers of {kind}. Give the folder of a run with {hint}trainer.samples_freq=1."
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


def arrange(frame: pd.DataFrame, order: str | None, source: str | None) -> pd.DataFrame:
    """Return the samples of one data source in one of the orders of the command."""
    if source is not None:
        sources = frame["data_source"].unique()
        frame = frame[frame["data_source"] == source]
        if not len(frame):
            raise DataError(f"--source {source}: there is none of it. Sources: {', '.join(sources)}.")
    if order in ("worst", "best"):
        # Stable, so that equal scores keep the order of the data and repeated calls show the same.
        return frame.sort_values("score", ascending=order == "worst", kind="stable")
    if order == "longest":
        return frame.sort_values("response_length", ascending=False, kind="stable")
    if order == "failed":
        failed = frame["reward_failed"] > 0
        return frame[failed | (frame["agent_failed"] != "")] if "agent_failed" in frame else frame[failed]
    if order in ("most_turns", "failed_tools"):
        return _by_turns(frame, order)
    if order == "mixed":
        right = frame.apply(is_right, axis=1)
        # For an empty table, pandas' `apply` returns a table and not a column.
        return frame[right.groupby(frame["row"]).transform("nunique") > 1] if len(frame) else frame
    return frame


def _by_turns(frame: pd.DataFrame, order: str) -> pd.DataFrame:
    if "num_turns" not in frame:
        raise DataError(f"--{order.replace('_', '-')}: the answers of this run have one turn each.")
    if order == "most_turns":
        return frame.sort_values("num_turns", ascending=False, kind="stable")
    troubles = frame[list(_TROUBLES)].sum(axis=1)
    return frame[troubles > 0].loc[troubles[troubles > 0].sort_values(ascending=False, kind="stable").index]


def compare(run: Path, steps: Sequence[int], count: int, source: str | None, width: int) -> list[str]:
    """Return one line per first response to the same validation prompts at two steps.

    steps: default is the first and the newest.
    """
    tested = list(sample_steps(run, "val"))
    # A single step is compared with the first.
    steps = [tested[0], *steps] if len(steps) == 1 else steps or tested
    if steps[0] == steps[-1]:
        only = f"there is one validation only, of step {tested[0]}" if len(tested) == 1 else f"step {steps[0]} twice"
        raise DataError(
            f"--compare: {only}. Kept are: {', '.join(map(str, tested[:20]))}. trainer.test_freq=N validates every N "
            "steps, trainer.val_before_train=True before the first."
        )
    frames = [arrange(read_samples(run, step, "val"), None, source) for step in (steps[0], steps[-1])]
    # The first response to each prompt: the saved prompts do not change between validations.
    before, after = [frame[frame["sample"] == 0].set_index("row") for frame in frames]
    lines = []
    for row in [row for row in before.index if row in after.index][:count]:
        lines.append(shorten(before.loc[row, "question"], width))
        for sample in (before.loc[row].to_dict(), after.loc[row].to_dict()):
            lines.append(f"  step {sample['step']:>5}{one_line(sample | {'question': ''}, width - 16)}")
    rights = [f"step {frame['step'].iloc[0]}: {frame.apply(is_right, axis=1).mean():.1%}" for frame in frames]
    return [*lines, f"right, of all that were kept: {', '.join(rights)}"]


def show(sample: Mapping[str, Any], console: Any, most: int) -> None:
    """Print one sample: origin, prompt, response, ground truth, and every number. Long texts lose their middle.

    A conversation is printed message by message, with a label on the policy's turns.
    """
    from rich.text import Text

    right = is_right(sample)
    head = " ".join(f"{name} {sample[name]}" for name in _HEAD if sample.get(name) is not None)
    console.rule(
        Text(sanitize(f"{head} {'✓' if right else '✗'}"), style="bold green" if right else "bold red"), align="left"
    )
    for label, text in texts_of(sample, most, " (--chars)"):
        style = "bold green" if label.startswith(_POLICY) else "bold cyan"
        console.print(Text(f"{label}: ", style=style) + Text(sanitize(text)))
    console.print(Text(sanitize(numbers_of(sample)), style="dim"))


def texts_of(sample: Mapping[str, Any], most: int, how: str = "") -> list[tuple[str, str]]:
    """Return prompt, response (or messages) and ground truth, each with its label.

    Texts of more than ``most`` characters lose their middle. how: a hint on how to see it.
    """

    def columns(*names: str) -> list[tuple[str, str]]:
        return [(name, sample[name]) for name in names if sample.get(name)]

    said = _labelled(conversation(sample)) or columns("answer")
    behind = columns("ground_truth", "reward_error", "agent_failed")
    return [(label, without_middle(text, most, how)) for label, text in [*columns("prompt"), *said, *behind]]


def numbers_of(sample: Mapping[str, Any]) -> str:
    """Return all numbers of a sample on one line."""
    numbers = {name: value for name, value in sample.items() if name not in (*_HEAD, *_TEXTS)}
    parts = (f"{name} {each:.4g}" if isinstance(each, float) else f"{name} {each}" for name, each in numbers.items())
    return "  ".join(parts)


def _labelled(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the texts of messages with labels: ``policy, turn 1``, ``add {"a": 2} (0.003 s)``, ``user``."""
    labelled, turn = [], 0
    for message in messages:
        if message["role"] == "assistant":
            turn += 1
            label = f"{_POLICY} {turn}"
        else:
            call = [str(message[key]) for key in ("name", "arguments") if key in message]
            seconds = [f"({message['seconds']:.3g} s)"] if "seconds" in message else []
            label = shorten(" ".join([message["role"], *call, *seconds]), _LABEL_CHARS)
        labelled.append((label, as_text(message["content"])))
    return labelled


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rltrain view", description="Show the answers that a run has kept.")
    parser.add_argument("run", type=Path, help="run folder (trainer.default_local_dir)")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument("--val", action="store_true", help="answers of validation instead of training")
    order = parser.add_mutually_exclusive_group()
    for name, text in _ORDERS.items():
        order.add_argument(f"--{name.replace('_', '-')}", dest="order", action="store_const", const=name, help=text)
    pair = "the same validation prompts at two steps (default: first and newest; one step: first and that)"
    parser.add_argument("--compare", nargs="*", type=int, metavar="STEP", help=pair)
    parser.add_argument("-n", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--source", help="only this data_source")
    parser.add_argument("--lines", action="store_true", help="one line an answer")
    parser.add_argument("--chars", type=int, default=2000, help="longest text shown whole (default 2000)")
    parser.add_argument("--width", type=int, help="columns (default: those of the terminal)")
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    from rltrain.common.logs import SanitizedConsole

    plainly = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": not sys.stdout.isatty()}
    console = SanitizedConsole(width=arguments.width, **plainly)  # type: ignore[arg-type]
    try:
        if arguments.compare is not None:
            lines = compare(arguments.run, arguments.compare, arguments.n, arguments.source, console.width)
            console.print("\n".join(lines))
            return 0
        frame = read_samples(arguments.run, arguments.step, "val" if arguments.val else "train")
        arranged = arrange(frame, arguments.order, arguments.source)
        for sample in arranged.head(arguments.n).to_dict("records"):
            if arguments.lines:
                console.print(one_line(sample, console.width - 8))
            else:
                show(sample, console, arguments.chars)
        console.print(f"{min(len(arranged), arguments.n)} of {len(arranged)} answers, step {frame['step'].iloc[0]}")
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        # Else Python reports the broken pipe when it flushes standard output at exit.
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
