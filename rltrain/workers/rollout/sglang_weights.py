"""What SGLang's own process runs when weights arrive (its ``custom_weight_loader``).

SGLang lets us name functions that it imports and calls with its model and some named tensors; it drops what they return, and an exception
ends its process and ours without a word. So weights go through the model's own loader, which knows its fused layout, and an
exception is kept until the end of the sync, when one more call writes what was refused to a file: its name is that of the only tensor,
because a tensor's name is the only text that can be handed over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rltrain.device import device_of

# During one sync: the weights that the model did not take, and why.
_REFUSED: dict[str, str] = {}


def load_weights(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Hand weights to the model's loader, one by one."""
    for name, values in named_tensors:
        try:
            model.load_weights([(name, values)])
        except (LookupError, AttributeError, AssertionError, TypeError, ValueError, RuntimeError) as error:
            _REFUSED[name] = repr(error)
        # The sender may free them as soon as this returns.
        device_of(values).synchronize()


def report_refused(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """End a sync: write a JSON of ``refused`` (weight -> why) to the file that the only tensor is named after."""
    Path(named_tensors[0][0]).write_text(json.dumps({"refused": _REFUSED, "model": type(model).__name__}))
    _REFUSED.clear()
