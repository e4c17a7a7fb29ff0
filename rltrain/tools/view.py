"""``rltrain view RUN``: shows the saved samples of a run on the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.common.errors import DataError, command, sanitize
from rltrain.run.report.samples import (
    HEAD,
    POLICY,
    different_prompts_first,
    is_right,
    numbers_of,
    one_line,
    read_samples,
    sample_steps,
    shorten,
    texts_of,
)

if TYPE_CHECKING:
    import pandas as pd

_ORDERS = {
    "worst": "lowest score first",
    "best": "highest score first",
    "longest": "most tokens first",
    "mixed": "a right and a wrong response of each prompt that has both",
    "failed": "responses whose scorer or trajectory failed",
    "most_turns": "most turns of the policy first",
    "failed_tools": "responses whose tool calls failed, were unreadable or not run; most of them first",
}
# Sort column and direction of each order.
_SORTED_BY = {
    "worst": ("score", True), "best": ("score", False), "longest": ("response_length", False),
    "most_turns": ("num_turns", False), "failed_tools": ("_errors", False),
}  # fmt: skip
_TROUBLES = ("tool_errors", "unreadable_calls", "calls_not_run")


def arrange(frame: pd.DataFrame, order: str | None, source: str | None) -> pd.DataFrame:
    """Return the samples of one data source in the requested order, the first of each prompt first."""
    if source is not None:
        sources = frame["data_source"].unique()
        frame = frame[frame["data_source"] == source]
        if not len(frame):
            raise DataError(f"--source {source}: no sample has it. Sources: {', '.join(sources)}.")
    if order in ("most_turns", "failed_tools") and "num_turns" not in frame:
        raise DataError(f"--{order.replace('_', '-')}: the responses of this run have only one turn.")
    if order == "mixed" and len(frame):  # for an empty table, pandas' `apply` returns a table, not a column
        right = frame.apply(is_right, axis=1)
        mixed = right.groupby(frame["row"]).transform("nunique") > 1
        return frame[mixed & ~frame.assign(right=right).duplicated(["row", "right"])]
    if order == "failed":
        failed = frame["reward_failed"] > 0
        frame = frame[failed | (frame["agent_failed"] != "")] if "agent_failed" in frame else frame[failed]
    elif order == "failed_tools":
        frame = frame.assign(_errors=frame[list(_TROUBLES)].sum(axis=1)).query("_errors > 0")
    column, ascending = _SORTED_BY.get(order or "", (None, True))
    # The sort is stable, so that equal scores keep the order of the data and repeated calls show the same samples.
    frame = frame.sort_values(column, ascending=ascending, kind="stable") if column else frame
    return different_prompts_first(frame).drop(columns="_errors", errors="ignore")


def compare(run: Path, steps: Sequence[int], count: int, source: str | None, width: int) -> list[str]:
    """Return one line per prompt that compares its first responses at two validation steps. steps: by default the first
    and the newest.
    """
    tested = list(sample_steps(run, "val"))
    # A single given step is compared with the first step.
    steps = [tested[0], *steps] if len(steps) == 1 else steps or tested
    if steps[0] == steps[-1]:
        only = f"there is one validation only, of step {tested[0]}" if len(tested) == 1 else f"step {steps[0]} twice"
        raise DataError(
            f"--compare: {only}. Saved: {', '.join(map(str, tested[:20]))}. trainer.test_freq=N validates every N "
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
    return [*lines, f"right, of all saved ones: {', '.join(rights)}"]


def show(sample: Mapping[str, Any], console: Any, most: int) -> None:
    """Print one sample: origin, prompt, response, ground truth, and every number. The middle of long texts is omitted.

    A conversation is printed message by message, with a label on the policy's turns.
    """
    from rich.text import Text

    right = is_right(sample)
    head = " ".join(f"{name} {sample[name]}" for name in HEAD if sample.get(name) is not None)
    console.rule(
        Text(sanitize(f"{head} {'✓' if right else '✗'}"), style="bold green" if right else "bold red"), align="left"
    )
    for label, text in texts_of(sample, most, " (--chars)"):
        style = "bold green" if label.startswith(POLICY) else "bold cyan"
        console.print(Text(f"{label}: ", style=style) + Text(sanitize(text)))
    console.print(Text(sanitize(numbers_of(sample)), style="dim"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rltrain view", description="Show the saved samples of a run.")
    parser.add_argument("run", type=Path, help="run folder (trainer.default_local_dir)")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument("--val", action="store_true", help="responses of a validation instead of a training step")
    order = parser.add_mutually_exclusive_group()
    for name, text in _ORDERS.items():
        order.add_argument(f"--{name.replace('_', '-')}", dest="order", action="store_const", const=name, help=text)
    pair = "the same validation prompts at two steps (default: first and newest; one step: first and that)"
    parser.add_argument("--compare", nargs="*", type=int, metavar="STEP", help=pair)
    parser.add_argument("-n", type=int, default=5, help="number of responses (default 5)")
    parser.add_argument("--source", help="show only this data_source")
    parser.add_argument("--lines", action="store_true", help="one line per response")
    parser.add_argument("--chars", type=int, default=2000, help="maximum characters of a text (default 2000)")
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    from rltrain.common.logs import SanitizedConsole

    console = SanitizedConsole(markup=False, emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())
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
        console.print(f"{min(len(arranged), arguments.n)} of {len(arranged)} responses, step {frame['step'].iloc[0]}")
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        # Otherwise Python reports the broken pipe when it flushes standard output at exit.
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
