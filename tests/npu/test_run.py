"""Runs of the real command with ``trainer.device=npu``, compared with a run on the CPU with the same arithmetic."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.clock import eventually
from tests.npu.standin import environment
from tests.tiny import small_run

STEPS = 2
A = "actor_rollout_ref__actor__"
CHANGES = {
    "trainer__n_gpus_per_node": 2,
    "trainer__save_freq": 1,
    "trainer__total_training_steps": STEPS,
    "actor_rollout_ref__rollout__name": "hf",
    "actor_rollout_ref__rollout__dtype": "float32",
    A + "policy_loss__loss_mode": f"{Path(__file__).parent / 'probe.py'}:usual",
    A + "fsdp_config__compute_dtype": "float32",
    A + "fsdp_config__param_offload": True,
    A + "fsdp_config__optimizer_offload": True,
    "actor_rollout_ref__ref__fsdp_config__param_offload": True,
}


def command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "rltrain.main_ppo", *arguments]


def finished(arguments: list[str], variables: dict[str, str]) -> None:
    process = subprocess.run(command(arguments), env=variables, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"[-6000:]


def weights(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}" / "huggingface" / "model.safetensors")


@pytest.fixture(scope="module")
def on_npu(tiny_model, arithmetic_files, tmp_path_factory):
    """Return (run folder, lines of the report of each rank)."""
    folder = tmp_path_factory.mktemp("npu")
    report = folder / "report"
    report.mkdir()
    variables = environment(count=2) | {"RLTRAIN_STANDIN_REPORT": str(report)}
    finished(small_run(tiny_model, arithmetic_files, folder, trainer__device="npu", **CHANGES), variables)
    return folder, [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(report.iterdir())]


@pytest.fixture(scope="module")
def killed_on_npu(tiny_model, arithmetic_files, tmp_path_factory):
    """Return the folder of a run that was killed by signal 9 after its first checkpoint, then resumed."""
    folder = tmp_path_factory.mktemp("killed")
    arguments = small_run(tiny_model, arithmetic_files, folder, trainer__device="npu", **CHANGES)
    with (folder / "first.out").open("w") as output:
        first = subprocess.Popen(command(arguments), env=environment(count=2), stdout=output, stderr=subprocess.STDOUT)
        saved = folder / "global_step_1" / "manifest.json"
        eventually(lambda: saved.is_file() or first.poll() is not None, "a checkpoint")
        assert saved.is_file(), (folder / "first.out").read_text()[-6000:]
        first.kill()
        first.wait()
    finished(arguments, environment(count=2))
    return folder


@pytest.fixture(scope="module")
def on_cpu(tiny_model, arithmetic_files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    finished(small_run(tiny_model, arithmetic_files, folder, trainer__device="cpu", **CHANGES), environment())
    return folder


# Steps in one process, bit for bit as on the CPU: test_standin.py. Two ranks and their memory: the last test.
@pytest.mark.long
@pytest.mark.fault("A run on a device, killed by kill -9, ends with the weights of an unbroken one")
def test_weights_are_those_of_the_cpu_bit_for_bit(killed_on_npu, on_cpu):
    own, expected = weights(killed_on_npu), weights(on_cpu)
    assert own.keys() == expected.keys()
    assert [name for name in own if not torch.equal(own[name], expected[name])] == []


def test_offloaded_memory_is_gone_before_other_memory_comes(on_npu, tiny_model):
    """After each transition the device holds only what the phase needs. During it, memory never exceeds the larger of
    before and after."""
    shard = sum(each.nbytes for each in load_file(tiny_model / "model.safetensors").values()) // 2
    # In shards: the actor, whose moments stay on the host; the reference; the engine, which has all weights.
    needed = {"sync": 1, "gen": 2, "old_log_prob": 1, "ref": 1, "update_actor": 1}
    # Of actor and reference two tables of 16 frequencies each stay, and the attention's mask of 2048 x 2048 bytes.
    tables, mask = 4 * 16 * 4, 2048 * 2048
    _, reports = on_npu
    assert len(reports) == 2
    for lines in reports:
        # In the first step no engine has any weights.
        second = [number for number, line in enumerate(lines) if line["phase"] == "sync"][1]
        assert {line["phase"] for line in lines[second:]} == set(needed)
        for line in lines[second:]:
            held = line["after"] - (mask if line["after"] >= mask else 0)
            assert held - needed[line["phase"]] * shard == tables, line
            assert line["peak_of_move"] <= max(line["before"], line["after"]), line
