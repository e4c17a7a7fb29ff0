"""Training from Python, with Ray."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import rltrain
from tests.clock import eventually
from tests.tiny import small_run

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
def test_the_example_script_runs_as_it_stands(tiny_model, arithmetic_files, tmp_path):
    run = [word for word in small_run(tiny_model, arithmetic_files, tmp_path) if "adv_estimator" not in word]
    further = [
        word for word in run if not word.startswith(("data.train_files", "data.val_files", "trainer.default_local"))
    ]
    words = [str(each) for each in (tiny_model, *arithmetic_files, tmp_path / "run")]
    script = [sys.executable, str(ROOT / "examples" / "from_python.py")]
    process = subprocess.run([*script, *words, *further], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    lines = process.stdout.splitlines()
    assert any(line.startswith("after one step: ") and line.endswith("1 step made") for line in lines)
    (rewards,) = [line for line in lines if line.startswith("mean rewards: ")]
    assert len(rewards.split()) == 4, "two steps, of which fit made one"
    assert "16 answers of the last step were kept" in process.stdout
    assert "the model before training: {'val-core/rltrain/arithmetic/acc/mean@1'" in process.stdout
    assert {file.name.split("-")[0] for file in (tmp_path / "run" / "objects").iterdir()} == {"last_number", "centered"}


def everything(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("saves", [True, False])
def test_an_evaluation_in_the_folder_of_a_run_leaves_it_alone(tiny_model, arithmetic_files, tmp_path, saves, caplog):
    steps = {"trainer__total_training_steps": 1, "trainer__save_at_end": saves}
    run = small_run(tiny_model, arithmetic_files, tmp_path / "run", **steps)
    assert rltrain.train(run).exit_code == 0
    for changed in (
        [],
        [
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        ],
    ):
        before = everything(tmp_path / "run")
        assert rltrain.evaluate([*run, *changed])
        after = everything(tmp_path / "run")
        for name, held in before.items():
            # The log continues; nothing else of the run has changed.
            assert after[name] == held or name.suffix in (".lock", ".log"), name
        assert sum(name.name == "metrics.jsonl" for name in after) == 2 + bool(changed)
    newest = rltrain.train([*run, "trainer.val_only=True"])
    assert newest.folder == tmp_path / "run" / "evaluation_3"
    assert newest.table().index.tolist() == [int(saves)]
    caplog.clear()
    assert rltrain.train([*run, "trainer.total_training_steps=2"]).table().index.max() == 2
    assert "another experiment" not in caplog.text


@pytest.mark.long
def test_evaluation_gives_the_numbers_of_a_trainer(local_ray, tiny_model, arithmetic_files, tmp_path):
    """An evaluation of the unchanged model, by rollout workers only, in the caller's Ray, which keeps running."""
    run = small_run(tiny_model, arithmetic_files, tmp_path / "whole", data__max_response_length=12)
    with rltrain.build(run) as trainer:
        wanted = trainer.validate()
        logging.getLogger("rltrain").info("a line while the trainer lives")
    assert "a line while the trainer lives" in (tmp_path / "whole" / "train.log").read_text()
    found = rltrain.evaluate([*run, f"trainer.default_local_dir={tmp_path / 'alone'}"])
    assert local_ray.is_initialized()
    eventually(lambda: local_ray.available_resources().get("CPU") == 4, "Ray frees them in the background")
    core = {name for name in wanted if name.startswith("val-")}
    assert core
    assert {name: found[name] for name in core} == {name: wanted[name] for name in core}
