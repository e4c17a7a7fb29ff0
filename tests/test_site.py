"""The documentation site: its pages, the page of keys, recipes, and tables of other trainers' keys."""

import re

import pytest

from rltrain.config.schema.keys import all_keys
from rltrain.config.verl.other_trainers import rltrain_name
from scripts.site.keys import full_name, keys_page
from scripts.site.pages import KEYS, ROOT, linked, parts, rows, search_boost, written
from scripts.site.recipes import recipe_page, recipes, with_pages


def test_every_page_of_the_docs_stands_in_the_index_once():
    listed = [page for pages in parts().values() for page in pages]
    assert len(listed) == len(set(listed))
    pages = {page for page in written() if page.startswith("docs/") and page.endswith(".md")}
    assert pages - set(listed) == {"docs/README.md"}
    assert {"bench/README.md", "examples/README.md", "CONTRIBUTING.md"} < set(listed)
    assert min(map(search_boost, [KEYS, *pages])) > search_boost("README.md") > search_boost("CHANGELOG.md")
    assert search_boost(KEYS) > search_boost("docs/data.md") > search_boost("docs/from-verl.md")


def test_messages_of_the_faq_are_in_the_code():
    code = re.sub(r'"\n\s*f?"', "", "".join(file.read_text() for file in (ROOT / "rltrain").rglob("*.py")))
    parts = "…".join(re.findall(r"^### `(.*)`$", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)).split("…")
    assert [part for part in parts if part.strip() and part not in code] == []


def test_every_key_has_an_anchor_a_default_and_a_meaning():
    page = keys_page()
    entries = dict(re.findall(r"^#### `[\w.]+` \{#([\w.]+)\}\n\n(.*?)(?=\n\n##|\Z)", page, re.DOTALL | re.MULTILINE))
    assert sorted(entries) == sorted(all_keys())
    for name, entry in entries.items():
        facts, _, meaning = entry.partition("\n\n")
        assert "default `" in facts, name
        assert len(meaning) > 10, name


@pytest.mark.parametrize("trainer", ["trl", "openrlhf", "mindspeed-rl"])
def test_tables_of_other_trainers_name_keys_that_there_are(trainer):
    table = list(rows((ROOT / f"docs/from-{trainer}.md").read_text()))
    assert len(table) > 10
    for theirs, ours in table:
        named = re.findall(r"`([a-z_]+\.[\w.]*)(?:=[^`]*)?`", ours)
        keys = {name: full_name(name) for name in named}
        assert all(keys.values()), (theirs, keys)
        for name in re.findall(r"`([a-z_]+)`", theirs):
            # What a run answers to a mistyped key is what the table says.
            hint = rltrain_name(name)
            assert hint is None or hint in keys.values() or ours.startswith("nothing"), (name, hint, keys)


def test_every_script_of_the_examples_says_what_it_should_give():
    for page, script in recipes().items():
        text = recipe_page(page, script)
        assert "Nothing is known." not in text, f"{script} has no row in the last table of examples/README.md"
        assert (ROOT / script).read_text().splitlines()[-1] in text
        for link, file in linked(text.partition(f"\n## {script}")[0], page):
            assert (ROOT / file).exists(), (page, link)
    assert "(math/qwen2_5_7b_grpo.sh.md)" in with_pages((ROOT / "examples/README.md").read_text())
