"""Files that docs/architecture.md names exist, and a run uses the additions of docs/extending.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import small_run, write_arithmetic

ROOT = Path(__file__).parent.parent
TEXT, ADDITIONS = ((ROOT / "docs" / name).read_text() for name in ("architecture.md", "extending.md"))
# "# FILE, a new file", "# FILE, at the end" or "# FILE, after: LINE", then the lines to write or to insert.
ADDITION = re.compile(r"```python\n# (\S+), (?:(a new file)|(at the end)|after: ([^\n]+))\n(.*?)```", re.DOTALL)


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`([\w./]+\.(?:py|md|svg)|[\w/]+/)`", TEXT + ADDITIONS))
    assert len(named) > 20
    assert {name for name in named if not ((ROOT / "rltrain" / name).exists() or (ROOT / name).exists())} == set()


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the package with every addition of the page."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "rltrain", folder / "rltrain", ignore=shutil.ignore_patterns("__pycache__"))
    additions = ADDITION.findall(ADDITIONS)
    assert len(additions) >= 8
    for name, new, at_end, anchor, code in additions:
        file = folder / name
        assert file.exists() != bool(new), name
        if new or at_end:
            with file.open("a") as stream:
                stream.write(code)
            continue
        lines = file.read_text().splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.rstrip("\n") == anchor]
        assert len(places) == 1, f"{name}: {anchor!r} is there {len(places)} times"
        lines.insert(places[0] + 1, code)
        file.write_text("".join(lines))
    return folder


def run(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "rltrain.main_ppo", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("dry", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_uses_everything_that_was_added(extended, tiny_model, tmp_path, dry):
    """A scorer, an estimator, a loss, an engine, a tracker and a key, each added as described on the page."""
    file = write_arithmetic(tmp_path / "train.parquet", range(24), data_source="my/parity")
    changes = {
        "data__val_files": "null",
        "algorithm__adv_estimator": "above_mean",
        "actor_rollout_ref__actor__policy_loss__loss_mode": "tanh_clip",
        "actor_rollout_ref__rollout__name": "echo",
        "trainer__logger": "[lines]",
        "data__shout": 2,
    }
    words = small_run(tiny_model, (file, file), tmp_path / "run", **changes)
    done = run(extended, *words, *["--dry-run"] * dry)
    assert done.returncode == 0, done.stderr
    if dry:
        return
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    assert all("actor/outside" in line for line in metrics)
    assert "the engine sleeps" in (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
    assert (tmp_path / "run" / "lines.txt").read_text().count("\n") >= 2


def test_an_added_key_has_help_and_a_bound(extended):
    assert "exclamation" in run(extended, "--help", "data.shout").stdout
    refused = run(extended, "data.shout=0", "--dry-run")
    assert refused.returncode == 2
    assert "data.shout=0" in refused.stderr + refused.stdout


def test_an_added_device_is_one_row(extended):
    code = (
        "from rltrain.common.device import get_device; print(get_device('tpu').backend, get_device('tpu').ray_resource)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=extended, capture_output=True, text=True)
    assert process.stdout.split() == ["cpu:gloo,tpu:tccl", "TPU"], process.stderr
