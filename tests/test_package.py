"""The built, installed and imported package."""

import importlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from rltrain import __main__ as cli
from rltrain.commands import COMMANDS
from tests.tiny import small_run

ROOT = Path(__file__).parent.parent
_BUILD = (
    "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist'); b.build_editable('editable')"
)


def python(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    own = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=own, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel, built from a copy of this checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("rltrain", "docs", "examples", "scripts", "tests", "bench"):
        subprocess.run(["cp", "-r", ROOT / name, folder / name], check=True)
    for file in ROOT.iterdir():
        if file.is_file() and file.name != ".git":
            (folder / file.name).write_bytes(file.read_bytes())
    done = python("-c", _BUILD, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The wheel, installed by pip with --target."""
    folder = tmp_path_factory.mktemp("site")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (data,) = folder.glob("*.data/data")
    (data / "share").rename(folder / "share")
    record = next(folder.glob("*.dist-info")) / "RECORD"
    record.write_text(record.read_text().replace(f"{data.parent.name}/data/", ""))
    return folder


def test_the_lowest_versions_have_no_advisory_that_was_known(tmp_path):
    """`make audit` requests new ones, which needs a network."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/lowest_versions.py", "images"], capture_output=True, text=True, check=True
    )
    pins = dict(line.split("==") for line in done.stdout.split())
    least = {"jinja2": "3.1.6", "pillow": "12.3", "pyarrow": "14.0.1", "ray": "2.56", "bokeh": "3.8.2"}
    assert all(Version(pins[name]) >= Version(version) for name, version in least.items())
    assert {"pandas", "numpy", "safetensors", "torch", "transformers", "httpx"} <= pins.keys()


def test_the_sdist_holds_what_a_packager_needs(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = "LICENSE CHANGELOG.md Makefile docs/rewards.md scripts/ray_start.sh tests/config/keys.txt rltrain/py.typed"
    assert {*wanted.split()} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_an_editable_install_is_found_from_the_parent_folder_of_the_clone(built, tmp_path):
    (wheel,) = built.with_name("editable").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    # A clone is called rltrain as the package in it is, and Python takes a folder without __init__.py for a package.
    (tmp_path / "rltrain").symlink_to(built.parent)
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import rltrain; print(rltrain.__version__)"
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_wheel_says_what_it_is(installed):
    (info,) = installed.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    for line in ("License-Expression: Apache-2.0", "Author: rltrain developers", "Classifier: Typing :: Typed"):
        assert line in metadata
    assert "rltrain = rltrain.__main__:main" in (info / "entry_points.txt").read_text()
    for file in ("py.typed", "config/verl/keys.tsv", "agents/ready/search.py"):
        assert (installed / "rltrain" / file).is_file()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    description = metadata.partition("\n\n")[2]
    assert "](docs/" not in description
    assert "docs/rollout.md" in description


@pytest.mark.long
def test_an_installed_wheel_plans_a_run_away_from_the_checkout(installed, tiny_model, arithmetic_files, tmp_path):
    run = small_run(tiny_model, arithmetic_files, tmp_path / "run")
    done = python("-m", "rltrain", "train", *run, "--dry-run", cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 x 1 = 1 (cpu)" in done.stdout
    code = "from rltrain.common.env import shipped; print(shipped('docs/rewards.md'), shipped('scripts/ray_start.sh'))"
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert [Path(word).is_file() for word in done.stdout.split()] == [True, True], done.stdout


def test_messages_name_pages_that_are_there(monkeypatch):
    from rltrain.common.env import shipped

    assert shipped("docs/rewards.md") == "docs/rewards.md"
    for file in (ROOT / "rltrain").rglob("*.py"):
        for line in file.read_text().splitlines():
            if "shipped('" in line:
                assert (ROOT / line.partition("shipped('")[2].partition("'")[0]).is_file(), line


def test_the_console_command_opens_every_program(capsys):
    assert cli.main([]) == 0
    usage = capsys.readouterr().out
    for name in (*COMMANDS, "data"):
        assert f"\n  {name} " in usage
    for module, _ in COMMANDS.values():
        assert callable(importlib.import_module(module).main)
    assert cli.main(["reprot"]) == 2
    assert "Did you mean rltrain report?" in capsys.readouterr().err
    assert cli.main(["export"]) == cli.main(["grpo"]) == 2
    meant = capsys.readouterr().err
    assert "Did you mean rltrain checkpoint export?" in meant
    assert "Did you mean rltrain train algorithm.adv_estimator=grpo?" in meant
    assert cli.main(["trainer.device=cpu"]) == 2
    assert "Did you mean rltrain train trainer.device=cpu" in capsys.readouterr().err
    assert cli.main(["data", "common"]) == 2
    assert "needs the name of a converter: aime, " in capsys.readouterr().err


def test_nothing_is_imported_through_the_links_at_the_top():
    for name in ("trainer.plan", "workers.interface.tasks", "data_preprocess.common"):
        done = python("-c", f"import {name}", cwd=ROOT)
        assert done.returncode == 1
        assert f"ImportError: import rltrain.{name.partition('.')[0]}: importing through the symlink" in done.stderr
    done = python("-m", "data_preprocess.gsm8k", "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr
