"""docs/security.md: every test that the page names exists, and every row names one."""

import re
from itertools import pairwise

from tests.test_house_rules import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 25
    missing = [f"{file}::{name}" for file, name in named if f"\ndef {name}(" not in (ROOT / file).read_text()]
    assert missing == []


def test_every_row_of_the_page_names_a_test():
    lines = [*PAGE.splitlines(), ""]
    rows = [row for row, after in pairwise(lines) if row.startswith("| ") and not after.startswith("|---")]
    assert len(rows) > 15
    assert [row for row in rows if "::test_" not in row.split(" | ")[2]] == []
