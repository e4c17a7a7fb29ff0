"""The command `rltrain sft` on a tiny model, with real Ray."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from rltrain.tools.sft import main

pytestmark = pytest.mark.usefixtures("joined")


def test_a_resumed_run_is_bit_identical_on_two_ranks(tiny_model, tmp_path):
    rows = [{"prompt": f"{number}+{number}=?", "response": str(2 * number)} for number in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file, words = f"{tmp_path}/rows.jsonl", ["trainer.n_gpus_per_node=2", "trainer.report=False", "trainer.save_freq=2"]
    words += ["data.max_length=32", "data.train_batch_size=8", "trainer.total_training_steps=4", "trainer.device=cpu"]
    words += [f"model.path={tiny_model}", f"data.train_files={file}", f"data.val_files={file}", "optim.lr=1e-2"]
    assert main([*words, f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed", ignore=shutil.ignore_patterns("global_step_4", "*.lock"))
    assert main([*words, f"trainer.default_local_dir={tmp_path}/resumed"]) == 0
    lines, weights = [], []
    for run in ("whole", "resumed"):
        metrics = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        lines.append({(line["step"], name): line[name] for line in metrics for name in line if name.endswith("/loss")})
        weights.append(load_file(tmp_path / run / "global_step_4/huggingface/model.safetensors"))
    assert lines[0] == lines[1]
    assert lines[0][4, "val/loss"] < lines[0][0, "val/loss"]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
