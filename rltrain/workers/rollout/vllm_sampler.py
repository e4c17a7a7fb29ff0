"""Replaces vLLM's drawing by counted random numbers, the same as in every engine that can.

vLLM seeds a generator per request, whose numbers depend on its kernels and on how often a draft was rejected. To make
an answer depend on its seed alone, vLLM's sampler gets another drawing part, and its rejection sampler is replaced: a
draft is accepted exactly where it is what would have been drawn. vLLM's model runner stays as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rltrain.workers.rollout.base import Sampling
from rltrain.workers.rollout.sampling import choose, random_numbers


class RandomStream(NamedTuple):
    """The random numbers of one request: those of ``seed`` from position ``start`` on. Travels in ``extra_args``."""

    seed: int
    start: int

    def as_arguments(self) -> dict[str, Any]:
        return {"rltrain": tuple(self)}

    @classmethod
    def of(cls, params: Any) -> RandomStream:
        """Of the request's SamplingParams."""
        return cls(*(params.extra_args or {}).get("rltrain", (0, 0)))


class CountedSampler(nn.Module):
    """Replaces vLLM's top-k/top-p sampler, and draws the whole batch at once. Returns log-probs before top-k and top-p.

    never: ids that are never drawn. They keep their place in the log-probs, because the trainer's softmax has them too.
    """

    def __init__(self, runner: Any, never: Tensor) -> None:
        super().__init__()
        self._runner = weakref.ref(runner)  # it holds this, and an engine must end with its last reference
        self._never = never
        # One for all requests of a call: vLLM's own top_k and top_p per request are not used.
        self._sampling = Sampling(1)

    @classmethod
    def put_into(cls, runner: Any, never: Tensor) -> CountedSampler:
        """Replace the drawing parts of vLLM's model runner: of its sampler and of its judge of drafts."""
        sampler: Any = getattr(runner, "sampler", None)
        if not hasattr(sampler, "topk_topp_sampler") or not hasattr(sampler, "greedy_sample"):
            raise RuntimeError(
                f"this version of vLLM has another sampler ({type(sampler).__name__}) than rltrain knows"
            )
        sampler.topk_topp_sampler = counted = cls(runner, never)
        if len(never):
            greedy = sampler.greedy_sample
            sampler.greedy_sample = lambda logits: greedy(counted._without_never(logits))
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler = counted.verify
        return counted

    def begin(self, sampling: Sampling) -> None:
        """Draw as ``sampling`` says from now on."""
        self._sampling = sampling

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """logits [rows, vocabulary], divided by the temperature -> token ids [rows], log-probs [rows, vocabulary]."""
        log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)
        return self._draw(logits, [1] * len(logits)), log_probs

    def verify(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        """Replaces vLLM's rejection sampler: a draft is accepted while it is what would have been drawn without it.

        That is as often as rejection sampling accepts a draft that is sure of itself (Leviathan et al. 2023), and the
        answer is the one without drafts. logits [per request its drafts and one more, vocabulary], not divided by the
        temperature. Returns vLLM's SamplerOutput: -1 behind the accepted drafts and the first token that was not.
        """
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        scaled = logits.float() / (1.0 if self._sampling.greedy else self._sampling.temperature)
        counts = [drafts + 1 for drafts in metadata.num_draft_tokens]
        log_probs = torch.log_softmax(scaled, -1)
        drawn = self._draw(scaled, counts)
        log_probs = log_probs.gather(-1, drawn[:, None])[:, 0]
        drafts = torch.full_like(drawn, -1)
        drafts[metadata.target_logits_indices.long()] = metadata.draft_token_ids.long()

        def table(rows: Tensor, padding: float) -> Tensor:
            return nn.utils.rnn.pad_sequence(list(rows.split(counts)), batch_first=True, padding_value=padding)

        accepted = table((drawn == drafts).long(), 0).cumprod(1)
        tokens = table(drawn, -1)
        tokens[:, 1:].masked_fill_(accepted[:, :-1] == 0, -1)
        ids = tokens.clamp(min=0).view(-1, 1).int()
        ranks = torch.zeros_like(ids[:, 0])  # nobody reads them
        return SamplerOutput(tokens.int(), LogprobsTensors(ids, table(log_probs, 0.0).view(-1, 1), ranks))

    def _draw(self, logits: Tensor, counts: Sequence[int]) -> Tensor:
        """logits [rows, vocabulary], divided by the temperature -> token ids [rows]. Overwrites the logits.

        counts: rows per request.
        """
        runner = self._runner()
        assert runner is not None
        seeds, places = np.zeros(len(logits), dtype=np.uint64), np.zeros(len(logits), dtype=np.int64)
        row = 0
        # There are no requests while vLLM profiles itself.
        for name, count in zip(runner.input_batch.req_ids, counts, strict=False):
            request = runner.requests[name]
            stream = RandomStream.of(request.sampling_params)
            seeds[row : row + count] = stream.seed
            # Counted from the tokens that the request has, so a rejected draft uses up no number.
            places[row : row + count] = stream.start + len(request.output_token_ids) + np.arange(count)
            row += count
        noise = torch.from_numpy(random_numbers(seeds, places)).to(logits.device)
        return choose(self._without_never(logits), noise, replace(self._sampling, temperature=1.0))[0]

    def _without_never(self, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, self._never, -torch.inf) if len(self._never) else logits
