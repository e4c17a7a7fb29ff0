"""The shell scripts: they parse, they stop at the first error, and their commands are accepted."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml

from rltrain.main_ppo import main
from tests.clock import PATIENCE_S, eventually

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/**/*.sh"), ROOT / ".ci" / "run"])


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "HEAD_FILE", "HEAD_ADDRESS", "RAY_AUTH_TOKEN", "RLTRAIN_PYTHON")
    }
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean | environment, cwd=ROOT)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_script_parses_and_stops_on_the_first_error(script):
    assert run("bash", "-n", str(script)).returncode == 0
    sourced = script.name == "setup_env.sh"
    assert sourced or re.search(r"^set -euo pipefail$", script.read_text(), re.MULTILINE)


def test_ray_start_needs_no_active_environment_and_says_what_it_lacks(tmp_path):
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run("bash", "scripts/ray_start.sh", "haed", **path)
    assert done.returncode == 2
    assert "error: 'haed' is not head, worker or stop" in done.stderr
    help_text = run("bash", "scripts/ray_start.sh", "--help").stdout
    assert "RANK=r NNODES=4 ray_start.sh -- python" in help_text
    assert help_text.rstrip().endswith("Keep the cluster in a private network all the same.")
    supervised = run("bash", "scripts/ray_start.sh", "haed", RESTARTS="3", **path)
    assert supervised.returncode == 2
    assert "supervise: attempt 1 ended with exit code 2" in supervised.stderr
    assert "'haed' is not head, worker or stop" in supervised.stderr
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/ray_start.sh").write_text((ROOT / "scripts/ray_start.sh").read_text())
    done = run("bash", str(tmp_path / "scripts/ray_start.sh"), "head", PATH="/usr/bin:/bin")
    assert done.returncode == 2
    assert "no python here has Ray. Activate the environment" in done.stderr


def test_the_environment_of_another_checkout_is_left_alone(tmp_path):
    other = tmp_path / "other"
    for file in ("rltrain/__init__.py", ".venv/rltrain-stamp", ".venv/bin/python"):
        (other / file).parent.mkdir(parents=True, exist_ok=True)
        (other / file).touch(0o755)
    calls = tmp_path / "calls"
    code = f'#!/bin/bash\necho "$@" >>{calls}; PYTHONPATH={other} exec {sys.executable} "$@"\n'
    (other / ".venv/bin/python").write_text(code)
    (tmp_path / "linked").symlink_to(other / ".venv")
    done = run("bash", "-c", f"set -eu; source scripts/setup_env.sh; VENV={tmp_path}/linked; setup_env lora")
    assert done.returncode == 1
    assert f"{tmp_path}/linked is the environment of {other}, and stays as it is" in done.stderr
    assert "install" not in calls.read_text()


def test_constraints_pin_what_setup_asks_for():
    wanted = {re.split(r"[<>=;\[ ]", line)[0] for line in requires("rltrain") or []}
    pinned = {
        line.split("==")[0] for line in (ROOT / "scripts/constraints-cpu.txt").read_text().splitlines() if "==" in line
    }
    assert {"torch", "transformers", "ray", "omegaconf"} <= pinned
    assert pinned <= wanted


# Records the signal, saves once the pipe ``go`` is written to, and ends as a run does.
RECORDER = """
import pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
def handle(*_):
    (folder / "go").read_text()
    (folder / "saved").write_text(" ".join(sys.argv[2:]))
    sys.exit(75)
signal.signal(signal.SIGTERM, handle)
(folder / "running").touch()
while True:
    signal.pause()
"""


# Slurm's commands: srun hands its signals on to what it runs, here the script on the first node alone.
SRUN = 'echo "$@" >"$FOLDER/srun"; shift 2; exec env SLURM_NODEID=0 "$@"'
SCONTROL = 'echo "$@" >"$FOLDER/queued"'
START = 'echo "file=$HEAD_FILE token=$RAY_AUTH_TOKEN" >"$FOLDER/start"; touch "$HEAD_FILE"; shift; exec "$@"'


@pytest.fixture
def slurm(tmp_path):
    """The submit folder of a job whose scripts/ray_start.sh only runs the command."""
    (tmp_path / "scripts").mkdir()
    for name, body in (("srun", SRUN), ("scontrol", SCONTROL), ("scripts/ray_start.sh", START)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "FOLDER": str(tmp_path)}

    def start(**more: str) -> subprocess.Popen:
        command = ["bash", ROOT / "scripts" / "slurm.sh", "launch.sh", "a=b"]
        return subprocess.Popen(command, env=environment | more, start_new_session=True)

    return start


@pytest.mark.parametrize("restarts", ["", "20"])
def test_slurm_hands_on_sigterm_waits_and_queues_again(slurm, tmp_path, restarts):
    (tmp_path / "recorder.py").write_text(RECORDER)
    (tmp_path / "launch.sh").write_text(f'set -e\nexec {sys.executable} recorder.py {tmp_path} "$@"\n')
    job = slurm(RESTARTS=restarts)
    os.mkfifo(tmp_path / "go")
    eventually((tmp_path / "running").exists, "the run")
    job.terminate()
    (tmp_path / "go").write_text("")  # waits until the run saves
    assert job.wait(PATIENCE_S) == 75
    assert (tmp_path / "saved").read_text() == "trainer.nnodes=2 trainer.stop_notice_s=280 a=b"
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
    line = "bash scripts/ray_start.sh -- bash launch.sh trainer.nnodes=2 trainer.stop_notice_s=280 a=b\n"
    assert (tmp_path / "srun").read_text().endswith(line)
    assert re.fullmatch(rf"file={tmp_path}/.ray_head_7 token=[0-9a-f]{{64}}\n", (tmp_path / "start").read_text())
    assert not list(tmp_path.glob(".ray_head_*"))


FIRST_NODE = '[ -z "${NODE_IP:-}" ] && echo %s >"$EXIT_CODE_FILE"; exit %s'


@pytest.mark.parametrize(
    ("script", "environment", "code", "queued"),
    [
        ("exit 0", {}, 0, False),
        ("exit 2", {}, 2, False),
        ("exit 75", {}, 75, True),
        ("exit 75", {"SLURM_RESTART_COUNT": "20"}, 75, False),
        # Failures are left to the supervisor where there is one.
        ("exit 75", {"RESTARTS": "20"}, 75, False),
        # The exit code of the first node counts.
        (FIRST_NODE % (75, 137), {"NODE_IP": "10.0.0.1"}, 75, True),
        (FIRST_NODE % (2, 75), {"NODE_IP": "10.0.0.1"}, 2, False),
    ],
)
def test_slurm_ends_as_the_run_ended_and_queues_75_again(slurm, tmp_path, script, environment, code, queued):
    (tmp_path / "launch.sh").write_text(f"{script}\n")
    assert slurm(**environment).wait(PATIENCE_S) == code
    assert (tmp_path / "queued").exists() == queued
    assert not list(tmp_path.glob(".ray_head_*"))


def test_signals_reach_the_trainer_in_every_launch_script():
    """A container or scheduler signals the shell, which does not forward signals while it waits for python."""
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
    os.mkfifo(tmp_path / "go")
    eventually((tmp_path / "running").exists, "the run")
    job.terminate()
    (tmp_path / "go").write_text("")  # waits until the run saves
    assert job.wait(PATIENCE_S) == 75
    assert (tmp_path / "saved").read_text() == "once"
    assert not (tmp_path / "went_on").exists()


def accepted(words, capsys):
    """Return whether a dry run accepts a command. The model of an example does not exist here."""
    module = words.index("rltrain.main_ppo")
    assert words[module - 2 : module] == ["python", "-m"]
    assert main([*words[module + 1 :], "--dry-run"]) == 2
    out, error = capsys.readouterr()
    return (error, "samples per step" in out) == ("", True)


def test_the_kuberay_example_is_a_rayjob_whose_command_is_accepted(capsys):
    job = yaml.safe_load((ROOT / "scripts/kuberay/rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    pod = cluster["headGroupSpec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert workers["template"]["spec"] == pod
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "scripts/constraints-npu.txt").read_text()
    words = job["spec"]["entrypoint"].split()
    assert accepted(words, capsys)
    devices = int(container["resources"]["limits"]["huawei.com/Ascend910"])
    assert json.loads(json.loads(workers["rayStartParams"]["resources"])) == {"NPU": devices}
    assert {f"trainer.nnodes={1 + workers['replicas']}", f"trainer.n_gpus_per_node={devices}"} <= {*words}


def test_the_kubernetes_example_supervises_a_command_that_is_accepted(capsys):
    job = yaml.safe_load((ROOT / "scripts/kubernetes/job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # Kubernetes asks for this where there is a podFailurePolicy.
    assert pod["restartPolicy"] == "Never"
    _ignored, failed = job["spec"]["podFailurePolicy"]["rules"]
    # What the supervisor does not run again, no other pod shall.
    ends = {"containerName": container["name"], "values": [1, 2, 70, 74]}
    assert ends.items() <= failed["onExitCodes"].items()
    command = container["command"]
    assert command[:3] == ["python", "-m", "rltrain.supervise"]
    assert accepted(command, capsys)
    assert f"trainer.n_gpus_per_node={container['resources']['limits']['nvidia.com/gpu']}" in command
