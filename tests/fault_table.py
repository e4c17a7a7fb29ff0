"""The table of faults in docs/verified.md: what is promised, which test injects the fault, and how it ended.

    @pytest.mark.fault("A killed worker is named within seconds, exit 75")

`make test-faults` runs these tests in several processes, each of which writes its rows of the table (`--fault-table`).
"""

import fcntl
import re
from collections import defaultdict
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "verified.md"
_TABLE = re.compile(r"(?<=<!-- faults -->\n).*?(?=<!-- end -->)", re.DOTALL)


class FaultTable:
    """A plugin of pytest that fills the table."""

    def __init__(self) -> None:
        self._promises: dict[str, str] = {}
        self._ends: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def pytest_collection_finish(self, session) -> None:
        for item in session.items:
            marker = item.get_closest_marker("fault")
            self._promises[item.nodeid.partition("[")[0]] = marker.args[0] if marker else ""

    def pytest_runtest_logreport(self, report) -> None:
        # What makes a fault is often a fixture, so its time counts, and so does its failure.
        if report.when == "call" or report.outcome != "passed":
            self._ends[report.nodeid.partition("[")[0]][report.outcome].append(report.duration)

    def pytest_sessionfinish(self, session) -> None:
        if not session.config.option.fault_table:
            return
        new = {}
        for test, ends in self._ends.items():
            result = ", ".join(f"{len(times)} {outcome}" for outcome, times in sorted(ends.items()))
            new[test] = f"| {self._promises[test]} | `{test.removeprefix('tests/')}` | {result} |"
        with open(PAGE, "r+") as page:
            fcntl.flock(page, fcntl.LOCK_EX)
            text, exist = page.read(), marked()
            lines = dict(sorted({test: line for test, line in (rows(text) | new).items() if test in exist}.items()))
            table = "\n".join(["| promise | test | result |", "|---|---|---|", *lines.values(), ""])
            page.seek(0)
            page.write(_TABLE.sub(lambda _: table, text))
            page.truncate()


def rows(text: str) -> dict[str, str]:
    """The tests that the page lists, and the line of each."""
    (table,) = _TABLE.findall(text)
    return {f"tests/{test}": line for line, test in re.findall(r"^(.*\| `([\w/.:]+)` \|.*)$", table, re.MULTILINE)}


def marked() -> set[str]:
    """The tests that inject a fault, as their files say."""
    found = set()
    for file in Path(__file__).parent.rglob("test_*.py"):
        for block in re.findall(r"@pytest\.mark\.fault\(.*?\ndef (test_\w+)", file.read_text(), re.DOTALL):
            found.add(f"tests/{file.relative_to(Path(__file__).parent)}::{block}")
    return found
