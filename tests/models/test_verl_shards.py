"""FSDP checkpoints in verl's layout, created by torch itself, become model folders."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from rltrain.common.errors import CheckpointError
from rltrain.run.checkpoints.folder import Checkpoints
from rltrain.tools.checkpoint import main
from tests.models.test_safe import Payload
from tests.ranks import run_on_ranks
from tests.tiny import save_tiny_model

KINDS = ["sharded", "hybrid", "plain"]


def save_shards(rank, world_size, model, folder) -> None:
    """Save the files that each rank of verl's FSDP writes for a model: DTensors over one mesh, also over replicas, or
    plain rows."""
    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    meshes = {"sharded": init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))}
    meshes["hybrid"] = init_device_mesh("cpu", (1, 3), mesh_dim_names=("ddp", "fsdp"))
    for kind in KINDS:
        if kind == "plain":
            # Vectors whole, as buffers are, and the rows of all else.
            mine = {
                name: weight if weight.dim() == 1 else weight.chunk(3)[rank].clone() for name, weight in weights.items()
            }
        else:
            placements = [Shard(0)] if kind == "sharded" else [Replicate(), Shard(0)]
            mine = {name: distribute_tensor(weight, meshes[kind], placements) for name, weight in weights.items()}
        actor = Path(folder, kind, "global_step_7", "actor")
        actor.mkdir(parents=True, exist_ok=True)
        torch.save(mine, actor / f"model_world_size_{world_size}_rank_{rank}.pt")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model with 20 tokens, which is not a multiple of three ranks."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    run_on_ranks(save_shards, 3, str(model), str(folder))
    for kind in KINDS:
        small = folder / kind / "global_step_7" / "actor" / "huggingface"
        shutil.copytree(model, small)
        (small / "model.safetensors").unlink()
    return folder


@pytest.fixture
def step(saved, tmp_path) -> Path:
    """A checkpoint that tests may change."""
    return Path(shutil.copytree(saved / "sharded", tmp_path / "verl")) / "global_step_7"


@pytest.mark.parametrize("kind", KINDS)
def test_shards_become_the_model_they_were_cut_from(saved, model, tmp_path, kind):
    out = tmp_path / "out"
    assert main(["export", str(saved / kind / "global_step_7" / "actor"), str(out)]) == 0
    merged, expected = load_file(out / "model.safetensors"), load_file(model / "model.safetensors")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], weight) for name, weight in expected.items())
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def changed(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda shard, config: shard(1).unlink(), "lacks model_world_size_3_rank_1.pt (1 of 3 files)"),
        (lambda shard, config: os.truncate(shard(1), 1000), "cannot be read as tensors only"),
        (lambda shard, config: torch.save({"a": Payload("it_ran")}, shard(1)), "cannot be read as tensors only"),
        (lambda shard, config: shutil.copy(shard(0), shard(2)), "the parts of model.embed_tokens.weight make [21, 32]"),
        (lambda shard, config: shutil.copy(shard(0), shard(0, 4)), "has shards of 3 and 4 ranks"),
        (lambda shard, config: shutil.rmtree(config.parent), "has no huggingface/config.json"),
        (lambda shard, config: changed(config, intermediate_size=65), "do not have the sizes of config.json"),
        (lambda shard, config: changed(config, num_hidden_layers=3), "is not a Hugging Face model"),
        (lambda shard, config: torch.save({"epoch": 1}, shard(0)), "has other content than named tensors"),
    ],
)
def test_shards_that_make_no_model_are_refused_by_what_is_wrong(step, tmp_path, monkeypatch, capsys, damage, said):
    monkeypatch.chdir(tmp_path)
    actor = step / "actor"
    damage(lambda rank, world=3: actor / f"model_world_size_{world}_rank_{rank}.pt", actor / "huggingface/config.json")
    assert main(["export", str(step), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["verl"], "no payload ran, and nothing is left"


def test_a_run_that_meets_a_checkpoint_of_verls_names_the_command(step):
    with pytest.raises(CheckpointError, match=rf"rltrain\.checkpoint export {step}/actor FOLDER"):
        Checkpoints(str(step.parent)).newest()
