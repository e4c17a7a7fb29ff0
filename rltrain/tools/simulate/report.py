"""What was foretold, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rltrain.base.logs import count
from rltrain.run.seconds.assumptions import NOMINAL, Assumptions
from rltrain.run.seconds.step import Foretold
from rltrain.tools.simulate.calibration import Calibration
from rltrain.tools.simulate.request import Request
from rltrain.trainer.plan import Plan

_PARTS = ("generate_sequences", "reshard")


def describe(found: Foretold, plan: Plan, request: Request) -> str:
    """A step: its phases, throughput, and everything that was assumed."""
    nodes = f", {count(plan.num_nodes, 'node')}" if plan.num_nodes > 1 else ""
    where = f"{plan.num_devices} x {request.chip.name}{nodes}"
    parts = [
        f"a step takes about {seconds(found.step_s)} s on {where} (foretold, {basis(request)})",
        _phases(found),
        f"throughput  {found.throughput:,.1f} tokens/s/device over the whole step; "
        f"{found.response_tokens / (found.seconds['generate_sequences'] * found.num_devices):,.1f} of answers in "
        "generate_sequences",
        f"lengths     {request.lengths.told}",
        assumptions(request.assumed, nominal=request.chip is NOMINAL),
    ]
    if found.left_out:
        parts.append("\n  ".join(["not counted", *found.left_out]))
    return "\n".join(parts) + "\n"


def basis(request: Request) -> str:
    """Where the figures come from."""
    if request.calibration:
        return f"by the ratios of {request.calibration.run}"
    return "not measured on this device"


def seconds(value: float) -> str:
    """Three digits, and no fewer than there are in front of the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _phases(found: Foretold) -> str:
    width = max(map(len, found.seconds))
    lines = []
    for name, value in found.seconds.items():
        share = f"{value / found.step_s:4.0%}"
        label = f"  {name}" if name in _PARTS else name
        lines.append(f"  {label.ljust(width + 2)} {seconds(value):>8} s {share}  {found.why.get(name, '')}".rstrip())
    return "\n".join(lines)


def assumptions(assumed: Assumptions, *, nominal: bool) -> str:
    """All of them, with what `Assumptions` says of where they come from."""
    values = " ".join(f"{name}={value:g}" for name, value in assumed.told())
    head = "assumed     (--assume NAME=VALUE,… sets another; " + (
        "of nominal peaks, which the run's ratios correct)" if nominal else "docs/simulate.md says which are fitted)"
    )  # fmt: skip
    ratios = " ".join(f"{name}={value:.3g}" for name, value in assumed.ratios.items())
    return f"{head}\n  {values}" + (f"\n  times of the run's own seconds: {ratios}" if ratios else "")


def calibrated(calibration: Calibration) -> str:
    """What a run's phases took, beside what would have been foretold."""
    steps = count(calibration.num_steps, "step")
    lines = [f"calibrated on {calibration.run} ({steps}): measured, foretold before, ratio"]
    for name, foretold in calibration.foretold.items():
        if name in calibration.measured and name != "reward":
            own = calibration.measured[name]
            lines.append(f"  {name:<20} {own:9.3f} s {foretold:9.3f} s  {own / max(foretold, 1e-9):.2f}")
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns, the last one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join([*line[:-1], row[-1]]) for line, row in zip(lines, rows, strict=True))
