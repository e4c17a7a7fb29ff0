"""The shell scripts: they parse, they stop on the first error, their commands are accepted."""

import os
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/*.sh"), ROOT / ".ci" / "run"])
LAUNCHERS = [
    ROOT / "examples" / name
    for name in ("grpo_7b_boba_64gpu.sh", "grpo_gsm8k_npu_8.sh", "ppo_gae_gsm8k_npu_8.sh", "dapo_math_npu_8.sh")
]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "HEAD_FILE", "HEAD_ADDRESS")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean | environment, cwd=ROOT)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_script_parses_and_stops_on_the_first_error(script):
    assert run("bash", "-n", str(script)).returncode == 0
    sourced = script.name == "setup_env.sh"
    assert sourced or re.search(r"^set -euo pipefail$", script.read_text(), re.MULTILINE)


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda script: script.name)
def test_the_commands_of_the_examples_are_accepted(script, tmp_path):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    done = run("bash", str(script), "--dry-run", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert "samples per step" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ([], {}, "say head or worker, or set RANK"),
        (["haed"], {}, "'haed' is neither head nor worker"),
        (["worker"], {}, "a worker needs the head's address"),
        (["worker"], {"HEAD_FILE": "/no/such/file", "WAIT_S": "0"}, "no head address in /no/such/file after 0 s"),
    ],
)
def test_ray_start_says_what_it_lacks(arguments, environment, words):
    done = run("bash", "scripts/ray_start.sh", *arguments, **environment)
    assert done.returncode == 2
    assert words in done.stderr


def test_constraints_pin_what_setup_asks_for():
    wanted = {re.split(r"[<>=;\[ ]", line)[0] for line in requires("rltrain") or []}
    pinned = {
        line.split("==")[0] for line in (ROOT / "scripts/constraints-cpu.txt").read_text().splitlines() if "==" in line
    }
    assert {"torch", "transformers", "ray", "omegaconf"} <= pinned
    assert pinned <= wanted
