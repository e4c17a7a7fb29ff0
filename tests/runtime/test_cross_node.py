"""Rows that another node reads: each is sent there once, and arrives unchanged."""

import numpy as np
import pytest
import torch

from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.runtime.calls import Call
from rltrain.runtime.cross_node import pack_for_node, payload_bytes, route_calls
from rltrain.runtime.samples import Samples, assemble, whole


class Store:
    """Store of objects by name. Bundles are packed at once, and every packing is recorded."""

    def __init__(self) -> None:
        self.objects, self.cuts, self.bytes = {}, [], 0

    def put(self, made) -> str:
        name = f"object {len(self.objects)}"
        self.objects[name] = made
        return name

    def pack(self, node, cuts):
        *bundles, size = pack_for_node(list(cuts.values()), self.objects)
        self.bytes += size
        for reader, parts in cuts.items():
            self.cuts.append((node, reader, [(part.ref, part.rows.tolist()) for part in parts]))
        return {reader: self.put(bundle) for reader, bundle in zip(cuts, bundles, strict=True)}

    def read(self, request) -> Batch:
        found = [(self.objects[part.ref], part.piece) for part in request.parts]
        return assemble(request, [each if piece is None else each[piece] for each, piece in found])


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def samples(store):
    """Eight responses to four prompts: the even ones were made on node 0, the odd ones on node 1."""
    samples = Samples(8)
    samples.update({"group": np.arange(8) // 2})
    for node in (0, 1):
        ids = np.arange(node, 8, 2)
        prompts = Ragged.from_rows([torch.full((3,), 100 + each) for each in range(4)])
        made = Batch({
            "prompt": DictionaryColumn(prompts, torch.from_numpy(ids // 2)),
            "tokens": Ragged.from_rows([torch.full((int(each) + 1,), int(each)) for each in ids]),
        })  # fmt: skip
        samples.attach([whole(store.put(made), ("prompt", "tokens"), ids, node)])
        samples.attach([whole(store.put([f"text {each}" for each in ids]), ("text",), ids, node)])
    return samples


COLUMNS = ["prompt", "tokens", "text"]


def calls_of(samples, of_ranks) -> list[Call]:
    requests = [samples.request(np.array(ids, dtype=np.int64), COLUMNS) for ids in of_ranks]
    return [Call(print, ("first", request), {}) for request in requests]


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 2, 3]])
def test_what_is_read_through_parcels_is_what_was_made(store, samples, nodes):
    calls = calls_of(samples, [[5, 0, 3], [2, 1], [4, 5, 7, 6], []])
    for call, routed in zip(calls, route_calls(calls, nodes, store.pack), strict=True):
        expected, found = store.read(call.args[1]), store.read(routed.args[1])
        assert routed.args[0] == "first"
        assert list(found) == list(expected)
        if len(expected):
            assert found.ragged("tokens") == expected.ragged("tokens")
            assert found["text"] == expected["text"]
            assert found.dictionary("prompt").values == expected.dictionary("prompt").values
            assert torch.equal(found.dictionary("prompt").index, expected.dictionary("prompt").index)


def test_a_node_reads_its_own_objects_as_they_are(store, samples):
    calls = calls_of(samples, [[0, 2], [1, 3, 5]])
    for call, routed in zip(calls, route_calls(calls, [0, 1], store.pack), strict=True):
        assert routed.args[1].parts == call.args[1].parts
    assert not store.cuts


def test_a_row_goes_to_a_node_once_however_many_read_it(store, samples):
    """Ranks 2 and 3 share sequences and are on node 1. So is rank 1, which reads two of the rows again."""
    (shared,) = calls_of(samples, [[0, 2, 6, 1]])
    first, second = calls_of(samples, [[4], [2, 0, 4]])
    routed = route_calls([first, second, shared, shared], [0, 1, 1, 1], store.pack)
    assert store.cuts == [(0, 1, [("object 0", [0, 1, 2, 3]), ("object 1", [0, 1, 2, 3])])]
    assert routed[2].args[1] is routed[3].args[1]
    assert store.read(routed[1].args[1])["text"] == ["text 2", "text 0", "text 4"]
    bundle = store.objects["object 4"]
    assert store.bytes == sum(map(payload_bytes, bundle))
    # Of tokens 1 + 3 + 5 + 7 and of four prompts 12, eight lengths and four places, of 8 bytes each; and the texts.
    assert store.bytes == 8 * (16 + 12 + 8 + 4) + 4 * len("text 0")


def test_only_rows_that_another_node_reads_are_packed(store, samples):
    route_calls(calls_of(samples, [[0, 2, 3], [5, 4]]), [0, 1], store.pack)
    assert {(node, reader): rows for node, reader, ((_, rows), _) in store.cuts} == {(1, 0): [1], (0, 1): [2]}
