"""The columns of rltrain/config/verl/keys.tsv that the script writes, and the rows that people write."""

import re

from rltrain.config.verl import table
from rltrain.config.verl.table import FILE, read, rows
from scripts import verl_keys as script


def test_the_file_is_as_the_script_writes_it():
    text = FILE.read_text(encoding="utf-8")
    whole = read(text.splitlines())
    releases = table.sentence("releases").split()
    found = {release: {} for release in releases}
    for row in whole:
        for span in row.verl.split():
            first, last = (releases.index(end) for end in (span.split("-") * 2)[:2])
            for release in releases[first : last + 1]:
                found[release][row.key] = row.default.split(" | ")
    assert script.text_of(script.merge(whole, found)) == text


def test_every_row_has_a_meaning():
    actions = set(re.findall(r"^(\w+(?: \w+)?|path, name)  ", table.__doc__.partition("action      ")[2], re.M))
    known = {word for action in actions for word in action.split(", ")} | {""}
    whole = read(FILE.read_text(encoding="utf-8").splitlines())
    assert {row.action for row in whole} == known
    assert len({row[:1] + row[3:6] for row in whole}) == len(whole)
    used = {name for row in whole for name in re.findall(r"@\w+", row.note)}
    assert {row.key for row in rows("sentence")} == used | {"@generative"}  # which the reader names
