"""Every key is read by code that acts on it, not only by tables and checks of the configuration."""

import ast
from pathlib import Path

from rltrain.config.schema.keys import all_keys

PACKAGE = Path(__file__).parents[2] / "rltrain"
# Files that loop over all keys, or only check them.
JUDGES = {
    "config/check.py", "config/engine_rules.py", "config/load.py", "config/notes.py",
    "config/reader.py", "config/schema/keys.py",
}  # fmt: skip


def read_names() -> tuple[set[str], set[str]]:
    """Return the attributes that are read, and the texts, in all files that act on keys."""
    attributes, texts = set(), set()
    for file in PACKAGE.rglob("*.py"):
        name = str(file.relative_to(PACKAGE))
        if name.startswith(("tools/port/", "config/verl/")) or name in JUDGES:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                attributes.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return attributes, texts


def unread(names: list[str]) -> list[str]:
    attributes, texts = read_names()
    # The key of a budget consists of a role's section and one of these.
    ends = tuple(text for text in texts if text.endswith(("_per_gpu", "_dynamic_bsz")))

    def is_read(name: str) -> bool:
        leaf = name.rpartition(".")[2]
        # These keys are also composed with a role's section.
        return leaf in attributes or any(text in texts for text in (leaf, f".{leaf}", name)) or leaf.endswith(ends)

    return [name for name in names if not is_read(name)]


def test_every_key_is_read_by_something_that_acts_on_it():
    assert unread(list(all_keys())) == []


def test_a_key_that_nothing_reads_is_found():
    assert unread(["trainer.nobody_reads_this"]) == ["trainer.nobody_reads_this"]
