"""Runs that are stopped after every step end with the same files as a run that was never stopped."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rltrain.run.report.table import read_metrics
from tests.tiny import small_run, write_arithmetic
from tests.tiny_vision import save_tiny_vision_model, write_pictures
from tests.trainer.steps import ACTOR, GAE, numbers_of

pytestmark = pytest.mark.usefixtures("joined")

# Kills the driver as soon as a checkpoint exists, or asks the run to stop, in every step up to one.
FUSE = """
import os, signal

class Fuse:
    def __init__(self):
        self.name, until = os.environ.get("FUSE", "- 0").split()
        self.until = int(until)

    def on_step(self, step, metrics):
        if self.name == "SIGTERM" and step <= self.until:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_save(self, step, folder):
        if self.name == "SIGKILL" and step <= self.until:
            os.kill(os.getpid(), signal.SIGKILL)
"""
# Nine rows and four prompts a step: an epoch is two steps.
NUM_ROWS, STEPS = 9, 3
ROLLOUT = "actor_rollout_ref__rollout__"
ALL_ROLES = {
    **GAE, "algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive",
    "algorithm__kl_ctrl__horizon": 50, "algorithm__filter_groups__enable": True,
    "algorithm__filter_groups__metric": "seq_reward", "algorithm__rollout_correction__rollout_is": "token",
    "data__sampler__name": "solve_rate", "data__gen_batch_size": 2, "trainer__n_gpus_per_node": 2,
    "trainer__test_freq": 2,
}  # fmt: skip
PICTURES = {
    "actor_rollout_ref__model__lora_rank": 4, "data__max_prompt_length": 48, "data__max_response_length": 20,
    ACTOR + "ppo_max_token_len_per_gpu": 160,
}  # fmt: skip
# One worker, because with two the timing determines whose responses are carried over.
CARRIED = {
    ROLLOUT + "tail": "carry_over", ROLLOUT + "oversample_ratio": 1.5, ROLLOUT + "max_num_seqs": 8,
    "algorithm__rollout_correction__rollout_is": "token",
}  # fmt: skip
# The ways to stop a run, and the last step in which each is tried. One is stopped after its last step too.
RUNS = {
    "two workers, all roles": ("SIGKILL", STEPS, ALL_ROLES),
    "two workers, pictures and adapters": ("SIGKILL", STEPS - 1, PICTURES | {"trainer__n_gpus_per_node": 2}),
    "one worker, pictures and adapters, answers carried over": ("SIGTERM", STEPS - 1, PICTURES | CARRIED),
}


@pytest.fixture
def arguments(tiny_model, tmp_path):
    """arguments(folder, **changes): a run of a model with dropout in its configuration, and a `FUSE`."""
    (tmp_path / "fuse.py").write_text(FUSE)

    def make(folder: Path, **changes: object) -> list[str]:
        model, write = tmp_path / "model", write_arithmetic
        if changes.items() >= PICTURES.items():
            pytest.importorskip("torchvision", reason="torchvision is not installed (scripts/test.sh installs it)")
            write = write_pictures
            if not model.exists():
                save_tiny_vision_model(model, "qwen2_5_vl", tied=False)
        elif not model.exists():
            shutil.copytree(tiny_model, model)
            settings = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.5}))
        files = [write(tmp_path / f"{split}.parquet", range(NUM_ROWS)) for split in ("train", "test")]
        keys = {"trainer__save_freq": 1, "trainer__total_training_steps": STEPS, **changes}
        keys |= {ACTOR + "checkpoint__save_contents": "[model]", "trainer__callbacks": f"[{tmp_path}/fuse.py:Fuse]"}
        return small_run(model, files, folder, **keys)

    return make


def told(run: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of every step, except times."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_metrics(run):
        steps.setdefault(line["step"], {}).update(line)
    clocks = ("reward/compute_s", "drift/")
    return {
        step: {name: value for name, value in numbers_of(line).items() if not name.startswith(clocks)}
        for step, line in steps.items()
    }


def kept(run: Path) -> dict[str, object]:
    """Return the contents of checkpoints and samples."""
    found: dict[str, object] = {}
    for step in range(1, STEPS + 1):
        folder = run / f"global_step_{step}"
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".distcp", ".npz", ".safetensors"):
                found[str(file.relative_to(run))] = file.read_bytes()
        # Metrics of a validation after the save are excluded; they only show which prompt is generated first.
        found[f"global_step_{step}/lengths.npz"] = np.load(folder / "lengths.npz")["train"].tobytes()
        progress = json.loads((folder / "progress.json").read_text())
        found[f"progress {step}"] = {name: value for name, value in progress.items() if name != "metrics"}
    for file in (run / "samples").glob("*.parquet"):
        found[file.name] = pq.read_table(file).to_pylist()
    return found


@pytest.mark.long
@pytest.mark.fault("A run that is stopped or killed after any step ends bit for bit as the one that never was")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_stopped_at_every_step_is_the_unbroken_one(start, arguments, tmp_path, name):
    fuse, until, changes = RUNS[name]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    process = start(arguments(straight, **changes))
    assert process.wait(300) == 0, process.communicate()[0]
    codes = []
    while 0 not in codes and len(codes) <= until:
        process = start(arguments(stopped, **changes), FUSE=f"{fuse} {until}")
        output, _ = process.communicate(timeout=300)
        codes.append(process.returncode)
        assert process.returncode in (0, 75, -9), output
    assert len(codes) == until + 1, "it is stopped in every step"
    assert told(stopped) == told(straight)
    one, other = kept(straight), kept(stopped)
    assert one.keys() == other.keys()
    assert [name for name, each in one.items() if each != other[name]] == []
    assert len(one) >= STEPS * 5
