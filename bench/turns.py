"""Several turns with tools, family by family, against transformers: the table in docs/agents.md.

Every row is a small copy of a model with random weights, some of whose tokens are whole calls in the family's format
(tests/tiny_families.py). It generates with the embedded engine and calls a tool that adds; then each answer is computed
again by transformers' own attention, alone, and each context is made again by the seam.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

from tests.local import local_trainer
from tests.tiny import small_run, write_arithmetic
from tests.tiny_families import CALLING, ROOM, measured, save_calling_family
from tests.tiny_tools import tool_run

PAGE = Path(__file__).parents[1] / "docs" / "agents.md"
TITLES = ("family", "`multi_turn.format`", "turns", "contexts, equal token by token", "largest distance of a log-prob")
_TABLE = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end -->)", re.DOTALL)


def row_of(name: str, folder: Path) -> str:
    """The row of the table. Needs a process group of one process."""
    calling = CALLING[name]
    model = save_calling_family(folder / "model", calling)
    files = write_arithmetic(folder / "train.parquet", range(24)), write_arithmetic(folder / "test.parquet", range(6))
    of = measured(local_trainer(small_run(model, files, folder / "run", **tool_run(model, folder) | ROOM)), model)
    return f"| {name} | `{of.call_format}` | {of.num_turns} | {of.num_contexts} | {of.gap:.0e} |"


def rows_of(page: str) -> dict[str, str]:
    """The rows of the table in a page, by family."""
    table = _TABLE.search(page)
    rows = [line for line in table.group().splitlines() if line.startswith("| ")][1:] if table else []
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def with_table(page: str, rows: Sequence[str]) -> str:
    """The page with these rows in its table."""
    made = (
        f"`python -m bench.turns`, {date.today()}, transformers {version('transformers')}, torch {version('torch')}, "
        "float32, CPU"
    )
    table = "\n".join([f"| {' | '.join(TITLES)} |", "|" + "---|" * len(TITLES), *rows])
    return _TABLE.sub(lambda _: f"{made}\n\n{table}\n", page)


def main(argv: Sequence[str] | None = None) -> int:
    """Print rows, and write the table where all families were run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", choices=[*CALLING, []])
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for name in options.families or CALLING:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(name, Path(folder)))
        sys.stdout.write(rows[-1] + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()
    if not options.families:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
