"""Cross-node bundles: rows that are read on a different node than they are stored on.

Problem: Ray transfers whole objects, so every node would receive all responses of a step, although its ranks compute
only a few, and traffic would grow with the number of nodes. Choice: before a call, every node packs the rows for
another node into one bundle. Ray transfers it once, and the ranks of the receiving node read it from shared memory.
Bundles are not kept for later calls, because these may have different layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.runtime.calls import Call
from rltrain.runtime.samples import Request, StoredRows, driver_bytes, pick

# Rows of objects to send, by reading node; `ids` of these parts are unused.
RowsByReader = dict[int, list[StoredRows]]


def route_calls(
    calls: Sequence[Call[Any]], nodes: Sequence[int], pack: Callable[[int, RowsByReader], Mapping[int, Any]]
) -> list[Call[Any]]:
    """Return the calls [rank] with their requests routed for ``nodes`` [rank].

    Raises TypeError for a request passed by keyword.
    """
    if any(isinstance(value, Request) for call in calls for value in call.kwargs.values()):
        raise TypeError(f"{calls[0].name}: give samples as a positional argument; a keyword's would not be routed")
    places = [
        (rank, place)
        for rank, call in enumerate(calls)
        for place, value in enumerate(call.args)
        if isinstance(value, Request)
    ]
    if all(part.node == nodes[rank] for rank, place in places for part in calls[rank].args[place].parts):
        return list(calls)
    # Ranks of one node that share sequences have the same request, which is routed once.
    sites = {(id(calls[rank].args[place]), nodes[rank]): calls[rank].args[place] for rank, place in places}
    routed = dict(zip(sites, route(list(sites.values()), [node for _, node in sites], pack), strict=True))
    routed_calls = list(calls)
    for rank, place in places:
        args = list(routed_calls[rank].args)
        args[place] = routed[id(args[place]), nodes[rank]]
        routed_calls[rank] = replace(routed_calls[rank], args=tuple(args))
    return routed_calls


def route(
    requests: Sequence[Request], readers: Sequence[int], pack: Callable[[int, RowsByReader], Mapping[int, Any]]
) -> list[Request]:
    """Return the requests for reading on the nodes ``readers``: rows on other nodes are read from bundles.

    pack(node, rows_by_reader): packs the bundles on ``node``; returns their references by reading node.
    """
    objects_of: dict[tuple[int, int], dict[Any, list[StoredRows]]] = {}
    for request, reader in zip(requests, readers, strict=True):
        for part in request.parts:
            if part.node != reader:
                same = objects_of.setdefault((part.node, reader), {})
                same.setdefault((id(part.ref), part.columns), []).append(part)
    rows_by_reader: dict[int, RowsByReader] = {}
    piece_of: dict[tuple[int, Any], tuple[int, np.ndarray]] = {}
    for (node, reader), objects in objects_of.items():
        bundle = rows_by_reader.setdefault(node, {}).setdefault(reader, [])
        for key, parts in objects.items():
            # A row that several ranks of the node read is sent once.
            rows = np.unique(np.concatenate([part.rows for part in parts]))
            piece_of[reader, key] = len(bundle), rows
            bundle.append(replace(parts[0], ids=rows[:0], rows=rows))
    bundles = {node: pack(node, node_rows) for node, node_rows in rows_by_reader.items()}

    def readable(part: StoredRows, reader: int) -> StoredRows:
        if part.node == reader:
            return part
        piece, rows = piece_of[reader, (id(part.ref), part.columns)]
        places = np.searchsorted(rows, part.rows).astype(np.int32)
        return replace(part, ref=bundles[part.node][reader], rows=places, piece=piece)

    return [
        replace(request, parts=[readable(part, reader) for part in request.parts])
        for request, reader in zip(requests, readers, strict=True)
    ]


def pack_for_node(
    bundles: Sequence[Sequence[StoredRows]], objects: Mapping[Any, Batch | list[Any]]
) -> tuple[list[Batch | list[Any]] | int, ...]:
    """Return each bundle as a list of pieces, followed by the total bytes. objects: references."""
    bundle_pieces = [[pick(part, objects[part.ref]) for part in bundle] for bundle in bundles]
    return (*bundle_pieces, sum(payload_bytes(piece) for pieces in bundle_pieces for piece in pieces))


def payload_bytes(value: Any) -> int:
    """Return the bytes of columns sent between nodes."""
    if isinstance(value, Batch):
        return sum(payload_bytes(column) for _, column in value.items())
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Ragged):
        return payload_bytes(value.values) + payload_bytes(value.lengths)
    if isinstance(value, DictionaryColumn):
        return payload_bytes(value.values) + payload_bytes(value.index)
    return driver_bytes(value)
