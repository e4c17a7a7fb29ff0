"""What a run of the tests has not tried, and why: skipped, and deselected by a marker.

A skip is easily read over: for months the comparisons with real wheels were skipped everywhere. `scripts/test.sh` runs
pytest in several processes, each of which writes a record into the folder of the variable RECORDS, and ends with
`python -m tests.left_out FOLDER`, one table over all of them. With `--long` it is written into docs/verified.md.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "verified.md"
RECORDS = "RLTRAIN_TEST_RECORDS"
_TABLE = re.compile(r"(?<=<!-- long -->\n).*?(?=<!-- end -->)", re.DOTALL)
# Where a test is left out by its marker, and what runs it.
_MARKERS = {"fault": "injects a fault: make test-faults", "long": "long: make test-long"}


class LeftOut:
    """A plugin of pytest that keeps how each test ended, and why some were not run."""

    def __init__(self) -> None:
        self._files: dict[str, Counter[str]] = defaultdict(Counter)
        self._reasons: Counter[str] = Counter()

    def pytest_deselected(self, items) -> None:
        for item in items:
            names = [name for name in _MARKERS if item.get_closest_marker(name)]
            self._reasons[f"not selected, {_MARKERS[names[0]] if names else 'by the words of this command'}"] += 1

    def pytest_collectreport(self, report) -> None:
        self._keep(report, "collection")

    def pytest_runtest_logreport(self, report) -> None:
        self._keep(report, report.when)

    def _keep(self, report, when: str) -> None:
        counts = self._files[report.nodeid.partition("::")[0]]
        if report.skipped:
            # A test that is expected to fail (xfail) ends as skipped too, and has no place and reason.
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._reasons[f"skipped, {reason.removeprefix('Skipped: ')}"] += 1
            counts["skipped"] += 1
        elif report.failed:
            counts["failed"] += 1
        elif when == "call":
            counts["passed"] += 1
        counts["seconds"] += getattr(report, "duration", 0)

    def pytest_sessionfinish(self, session) -> None:
        if folder := os.environ.get(RECORDS):
            record = {"files": {name: counts for name, counts in self._files.items() if counts.total()}}
            (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps({**record, "reasons": self._reasons}))


def joined(folder: Path) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """What all processes kept: per file of tests the counts and seconds, and how often each reason was given."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for record in map(json.loads, map(Path.read_text, sorted(folder.glob("*.json")))):
        reasons.update(record["reasons"])
        for name, counts in record["files"].items():
            files[name].update(counts)
    return files, reasons


def report(files: dict[str, Counter[str]], reasons: Counter[str]) -> str:
    """One line per reason, and the closing line of all processes together."""
    total: Counter[str] = sum(files.values(), Counter())
    lines = [f"{count:6d}  {reason}" for reason, count in sorted(reasons.items())]
    heading = ["", "Not run:", *lines] if lines else []
    closing = f"{total['passed']:.0f} passed, {total['failed']:.0f} failed, {total['skipped']:.0f} skipped"
    return "\n".join([*heading, "", closing])


def table(files: dict[str, Counter[str]]) -> str:
    """Per file of tests how many ended how, for docs/verified.md."""
    words = ["git", "log", "-1", "--format=%h"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    place = f"{datetime.date.today()}, commit {commit}, {os.cpu_count()} cores, Python {platform.python_version()}"
    ends = ("passed", "failed", "skipped")
    rows = [
        f"| `{name.removeprefix('tests/')}` | {', '.join(f'{counts[end]:.0f} {end}' for end in ends if counts[end])} "
        f"| {counts['seconds']:.0f} |"
        for name, counts in sorted(files.items())
        if any(counts[end] for end in ends)
    ]
    return "\n".join([f"`make test-long`, {place}", "", "| tests | result | seconds |", "|---|---|---|", *rows, ""])


def unasked(files: Iterable[str]) -> str:
    """Which files of tests no process was asked to run, by folder."""
    tests = {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")}
    folders = Counter(name.rpartition("/")[0] for name in tests.difference(files))
    places = ", ".join(f"{number} in {folder}" for folder, number in sorted(folders.items()))
    return f"{folders.total()} of {len(tests)} files of tests are left to make test: {places}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--long", action="store_true", help="write the table of docs/verified.md")
    parser.add_argument("--quick", action="store_true", help="say which files of tests were left out")
    words = parser.parse_args()
    files, reasons = joined(words.folder)
    if words.long:
        PAGE.write_text(_TABLE.sub(lambda _: table(files), PAGE.read_text()))
    sys.stdout.write(report(files, reasons) + "\n")
    if words.quick:
        sys.stdout.write(unasked(files) + "\n")
    if not any(counts[end] for counts in files.values() for end in ("passed", "failed", "skipped")):
        raise SystemExit(5)


if __name__ == "__main__":
    main()
