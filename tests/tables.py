"""The tables of tests/README.md that a run of the tests writes."""

import ast
import datetime
import os
import platform
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "tests" / "README.md"
_ENDS = ("passed", "failed", "skipped")


class Tables:
    """A pytest plugin. It runs in the process that collects the results of all others."""

    def __init__(self) -> None:
        self._results: dict[str, Counter[str]] = defaultdict(Counter)  # by test without its parameters
        self._promises: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items) -> None:
        # A result carries the promise, because another process may have run the test.
        for item in items:
            if marker := item.get_closest_marker("fault"):
                item.user_properties.append(("fault", marker.args[0]))

    def pytest_runtest_logreport(self, report) -> None:
        test = report.nodeid.partition("[")[0]
        self._results[test]["seconds"] += report.duration
        # A fault is often injected by a fixture: its failure counts as well.
        if report.when == "call" or report.outcome != "passed":
            self._results[test][report.outcome] += 1
        self._promises[test] = dict(report.user_properties).get("fault", "")

    def pytest_sessionfinish(self, session) -> None:
        name = session.config.option.table
        if not name or hasattr(session.config, "workerinput"):
            return
        text = PAGE.read_text()
        table = self._faults(text) if name == "faults" else self._long()
        PAGE.write_text(re.sub(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", lambda _: table, text, flags=re.DOTALL))

    def _faults(self, text: str) -> str:
        new = {
            test: f"| {self._promises[test]} | `{test.removeprefix('tests/')}` | {_counts(results)} |"
            for test, results in self._results.items()
        }
        exist = marked("fault")
        lines = dict(
            sorted({test: line for test, line in (rows(text, "faults") | new).items() if test in exist}.items())
        )
        return "\n".join(["| promise | test | result |", "|---|---|---|", *lines.values(), ""])

    def _long(self) -> str:
        files: dict[str, Counter[str]] = defaultdict(Counter)
        for test, results in self._results.items():
            files[test.partition("::")[0].removeprefix("tests/")].update(results)
        command = ["git", "log", "-1", "--format=%h"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
        lines = [f"| `{file}` | {_counts(found)} | {found['seconds']:.0f} |" for file, found in sorted(files.items())]
        heading = f"`make test-long`, {datetime.date.today()}, commit {commit}, {machine}"
        return "\n".join([heading, "", "| tests | result | seconds |", "|---|---|---|", *lines, ""])


def _counts(results: Counter[str]) -> str:
    return ", ".join(f"{results[end]} {end}" for end in _ENDS if results[end])


def rows(text: str, name: str) -> dict[str, str]:
    """Return the rows of a table of the page ("faults", "smoke"), by test."""
    (table,) = re.findall(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", text, re.DOTALL)
    return {f"tests/{test}": line for line, test in re.findall(r"^(.*\| `([\w/.:]+)` \|.*)$", table, re.MULTILINE)}


def marked(marker: str) -> dict[str, str]:
    """Return the tests with a marker that has one text ("fault", "smoke"), from their source, and the text."""
    found = {}
    for file in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for each in getattr(node, "decorator_list", ()):
                if ast.unparse(each).startswith(f"pytest.mark.{marker}("):
                    test = f"tests/{file.relative_to(Path(__file__).parent)}::{node.name}"
                    found[test] = ast.literal_eval(each.args[0])
    return found
