"""Exchange of values between ranks, as JSON or by torch's object collectives with a signature of the run. torch's
object collectives send pickles, which can run code when loaded, and neither stores nor gloo require authentication. So
any process that reaches their ports could run code on other ranks.
"""

from __future__ import annotations

import hmac
import io
import json
import pickle
from typing import Any

import torch
import torch.distributed as dist

from rltrain.common.errors import WorkerLost


def gather_json(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks of ``group``, in rank order (a collective). JSON converts tuples to lists."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)]), group)
    most = int(max(sizes))
    parts = [torch.zeros(most, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(own, (0, most - len(own))), group)
    return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def sign_objects(key: bytes) -> None:
    """Make torch's object collectives add a signature by ``key``, and reject unsigned objects without loading them."""

    class Signing:
        def __init__(self, stream: io.BytesIO) -> None:
            self._stream = stream

        def dump(self, value: Any) -> None:
            content = pickle.dumps(value)
            self._stream.write(hmac.digest(key, content, "sha256") + content)

        def load(self) -> Any:
            signature, content = self._stream.read(32), self._stream.read()
            if not hmac.compare_digest(signature, hmac.digest(key, content, "sha256")):
                raise WorkerLost("a message to this rank was discarded because its sender is not a rank of this run.")
            return pickle.loads(content)

    c10d: Any = dist.distributed_c10d
    c10d._pickler = c10d._unpickler = Signing
