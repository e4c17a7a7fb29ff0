"""The columns of rltrain/config/verl/keys.tsv that the script writes, and the rows that people write."""

import re
import zipfile

import pytest

from rltrain.config.verl import table
from rltrain.config.verl.table import FILE, Row, read, rows
from scripts import verl_keys as script

TREE = """
defaults: [actor]
trainer: {nnodes: 1, tool: {_target_: verl.utils.profiler.config.ToolConfig, ranks: [0]}}
data: {kwargs: {}}
"""
CLASSES = """
@dataclass
class BaseConfig:
    _hidden: int = 0
    seed: int | None = None

@dataclass
class ToolConfig(BaseConfig):
    ranks: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    inner: BaseConfig = field(default_factory=BaseConfig)
    level: str = field(default="low", metadata={})
"""


@pytest.fixture
def folder(tmp_path):
    for version, tree in (("1.0", TREE), ("1.1", TREE + "extra: 2\n"), ("1.2", TREE.replace("nnodes: 1", "nnodes: 2"))):
        with zipfile.ZipFile(tmp_path / f"verl-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr("verl/trainer/config/_generated_ppo_trainer.yaml", tree)
            archive.writestr("verl/trainer/config/sft_trainer.yaml", "other: 1\n")
            archive.writestr("verl/utils/profiler/config.py", CLASSES)
    return tmp_path


def test_keys_come_from_trees_and_from_the_classes_that_they_name(folder):
    assert script.keys_of_wheel(script.wheel("1.0", folder)) == {
        "trainer.nnodes": ["1"], "trainer.tool.ranks": ["[0]"], "trainer.tool.seed": ["null"],
        "trainer.tool.steps": ["[]"], "trainer.tool.inner": ["{}"], "trainer.tool.level": ['"low"'],
        "data.kwargs": ["{}"],
    }  # fmt: skip


def test_an_update_keeps_what_people_wrote(folder, tmp_path, monkeypatch, capsys):
    file = tmp_path / "keys.tsv"
    written = [
        Row("@releases", action="list", note="1.0 1.1 1.2"),
        Row("extra", action="refused", when="=2", note="leave it out"),
        Row("extra", action="no effect", note="it says nothing"),
        Row("gone", "0.9", "3", "renamed", to="data.seed"),
        Row("gone_too", "0.9", "3"),
        Row("*.tool.*", action="no effect", note="no tools"),
    ]
    file.write_text(script.text_of(written))
    monkeypatch.setattr(script, "FILE", file)
    script.main(["--wheels", str(folder)])
    found = read(file.read_text().splitlines())
    assert [row for row in found if not row.key.startswith("trainer.tool")] == [
        written[0],
        Row("data.kwargs", "1.0-1.2", "{}"),
        Row("extra", "1.1", "2", "refused", "=2", note="leave it out"),
        written[2],
        Row("gone", action="renamed", to="data.seed"),
        Row("trainer.nnodes", "1.0-1.2", "1 | 2", "same"),
        written[5],
    ]
    assert "8 keys of verl" in capsys.readouterr().out
    text = file.read_text()
    script.main(["--wheels", str(folder)])
    assert file.read_text() == text


def test_releases_are_written_as_ranges():
    assert script.spans(["1", "2", "3", "4", "5"], [0, 1, 3, 4]) == "1-2 4-5"
    assert script.spans(["1", "2", "3"], [0, 2]) == "1 3"


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
