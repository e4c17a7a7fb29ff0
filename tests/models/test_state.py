"""Training state can be loaded on any number of processes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.common.device import get_device
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.models.weights.state import load_training_state, moments, save_training_state
from tests.ranks import run_on_ranks


def trained(folder: Path, seed: int) -> tuple[PolicyModel, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step with gradients derived from ``seed``, equal on any number
    of ranks."""
    spec = ModelSpec(str(folder / "model"), master_dtype=torch.float32, compute_dtype=torch.float32)
    policy = sharded_model(PolicyModel, spec, get_device("cpu"))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, fused=False)
    for parameter in policy.parameters():
        parameter.grad = torch.cos(seed * parameter.detach())
    optimizer.step()
    return policy, optimizer


def whole(policy, optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in policy.named_parameters():
        for part, values in {"weight": parameter, **moments(optimizer, parameter)}.items():
            full = values.full_tensor() if hasattr(values, "full_tensor") else values
            found[f"{name} {part}"] = full.detach().clone()
    return found


def save_and_load(rank: int, world: int, folder: Path, load: list[int]) -> None:
    policy, optimizer = trained(folder, seed=world)
    if not (folder / f"world_{world}.pt").exists():
        save_training_state(policy, optimizer, str(folder / f"world_{world}"))
        found = whole(policy, optimizer)
        dist.barrier()
        if rank == 0:
            torch.save(found, folder / f"world_{world}.pt")
    for other in load:
        load_training_state(policy, optimizer, str(folder / f"world_{other}"))
        found, expected = whole(policy, optimizer), torch.load(folder / f"world_{other}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, values in found.items():
            assert torch.equal(values, expected[name]), f"{name} of {other} on {world}"


@pytest.mark.usefixtures("process_group")
def test_training_state_goes_to_any_number_of_processes(tiny_model, tmp_path):
    """From 1 to 3, from 3 to 2 and 1 to 2, from 2 and 3 to 1: weights and both moments are equal bit for bit."""
    (tmp_path / "model").symlink_to(tiny_model)
    save_and_load(0, 1, tmp_path, [])
    run_on_ranks(save_and_load, 3, tmp_path, [1])
    run_on_ranks(save_and_load, 2, tmp_path, [3, 1])
    save_and_load(0, 1, tmp_path, [2, 3])
