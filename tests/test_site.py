"""The site of the documentation: which pages it has, the page of keys, recipes, and tables of other trainers' keys.

`make docs`, a part of `make check`, builds it and refuses a link that leads nowhere.
"""

import re

import pytest

from rltrain.config.schema.keys import all_keys
from rltrain.config.verl.others import own_name
from scripts.site.keys import breakable, keys_page, whole_name, with_links
from scripts.site.notebooks import notebook_page, notebooks
from scripts.site.pages import API, KEYS, ROOT, linked, moved, parts, plain_pipes, rows, written
from scripts.site.recipes import recipe_page, recipes, with_pages
from scripts.site.reports import reports

MADE = {KEYS, API}


def test_every_page_of_the_docs_stands_in_the_index_once():
    listed = [page for pages in parts().values() for page in pages]
    assert len(listed) == len(set(listed))
    pages = {page for page in written() if page.startswith("docs/") and page.endswith(".md")}
    assert pages - set(listed) == {"docs/README.md"}
    assert {"bench/README.md", "examples/README.md", "CONTRIBUTING.md"} < set(listed)


def test_links_of_all_pages_lead_to_pages_of_the_site_or_to_scripts_that_have_one():
    reached = {*written(), *recipes().values(), *notebooks().values(), *reports().values()}
    dead = [
        (page, link)
        for page in written()
        if page.endswith(".md")
        for link, file in linked((ROOT / page).read_text(), page)
        if file not in reached
    ]
    assert not dead


def test_every_key_has_an_anchor_a_default_and_a_meaning():
    page = keys_page()
    entries = dict(re.findall(r"^#### `[\w.]+` \{#([\w.]+)\}\n\n(.*?)(?=\n\n##|\Z)", page, re.DOTALL | re.MULTILINE))
    assert sorted(entries) == sorted(all_keys())
    for name, entry in entries.items():
        facts, _, meaning = entry.partition("\n\n")
        assert "default `" in facts, name
        assert len(meaning) > 10, name
    assert "one of `error`, `left`, `right`, `middle`" in entries["data.truncation"]
    assert "Elsewhere called `num_generations`" in entries["actor_rollout_ref.rollout.n"]
    assert "`algorithm.filter_groups.enable`" in entries["data.gen_batch_size"]
    assert "[precision.md](precision.md)" in page


def test_long_names_may_go_on_in_the_next_line_and_nothing_else_is_touched():
    page = "<p><code>trainer.total_training_steps=1</code> <code>a.b</code></p><pre><code>a.b_c.d_e.f_g.h</code></pre>"
    expected = "<code>trainer.<wbr>total_<wbr>training_<wbr>steps=<wbr>1</code>"
    assert breakable(page) == page.replace("<code>trainer.total_training_steps=1</code>", expected)


def test_names_of_keys_in_a_page_lead_to_their_meaning():
    page = "<p><code>rollout.n=8</code> <code>rollout.m</code> <code>lr</code></p><pre><code>rollout.n</code></pre>"
    expected = '<p><a href="keys.html#actor_rollout_ref.rollout.n"><code>rollout.n=8</code></a>'
    assert with_links(page, "keys.html") == page.replace("<p><code>rollout.n=8</code>", expected)
    assert whole_name("optim.lr") is None, "the actor's or the critic's"


@pytest.mark.parametrize("trainer", ["trl", "openrlhf", "mindspeed-rl"])
def test_tables_of_other_trainers_name_keys_that_there_are(trainer):
    table = list(rows((ROOT / f"docs/from-{trainer}.md").read_text()))
    assert len(table) > 10
    for theirs, ours in table:
        named = re.findall(r"`([a-z_]+\.[\w.]*)(?:=[^`]*)?`", ours)
        keys = {name: whole_name(name) for name in named}
        assert all(keys.values()), (theirs, keys)
        for name in re.findall(r"`([a-z_]+)`", theirs):
            # What a run answers to a mistyped key is what the table says.
            hint = own_name(name)
            assert hint is None or hint in keys.values() or ours.startswith("nothing"), (name, hint, keys)


def test_every_script_of_the_examples_says_what_it_should_give():
    for page, script in recipes().items():
        text = recipe_page(page, script)
        assert "Nothing is known." not in text, f"{script} has no row in the last table of examples/README.md"
        assert (ROOT / script).read_text().splitlines()[-1] in text
        for link, file in linked(text.partition(f"\n## {script}")[0], page):
            assert (ROOT / file).exists(), (page, link)
    unrun = recipe_page("examples/math/qwen2_5_7b_grpo.sh.md", "examples/math/qwen2_5_7b_grpo.sh")
    assert "We have not run it." in unrun
    assert "| 1 × 8 910B | " in unrun
    listed = with_pages((ROOT / "examples/README.md").read_text())
    assert listed.count("[`math/qwen2_5_7b_grpo.sh`](math/qwen2_5_7b_grpo.sh.md)") == 3


def test_what_is_said_of_a_result_names_the_commit_of_its_table(monkeypatch):
    monkeypatch.setattr("scripts.site.recipes._git", lambda *words: f"abc of 2026-01-01 {words[-1]}")
    page = recipe_page("examples/vlm_cpu.sh.md", "examples/vlm_cpu.sh")
    assert "written at commit abc of 2026-01-01 bench/results/learning_vision_cpu.md" in page
    assert "](../bench/results/learning_vision_cpu.md)" in page


def test_a_text_that_is_moved_keeps_its_links():
    text = "[a](../docs/vlm.md#images) [b](https://example.org) [c](math/x.sh)"
    assert moved(text, "examples/README.md", "examples/math/x.md") == (
        "[a](../../docs/vlm.md#images) [b](https://example.org) [c](x.sh)"
    )
    assert plain_pipes(r"| `a\|b` | c\|d |") == r"| `a|b` | c\|d |"


def test_a_notebook_is_a_page_with_what_its_cells_said():
    assert "](data:image/png;base64," in notebook_page("examples/notebooks/quickstart.ipynb"), "saved without outputs"
    for page, notebook in notebooks().items():
        text = notebook_page(notebook)
        assert text.startswith("# "), page
        assert text.count("```python") > 5


def test_the_site_has_no_page_that_is_made_and_written():
    assert not MADE & set(written())


def test_what_is_kept_of_a_run_is_small_and_of_no_machine():
    (folder,) = reports().values()
    for file in (ROOT / folder).rglob("*"):
        assert not file.is_file() or (file.stat().st_size < 400_000 and b"/home/" not in file.read_bytes())
