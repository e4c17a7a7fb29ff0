"""The shell scripts: they parse, they stop on the first error, their commands are accepted."""

import os
import re
import socket
import subprocess
import sys
import time
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/**/*.sh"), ROOT / ".ci" / "run"])


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "HEAD_FILE", "HEAD_ADDRESS", "RAY_AUTH_TOKEN")
    }
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean | environment, cwd=ROOT)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_script_parses_and_stops_on_the_first_error(script):
    assert run("bash", "-n", str(script)).returncode == 0
    sourced = script.name == "setup_env.sh"
    assert sourced or re.search(r"^set -euo pipefail$", script.read_text(), re.MULTILINE)


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


@pytest.fixture
def ray(tmp_path):
    """A `ray` that tells its arguments and token, on nodes whose homes are empty."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ray").write_text('#!/bin/sh\necho "ray $* token=$RAY_AUTH_TOKEN mode=$RAY_AUTH_MODE"\n')
    (tmp_path / "bin" / "ray").chmod(0o755)

    def start(node: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        (tmp_path / node).mkdir(exist_ok=True)
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        return run("bash", "scripts/ray_start.sh", *arguments, HOME=str(tmp_path / node), PATH=path, **environment)

    return start


def test_a_new_head_makes_a_token_for_its_user_alone(ray, tmp_path):
    done = ray("one", "head", "--num-cpus=2")
    assert done.returncode == 0, done.stderr
    assert "ray start --head" in done.stdout
    assert "--num-cpus=2 token= mode=token" in done.stdout
    token = tmp_path / "one" / ".ray" / "auth_token"
    assert len(token.read_text().strip()) == 64
    assert token.stat().st_mode & 0o777 == 0o600
    ray("one", "head")
    assert len(token.read_text().strip()) == 64


@pytest.mark.parametrize(("role", "more"), [("head", []), ("worker", ["10.0.0.1"])])
def test_a_nodes_address_can_be_named(ray, role, more):
    done = ray("one", role, *more, NODE_IP="10.0.0.7", RAY_AUTH_TOKEN="abc")
    assert "--node-ip-address=10.0.0.7" in done.stdout


def test_workers_find_the_head_and_ignore_an_earlier_one(ray, tmp_path):
    shared = tmp_path / "head"
    shared.write_text("127.0.0.1:1\n")  # nobody answers there
    done = ray("two", "worker", HEAD_FILE=str(shared), WAIT_S="1")
    assert "no head address" in done.stderr
    assert ray("one", "head", HEAD_FILE=str(shared), RAY_PORT="1").returncode == 0
    token = tmp_path / "head.token"
    assert token.stat().st_mode & 0o777 == 0o600
    with socket.create_server(("127.0.0.1", 0)) as head:
        shared.write_text(f"127.0.0.1:{head.getsockname()[1]}\n")
        done = ray("two", "worker", "--num-cpus=1", HEAD_FILE=str(shared))
    assert done.returncode == 0, done.stderr
    assert f"--num-cpus=1 token={token.read_text().strip()} mode=token" in done.stdout


def test_a_worker_without_the_heads_token_says_where_to_get_it(ray):
    done = ray("two", "worker", "127.0.0.1")
    assert done.returncode == 2
    assert "Copy ~/.ray/auth_token from the head" in done.stderr
    assert "token=abc" in ray("two", "worker", "127.0.0.1", RAY_AUTH_TOKEN="abc").stdout


def test_constraints_pin_what_setup_asks_for():
    wanted = {re.split(r"[<>=;\[ ]", line)[0] for line in requires("rltrain") or []}
    pinned = {
        line.split("==")[0] for line in (ROOT / "scripts/constraints-cpu.txt").read_text().splitlines() if "==" in line
    }
    assert {"torch", "transformers", "ray", "omegaconf"} <= pinned
    assert pinned <= wanted


@pytest.mark.parametrize("other", ["", "transformers==5.5.4"])
def test_an_environment_is_for_the_cpu_beside_accelerators(other, tmp_path):
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/calls\n')
    (tmp_path / "nvidia-smi").write_text("#!/bin/bash\n")
    for file in (python, tmp_path / "nvidia-smi"):
        file.chmod(0o755)
    line = f"set -eu; source {ROOT}/scripts/setup_env.sh; VENV={tmp_path}/venv; setup_env lora {other and repr(other)}"
    done = subprocess.run(
        ["bash", "-c", line], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    torch, package = (tmp_path / "calls").read_text().splitlines()
    assert torch.endswith("install --quiet --disable-pip-version-check torch==2.13.0+cpu")
    constraints = re.search(r"-c (\S+) -e .*\[lora\]$", package)[1]
    pinned = (ROOT / "scripts/constraints-cpu.txt").read_text()
    wanted = re.sub(r"(?m)^transformers==.*", other, pinned) if other else pinned
    assert Path(constraints).read_text() == wanted


# Records the signal, saves for a moment, and ends as a run does.
RECORDER = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def handle(*_):
    time.sleep(1)
    (folder / "saved").write_text(" ".join(sys.argv[2:]))
    sys.exit(75)
signal.signal(signal.SIGTERM, handle)
(folder / "running").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("first", ["exec ", ""], ids=["with_exec", "without_exec"])
def test_slurm_hands_on_sigterm_waits_and_queues_again(tmp_path, first):
    (tmp_path / "recorder.py").write_text(RECORDER)
    (tmp_path / "launch.sh").write_text(f'set -e\n{first}{sys.executable} recorder.py {tmp_path} "$@"\n')
    for name, body in (
        ("srun", 'echo 10.0.0.1:6379 >"$HEAD_FILE"; exec sleep 60'),
        ("scontrol", f'echo "$@" >{tmp_path}/queued'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    job = subprocess.Popen(
        ["bash", ROOT / "scripts" / "slurm.sh", "launch.sh", "a=b"], env=environment, start_new_session=True
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "running").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.terminate()
    assert job.wait(timeout=20) == 75
    assert (tmp_path / "saved").read_text() == "trainer.nnodes=2 ray_kwargs.ray_init.address=10.0.0.1:6379 a=b"
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
    assert not list(tmp_path.glob(".ray_head_*"))


@pytest.mark.parametrize("code", [0, 2])
def test_slurm_ends_as_the_run_ended(tmp_path, code):
    (tmp_path / "launch.sh").write_text(f"exit {code}\n")
    (tmp_path / "srun").write_text('#!/bin/bash\necho 10.0.0.1:6379 >"$HEAD_FILE"\n')
    (tmp_path / "srun").chmod(0o755)
    done = run(
        "bash", "scripts/slurm.sh", str(tmp_path / "launch.sh"),
        PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(tmp_path), SLURM_JOB_ID="7", SLURM_NNODES="1",
    )  # fmt: skip
    assert done.returncode == code
    assert "requeue" not in done.stdout + done.stderr


def test_signals_reach_the_trainer_in_every_launch_script():
    """A container or scheduler signals the shell; a shell that waits for python does not hand it on."""
    recipes = [file for file in ROOT.glob("examples/**/*.sh") if not file.name.endswith("_cpu.sh")]
    assert recipes
    for script in recipes:
        started = re.findall(r"^.*(?:python\b.*main_ppo|bash .*\.sh).*$", script.read_text(), re.MULTILINE)
        assert [line for line in started if not line.startswith(("#", "exec "))] == [], script


def test_a_script_of_several_runs_hands_signals_on_too(tmp_path):
    assert "handing_on_signals" in (ROOT / "examples" / "smollm2_gsm_cpu.sh").read_text()
    (tmp_path / "recorder.py").write_text(RECORDER)
    script = (
        f"set -euo pipefail; source {ROOT}/scripts/setup_env.sh; "
        f"handing_on_signals {sys.executable} recorder.py {tmp_path} once; handing_on_signals touch {tmp_path}/went_on"
    )
    job = subprocess.Popen(["bash", "-c", script], cwd=tmp_path)
    deadline = time.monotonic() + 20
    while not (tmp_path / "running").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.terminate()
    assert job.wait(timeout=20) == 75
    assert (tmp_path / "saved").read_text() == "once"
    assert not (tmp_path / "went_on").exists()
