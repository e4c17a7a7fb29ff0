"""The table of families is what `python -m bench.turns` writes."""

import re

from bench.turns import PAGE, TITLES, rows_of, with_table
from tests.tiny_families import CALLING


def test_the_table_of_families_is_the_one_that_is_written():
    page = PAGE.read_text(encoding="utf-8")
    rows = rows_of(page)
    assert list(rows) == list(CALLING)
    assert all(row.count(" | ") == len(TITLES) - 1 for row in rows.values())
    # Everything is the same except the date and the versions.
    made = "`python -m bench.turns`, .*"
    assert re.sub(made, "", with_table(page, list(rows.values()))) == re.sub(made, "", page)
