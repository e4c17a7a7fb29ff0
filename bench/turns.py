"""Multi-turn generation with tools by family, against transformers: the table bench/results/turns_cpu.md.

Every row is a small copy of a model with random weights, some of whose tokens are whole calls in the family's format
(tests/tiny_families.py). It generates with the embedded engine and calls a tool that adds. Then transformers' attention
recomputes each response alone, and `TurnDelta` recreates each context.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

from bench.table import ROOT, finished_row, parse, table
from tests.local import local_trainer
from tests.tiny import small_run, write_arithmetic
from tests.tiny_families import CALLING, ROOM, measured, save_calling_family
from tests.tiny_tools import tool_run

PAGE = ROOT / "bench/results/turns_cpu.md"
TITLES = ("family", "`multi_turn.format`", "turns", "contexts, equal token by token", "largest distance of a log-prob")
_TABLE = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end -->)", re.DOTALL)


def row_of(name: str, folder: Path) -> str:
    """Return the row of the table. Needs a process group of one process."""
    calling = CALLING[name]
    model = save_calling_family(folder / "model", calling)
    files = write_arithmetic(folder / "train.parquet", range(24)), write_arithmetic(folder / "test.parquet", range(6))
    of = measured(local_trainer(small_run(model, files, folder / "run", **tool_run(model, folder) | ROOM)), model)
    return f"| {name} | `{of.call_format}` | {of.num_turns} | {of.num_contexts} | {of.gap:.0e} |"


def rows_of(page: str) -> dict[str, str]:
    """Return the rows of the table in a page, by family."""
    found = _TABLE.search(page)
    rows = [line for line in found.group().splitlines() if line.startswith("| ")][1:] if found else []
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def with_table(page: str, rows: Sequence[str]) -> str:
    """Return the page with these rows in its table."""
    made = (
        f"`python -m bench.turns`, {date.today()}, transformers {version('transformers')}, torch {version('torch')}, "
        "float32, CPU"
    )
    return _TABLE.sub(lambda _: f"{made}\n\n{table(TITLES, rows)}\n", page)


def main(argv: Sequence[str] | None = None) -> None:
    """Print rows, and write the table if all families were run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", choices=[*CALLING, []])
    options = parse(parser, argv, out=PAGE, families=list(CALLING)[:1])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[str] = []
    for name in options.families or CALLING:
        with tempfile.TemporaryDirectory() as folder:
            finished_row(rows, row_of(name, Path(folder)))
    dist.destroy_process_group()
    print(table(TITLES, rows))
    if options.smoke or not options.families:
        options.out.write_text(with_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
