"""bench/results/models.md is what `python -m bench.models` writes, and docs/models.md lists its families by result."""

import re
from pathlib import Path

import pytest

from bench.models import FAMILIES, TITLES, page_of, row_of, rows_of

PAGE = Path(__file__).parents[2] / "bench" / "results" / "models.md"


def test_the_page_of_families_is_the_one_that_is_written():
    page = PAGE.read_text()
    found = rows_of(page)
    assert list(found) == list(FAMILIES)
    assert all(row.count(" | ") == len(TITLES) - 1 for row in found.values())
    # Everything is the same except the date and the versions.
    made = "`python -m bench.models` wrote this on .*"
    assert re.sub(made, "", page_of(list(found.values()))) == re.sub(made, "", page)


def test_the_page_of_models_lists_each_family_by_its_result():
    page = (PAGE.parents[2] / "docs" / "models.md").read_text().replace("`model_type`", "")
    cells = [re.findall(r"`(\w+)`(?=[^|\n]*\|[^|\n]*\|$)", part, re.M) for part in page.split("## Families that ")]
    found = rows_of(PAGE.read_text())
    assert sorted(cells[1]) == sorted(name for name, row in found.items() if row.split(" | ")[2] == "works")
    assert sorted(cells[1] + cells[2]) == sorted(found)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss", "diffllama", "stablelm", "bloom", "falcon", "jamba"])
def test_a_row_of_the_page_is_true(name, process_group):
    cells = row_of(name, vllm=False).split(" | ")
    expected = rows_of(PAGE.read_text())[name].split(" | ")
    del cells[4], expected[4]  # vLLM would take too long
    assert cells == expected
