"""Rollout role of supervised fine-tuning: responses from the data, without an engine."""

from __future__ import annotations

import time

import numpy as np
import torch.distributed as dist

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.data.chat import ChatEncoder
from rltrain.data.prompts import PromptStore
from rltrain.workers.interface.results import Array, GenerationNumbers
from rltrain.workers.interface.roles import Rollout
from rltrain.workers.interface.tasks import Finished, GenerateTask
from rltrain.workers.rollout.conversations import Conversation, answer_numbers, payload_of


class DemonstrationWorker(Rollout):
    """Rollout role of a rank. It serves every n-th prompt of a task with the response from the data."""

    def __init__(self, prompts: dict[str, PromptStore], encoder: ChatEncoder, *, images: bool) -> None:
        self._prompts, self._encoder, self._images = prompts, encoder, images
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def generate(self, task: GenerateTask, begun: Batch | None = None) -> tuple[Batch, list[str], GenerationNumbers]:
        """Return prompts and responses of this rank's prompts. There is no engine, so its log-probs are 0."""
        started, store = time.perf_counter(), self._prompts[task.split]
        places = range(self._rank, len(task.rows), self._world)
        conversations = [self._conversation(store, place, int(task.rows[place])) for place in places]
        seconds = {"reshard": 0.0, "generate_sequences": time.perf_counter() - started}
        if not conversations:
            return Batch(), [], GenerationNumbers(seconds)
        payload = payload_of(conversations)
        if self._images:
            images = [store.encoded(int(task.rows[place])).images for place in places]
            payload.update({c.IMAGES: DictionaryColumn(images, payload.dictionary(c.PROMPT).index)})
            payload.update({c.RESPONSE_IMAGES: [None] * len(images)})
        texts = self._encoder.decode_batch([conversation.tokens for conversation in conversations])
        return payload, texts, GenerationNumbers(seconds, per_sample=answer_numbers(conversations, 1))

    @staticmethod
    def _conversation(store: PromptStore, place: int, row: int) -> Conversation:
        assert store.responses
        tokens, mask = store.responses[row]
        log_probs = np.zeros(int(mask.sum()), dtype=np.float32)
        return Conversation(place, 0, store.prompt(row), tokens, mask, log_probs, aborted=False)

    def take_finished(self, wait_s: float) -> tuple[list[str], Finished]:
        """Return no responses, and ``done=True``."""
        nothing = np.zeros(0, dtype=np.int64)
        return [], Finished(nothing, nothing, True)

    def save_answers(self, batch: Batch, file: str) -> None:
        """Do nothing: no response waits for a later step."""

    def load_answers(self, file: str) -> tuple[Batch, list[str], dict[str, Array]]:
        """Raise an error: no response waits in a checkpoint."""
        raise NotImplementedError("supervised fine-tuning carries no response over")

    def abort(self) -> None:
        """Do nothing: a response from the data is complete at once."""
