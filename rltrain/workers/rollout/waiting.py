"""Responses that wait for a later step, saved in a file of the checkpoint.

With ``carry_over`` they affect later steps, so a resumed run needs their exact tokens. Prompts, pixels and texts are
not written: they are rebuilt from the data and the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.data.prompts import PromptStore
from rltrain.models.files.hashed import write_weights

# Numbers per response to keep if this step does not serve it, because it is complete or waits for a later step.
KEPT = (
    c.PROMPT_LENGTH, c.RESPONSE_LENGTH, c.POLICY_TOKENS, c.LOSS_TOKENS, c.TRUNCATED, c.COMPLETE, c.ENGINE,
    c.TOKEN_AGES, c.OLDEST,
)  # fmt: skip
WRITTEN = (*KEPT, c.ROW, c.SLOT)
# Payload columns, each with the name of the number that gives the length of its rows.
_LENGTHS = {c.RESPONSE: c.RESPONSE_LENGTH, c.RESPONSE_MASK: c.RESPONSE_LENGTH, c.ROLLOUT_LOG_PROBS: c.POLICY_TOKENS}
_DTYPES = {c.RESPONSE: torch.int32, c.RESPONSE_MASK: torch.bool, c.ROLLOUT_LOG_PROBS: torch.float32}


def write_answers(batch: Batch, file: str) -> None:
    """Write the numbers `WRITTEN`, and the columns `columns.ANSWER` if any response has tokens. Raises DiskError or
    StorageError.
    """
    nothing = {name: torch.zeros(0, dtype=dtype) for name, dtype in _DTYPES.items()}
    payload = {name: batch.ragged(name).values if name in batch else nothing[name] for name in c.ANSWER}
    write_weights(payload | {name: batch.dense(name) for name in WRITTEN}, Path(file), {})


def read_answers(file: str, store: PromptStore, *, images: bool) -> tuple[Batch, dict[str, NDArray[Any]]]:
    """Load the columns `columns.GENERATED` and the numbers saved by `write_answers`.

    images: also restore the image columns. store: source of prompts and images.
    """
    tensors = load_file(file)
    numbers = {name: tensors[name].numpy() for name in WRITTEN}
    rows, index = np.unique(numbers[c.ROW], return_inverse=True)
    prompts = Ragged.from_rows([torch.from_numpy(np.array(store.prompt(row), dtype=np.int32)) for row in rows.tolist()])
    payload = Batch({c.PROMPT: DictionaryColumn(prompts, torch.from_numpy(index))})
    payload.update({name: Ragged(tensors[name], tensors[length].long()) for name, length in _LENGTHS.items()})
    if images:
        pixels = [store.encoded(row).images for row in rows.tolist()]
        # Waiting responses have a single turn: for multi-turn runs no file is written.
        payload.update(
            {c.IMAGES: DictionaryColumn(pixels, torch.from_numpy(index)), c.RESPONSE_IMAGES: [None] * len(index)}
        )
    return payload, numbers
