"""The columns of rltrain/config/verl/keys.tsv that the script writes, and the hand-written rows."""

import re

from rltrain.config.verl import table
from rltrain.config.verl.table import FILE, read, rows


def test_every_row_has_a_meaning():
    actions = set(re.findall(r"^(\w+(?: \w+)?|path, name)  ", table.__doc__.partition("action      ")[2], re.M))
    known = {word for action in actions for word in action.split(", ")} | {""}
    whole = read(FILE.read_text(encoding="utf-8").splitlines())
    assert {row.action for row in whole} == known
    assert len({row[:1] + row[3:6] for row in whole}) == len(whole)
    used = {name for row in whole for name in re.findall(r"@\w+", row.note)}
    assert {row.key for row in rows("sentence")} == used | {"@generative"}  # which the reader names
