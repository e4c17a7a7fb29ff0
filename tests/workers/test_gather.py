"""What a weight sync asks of the network, seen by one rank of many that are not there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from rltrain.workers.weight_sync import fingerprint, pieces

RANKS = 64


@pytest.fixture
def model():
    """Two matrices and a vector, sharded by rows over 64 ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    found = nn.ParameterDict({"large": torch.zeros(512, 64), "small": torch.zeros(100, 8), "norm": torch.zeros(64)})
    for name, weight in found.items():
        found[name] = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    yield found
    dist.destroy_process_group()


@pytest.mark.parametrize(("bucket_bytes", "gathers"), [(1 << 20, 1), (3 * 512 * 64, 5), (3 * 64 * 64, 10)])
def test_a_bucket_is_one_gather_and_nothing_else(model, bucket_bytes, gathers):
    with CommDebugMode() as seen:
        found = list(pieces(model, bucket_bytes, torch.float32))
    assert seen.get_total_counts() == gathers
    assert {piece.name for piece in found} == {"large", "small", "norm"}
    assert sum(piece.values.numel() for piece in found) == 512 * 64 + 100 * 8 + 64


def test_a_fingerprint_is_one_sum(model):
    with CommDebugMode() as seen:
        fingerprint(model, torch.float32)
    assert seen.get_total_counts() == 1
