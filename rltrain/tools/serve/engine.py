"""The embedded engine behind the server: each answer is drawn as its request says, and prompts have log-probs too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.base.device import get_device, resolve_dtype
from rltrain.base.errors import ConfigError
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.data.chat import ChatEncoder
from rltrain.models.attention.packed import PLAN
from rltrain.models.attention.packing import AttentionPlan
from rltrain.models.forward import final_logits
from rltrain.models.load import read_weights, source_dtype
from rltrain.models.weights.names import Weight
from rltrain.models.weights.spec import ModelSpec
from rltrain.tools.serve.answers import AnswerQueue, Asked, TokenLogProb
from rltrain.tools.serve.settings import ServeSettings
from rltrain.workers.rollout.contract import Job, Sampling, Source
from rltrain.workers.rollout.embedded.engine import HFRollout
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.sampling import choose
from rltrain.workers.rollout.settings import EngineSettings

_ALONE = Replica(number=0, count=1, member=0, size=1)
# A model whose configuration names no positions.
_USUAL_LENGTH = 4096


class ServingEngine(HFRollout):
    """See `HFRollout`. words: of the engine's thread alone, as a tokenizer is for one thread."""

    def __init__(self, settings: EngineSettings, queue: AnswerQueue, words: ChatEncoder) -> None:
        super().__init__(settings)
        self._queue, self._words = queue, words

    @property
    def most_rows(self) -> int:
        """Answers that are generated at once, when `wake_cache` has looked at the memory."""
        return self._most_rows

    @property
    def longest(self) -> int:
        """Most tokens of prompt and answer."""
        return self._max_model_len

    def run(self) -> None:
        """Answer until the queue is closed."""
        # Each answer is drawn in its own way, and ends by itself.
        sampling = Sampling(self._max_model_len)
        while self._queue.await_work():
            self.generate(self._queue, sampling)

    def _take(self, source: Source, num_running: int) -> list[Job]:
        # Between two steps, so that answers that are running wait for one pack alone.
        if unread := self._queue.take_unread(self._rollout.max_num_batched_tokens):
            self._read_prompts(unread)
        return super()._take(source, num_running)

    def _read_prompts(self, unread: Sequence[Asked]) -> None:
        """Log-probs of the tokens of prompts, each given those before it."""
        lengths = [len(asked.prompt.tokens) for asked in unread]
        tokens = np.concatenate([asked.prompt.tokens for asked in unread]).astype(np.int64)
        ids = torch.from_numpy(tokens).to(self._device.torch_device)
        parts = [(asked.prompt, 0, length) for asked, length in zip(unread, lengths, strict=True)]
        hidden = self._read(ids, parts, {PLAN: AttentionPlan.of_lengths(lengths)})
        for asked, states, own in zip(unread, hidden.split(lengths), ids.split(lengths), strict=True):
            asked.prompt_log_probs = [TokenLogProb(int(own[0]), None, [])]
            rows = max(1, self._device.sampling_elements // len(self._is_end))
            for before, token in zip(states[:-1].split(rows), own[1:].split(rows), strict=True):
                log_probs = torch.log_softmax(final_logits(self._model, before), -1)
                asked.prompt_log_probs += _told(log_probs, token, asked.wanted.num_top or 0)
            self._queue.was_read(asked)

    def _draw(
        self, hidden: Tensor, rows: NDArray[np.int64], noise: Tensor, sampling: Sampling, seen: Tensor | None
    ) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
        logits = final_logits(self._model, hidden)
        answers = [self._queue.running(number) for number in rows.tolist()]
        # Log-probs are the model's own, of temperature 1; `choose` overwrites the logits.
        telling = [row for row, answer in enumerate(answers) if answer and answer.asked.wanted.num_top is not None]
        log_probs = torch.log_softmax(logits[telling], -1)
        tokens = torch.zeros(len(rows), dtype=torch.long, device=logits.device)
        ways: dict[Sampling, list[int]] = {}
        for row, answer in enumerate(answers):
            if answer:
                ways.setdefault(answer.asked.way, []).append(row)
        for way, of_way in ways.items():
            places = torch.tensor(of_way, device=logits.device)
            tokens[places] = choose(logits[places], noise[places], way, self._never)[0]
        told: dict[int, TokenLogProb] = {}
        if telling:
            most = max(answer.asked.wanted.num_top or 0 for answer in answers if answer)
            told = dict(zip(telling, _told(log_probs, tokens[telling], most), strict=True))
        ends = np.ones(len(rows), dtype=bool)
        for row, (answer, token) in enumerate(zip(answers, tokens.tolist(), strict=True)):
            if answer is None:
                continue
            of_token = told.get(row)
            if of_token:
                of_token = of_token._replace(top=of_token.top[: answer.asked.wanted.num_top])
            ends[row] = answer.add(token, of_token, bool(self._is_end[token]), self._words.tokenizer)
            if ends[row]:
                self._queue.end(int(rows[row]))
        return tokens, torch.zeros(len(rows)), ends


def _told(log_probs: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogProb]:
    """log_probs [n, vocabulary], tokens [n]."""
    own = log_probs.gather(-1, tokens[:, None])[:, 0].tolist()
    values, places = log_probs.topk(num_top, -1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(places.tolist(), values.tolist(), strict=True)]
    return list(map(TokenLogProb, tokens.tolist(), own, tops))


def load_engine(settings: ServeSettings, path: str, words: ChatEncoder, queue: AnswerQueue) -> ServingEngine:
    """The engine with the weights of ``path``. Raises ConfigError where there is no memory for an answer."""
    device = get_device(settings.device)
    device.activate()
    model = ModelSpec(path, "model", settings.trust_remote_code)
    config = model.load_config()
    dtype = source_dtype(config, path) if settings.dtype == "auto" else resolve_dtype(settings.dtype, device)
    length = settings.max_model_len or getattr(config.get_text_config(), "max_position_embeddings", None)
    rollout = RolloutConfig(
        name="hf", max_num_seqs=settings.max_num_seqs, gpu_memory_utilization=settings.gpu_memory_utilization
    )
    engine = ServingEngine(
        EngineSettings(
            rollout, model, dtype, device, _ALONE, words.eos_token_ids, max_model_len=length or _USUAL_LENGTH
        ),
        queue,
        words,
    )
    engine.wake_weights()
    weights = read_weights(path, config, dtype, trust_remote_code=settings.trust_remote_code)
    held = [*weights.named_parameters(), *weights.named_buffers(remove_duplicate=False)]
    engine.load_weights(Weight(name, values.detach()) for name, values in held)
    engine.wake_cache()
    queue.most_rows = engine.most_rows
    if not engine.most_rows:
        raise ConfigError(
            f"there is no memory for keys and values of one answer of max_model_len={engine.longest} tokens. Set a "
            "smaller max_model_len=, or a larger gpu_memory_utilization=."
        )
    return engine
