"""The data of a run: rows and tokenised prompts of both splits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rltrain.common import logs
from rltrain.common.errors import DataError
from rltrain.config.budgets import longest_sequence
from rltrain.config.schema import Config
from rltrain.data.chat import ChatEncoder, chat_encoder
from rltrain.data.custom import custom_rows
from rltrain.data.prompts import PromptStore, check_limit_images, check_vocabulary, encode_prompts
from rltrain.data.row_tools import check_agents
from rltrain.data.rows import Rows, keys_of, read_rows
from rltrain.data.turns.demonstrations import encode_demonstrations, read_demonstrations
from rltrain.trainer.plan import ImageSizes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """Rows and tokenised prompts of each split ("train", "val"), and the encoder that made the prompts."""

    rows: dict[str, Rows]
    prompts: dict[str, PromptStore]
    encoder: ChatEncoder

    @cached_property
    def images(self) -> ImageSizes | None:
        """Sizes of the images, or None if no prompt has images."""
        return ImageSizes.of(self.prompts)


def load_data(cfg: Config) -> Data:
    """Read, check and tokenise the prompts of both splits. An evaluation reads only the validation split.

    ``rows`` holds only the rows of the prompts that pass the filter.
    """
    data, encoder = cfg.data, chat_encoder(cfg)
    rows: dict[str, Rows] = {}
    prompts: dict[str, PromptStore] = {}
    for split, files, limit in splits_of(cfg):
        if not files:
            continue
        log.info("reading data.%s_files=%s", split, files)
        if cfg.sft.enabled:
            rows_read = read_demonstrations(files, cfg.sft, data, limit)
        elif data.custom_cls:
            rows_read = custom_rows(data, files, encoder.tokenizer, limit)
        else:
            rows_read = read_rows(files, keys=keys_of(data), max_rows=limit, seed=data.seed if data.shuffle else None)
        rows[split], prompts[split] = encode_split(cfg, split, rows_read, encoder)
        sources = ", ".join(rows[split].data_sources())
        prompts_left, num_dropped = logs.count(len(prompts[split]), "prompt"), prompts[split].num_dropped
        log.info("%s: %s of %s (%d too long and left out)", split, prompts_left, sources, num_dropped)
    check_agents(cfg.actor_rollout_ref.rollout, encoder.row_tools, rows)
    return Data(rows, prompts, encoder)


def splits_of(cfg: Config) -> list[tuple[str, Any, int]]:
    """Return (split, files, maximum number of rows) of each split that the run reads. 0 or less means all rows."""
    data = cfg.data
    train = ("train", data.train_files, data.train_max_samples)
    validation = ("val", data.val_files, data.val_max_samples)
    return [validation] if cfg.trainer.val_only else [train, validation]


def encode_split(cfg: Config, split: str, found: Rows, encoder: ChatEncoder) -> tuple[Rows, PromptStore]:
    """Return the tokenised prompts that pass the filter, and their rows. Raises DataError."""
    data = cfg.data
    if cfg.sft.enabled:
        most = longest_sequence(cfg)
        store = encode_demonstrations(found, encoder, most, data.filter_overlong_prompts, data.truncation)
    else:
        store = encode_prompts(found, encoder, data.max_prompt_length, data.filter_overlong_prompts, data.truncation)
    if not len(store):
        raise DataError(
            f"{found.paths}: no prompt is left for data.{split}_files. Raise "
            f"data.max_prompt_length={data.max_prompt_length}."
        )
    # Rows and prompts must have the same numbering, because a batch has one row number for both tokens and ground
    # truth.
    rows = found.select(store.row_index)
    check_vocabulary(rows, store, encoder)
    check_limit_images(rows, store, cfg.actor_rollout_ref.rollout.limit_images)
    return rows, store
