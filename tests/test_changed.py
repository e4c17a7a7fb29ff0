"""`scripts/test.sh --changed`: what a change touches is chosen, and what was not is said."""

import json
import subprocess
import sys

import pytest

from tests import changed

FILES = {
    "rltrain/base/low.py": "",
    "rltrain/base/lazy.py": "",
    "rltrain/base/unused.py": "def late():\n    import rltrain.base.lazy\n",
    "rltrain/trainer/__init__.py": "",
    "rltrain/trainer/step.py": "from rltrain.base import low\n",
    "rltrain/trainer/typed.py": "if TYPE_CHECKING:\n    from rltrain.base import low\n",
    "rltrain/trainer/loaded.py": "",
    "rltrain/run/build.py": "import rltrain.trainer.step\n",
    "rltrain/door.py": "import rltrain.run.build\n",
    "rltrain/settings.py": "ENGINE = 'rltrain.trainer.loaded:Engine'\n",
    "docs/page.md": "",
    "setup.cfg": "",
    "tests/conftest.py": "import tests.helper\ndef deep(): tests.helper\ndef made(deep): pass\ndef other(): pass\n",
    "tests/helper.py": "import rltrain.base.unused\n",
    "tests/data/rows.jsonl": "",
    "tests/e2e/test_whole.py": "import rltrain.trainer.step, tests.helper\n",
    "tests/test_door.py": "import rltrain.door, rltrain.settings\n",
    "tests/test_fixture.py": "def test_it(made): pass\n",
    "tests/test_page.py": "PAGES = sorted(ROOT.glob('docs/**/*.md'))\n",
    "tests/test_rows.py": "ROWS = 'data'\n",
    "tests/test_typed.py": "from rltrain.trainer import typed\n",
    "tests/trainer/test_patched.py": "def test_it(monkeypatch): monkeypatch.setattr('rltrain.trainer.step.low', 1)\n",
    "tests/trainer/test_step.py": "from rltrain.trainer.step import low\ndef test_it(other): pass\n",
}


@pytest.fixture
def checkout(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("rltrain/base/low.py", "trainer/test_patched trainer/test_step"),
        ("rltrain/base/lazy.py", "test_fixture"),
        ("rltrain/trainer/__init__.py", "test_typed trainer/test_patched trainer/test_step"),
        ("rltrain/trainer/loaded.py", "trainer/test_patched trainer/test_step"),
        ("rltrain/door.py", "test_door"),
        ("rltrain/settings.py", "test_door"),
        ("tests/trainer/conftest.py", "trainer/test_patched trainer/test_step"),
        ("tests/helper.py", "e2e/test_whole test_fixture"),
        ("tests/trainer/test_step.py", "trainer/test_step"),
        ("docs/page.md", "test_page"),
        ("tests/data/rows.jsonl", "test_rows"),
        ("tests/test_gone.py", ""),
        ("setup.cfg", ""),
    ],
)  # fmt: skip
def test_a_change_chooses_the_tests_that_it_touches(checkout, file, tests):
    chosen, words = changed.choose(checkout, {file})
    assert chosen == [f"tests/{test}.py" for test in tests.split()]
    assert words.startswith(f"{len(chosen)} of 8 files of tests chosen")
    assert words.endswith(f"; none imports or names {file}") == (file == "setup.cfg")
    assert ("not chosen: tests/e2e tests/faults tests/hosts" in words) == file.startswith("rltrain/")


def test_a_deleted_module_chooses_those_that_still_import_it(checkout):
    (checkout / "rltrain/base/low.py").unlink()
    chosen, _ = changed.choose(checkout, {"rltrain/base/low.py"})
    assert chosen == ["tests/trainer/test_patched.py", "tests/trainer/test_step.py"]


def test_committed_staged_unstaged_and_untracked_files_are_changes(checkout):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=checkout, check=True)

    git("init", "--quiet", "--initial-branch", "main")
    (checkout / ".gitignore").write_text("ignored\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "all")
    assert changed.changed_files(checkout) == set()
    git("checkout", "--quiet", "-b", "work")
    (checkout / "docs/page.md").write_text("committed")
    git("mv", "rltrain/base/lazy.py", "rltrain/base/moved.py")
    git("commit", "--quiet", "-a", "-m", "some")
    git("checkout", "--quiet", "main")
    (checkout / "tests/helper.py").write_text("of main alone")
    git("commit", "--quiet", "-a", "-m", "meanwhile")
    git("checkout", "--quiet", "work")
    (checkout / "rltrain/door.py").write_text("staged")
    git("add", ".")
    (checkout / "rltrain/settings.py").write_text("unstaged")
    (checkout / "tests/test_new name.py").touch()
    (checkout / "ignored").touch()
    moved = {"rltrain/base/lazy.py", "rltrain/base/moved.py"}
    found = {"docs/page.md", "rltrain/door.py", "rltrain/settings.py", "tests/test_new name.py"}
    assert changed.changed_files(checkout) == moved | found
    with pytest.raises(SystemExit, match="compares a checkout with its branch trunk"):
        changed.changed_files(checkout, "trunk")


def test_nothing_chosen_ends_as_pytest_does_when_it_ran_nothing(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(changed, "ROOT", checkout)
    monkeypatch.setattr(sys, "argv", ["changed", str(tmp_path / "note")])
    monkeypatch.setattr(changed, "changed_files", lambda root: set())
    with pytest.raises(SystemExit) as ended:
        changed.main()
    assert ended.value.code == 5
    assert (tmp_path / "note").read_text() == "0 of 8 files of tests chosen\n"
    monkeypatch.setattr(changed, "changed_files", lambda root: {"docs/page.md", "rltrain/base/low.py"})
    changed.main()
    assert capsys.readouterr().out.splitlines() == [
        "tests/trainer/test_patched.py tests/trainer/test_step.py",
        "tests/test_page.py",
    ]


def test_what_a_test_imports_when_it_runs_is_found_in_its_sources():
    """And little besides: the scorers import nothing of the trainer's."""
    code = "import json, sys, tests.rewards.test_labelled; print(json.dumps(sorted(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], cwd=changed.ROOT, capture_output=True, text=True, check=True)
    sources = changed.Sources(changed.ROOT)
    loaded = set().union(
        *(sources.files_of(name) for name in json.loads(process.stdout) if name.startswith("rltrain."))
    )
    reached = sources.reached("tests/rewards/test_labelled.py")
    assert loaded
    assert loaded <= reached
    assert not any(file.startswith("rltrain/trainer/") for file in reached)
