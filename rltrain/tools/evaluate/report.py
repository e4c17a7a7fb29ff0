"""Tables of an evaluation, as wide as the terminal, or 200 columns without a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from rltrain.common.errors import sanitize
from rltrain.common.logs import SanitizedConsole

_WIDTH = 200
_BENCHMARKS = re.compile(r"logicvista|math-?_?vision|math-?_?vista", re.IGNORECASE)
_SHARES = ("truncated", "failed")
_AVERAGE = "Avg."


def show(results: Sequence[Mapping[str, Any]], differences: Sequence[Mapping[str, Any]] = ()) -> None:
    """Print one table per model, and a table over all models with their `differences` if there are several.

    Benchmarks with published numbers per model always get the second table.
    """
    console = console_of()
    try:
        if len(results) == 1:
            write_table(console, _of_model(results[0]))
        if len(results) > 1 or any(_BENCHMARKS.search(source) for source in results[0]["sources"]):
            write_table(console, _of_all(results))
        for result in results:
            for name, value in result.get("whole_sets", {}).items():
                console.print(Text(sanitize(f"{result['model']['name']}: {name} {100 * value:.1f} %")))
        for line in _difference_lines(differences):
            console.print(Text(sanitize(line)), soft_wrap=True)
        for note in dict.fromkeys(note for result in results for note in result["notes"]):
            console.print(Text(sanitize(f"note: {note}")), soft_wrap=True)
        console.print(Text("[ ]: 95 % of bootstrap draws over prompts"))
    except BrokenPipeError:  # a reader such as head has exited
        sys.stderr.close()


def console_of() -> SanitizedConsole:
    """Return a console as wide as the terminal, or with a fixed width without a terminal."""
    return SanitizedConsole(width=None if sys.stdout.isatty() else _WIDTH, markup=False, emoji=False, highlight=False)


def write_table(console: SanitizedConsole, rows: tuple[Sequence[str], Iterable[Sequence[str]]]) -> None:
    """Print a table."""
    head, body = rows
    table = Table()
    for cell in head:
        table.add_column(Text(sanitize(cell)))
    for row in body:
        table.add_row(*(Text(sanitize(cell)) for cell in row))
    console.print(table)


def _of_model(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of one model: a row per statistic, a column per source."""
    parts = _parts(result)
    names = dict.fromkeys(name for part in parts.values() for name in part["figures"])
    head = [result["model"]["name"], *parts]
    sizes = ["prompts", *(str(part.get("prompts", "")) for part in parts.values())]
    rows = [[name, *(_cell(part, name) for part in parts.values())] for name in names]
    return head, [sizes, *rows]


def _of_all(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the means over responses: a row per model, a column per source, and the average."""
    sources = list(dict.fromkeys(source for result in results for source in _parts(result)))
    # The average is last, even if the first model has few sources.
    columns = [*(name for name in sources if name != _AVERAGE), *(name for name in sources if name == _AVERAGE)]
    name = main_figure(results[0])
    rows = [
        [result["model"]["name"], *(_cell(_parts(result).get(source), name) for source in columns)]
        for result in results
    ]
    return [name, *columns], rows


def _difference_lines(differences: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence per model and source: ``B - A: -0.4 points [-4.1, 3.3], paired by prompt (500)``."""
    for each in differences:
        parts = each["sources"] | ({_AVERAGE: each["average"]} if "average" in each else {})
        for source, part in parts.items():
            where = f" ({source})" if len(parts) > 1 else ""
            value, low, high = _numbers(part, part["binary"])
            shown = f"{value}{' points' if part['binary'] else ''} [{low}, {high}]"
            yield f"{each['model']} - {each['minus']}{where}: {shown}, paired by prompt ({part['prompts']})"


def main_figure(result: Mapping[str, Any]) -> str:
    """Return the name of the mean over responses."""
    return f"avg@{result['answers_per_prompt']}"


def _parts(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the sources, and the average if there are several sources or a benchmark."""
    sources = dict(result["sources"])
    if len(sources) > 1 or any(_BENCHMARKS.search(source) for source in sources):
        binary = all(source["binary"] for source in sources.values())
        sources[_AVERAGE] = {"figures": result["average"], "binary": binary}
    return sources


def _cell(part: Mapping[str, Any] | None, name: str) -> str:
    """Format a cell as ``42.5 [38.0, 47.1]``: shares in percent, other numbers unchanged."""
    figure = part["figures"].get(name) if part else None
    if not part or not figure or figure["value"] is None:
        return ""
    is_share = name in _SHARES or (part["binary"] and name != "length")
    value, low, high = _numbers(figure, is_share)
    return f"{value}{' %' if is_share else ''} [{low}, {high}]"


def _numbers(figure: Mapping[str, Any], is_share: bool) -> list[str]:
    numbers = [figure[name] for name in ("value", "low", "high")]
    return [f"{100 * number:.1f}" if is_share else f"{number:.4g}" for number in numbers]
