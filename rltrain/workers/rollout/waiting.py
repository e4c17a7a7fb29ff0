"""Answers of prompts that wait for a later step, in a file of a checkpoint.

With ``carry_over`` these answers decide what the next steps generate and learn from, so a resumed run needs them token
by token. Prompts, pixels and texts are not written: they are made again, of the data and of the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from rltrain.base.columns import names as c
from rltrain.base.columns.batch import Batch, DictionaryColumn
from rltrain.base.columns.ragged import Ragged
from rltrain.data.prompts import PromptStore
from rltrain.models.files.hashed import write_weights

# Numbers of an answer that an engine need not have worked on in this step: it was complete before, or it waits.
KEPT = (
    c.PROMPT_LENGTH, c.RESPONSE_LENGTH, c.POLICY_TOKENS, c.LOSS_TOKENS, c.TRUNCATED, c.COMPLETE, c.ENGINE,
    c.TOKEN_AGES, c.OLDEST,
)  # fmt: skip
WRITTEN = (*KEPT, c.ROW, c.SLOT)
# Payload, with the number that says how long its rows are.
_LENGTHS = {c.RESPONSE: c.RESPONSE_LENGTH, c.RESPONSE_MASK: c.RESPONSE_LENGTH, c.ROLLOUT_LOG_PROBS: c.POLICY_TOKENS}
_DTYPES = {c.RESPONSE: torch.int32, c.RESPONSE_MASK: torch.bool, c.ROLLOUT_LOG_PROBS: torch.float32}


def write_answers(batch: Batch, file: str) -> None:
    """batch: `WRITTEN`, and `columns.ANSWER` where any answer has tokens. Raises as `unwritten` says."""
    nothing = {name: torch.zeros(0, dtype=dtype) for name, dtype in _DTYPES.items()}
    payload = {name: batch.ragged(name).values if name in batch else nothing[name] for name in c.ANSWER}
    write_weights(payload | {name: batch.dense(name) for name in WRITTEN}, Path(file), {})


def read_answers(file: str, store: PromptStore, *, images: bool) -> tuple[Batch, dict[str, NDArray[Any]]]:
    """`columns.GENERATED` (with ``images`` also those) and the numbers of `write_answers`. store: the prompts."""
    tensors = load_file(file)
    numbers = {name: tensors[name].numpy() for name in WRITTEN}
    rows, index = np.unique(numbers[c.ROW], return_inverse=True)
    prompts = Ragged.from_rows([torch.from_numpy(np.array(store.prompt(row), dtype=np.int32)) for row in rows.tolist()])
    payload = Batch({c.PROMPT: DictionaryColumn(prompts, torch.from_numpy(index))})
    payload.update({name: Ragged(tensors[name], tensors[length].long()) for name, length in _LENGTHS.items()})
    if images:
        pixels = [store.encoded(row).images for row in rows.tolist()]
        # What waits is in its first turn, or is done and of one turn: of several turns no file is written.
        payload.update({c.IMAGES: DictionaryColumn(pixels, torch.from_numpy(index)), c.OWN_IMAGES: [None] * len(index)})
    return payload, numbers
