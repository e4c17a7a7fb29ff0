"""The embedded rollout engine: a decode loop over the Hugging Face model itself. It runs wherever torch runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from rltrain.device import Device
from rltrain.models.forward import final_logits
from rltrain.models.load import empty_model
from rltrain.ragged import Ragged
from rltrain.workers.rollout.base import (
    Finished,
    Generation,
    Job,
    Sampling,
    Source,
    WeightPiece,
    fingerprint_of,
    uniforms,
)

# Random numbers are made for this many tokens at a time.
BLOCK = 128
# The cache is compacted when at most this share of its rows is still running.
_COMPACT_AT = 0.9


class HFRollout:
    """Samples answers with a key-value cache: one prefill a prompt, shared by its samples; finished rows leave the batch."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: Device,
        eos_token_ids: Sequence[int],
        max_num_seqs: int,
        trust_remote_code: bool = False,
    ) -> None:
        self._model = empty_model(config, "sdpa", dtype, trust_remote_code=trust_remote_code).eval()
        self._dtype = dtype
        self._device = device.torch_device
        self._eos = torch.tensor(sorted(eos_token_ids), dtype=torch.long, device=self._device)
        self._max_num_seqs = max_num_seqs

    def wake_weights(self) -> None:
        """Memory is taken weight by weight in `load_weights`."""

    def wake_cache(self) -> None:
        """There is no cache between calls."""

    def load_weights(self, pieces: Iterator[WeightPiece]) -> int:
        """Point the model at the training weights where dtype and device agree; copy the others into its own."""
        for piece in pieces:
            path, _, leaf = piece.name.rpartition(".")
            module = self._model.get_submodule(path)
            where = module._parameters if leaf in module._parameters else module._buffers
            if piece.lasting:
                dtype = self._dtype if leaf in module._parameters else piece.values.dtype
                values = piece.values.to(self._device, dtype)
                where[leaf] = nn.Parameter(values, requires_grad=False) if leaf in module._parameters else values
                continue
            own = where[leaf]
            if own is None or own.is_meta:
                own = nn.Parameter(
                    torch.empty(piece.shape, dtype=self._dtype, device=self._device), requires_grad=False
                )
                module._parameters[leaf] = own
            own.data[piece.start : piece.start + len(piece.values)].copy_(piece.values)
        self._model.tie_weights()
        if missing := [name for name, parameter in self._model.named_parameters() if parameter.is_meta]:
            raise RuntimeError(
                f"the weight sync left {len(missing)} weights of the rollout engine empty: {missing[:3]}"
            )
        return sum(fingerprint_of(name, 0, weight) for name, weight in self._model.named_parameters()) % 2**64

    def sleep(self) -> bool:
        self._model.to("meta")
        return True

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(tokens)], device=self._device)
        hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        return torch.log_softmax(final_logits(self._model, hidden), -1).gather(-1, ids[0, 1:, None])[:, 0].cpu()

    @torch.inference_mode()
    def generate(self, source: Source, sampling: Sampling, finished: Finished | None = None) -> Generation:
        started = time.perf_counter()
        parts = [_Answers([], sampling, self._device, None, started).finish()]
        while jobs := source.take(self._max_num_seqs):
            parts.append(self._wave(jobs, sampling, _Answers(jobs, sampling, self._device, finished, started), source))
        return Generation(
            tokens=Ragged.concat([part.tokens for part in parts]),
            log_probs=Ragged.concat([part.log_probs for part in parts]),
            truncated=torch.cat([part.truncated for part in parts]),
            aborted=torch.cat([part.aborted for part in parts]),
            seconds=torch.cat([part.seconds for part in parts]),
        )

    def _wave(self, jobs: Sequence[Job], sampling: Sampling, answers: _Answers, source: Source) -> Generation:
        """Prefill the prompts and decode all their samples until the last one has finished."""
        cache = DynamicCache()
        hidden, mask, position = self._prefill([job.prompt for job in jobs], cache)
        seeds = np.concatenate([job.seeds for job in jobs])
        owner = torch.arange(len(jobs)).repeat_interleave(torch.tensor([len(job.seeds) for job in jobs]))
        owner = owner.to(self._device)
        cache.batch_select_indices(owner)
        hidden, mask, position = (x[owner] for x in (hidden, mask, position))
        rows = torch.arange(len(seeds), device=self._device)
        noise = torch.empty(0)
        for step in range(sampling.max_tokens):
            if step % BLOCK == 0:
                noise = torch.from_numpy(random_block(seeds, step)).to(self._device)
            tokens, log_probs = choose(final_logits(self._model, hidden), noise[rows, step % BLOCK], sampling)
            ended = torch.isin(tokens, self._eos) & (not sampling.ignore_eos)
            answers.write(rows, step, tokens, log_probs, ended)
            running = ~answers.ended[rows]
            num_running = int(running.sum())
            if not num_running or step + 1 == sampling.max_tokens:
                break
            if source.stopped():
                return answers.finish(aborted=True)
            if num_running <= _COMPACT_AT * len(rows):
                keep = running.nonzero()[:, 0]
                cache.batch_select_indices(keep)
                rows, tokens, mask, position = rows[keep], tokens[keep], mask[keep], position[keep]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            hidden = self._forward(tokens[:, None], mask, position[:, None], cache)
            position = position + 1
        return answers.finish()

    def _prefill(self, prompts: Sequence[NDArray[np.int32]], cache: DynamicCache) -> tuple[Tensor, Tensor, Tensor]:
        """Left-pad and run the prompts: last hidden state [prompts, h], attention mask, and the next position of each."""
        width = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return self._forward(tokens, mask, positions, cache), mask, positions[:, -1] + 1

    def _forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self._model.base_model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return output.last_hidden_state[:, -1]


class _Answers:
    """What has been sampled so far, by sample."""

    def __init__(
        self,
        jobs: Sequence[Job],
        sampling: Sampling,
        device: torch.device,
        finished: Finished | None,
        started: float,
    ) -> None:
        self._jobs = jobs
        self._owner = [number for number, job in enumerate(jobs) for _ in job.samples]
        self._running = [len(job.samples) for job in jobs]
        self._first = np.cumsum([0, *self._running]).tolist()
        self._finished = finished
        self._started = started
        num_samples = len(self._owner)
        self.tokens = torch.zeros(num_samples, sampling.max_tokens, dtype=torch.int32, device=device)
        self.log_probs = torch.zeros(num_samples, sampling.max_tokens, device=device)
        self.lengths = torch.zeros(num_samples, dtype=torch.long, device=device)
        self.ended = torch.zeros(num_samples, dtype=torch.bool, device=device)
        self._seconds = torch.zeros(num_samples)

    def write(self, rows: Tensor, step: int, tokens: Tensor, log_probs: Tensor, ended: Tensor) -> None:
        """Add one token to each row that has not ended (rows stay in the batch for a while after they end)."""
        running = ~self.ended[rows]
        live = rows[running]
        self.tokens[live, step] = tokens[running].int()
        self.log_probs[live, step] = log_probs[running]
        self.lengths[live] = step + 1
        self.ended[live] = ended[running]
        if bool(ended.any()):
            self._note(live[ended[running]].tolist())

    def _note(self, samples: list[int]) -> None:
        """These have ended now. Hands out the jobs whose last answer is among them."""
        self._seconds[samples] = time.perf_counter() - self._started
        for sample in samples:
            number = self._owner[sample]
            self._running[number] -= 1
            if not self._running[number] and self._finished:
                rows = range(self._first[number], self._first[number + 1])
                self._finished(self._jobs[number], [self.tokens[i, : int(self.lengths[i])].tolist() for i in rows])

    def finish(self, *, aborted: bool = False) -> Generation:
        cut = ~self.ended
        if aborted:
            self._seconds[cut.cpu()] = time.perf_counter() - self._started
        else:
            self._note(cut.nonzero()[:, 0].tolist())
        written = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]
        tokens, log_probs = Ragged(self.tokens[written], self.lengths), Ragged(self.log_probs[written], self.lengths)
        cut, none = cut.cpu(), torch.zeros(len(self._owner), dtype=torch.bool)
        return Generation(
            tokens.to("cpu"), log_probs.to("cpu"), none if aborted else cut, cut if aborted else none, self._seconds
        )


def random_block(seeds: NDArray[np.uint64], start: int) -> NDArray[np.float32]:
    """Random numbers ``start`` to ``start + BLOCK`` of each seed, in [0, 1 - 2^-23].

    So far below 1 that the product with a float32 total is smaller than the total: the search for it never runs past the last token
    that has any mass. In float32, because not every accelerator computes in float64.
    """
    return np.minimum(uniforms(seeds, start, BLOCK), 1 - 2.0**-23).astype(np.float32)


def choose(logits: Tensor, noise: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the distribution function at ``noise`` (as from `random_block`).

    logits [n, vocabulary] -> token ids [n] and their log-probs [n].
    """
    if sampling.greedy:
        tokens = logits.argmax(-1)
        return tokens, torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
    log_probs = torch.log_softmax(logits / sampling.temperature, -1)
    mass = restrict(log_probs.exp(), sampling.top_k, sampling.top_p).cumsum(-1)
    tokens = torch.searchsorted(mass, noise[:, None] * mass[:, -1:], right=True)[:, 0]
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def restrict(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero the mass of tokens outside the ``top_k`` most likely, then outside the smallest set that holds ``top_p``."""
    vocabulary = probs.shape[-1]
    if 0 < top_k < vocabulary:
        threshold = probs.topk(top_k, -1).values[:, -1:]
        probs = probs.where(probs >= threshold, 0)
    if top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        inside = before < top_p * ordered.sum(-1, keepdim=True)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered.where(inside, 0))
    return probs
