"""Modules under the names that people type and import: scripts of the first versions go on working."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.base import moved

ROOT = Path(__file__).parent.parent
# Written down once; never shortened.
TYPED = [
    "rltrain.view", "rltrain.report", "rltrain.port", "rltrain.doctor", "rltrain.sync", "rltrain.supervise",
    "rltrain.replay", "rltrain.collect", "rltrain.env_report", "rltrain.rewards.try",
    "rltrain.controller.launch", "rltrain.cli", "rltrain.main_ppo",
]  # fmt: skip
IMPORTED = [
    "rltrain.algorithms.value_loss", "rltrain.aside", "rltrain.base.aside",
    "rltrain.batch", "rltrain.chips", "rltrain.columns", "rltrain.device", "rltrain.dry_run",
    "rltrain.env", "rltrain.errors", "rltrain.help", "rltrain.imports", "rltrain.logs", "rltrain.plugin",
    "rltrain.plugins", "rltrain.port.shell", "rltrain.port.translate", "rltrain.ragged", "rltrain.report",
    "rltrain.rewards.jail.limits", "rltrain.rewards.processes.output",
    "rltrain.rewards.registry", "rltrain.seeds", "rltrain.stacks", "rltrain.stop", "rltrain.storage",
    "rltrain.trainer.build", "rltrain.trainer.run", "rltrain.versions", "rltrain.view",
    "rltrain.workers.rollout.base", "rltrain.workers.rollout.hf",
]  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
def test_a_command_is_found_by_the_name_that_people_type(name):
    done = subprocess.run([sys.executable, "-m", name, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert "Traceback" not in done.stderr
    assert "No module named" not in done.stderr
    assert done.returncode in (0, 2)


@pytest.mark.parametrize("name", IMPORTED)
def test_a_module_is_one_module_by_both_names(name):
    now = moved.home(name)
    assert now
    module = importlib.import_module(name)
    assert module is importlib.import_module(now)
    assert (module.__name__, module.__spec__.name) == (now, now)


def test_every_old_name_leads_somewhere():
    for old, new in moved.MOVED.items():
        assert importlib.import_module(old) is importlib.import_module(new)
    with pytest.raises(ModuleNotFoundError, match=r"rltrain\.nothing"):
        importlib.import_module("rltrain.nothing")
