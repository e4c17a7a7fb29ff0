"""Tables whose last column is "tests": each row names existing tests. Tests of the differences from verl are listed in
tests/README.md, so that users read only the differences."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "tests" / "README.md").read_text()
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def rows(text):
    """The rows of all tables of a page, without the lines below their heads."""
    return [row for table in _TABLE.findall(text) for row in table.splitlines() if row[:4] != "|---"]


def test_each_promise_of_a_page_is_held_by_a_test():
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    promises = [row for table in _TABLE.findall(PAGE) if "| tests |\n" in table for row in rows(table)]
    missing = []
    for row in promises:
        holder = row.rstrip("| ").rpartition("|")[2].strip()
        for name in re.findall(r"`([^`]+)`", holder) or ([] if holder == "tests" else [""]):
            found = (ROOT / name).exists() if "/" in name else re.search(rf"^def {re.escape(name)}\(", tests, re.M)
            missing += [] if name and found else [row[:100]]
    assert len(promises) > 100
    assert not missing


def test_each_difference_from_verl_has_its_test_and_no_other_is_listed():
    heads = {"key", "feature", "code", "written", "row"}
    page = (ROOT / "docs" / "from-verl.md").read_text()
    (listed,) = re.findall(r"## Differences from verl\n(.*?)\n## ", PAGE, re.DOTALL)
    differences, held = (
        [first for row in rows(text) if (first := row[2:].split(" | ")[0]) not in heads] for text in (page, listed)
    )
    assert len(differences) > 90
    assert sorted(differences) == sorted(held)
