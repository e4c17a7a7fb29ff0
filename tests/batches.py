"""Batches of prompts and responses as a rollout produces them, from rows of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged


def batch_of_rows(rows: Sequence[Tensor], prompt_lengths: Sequence[int], mask: Tensor | None = None) -> Batch:
    """rows: prompt and response of each sample. Equal prompts are stored once. mask [response tokens]: all ones by
    default."""
    prompts = [row[:length] for row, length in zip(rows, prompt_lengths, strict=True)]
    keys = [tuple(prompt.tolist()) for prompt in prompts]
    first = list(dict.fromkeys(keys))
    answers = Ragged.from_rows([row[length:] for row, length in zip(rows, prompt_lengths, strict=True)])
    kept = torch.ones(len(answers.values)) if mask is None else mask
    index = torch.tensor([first.index(key) for key in keys])
    return Batch(
        {
            "prompt": DictionaryColumn(Ragged.from_rows([prompts[keys.index(key)] for key in first]), index),
            "response": answers,
            "response_mask": answers.like(kept.bool()),
        }
    )


def rows_of(batch: Batch) -> list[Tensor]:
    """Return prompt and response of each sample in one row."""
    column = batch.dictionary("prompt")
    prompts = [column.values[place] for place in column.index.tolist()]
    return [torch.cat(pair) for pair in zip(prompts, batch.ragged("response").rows(), strict=True)]


def prompt_lengths(batch: Batch) -> list[int]:
    """Return the number of prompt tokens of each sample."""
    column = batch.dictionary("prompt")
    return column.values.lengths[column.index].tolist()
