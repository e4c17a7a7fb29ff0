"""Random layouts of four ranks compute the scores, gradients and optimizer step of one process, with uneven rows.

A layout draws tensor parallelism, Ulysses, ring attention, expert parallelism, copies of the weights, adapters and
recomputation. Some ranks get no sample, and must take part in every exchange of the others.
"""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rltrain.common.columns.batch import Batch
from rltrain.common.device import get_device
from rltrain.config.schema.model import ShardingConfig
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.lora import Lora
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from tests.batches import batch_of_rows
from tests.models.test_tensor_parallel import WORLD, check, of_rank, save, save_adapter, step
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

NUMBERS = range(32)
# Families, and the layers of their adapters.
FAMILIES = {
    "qwen3, norms of heads": ["q_proj", "v_proj", "o_proj", "up_proj"], "phi3, fused": "all-linear",
    "qwen3_moe": ["q_proj", "k_proj", "o_proj"], "gpt_oss": ["q_proj", "v_proj"],
    "deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"],
}  # fmt: skip
WITH_EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v3")


# Ranks that share matrices, heads (Ulysses), rings and experts, and ranks of a copy of the weights.
DRAWN = {
    "tensor": [1, 2, 2, 4], "ulysses": [1, 1, 2, 4], "ring": [1, 1, 2, 4], "experts": [1, 2, 4], "copy": [-1, -1, 2],
    "adapters": [False, False, True], "recomputes": [False, True, 1, "selective"], "family": list(FAMILIES),
}  # fmt: skip


@cache
def draw(number: int) -> dict[str, object]:
    rng = random.Random(f"ranks {number}")
    while True:
        found = {name: rng.choice(values) for name, values in DRAWN.items()}
        tensor, ulysses, ring, experts, copy = (found[name] for name in list(DRAWN)[:5])
        shards = WORLD if copy < 0 else copy
        if (
            WORLD % (tensor * ulysses * ring) == 0
            and shards % tensor == 0 == shards % experts
            and (tensor == 1 or ring == 1)
            and (experts == 1 or found["family"] in WITH_EXPERTS)
            and tensor * ulysses * ring * experts > 1
        ):
            return found


def batches(number: int) -> dict[int, Batch]:
    """Return batches of 0 to 5 samples, of which some share a prompt. Every rank gets as many batches."""
    rng = random.Random(f"rows {number}")
    found = {}
    for part in range(WORLD * rng.choice([1, 2])):
        prompts = [torch.tensor(rng.choices(range(2, 128), k=rng.randint(1, 12)), dtype=torch.int32) for _ in range(2)]
        rows, lengths = [], []
        for prompt in rng.choices(prompts, k=rng.choice([0, 0, 1, 2, 5] if part else [1, 5])):
            answer = torch.tensor(rng.choices(range(2, 128), k=rng.choice([1, 2, 7, 20])), dtype=torch.int32)
            rows.append(torch.cat([prompt, answer]))
            lengths.append(len(prompt))
        found[part] = batch_of_rows(rows, lengths) if rows else Batch()
    return found


def compute(rank: int, world: int, folder: Path, numbers: range, layouts: bool) -> None:
    """Save the results of all ranks. layouts: use the drawn layouts, instead of one process."""
    results = {}
    for number in numbers:
        drawn = draw(number)
        tensor, ulysses, ring, experts = (drawn[name] if layouts else 1 for name in list(DRAWN)[:4])
        path, targets = folder / drawn["family"], FAMILIES[drawn["family"]]
        adapters = Lora("actor_rollout_ref.model", 2, 4.0, targets, None, str(path / "adapter"), torch.float32, 1)
        sharding = ShardingConfig(fsdp_size=drawn["copy"] if layouts else -1, expert_parallel_size=experts)
        made = ModelSpec(
            str(path), fsdp=sharding, tensor_size=tensor, sequence_parallel_size=ulysses * ring, ring_size=ring,
            gradient_checkpointing=drawn["recomputes"] if layouts else False,
            lora=adapters if drawn["adapters"] else None,
        )  # fmt: skip
        policy = sharded_model(PolicyModel, made, get_device("cpu")).train()
        own = of_rank(batches(number), rank, world, tensor * ulysses * ring)
        results[number] = step(policy, own, world / tensor)
    everyone = [None] * world
    dist.all_gather_object(everyone, results)
    if rank == 0:
        torch.save(everyone, folder / f"{world}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """Return the results of four ranks, and of one process."""
    own = [item for item in request.session.items if item.path == request.path]
    numbers = [item.callspec.params["number"] for item in own]
    folder = tmp_path_factory.mktemp("random_layouts")
    for name, targets in FAMILIES.items():
        save(name, folder / name)
        save_adapter(folder / name, targets)
    run_on_ranks(compute, 1, folder, numbers, False)
    run_on_ranks(compute, WORLD, folder, numbers, True)
    return torch.load(folder / f"{WORLD}.pt"), torch.load(folder / "1.pt")[0]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number} {draw(number)}")
def test_a_random_layout_computes_what_one_process_computes(found, number):
    check([rank[number] for rank in found[0]], found[1][number])
