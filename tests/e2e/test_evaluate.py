"""``rltrain evaluate`` with Ray equals the trainer's own validation."""

import json
import os
import signal

import pandas as pd
import pytest

import rltrain
from rltrain.common.imports import IMPORTING
from rltrain.run.fit import Trainer
from rltrain.run.report.table import read_metrics
from rltrain.tools.evaluate.__main__ import main
from rltrain.trainer.validation import Validation
from tests.tiny import small_run

SETTINGS = [
    "data.max_prompt_length=16", "data.max_response_length=8", "trainer.device=cpu", "trainer.n_gpus_per_node=1",
    "n=4", "temperature=1.0",
]  # fmt: skip


def found(folder, name="evaluation.json"):
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.smoke("An evaluation of a checkpoint equals the validation of its run")
@pytest.mark.usefixtures("joined")
def test_checkpoints_get_the_numbers_that_their_run_has_found(tiny_model, arithmetic_files, tmp_path, capfd):
    sampled = {
        f"actor_rollout_ref__rollout__val_kwargs__{name}": value for name, value in (("n", 4), ("temperature", 1))
    }
    often = {
        "trainer__report": True,
        "trainer__test_freq": 1,
        "trainer__save_freq": 1,
        "actor_rollout_ref__actor__optim__lr": 0.05,
    }
    run = tmp_path / "run"
    rltrain.train(small_run(tiny_model, arithmetic_files, run, **sampled, **often))
    name = "val-core/rltrain/arithmetic/reward/mean@4"
    wanted = {line["step"]: line[name] for line in read_metrics(run) if name in line}
    words = [f"model={run / 'global_step_*'}", f"data={arithmetic_files[1]}", *SETTINGS]
    assert main(words) == 0
    told = capfd.readouterr().out
    assert "global_step_1" in told
    for step, value in wanted.items():
        one = found(run / "evaluation" / f"global_step_{step}")
        assert one["average"]["avg@4"]["value"] == value
        kept = rltrain.read_samples(run / "evaluation" / f"global_step_{step}", split="val")
        own = rltrain.read_samples(run, step, "val")
        pd.testing.assert_frame_equal(kept[own.columns], own)
    both = found(run / "evaluation", "evaluations.json")["evaluations"]
    assert [one["model"]["step"] for one in both] == [1, 2]
    assert (run / "evaluation" / "evaluation.html").is_file()
    # Slow operations are logged before they start, by the run and by its evaluations.
    logs = [
        file.read_text() for file in (run / "train.log", run / "evaluation" / "global_step_2" / "run" / "train.log")
    ]
    said = (IMPORTING, "writing report.html"), (f"loading {run / 'global_step_2'} on 1 worker",)
    assert [line for log, lines in zip(logs, said, strict=True) for line in lines if line not in log] == []
    assert main(words) == 0
    assert "was evaluated before" in capfd.readouterr().out
    assert found(run / "evaluation", "evaluations.json")["evaluations"] == both


@pytest.mark.long
@pytest.mark.usefixtures("joined")
def test_an_evaluation_that_was_stopped_goes_on_with_equal_numbers(
    tiny_model, arithmetic_files, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(Validation, "prompts_at_once", 2)
    words = [f"model={tiny_model}", f"data={arithmetic_files[1]}", *SETTINGS]
    assert main([*words, f"out={tmp_path / 'whole'}"]) == 0
    answer, made = Trainer.answer, []

    def stopped(trainer, rows, file):
        if made:
            os.kill(os.getpid(), signal.SIGINT)
        made.append(rows)
        answer(trainer, rows, file)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "answer", stopped)
        assert main([*words, f"out={tmp_path / 'cut'}"]) == 130
    message = f"stopped; 2 of 6 prompts of {tiny_model.name} are done: the same command continues after them"
    assert message in capfd.readouterr().err
    assert not (tmp_path / "cut" / "evaluation.json").exists()
    assert main([*words, f"out={tmp_path / 'cut'}", "temperature=0.5"]) == 2
    assert "val_kwargs.temperature: 1.0 then, 0.5 now" in capfd.readouterr().err
    assert main([*words, f"out={tmp_path / 'cut'}"]) == 0
    assert "2 of 6 prompts already have responses" in capfd.readouterr().out
    assert found(tmp_path / "cut") == found(tmp_path / "whole")
