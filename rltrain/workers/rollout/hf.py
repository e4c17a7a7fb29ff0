"""The embedded rollout engine: a decode loop over the Hugging Face model itself. It runs wherever torch runs."""

from __future__ import annotations

import functools
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
from rltrain.workers.rollout.base import Finished, Generation, Sampling, uniforms

# Random numbers are made for this many tokens at a time.
_BLOCK = 128
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

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Point the model at the given tensors: no copy when dtype and device already agree."""
        for name, tensor in weights:
            path, _, leaf = name.rpartition(".")
            module = self._model.get_submodule(path)
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(tensor.to(self._device, self._dtype), requires_grad=False)
            else:
                module._buffers[leaf] = tensor.to(self._device)
        self._model.tie_weights()
        if missing := [name for name, parameter in self._model.named_parameters() if parameter.is_meta]:
            raise RuntimeError(
                f"the weight sync left {len(missing)} weights of the rollout engine empty: {missing[:3]}"
            )

    def release(self) -> None:
        self._model.to("meta")

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        seeds: NDArray[np.uint64],
        sampling: Sampling,
        finished: Finished | None = None,
    ) -> Generation:
        wave = max(1, self._max_num_seqs // sampling.num_samples)
        parts = []
        for start in range(0, len(prompts), wave):
            some = prompts[start : start + wave]
            first = start * sampling.num_samples
            tell = None if finished is None else functools.partial(_tell, finished, start)
            parts.append(self._wave(some, seeds[first : first + len(some) * sampling.num_samples], sampling, tell))
        return Generation(
            tokens=Ragged.concat([part.tokens for part in parts]),
            log_probs=Ragged.concat([part.log_probs for part in parts]),
            truncated=torch.cat([part.truncated for part in parts]),
        )

    def _wave(
        self,
        prompts: Sequence[NDArray[np.int32]],
        seeds: NDArray[np.uint64],
        sampling: Sampling,
        finished: Finished | None,
    ) -> Generation:
        """Prefill the prompts and decode all their samples until the last one has finished."""
        cache = DynamicCache()
        hidden, mask, position = self._prefill(prompts, cache)
        cache.batch_repeat_interleave(sampling.num_samples)
        hidden, mask, position = (x.repeat_interleave(sampling.num_samples, 0) for x in (hidden, mask, position))
        answers = _Answers(len(seeds), sampling, self._device, finished)
        rows = torch.arange(len(seeds), device=self._device)
        noise = torch.empty(0)
        for step in range(sampling.max_tokens):
            if step % _BLOCK == 0:
                noise = torch.from_numpy(random_block(seeds, step)).to(self._device)
            tokens, log_probs = choose(final_logits(self._model, hidden), noise[rows, step % _BLOCK], sampling)
            ended = torch.isin(tokens, self._eos) & (not sampling.ignore_eos)
            answers.write(rows, step, tokens, log_probs, ended)
            running = ~answers.ended[rows]
            num_running = int(running.sum())
            if not num_running or step + 1 == sampling.max_tokens:
                break
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

    def __init__(self, num_samples: int, sampling: Sampling, device: torch.device, finished: Finished | None) -> None:
        max_tokens = sampling.max_tokens
        self._group = sampling.num_samples
        self._finished = finished
        self._told: set[int] = set()
        self.tokens = torch.zeros(num_samples, max_tokens, dtype=torch.int32, device=device)
        self.log_probs = torch.zeros(num_samples, max_tokens, device=device)
        self.lengths = torch.zeros(num_samples, dtype=torch.long, device=device)
        self.ended = torch.zeros(num_samples, dtype=torch.bool, device=device)

    def write(self, rows: Tensor, step: int, tokens: Tensor, log_probs: Tensor, ended: Tensor) -> None:
        """Add one token to each row that has not ended (rows stay in the batch for a while after they end)."""
        running = ~self.ended[rows]
        live = rows[running]
        self.tokens[live, step] = tokens[running].int()
        self.log_probs[live, step] = log_probs[running]
        self.lengths[live] = step + 1
        self.ended[live] = ended[running]
        if self._finished and bool(ended.any()):
            self._tell(self.ended)

    def _tell(self, ended: Tensor) -> None:
        """Hand out the prompts whose answers have all ended, each once."""
        assert self._finished is not None
        for prompt in ended.view(-1, self._group).all(1).nonzero()[:, 0].tolist():
            if prompt not in self._told:
                self._told.add(prompt)
                samples = range(prompt * self._group, (prompt + 1) * self._group)
                self._finished(prompt, [self.tokens[i, : int(self.lengths[i])].tolist() for i in samples])

    def finish(self) -> Generation:
        if self._finished:
            self._tell(torch.ones_like(self.ended))
        written = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]
        tokens, log_probs = Ragged(self.tokens[written], self.lengths), Ragged(self.log_probs[written], self.lengths)
        return Generation(tokens.to("cpu"), log_probs.to("cpu"), (~self.ended).cpu())


def _tell(finished: Finished, start: int, prompt: int, answers: list[list[int]]) -> None:
    finished(start + prompt, answers)


def random_block(seeds: NDArray[np.uint64], start: int) -> NDArray[np.float32]:
    """Random numbers ``start`` to ``start + _BLOCK`` of each seed, in [0, 1 - 2^-23].

    So far below 1 that the product with a float32 total is smaller than the total: the search for it never runs past the last token
    that has any mass. In float32, because not every accelerator computes in float64.
    """
    return np.minimum(uniforms(seeds, start, _BLOCK), 1 - 2.0**-23).astype(np.float32)


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
