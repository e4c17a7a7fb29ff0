"""Weights of which a rank receives only the part that its tensor-parallel engine copies."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rltrain.common.errors import SyncError
from rltrain.models.weights.names import gathered_weights
from rltrain.models.weights.partial import PartialWeight, Record, parts_of
from tests.ranks import run_on_ranks

# What loaders do with a weight of shape (6, 4, 2) before they copy it, and the part of it that they copy.
READ = {
    "complete": (lambda w: w, ((0, 6), (0, 4), (0, 2))),
    "rows": (lambda w: w.narrow(0, 2, 3), ((2, 5), (0, 4), (0, 2))),
    "columns": (lambda w: w[:, 1:3], ((0, 6), (1, 3), (0, 2))),
    "one expert": (lambda w: w[4], ((4, 5), (0, 4), (0, 2))),
    "half of an expert, transposed": (lambda w: w[4].chunk(2, 0)[1].t(), ((4, 5), (2, 4), (0, 2))),
    "last column, as a row": (lambda w: w[..., -1].unsqueeze(0), ((0, 6), (0, 4), (1, 2))),
    "permuted": (lambda w: w.permute(2, 0, 1)[:, 1:], ((1, 6), (0, 4), (0, 2))),
    "detached": (lambda w: w.data.detach()[1:2], ((1, 2), (0, 4), (0, 2))),
    "two reads": (lambda w: torch.cat([w[1:2], w[3:4]]), ((1, 4), (0, 4), (0, 2))),
    # Not one box in the dimensions of the weight: the rank needs all of it.
    "flattened": (lambda w: w.view(-1)[3:20], ((0, 6), (0, 4), (0, 2))),
    "every second row": (lambda w: w[::2], ((0, 6), (0, 4), (0, 2))),
    "diagonal": (lambda w: w.diagonal(0, 0, 1), ((0, 6), (0, 4), (0, 2))),
    "bits": (lambda w: w[2:4].view(torch.int32), ((2, 4), (0, 4), (0, 2))),
    "nothing": (lambda w: w.narrow(0, 6, 0), ((0, 0), (0, 0), (0, 0))),
}


@pytest.fixture
def weight():
    return torch.arange(48.0).view(6, 4, 2)


@pytest.mark.parametrize("read", READ)
def test_a_read_is_recorded_and_its_part_is_enough_for_it(weight, read):
    action, box = READ[read]
    record, expected = Record(2), action(weight)
    of_a_larger_one = torch.cat([torch.zeros(8, 4, 2), weight])[8:]
    for values in (weight, weight.transpose(0, 2).contiguous().transpose(0, 2), of_a_larger_one):
        copy = torch.empty_like(expected, memory_format=torch.contiguous_format)
        assert type(copy.copy_(action(record.observed("w", values)))) is torch.Tensor
        assert torch.equal(copy, expected)
    assert record.boxes == {"w": box}
    held = weight[tuple(slice(*each) for each in box)].clone()
    for values in (held, torch.cat([torch.zeros(3, *held.shape[1:]), held])[3:]):
        part = action(PartialWeight.make("w", values, box, weight.shape))
        assert part.shape == expected.shape
        assert torch.equal(copy.zero_().copy_(part), expected)


@pytest.mark.parametrize("box", [((0, 3), (0, 4), (0, 2)), ((0, 6), (0, 2), (0, 2)), ((0, 0), (0, 0), (0, 0))])
@pytest.mark.parametrize("read", [lambda w: w, lambda w: w[2:4, 1:3], lambda w: w.view(-1)])
def test_a_read_beyond_the_part_raises_an_error(weight, box, read):
    held = weight[tuple(slice(*each) for each in box)].clone()
    part = read(PartialWeight.make("w", held, box, weight.shape))
    with pytest.raises(SyncError, match="copies another part of w than at its first load"):
        torch.empty(part.shape).copy_(part)


SHAPES = {"even": (8, 3), "uneven": (7, 3), "fewer rows than ranks": (2, 5), "vector": (5,), "cube": (4, 2, 3)}


class Names:
    """Names of a checkpoint in which one weight has another name, and one another layout."""

    def unit(self, name):
        return self.renamed(name) or name

    def renamed(self, name):
        return None if name == "even" else name.replace("cube", "box")

    def __call__(self, weights):
        return {self.unit(name): values for name, values in weights.items()}


def rank_main(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    mesh = init_device_mesh("cpu", (world,))
    model = nn.ParameterDict(
        {name: nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for name, w in weights.items()}
    )
    # Two tensor-parallel ranks per engine. They cut rows, or columns, or nothing.
    member = rank % 2
    boxes = {
        "even": ((4 * member, 4 * member + 4), (0, 3)),
        "uneven": ((3 * member, 3 * member + 4), (0, 3)),
        "fewer rows than ranks": ((0, 2), (2 * member, 2 * member + 3)),
        "vector": ((0, 5),),
        "box": ((0, 0), (0, 0), (0, 0)) if member else ((1, 4), (0, 2), (1, 3)),
    }
    assert parts_of(boxes, 2, node=f"with two ranks: {rank // 2}")
    # Engines of two ranks on nodes of more would fetch several copies of the model to each node.
    assert (parts_of(boxes, 2, node=f"with four ranks: {rank // 4}") is None) == (world > 4)
    parts = parts_of(boxes, 2)
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in (0, 100, 1 << 20):
            found = {w.name: w.values for w in gathered_weights(model, dtype, bucket_bytes, Names(), parts=parts)}
            assert torch.equal(found.pop("even"), weights["even"].to(dtype)), "another layout comes complete"
            assert found.keys() == {"uneven", "fewer rows than ranks", "vector", "box"}
            for name, values in found.items():
                within = tuple(slice(*each) for each in boxes[name])
                expected = weights[name.replace("box", "cube")]
                assert values.shape == expected.shape
                assert torch.equal(values.held.values, expected[within].to(dtype)), (name, dtype, bucket_bytes)


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_each_rank_receives_its_part_to_the_bit(ranks):
    run_on_ranks(rank_main, ranks)
