"""Age of each table in results/: its date, and the number of commits to the library since the table was written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Age(NamedTuple):
    """Age of a table. commits: number of commits to rltrain/ since the table was committed; 0 also for a table with
    uncommitted changes."""

    table: str
    day: str
    commits: int


def ages() -> list[Age]:
    """Return the ages of all tables, oldest first; [] without git history (an unpacked archive, a shallow clone)."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return []
    tables = sorted((ROOT / "bench/results").glob("*.md"))
    written = [(table, *_git("log", "-1", "--format=%h %cs", "--", str(table)).split()) for table in tables]
    result = [
        Age(table.name, commit[1], int(_git("rev-list", "--count", f"{commit[0]}..HEAD", "--", "rltrain")))
        for table, *commit in written
        if commit
    ]
    return sorted(result, key=lambda age: -age.commits)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> None:
    for table, day, commits in ages():
        sys.stdout.write(f"{table:28} {day}  {commits:4} commits to rltrain/ since\n")


if __name__ == "__main__":
    main()
