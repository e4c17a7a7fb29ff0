"""The table of faults in docs/recovery.md: what is promised, which test injects the fault, and how it ended.

    @pytest.mark.fault("A killed worker is named within seconds, exit 75")

`make test-faults` runs these tests and, by `--fault-table`, writes the table.
"""

import re
from collections import defaultdict
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "recovery.md"
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
        lines = ["| promise | test | result |", "|---|---|---|"]
        for test, ends in sorted(self._ends.items()):
            result = ", ".join(f"{len(times)} {outcome}" for outcome, times in sorted(ends.items()))
            lines.append(f"| {self._promises[test]} | `{test.removeprefix('tests/')}` | {result} |")
        PAGE.write_text(_TABLE.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text()))


def rows() -> set[str]:
    """The tests that the page lists."""
    (table,) = _TABLE.findall(PAGE.read_text())
    return {f"tests/{name}" for name in re.findall(r"\| `([\w/.:]+)` \|", table)}


def marked() -> set[str]:
    """The tests that inject a fault, as their files say."""
    found = set()
    for file in Path(__file__).parent.rglob("test_*.py"):
        for block in re.findall(r"@pytest\.mark\.fault\(.*?\ndef (test_\w+)", file.read_text(), re.DOTALL):
            found.add(f"tests/{file.relative_to(Path(__file__).parent)}::{block}")
    return found
