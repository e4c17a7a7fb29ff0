"""Reward model: a score per complete response, using its own tokenizer and chat template.

It reads text only; images in a prompt are replaced by ``<image>``.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.errors import ConfigError, DataError, NonFiniteError
from rltrain.config.budgets import PassBudget
from rltrain.config.step_passes import StepPasses
from rltrain.data.chat import ChatEncoder
from rltrain.data.images import without_parts
from rltrain.data.rows import Rows
from rltrain.models.attention.packing import pack_rows
from rltrain.models.load import read_score_head
from rltrain.models.weights.shard import reshard
from rltrain.models.weights.spec import ModelSpec, Specs
from rltrain.workers.inference_models import load_role
from rltrain.workers.interface.results import Array
from rltrain.workers.interface.roles import RewardModel
from rltrain.workers.state.offload_manager import OffloadManager


def check_reward_model(spec: ModelSpec) -> ChatEncoder:
    """Return the encoder of a reward model. Raises ConfigError for a model without head or chat template."""
    if read_score_head(spec.path) is None:
        raise ConfigError(
            f"reward_model.model.path={spec.path} has no classification head (score.weight). Give a sequence "
            "classifier with one label."
        )
    encoder = ChatEncoder(spec.path, trust_remote_code=spec.trust_remote_code)
    try:
        _ = encoder.tokenizer  # load it now, so that a missing chat template is found before the first generation
    except DataError as error:
        raise ConfigError(f"reward_model.model.path={spec.path}: {error}") from error
    return encoder


class RewardModelWorker(RewardModel):
    """Shard of the reward model. ``rows``: the conversations of the prompts, by split."""

    def __init__(
        self,
        budget: PassBudget,
        specs: Specs,
        passes: StepPasses,
        offloader: OffloadManager,
        rows: dict[str, Rows],
    ) -> None:
        self._budget = budget
        self._rows = rows
        self.offloader = offloader
        self._path = specs["reward_model"][1].path
        self._encoder = check_reward_model(specs["reward_model"][1])
        self._model = load_role("reward_model", specs, passes, offloader)

    @torch.no_grad()
    def score(self, batch: Batch, split: str) -> Array:
        """Return ``model_score`` of each sample [n], from its ``text`` and ``row``."""
        self.offloader.enter_phase("reward")
        rows = self._encode(batch, split)
        micros = self._cut([len(row) for row in rows])
        outputs = [
            self._model(pack_rows([rows[i] for i in micro], self.offloader.device.torch_device)) for micro in micros
        ]
        reshard(self._model)
        scores = torch.cat(outputs).cpu().double().numpy()
        if not np.isfinite(scores).all():
            raise NonFiniteError(f"the reward model {self._path} returned non-finite scores.")
        return scores

    def _encode(self, batch: Batch, split: str) -> list[list[int]]:
        if not len(batch):
            return []
        texts, places = batch[c.TEXT], batch.dense(c.ROW).tolist()
        assert isinstance(texts, list)
        conversations = [
            [*without_parts(self._rows[split][row].prompt), {"role": "assistant", "content": text}]
            for row, text in zip(places, texts, strict=True)
        ]
        encoded = self._encoder.encode_batch(conversations, answered=True)
        # Check here, because the model's forward would silently replace a larger token id by its last one.
        if (last := max(map(max, encoded))) >= (size := self._encoder.model_vocab_size or last + 1):
            raise ConfigError(
                f"reward_model.model.path={self._path}: its tokenizer has the token id {last:,}, but the "
                f"model has {size:,} tokens. Use the model's tokenizer."
            )
        return encoded

    def _cut(self, lengths: list[int]) -> list[list[int]]:
        """Return micro-batches within the budget, in order, padded with empty ones to the same number on every rank."""
        micros: list[list[int]] = []
        room = 0
        for place, length in enumerate(lengths):
            cost = length if self._budget.max_tokens else 1
            # A conversation longer than the budget gets a separate micro-batch.
            if not micros or cost > room:
                micros.append([])
                room = self._budget.max_tokens or self._budget.max_samples or 1
            micros[-1].append(place)
            room -= cost
        count = torch.tensor(len(micros))
        dist.all_reduce(count, dist.ReduceOp.MAX)
        return micros + [[] for _ in range(max(int(count), 1) - len(micros))]
