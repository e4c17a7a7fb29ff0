"""Check for NaN and infinity in a checkpoint, so that they are reported at load time, by weight and file."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.common.errors import NonFiniteError
from rltrain.common.logs import count
from rltrain.models.forward import PackedModel
from rltrain.models.tensor_layers import local
from rltrain.models.weights.names import huggingface_name
from rltrain.runtime.exchange import gather_json

_NUM_SHOWN = 3


def all_finite(values: Tensor) -> bool:
    """Return whether all numbers are finite."""
    # The sum propagates NaN and infinity without extra memory, but may overflow, so a non-finite sum is checked
    # exactly.
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())


def check_finite(packed: PackedModel, compute_dtype: torch.dtype, key: str, files: Callable[[str], str]) -> None:
    """Raise NonFiniteError on all ranks if any rank has a weight that is not finite (a collective).

    compute_dtype: dtype to which weights are cast. key: name of the checkpoint in messages (``key=path``). files(name):
    the files of a weight.
    """
    damaged, too_large = [], []
    for name, parameter in packed.named_parameters():
        shard, short = local(parameter.detach()), huggingface_name(name)
        if not all_finite(shard):
            damaged.append(short)
        elif compute_dtype == torch.float16 != shard.dtype and not all_finite(shard.to(compute_dtype)):
            too_large.append(short)
    # Buffers are checked for NaN only, because they may contain infinite bounds.
    buffers = (
        (huggingface_name(name), buffer) for name, buffer in packed.named_buffers() if buffer.is_floating_point()
    )
    damaged += [name for name, buffer in buffers if bool(buffer.isnan().any())]
    lines = _describe(damaged, "numbers that are not finite (NaN or infinity)", "Give another copy of the model", files)
    lines += _describe(too_large, "numbers beyond the range of float16 (65,504)", "Compute in bfloat16", files)
    num_reports = torch.tensor(len(lines))
    dist.all_reduce(num_reports, dist.ReduceOp.MAX)
    if not num_reports:
        return
    first = next(rank_reports[0] for rank_reports in gather_json(lines) if rank_reports)
    raise NonFiniteError(f"{key}: {first}")


def _describe(names: list[str], problem: str, way_out: str, files: Callable[[str], str]) -> list[str]:
    if not names:
        return []
    listed = ", ".join(names[:_NUM_SHOWN]) + (", …" if len(names) > _NUM_SHOWN else "")
    return [f"{count(len(names), 'weight')} of {files(names[0])} with {problem}: {listed}. {way_out}."]
