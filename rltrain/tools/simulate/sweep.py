"""The best layouts among combinations of settings: by seconds, and such as fit a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rltrain.base.errors import ConfigError, RltrainError, first_line
from rltrain.config.loaded import LoadedConfig
from rltrain.run.preflight.memory import forecast
from rltrain.run.preflight.memory_room import no_cache, too_large
from rltrain.run.seconds.step import Foretold
from rltrain.tools.simulate.report import seconds, table
from rltrain.tools.simulate.request import Request
from rltrain.tools.sweep import combinations
from rltrain.trainer.plan import Plan

# A phase that differs by less of a step explains nothing.
_LEAST = 0.01


@dataclass(frozen=True)
class Layout:
    """One combination that may run."""

    name: str
    loaded: LoadedConfig
    plan: Plan
    found: Foretold
    memory_bytes: int | None
    """Of a device; None: unknown."""

    @property
    def sample_s(self) -> float:
        """Seconds of a step for each of its samples: steps of several sizes can be compared by it."""
        return self.found.step_s / self.found.samples

    def problem(self) -> tuple[str, float | None]:
        """Why it does not fit ("" where it does, or nobody knows), and the GiB of its largest phase."""
        cfg = self.loaded.config
        try:
            phases = forecast(cfg, self.plan, self.memory_bytes)
        except RuntimeError:  # a forward that depends on numbers
            return "", None
        largest = max(row.total() for row in phases.values()) / 2**30
        if self.memory_bytes is None:
            return "", largest
        over = too_large(phases, self.memory_bytes)
        needs = ", ".join(f"{name} needs {phases[name].total() / 2**30:,.1f} GiB" for name in over)
        return needs or first_sentence(no_cache(cfg, phases["gen"], self.memory_bytes)), largest


def first_sentence(text: str) -> str:
    """Without what follows."""
    return text.partition(". ")[0]


def sweep(request: Request, best: int) -> str:
    """Foretell all combinations of the request's words, and tell of the best. Raises ConfigError for no run."""
    made: list[Layout] = []
    refused: Counter[str] = Counter()
    for name, words in combinations(request.words):
        try:
            loaded, plan, found = request.foretell(words)
        except RltrainError as error:
            refused[first_line(error)] += 1
            continue
        made.append(Layout(name, loaded, plan, found, request.memory_bytes(loaded)))
    if not made:
        raise ConfigError("\n".join(_told("are refused", refused.items())))
    made.sort(key=lambda layout: layout.sample_s)
    fitting, full = _fitting(made, best)
    parts = [_table(fitting), why(fitting[0][0], made[-1], "the last") if len(made) > 1 and fitting else ""]
    if len(fitting) > 1:
        parts.insert(1, why(fitting[0][0], fitting[1][0], "the second"))
    parts += _told("do not fit", full) + _told("are refused", refused.items())
    return "\n".join(filter(None, parts)) + "\n"


def _fitting(made: list[Layout], best: int) -> tuple[list[tuple[Layout, float | None]], list[tuple[str, int]]]:
    """The first that fit, with the GiB of their largest phase; and those before them that do not."""
    fitting: list[tuple[Layout, float | None]] = []
    full = list[tuple[str, int]]()
    for layout in made:
        problem, largest = layout.problem()
        if problem:
            full.append((f"{layout.name}: {problem}", 1))
        else:
            fitting.append((layout, largest))
        if len(fitting) == best:
            break
    return fitting, full


def _table(fitting: list[tuple[Layout, float | None]]) -> str:
    if not fitting:
        return "no combination fits"
    names = [name for name in fitting[0][0].found.seconds if name not in ("step", "generate_sequences", "reshard")]
    names = [name for name in names if any(layout.found.seconds.get(name, 0) >= 0.005 for layout, _ in fitting)]
    rows = [["step s", *names, "ms/sample", "tokens/s/device", "GiB", "settings"]]
    for layout, largest in fitting:
        found = layout.found
        phases = [seconds(found.seconds.get(name, 0.0)) for name in names]
        rates = [f"{1000 * layout.sample_s:,.1f}", f"{found.throughput:,.0f}"]
        rows.append([seconds(found.step_s), *phases, *rates, f"{largest:,.1f}" if largest else "?", layout.name])
    return table(rows)


def why(best: Layout, other: Layout, which: str) -> str:
    """The phases in which the two differ, a sample, the largest difference first."""
    scale = best.found.samples / other.found.samples
    theirs = {name: value * scale for name, value in other.found.seconds.items()}
    ours = best.found.seconds
    skipped = ("step", "gen")  # of gen its parts are told
    names = [name for name in dict.fromkeys([*ours, *theirs]) if name not in skipped]
    gaps = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in names}
    telling = sorted(
        (name for name in names if abs(gaps[name]) >= _LEAST * best.found.step_s), key=lambda n: -abs(gaps[n])
    )
    lines = [f"why the first and not {which}, {other.name}" + (" (of as many samples)" if scale != 1 else "")]
    for name in telling:
        lines.append(f"  {name}: {seconds(ours.get(name, 0.0))} s, not {seconds(theirs.get(name, 0.0))}")
        lines += [f"    {text}" for text in _parts(name, best, other)]
    return "\n".join(lines) if telling else f"{lines[0]}: no phase differs by {_LEAST:.0%} of the step"


def _parts(name: str, best: Layout, other: Layout) -> Iterator[str]:
    for layout in (best, other):
        if text := layout.found.why.get(name):
            yield f"{layout.name}: {text}"


def _told(what: str, reasons: Iterable[tuple[str, int]]) -> list[str]:
    """Each reason once, with how many combinations it concerns."""
    reasons = list(reasons)
    if not reasons:
        return []
    number = sum(times for _, times in reasons)
    lines = [f"  {times} x {reason}" if times > 1 else f"  {reason}" for reason, times in reasons]
    return ["\n".join([f"{number} combination{'s' * (number > 1)} {what}", *lines])]
