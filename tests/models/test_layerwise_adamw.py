"""AdamW layer by layer: weights equal torch's AdamW bit for bit; moments in bfloat16 are right on average."""

from dataclasses import replace

import pytest
import torch

from rltrain.common.device import get_device
from rltrain.config.schema.model import OptimConfig
from rltrain.models.forward import PolicyModel
from rltrain.models.optim import clip_gradients, make_optimizer, moments_bytes
from rltrain.models.weights.shard import local_shard, sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.models.weights.state import load_training_state, moments, save_training_state
from tests.distance import distance

CPU = get_device("cpu")
OPTIM = OptimConfig(lr=0.01, weight_decay=0.1)
HALF = replace(OPTIM, moments="bfloat16")
pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def make(tiny_model):
    """make(OptimConfig, offload): a model and its optimizer."""

    def made(optim, *, offload=False):
        spec = ModelSpec(str(tiny_model), master_dtype=torch.float32, compute_dtype=torch.float32)
        policy = sharded_model(PolicyModel, spec, CPU)
        return policy, make_optimizer(policy, optim, CPU, offload=offload)

    return made


def steps(policy, optimizer, seeds, scale: float = 1.0) -> list[torch.Tensor]:
    """Make optimizer steps with clipped gradients derived from ``seeds``. Return weights and optimizer state."""
    weights = list(policy.parameters())
    for seed in seeds:
        for number, weight in enumerate(weights):
            weight.grad = scale * torch.cos((seed + number) * 37 * weight.detach()) if number != 3 else None
        clip_gradients(weights, 0.5)
        optimizer.step()
    return [*weights, *(value for weight in weights for value in moments(optimizer, weight).values())]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_layer_by_layer_equals_that_of_torch(make, fused):
    found = []
    for offload in (False, True):
        policy, optimizer = make(OPTIM, offload=offload)
        for group in optimizer.param_groups:
            group["fused"] = fused
        found.append(steps(policy, optimizer, range(3)))
    assert len(optimizer.param_groups) > len(policy.model.model.layers)
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)


def test_moments_in_bfloat16_take_half_and_follow_those_in_float32(make):
    (policy, optimizer), (other, exact) = make(HALF), make(OPTIM)
    assert moments_bytes(optimizer) == moments_bytes(exact) / 2
    steps(policy, optimizer, range(3))
    steps(other, exact, range(3))
    for name in ("exp_avg", "exp_avg_sq"):
        mine, theirs = (
            [
                local_shard(each.state[weight][name]).float()
                for weight in model.parameters()
                if each.state[weight].get("step")
            ]
            for model, each in ((policy, optimizer), (other, exact))
        )
        assert distance(mine, theirs) < 0.01, name
    # Without a gradient, a second moment falls by 0.1 % per step, less than to its neighbour in bfloat16.
    second = local_shard(optimizer.state[policy.model.lm_head.weight]["exp_avg_sq"])
    before = second.double().sum()
    for _ in range(100):
        for each in policy.parameters():
            each.grad = torch.zeros_like(each)
        optimizer.step()
    assert second.double().sum() / before == pytest.approx(0.999**100, rel=2e-3)


def test_a_run_with_moments_in_bfloat16_resumes_bit_for_bit(make, tmp_path):
    policy, optimizer = make(HALF)
    steps(policy, optimizer, range(2))
    save_training_state(policy, optimizer, str(tmp_path / "half"))
    expected = [value.clone() for value in steps(policy, optimizer, [2])]
    policy, optimizer = make(HALF, offload=True)
    load_training_state(policy, optimizer, str(tmp_path / "half"))
    for mine, other in zip(steps(policy, optimizer, [2]), expected, strict=True):
        assert torch.equal(mine, other)
