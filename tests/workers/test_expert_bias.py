"""The correction bias of routers equals that of one process on every rank, for any layout of weights and samples."""

import pytest
import torch
import torch.distributed as dist

from rltrain.common.columns.batch import Batch
from rltrain.common.device import get_device
from rltrain.config.load import load_config
from rltrain.config.schema.model import ShardingConfig
from rltrain.config.step_passes import make_step_passes
from rltrain.models.attention.packing import pack
from rltrain.models.forward import PolicyModel
from rltrain.models.routing import correction_biases
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.models.weights.state import load_training_state, save_training_state
from rltrain.workers.updates.expert_balance import ExpertBalance
from tests.models.test_routing import batch
from tests.ranks import run_on_ranks
from tests.tiny import save_tiny_biased_moe

CPU = torch.device("cpu")
RATE = 0.125
# Ranks that share experts, ranks that share sequences, ranks of a copy of the weights.
LAYOUTS = [(1, 1, -1), (2, 1, -1), (1, 2, -1), (1, 1, 1)]


def moved(policy: PolicyModel, batches: list[Batch]) -> torch.Tensor:
    """Return the biases after two mini-batches, of which this rank has ``batches``."""
    balance = ExpertBalance(policy, get_device("cpu"), make_step_passes(load_config([]).config), RATE)
    policy.train()
    policy.measure_load()
    for number in range(2):
        balance.begin(batches)
        for given in batches:
            policy(pack(given.select([number]) if len(given) else given, CPU)).log_probs.sum().backward()
        balance.move_biases()
    return biases_of(policy)


def biases_of(policy: PolicyModel) -> torch.Tensor:
    return torch.stack(list(correction_biases(policy.model).values())).clone()


def parts() -> list[Batch]:
    return [batch(), batch((2, 7, 1))]


def rank_main(rank: int, world: int, folder, expected: torch.Tensor) -> None:
    for layout in LAYOUTS:
        experts, size, fsdp_size = layout
        sharding = ShardingConfig(fsdp_size=fsdp_size, expert_parallel_size=experts)
        spec = ModelSpec(str(folder), fsdp=sharding, sequence_parallel_size=size)
        policy = sharded_model(PolicyModel, spec, get_device("cpu"))
        start = biases_of(policy)
        # Ranks that share sequences compute the same ones.
        found = moved(policy, [parts()[rank]] if size == 1 else parts())
        assert torch.equal(found, expected), layout
        assert not torch.equal(found, start)
        # What one layout has saved, the next one starts from.
        save_training_state(policy, None, str(folder / f"{layout}"))
        for bias in correction_biases(policy.model).values():
            bias.zero_()
        load_training_state(policy, None, str(folder / f"{layout}"))
        assert torch.equal(biases_of(policy), expected)
    dist.barrier()


@pytest.mark.usefixtures("process_group")
def test_every_rank_has_the_bias_of_one_process(tmp_path):
    save_tiny_biased_moe(tmp_path, vocab_size=128)
    policy = sharded_model(PolicyModel, ModelSpec(str(tmp_path)), get_device("cpu"))
    run_on_ranks(rank_main, 2, tmp_path, moved(policy, parts()))
