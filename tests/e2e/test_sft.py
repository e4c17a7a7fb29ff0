"""The command `rltrain sft` on a tiny model, with real Ray."""

import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from rltrain.api import check_settings
from rltrain.config.load import load_config
from rltrain.run.report.table import read_metrics
from rltrain.tools.sft import main
from tests.distance import distance
from tests.tiny import save_tiny_model, save_tiny_moe

pytestmark = pytest.mark.usefixtures("joined")

FSDP = "actor_rollout_ref.actor.fsdp_config."
# Name -> model, keys of the run on one rank, and keys on several ranks.
LAYOUTS = {
    "data parallel": (save_tiny_model, "", ""),
    "ulysses": (save_tiny_model, "", "ulysses_sequence_parallel_size=2"),
    "tensor parallel": (save_tiny_model, "", FSDP + "tensor_parallel_size=2"),
    "expert parallel": (save_tiny_moe, "", FSDP + "expert_parallel_size=2"),
    "LoRA, tensor parallel": (save_tiny_model, "model.lora_rank=4", FSDP + "tensor_parallel_size=2"),
}


def learn(model, folder, *others):
    """Run the command on two-turn sums."""
    rows = [("user", "{0}+{0}=?"), ("assistant", "{1}"), ("user", "1+1=?"), ("assistant", "2")]
    texts = [[(role, text.format(number, 2 * number)) for role, text in rows] for number in range(24)]
    file = folder.parent / "rows.jsonl"
    messages = [[{"role": role, "content": text} for role, text in row] for row in texts]
    file.write_text("\n".join(json.dumps({"messages": row}) for row in messages))
    words = [f"model.path={model}", f"data.train_files={file}", f"data.val_files={file}", "data.max_length=64"]
    words += ["data.train_batch_size=8", "optim.lr=1e-2", "trainer.device=cpu", "trainer.report=False"]
    assert main([*words, f"trainer.default_local_dir={folder}", *others]) == 0


def found(folder, step):
    """Return the losses of a run by step and name, and the exported weights of a step."""
    lines = read_metrics(folder)
    losses = {(line["step"], name): line[name] for line in lines for name in line if name.endswith("/loss")}
    return losses, load_file(folder / f"global_step_{step}/huggingface/model.safetensors")


def test_a_resumed_run_is_bit_identical_on_two_ranks_and_names_a_model(tiny_model, tmp_path):
    words = ["trainer.n_gpus_per_node=2", "trainer.save_freq=2", "trainer.total_training_steps=4"]
    learn(tiny_model, tmp_path / "whole", *words)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed", ignore=shutil.ignore_patterns("global_step_4", "*.lock"))
    learn(tiny_model, tmp_path / "resumed", *words)
    (losses, weights), (resumed_losses, resumed_weights) = (found(tmp_path / run, 4) for run in ("whole", "resumed"))
    assert losses == resumed_losses
    assert losses[4, "val/loss"] < losses[0, "val/loss"]
    assert all((weights[name] == resumed_weights[name]).all() for name in weights)
    # RL starts from the run.
    loaded = load_config([f"actor_rollout_ref.model.path={tmp_path}/whole", "trainer.device=cpu", "data.train_files=x"])
    export = f"{tmp_path}/whole/global_step_4/huggingface"
    assert any(note.endswith(f"its newest model is used: {export}") for note in check_settings(loaded))
    config = loaded.config
    assert config.actor_rollout_ref.model.path == config.actor_rollout_ref.ref.model.path == export


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """one_rank(save, keys): return a model, and the losses and weights of a run on one rank, which is made once."""

    @cache
    def make(save, keys):
        folder = tmp_path_factory.mktemp("one")
        model = save(folder / "model", heads=4, kv_heads=2)
        learn(model, folder / "run", "trainer.total_training_steps=5", *keys.split())
        return model, *found(folder / "run", 5)

    return make


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_equal_those_of_one_rank(one_rank, tmp_path, layout, world):
    save, keys, parallel = LAYOUTS[layout]
    model, losses, weights = one_rank(save, keys)
    start = load_file(model / "model.safetensors")
    # Several micro-batches for each rank, and not as many for all.
    cut = ["data.max_token_len_per_gpu=64", f"trainer.n_gpus_per_node={world}", "trainer.total_training_steps=5"]
    learn(model, tmp_path / "run", *keys.split(), *cut, *parallel.split())
    other_losses, other_weights = found(tmp_path / "run", 5)
    assert other_losses.keys() == losses.keys()
    in_order = (torch.tensor([values[key] for key in losses]) for values in (other_losses, losses))
    assert distance(*in_order) < 1e-5
    moved, other_moved = ({name: each[name] - start[name] for name in start} for each in (weights, other_weights))
    assert distance(other_moved, moved) < 1e-5
