"""Functions that SGLang's process runs to load weights (its ``custom_weight_loader``).

SGLang imports functions by name and calls them, in the process of every device, with its part of the model and some
named tensors. It ignores their return values, and an exception terminates its process and ours without a message. So
weights are loaded by the model's loader, which handles fused layouts and sharding, and exceptions are kept until the
end of the sync. Then one more call makes every process write them into a folder, whose path is the name of the only
tensor, because a tensor's name is the only text that can be passed. Left out: a check of the loaded names, because most
SGLang models do not return them; the canary detects missing weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rltrain.common.device import device_of
from rltrain.runtime import stacks

# Weights that the model rejected during one sync, with the reason.
_REFUSED: dict[str, str] = {}


def load_weights(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load weights with the model's loader: together, or one by one if it rejects them.

    One by one, rejected weights can be reported by name and do not block others.
    """
    stacks.offer()
    if len(named_tensors) > 1 and not _refused(model, named_tensors):
        named_tensors = named_tensors[:0]
    for name, values in named_tensors:
        if error := _refused(model, [(name, values)]):
            _REFUSED[name] = repr(error)


def _refused(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> Exception | None:
    try:
        model.load_weights(list(named_tensors))
    except (LookupError, AttributeError, AssertionError, TypeError, ValueError, RuntimeError) as error:
        return error
    finally:
        # The sender may free the values as soon as this returns.
        device_of(named_tensors[0][1]).synchronize()
    return None


def report_refused(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """End a sync: write ``refused`` (weight -> reason) as JSON into the folder that the only tensor is named after."""
    file = Path(named_tensors[0][0]) / str(os.getpid())
    file.write_text(json.dumps({"refused": _REFUSED, "model": type(model).__name__}), encoding="utf-8")
    _REFUSED.clear()
