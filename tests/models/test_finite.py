"""NaN and infinity in a checkpoint are reported by weight and file, on all ranks, when weights are loaded."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltrain.common.device import get_device
from rltrain.common.errors import NonFiniteError
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.finite import all_finite
from rltrain.models.weights.lora import Lora
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from tests.ranks import run_on_ranks
from tests.tiny import save_tiny_adapter

NORM, KEY = "model.norm.weight", "actor_rollout_ref.model.path"
EMBEDDING = "model.embed_tokens.weight"


def damaged(model, folder, name=NORM, value=float("nan")):
    """Return a copy of a model folder in which one number, the last of a weight, is changed."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[-1] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def told(folder, kind=PolicyModel, **spec):
    with pytest.raises(NonFiniteError) as error:
        sharded_model(kind, ModelSpec(str(folder), **spec), get_device("cpu"))
    return str(error.value)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_such_a_number_is_told_by_weight_and_file(value, tiny_model, tmp_path, process_group):
    said = told(folder := damaged(tiny_model, tmp_path / "model", value=value))
    assert said == (
        f"{KEY}={folder}: 1 weight of model.safetensors with numbers that are not finite (NaN or infinity): {NORM}. "
        "Give another copy of the model."
    )
    assert NonFiniteError.exit_code == 70


@pytest.mark.parametrize("held", [torch.float32, torch.float16])
def test_what_float16_cannot_hold_is_told(held, tiny_model, tmp_path, process_group):
    folder = damaged(tiny_model, tmp_path / "model", value=1e5)
    said = told(folder, master_dtype=held, compute_dtype=torch.float16)
    assert f": {NORM}. " in said
    assert ("beyond the range of float16" in said) == (held == torch.float32)
    sharded_model(PolicyModel, ModelSpec(str(folder), compute_dtype=torch.bfloat16), get_device("cpu"))


def test_adapters_are_looked_at_too(tiny_model, tmp_path, process_group):
    adapter = save_tiny_adapter(tmp_path / "adapter", tiny_model)
    weights = load_file(adapter / "adapter_model.safetensors")
    first = sorted(weights)[0]
    weights[first][0, 0] = float("nan")
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    lora = Lora("actor_rollout_ref.model", 0, 16, "all-linear", None, str(adapter), torch.float32, 0)
    assert f"1 weight of {adapter}'s adapter_model with numbers that are not finite" in told(tiny_model, lora=lora)


def every_rank_is_told(rank, world, folder):
    # The last row of the embedding is that of the last rank alone.
    assert f"model.safetensors with numbers that are not finite (NaN or infinity): {EMBEDDING}." in told(folder)


def test_all_ranks_end_with_the_weight_that_one_has(tiny_model, tmp_path):
    run_on_ranks(every_rank_is_told, 2, damaged(tiny_model, tmp_path / "model", EMBEDDING))


def test_finite_numbers_whose_sum_is_not_are_finite():
    assert all_finite(torch.full((8,), 3e38))
    assert all_finite(torch.empty(0))
    assert not all_finite(torch.tensor([1.0, float("nan")], dtype=torch.bfloat16))
