"""FSDP checkpoints in verl's layout, made by torch itself, become model folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from rltrain.base.errors import CheckpointError
from rltrain.run.checkpoints.folder import Checkpoints
from rltrain.tools.checkpoint import main
from tests.ranks import run_on_ranks
from tests.tiny import save_tiny_model

KINDS = ["sharded", "hybrid", "plain"]


def save_shards(rank, world_size, model, folder) -> None:
    """What each rank of verl's FSDP leaves of a model: DTensors over one mesh, over replicas too, or plain rows."""
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
    """Its 20 tokens are no multiple of three ranks."""
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
    """A checkpoint that may be changed."""
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


def test_the_step_itself_may_be_named_and_a_dtype(step, model, tmp_path):
    out = tmp_path / "out"
    assert main(["export", str(step), str(out), "--dtype", "bfloat16"]) == 0
    weights, expected = load_file(out / "model.safetensors"), load_file(model / "model.safetensors")
    assert all(torch.equal(weights[name], weight.bfloat16()) for name, weight in expected.items())
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


class Call:
    """A pickle that leaves a file when it is read as one."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_a_crafted_shard_of_verls_is_refused_and_not_run(step, tmp_path, capsys):
    torch.save({"model.norm.weight": Call(tmp_path / "ran")}, step / "actor" / "model_world_size_3_rank_1.pt")
    assert main(["export", str(step), str(tmp_path / "out")]) == 2
    assert "cannot be read as tensors alone" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def _lose(actor):
    (actor / "model_world_size_3_rank_1.pt").unlink()


def _cut(actor):
    file = actor / "model_world_size_3_rank_1.pt"
    file.write_bytes(file.read_bytes()[:1000])


def _repeat(actor):
    shutil.copy(actor / "model_world_size_3_rank_0.pt", actor / "model_world_size_3_rank_2.pt")


def _mix(actor):
    shutil.copy(actor / "model_world_size_3_rank_0.pt", actor / "model_world_size_4_rank_0.pt")


def _no_config(actor):
    shutil.rmtree(actor / "huggingface")


def _other_config(actor):
    file = actor / "huggingface" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 65}))


def _broken_config(actor):
    """Fewer kinds of layers than layers."""
    file = actor / "huggingface" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))


def _no_numbers(actor):
    torch.save({"epoch": 1}, actor / "model_world_size_3_rank_0.pt")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_lose, "lacks model_world_size_3_rank_1.pt (1 of 3 files)"),
        (_cut, "cannot be read as tensors alone"),
        (_repeat, "the parts of model.embed_tokens.weight make [21, 32] instead of [20, 32]"),
        (_mix, "holds shards of 3 and 4 ranks"),
        (_no_config, "has no huggingface/config.json"),
        (_other_config, "are not of one size"),
        (_broken_config, "is not a Hugging Face model"),
        (_no_numbers, "does not hold tensors by name alone"),
    ],
)
def test_shards_that_make_no_model_are_refused_by_what_is_wrong(step, tmp_path, capsys, damage, said):
    damage(step / "actor")
    assert main(["export", str(step), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "error: " in error
    assert said in error
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp_*"))


def test_a_run_that_meets_a_checkpoint_of_verls_names_the_command(step):
    run = Checkpoints(str(step.parent))
    with pytest.raises(CheckpointError, match=rf"rltrain\.checkpoint export {step}/actor FOLDER"):
        run.newest()
