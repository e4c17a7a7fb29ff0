"""Pages whose tables end in "held by", that of differences from verl first: each row names a test that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("page", "least"), [("from-verl.md", 20), ("vlm.md", 5)])
def test_each_promise_of_a_page_is_held_by_a_test(page, least):
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    rows = [row for table in tables if "held by |\n" in table for row in table.splitlines() if row[:4] != "|---"]
    missing = []
    for row in rows:
        holder = row.rstrip("| ").rpartition("|")[2].strip()
        for name in re.findall(r"`([^`]+)`", holder) or ([] if holder == "held by" else [""]):
            found = (ROOT / name).exists() if "/" in name else re.search(rf"^def {re.escape(name)}\(", tests, re.M)
            missing += [] if name and found else [row[:100]]
    assert len(rows) > least
    assert not missing
