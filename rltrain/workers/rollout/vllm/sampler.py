"""Sampler for vLLM with counter-based random numbers, the same as in other engines. vLLM seeds a generator per request,
whose numbers depend on its kernels and on rejected drafts. To make a response depend only on its seed, part of vLLM's
sampler and its rejection sampler are replaced: a draft token is accepted exactly if it is the token that would have
been sampled. vLLM's model runner is unchanged.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rltrain.common.device import send
from rltrain.workers.rollout.contract import Sampling
from rltrain.workers.rollout.sampling import choose, random_numbers
from rltrain.workers.rollout.vllm.experts import ExpertNotes


class RandomStream(NamedTuple):
    """Random stream of one request: numbers of ``seed`` from position ``start`` on. Passed in ``extra_args``."""

    seed: int
    start: int

    def as_arguments(self) -> dict[str, Any]:
        return {"rltrain": tuple(self)}

    @classmethod
    def of(cls, params: Any) -> RandomStream:
        """Return the stream of the request's SamplingParams."""
        return cls(*(params.extra_args or {}).get("rltrain", (0, 0)))


class CountedSampler(nn.Module):
    """Replacement of vLLM's top-k/top-p sampler for the whole batch.

    Returns log-probs before penalty, top-k, top-p and min-p. never: ids that are never sampled. They stay in the
    log-probs, because the trainer's softmax includes them. experts: notified of every step.
    """

    def __init__(self, runner: Any, never: Tensor, experts: ExpertNotes | None) -> None:
        super().__init__()
        self._experts = experts
        self._runner = weakref.ref(
            runner
        )  # weak, because the runner refers to this sampler, and an engine must be freed with its last reference
        self._never = never
        # One setting for all requests of a call; vLLM's top_k and top_p per request are unused.
        self._sampling = Sampling(1)
        # Logits of this step before vLLM's penalty; None without a penalty.
        self._plain_logits: Tensor | None = None
        # Requests of the last step, in the order of their rows.
        self._names: list[str] = []
        self._streams: list[RandomStream] = []
        self._seeds, self._starts = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)

    @classmethod
    def put_into(cls, runner: Any, never: Tensor, experts: ExpertNotes | None = None) -> CountedSampler:
        """Replace the sampling parts of vLLM's model runner: in its sampler and its rejection sampler."""
        sampler: Any = getattr(runner, "sampler", None)
        if not hasattr(sampler, "topk_topp_sampler") or not hasattr(sampler, "greedy_sample"):
            raise RuntimeError(f"this version of vLLM has an unsupported sampler ({type(sampler).__name__})")
        sampler.topk_topp_sampler = counted = cls(runner, never, experts)
        greedy = sampler.greedy_sample
        sampler.greedy_sample = lambda logits: greedy(counted._without_never(counted._noted(logits)))
        penalise, log_probs_of = sampler.apply_penalties, sampler.compute_logprobs
        sampler.apply_penalties = lambda logits, *rest: penalise(counted._remembered(logits), *rest)
        # vLLM still calls this for greedy responses.
        sampler.compute_logprobs = lambda logits: log_probs_of(counted._unpenalised(logits))
        # vllm-ascend ignores the requested mode, and would compute unused log-probs.
        sampler.logprobs_mode = "processed_logprobs"
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler = counted.verify
        return counted

    def set_sampling(self, sampling: Sampling) -> None:
        """Set the sampling parameters for the following steps."""
        self._sampling, self._plain_logits = sampling, None

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sample: logits [rows, vocabulary] / temperature -> token ids [rows], log-probs [rows, vocabulary]."""
        plain = self._unpenalised(logits)
        if plain is not logits:
            plain = plain / self._sampling.temperature
        # Compute the log-probs first, because sampling overwrites the logits.
        log_probs = torch.log_softmax(plain, -1, dtype=torch.float32)
        return self._draw(logits), log_probs

    def _remembered(self, logits: Tensor) -> Tensor:
        """Save a copy of the logits before the penalty overwrites them."""
        self._plain_logits = logits.clone() if self._sampling.repetition_penalty != 1 else None
        return logits

    def _unpenalised(self, logits: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] before penalty and temperature, or unchanged without a penalty."""
        plain, self._plain_logits = self._plain_logits, None
        return logits if plain is None else plain

    def verify(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        """Accept a draft token if it equals the token that would have been sampled. Replaces vLLM's rejection sampler.

        The acceptance rate equals that of rejection sampling with a deterministic draft (Leviathan et al. 2023), and
        the response is the same as without drafts. logits [rows, vocabulary], not divided by the temperature: each
        request has a row per draft token, and one more. Returns vLLM's SamplerOutput: -1 after the accepted drafts and
        the first rejected token.
        """
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        scaled = logits.float() / (1.0 if self._sampling.greedy else self._sampling.temperature)
        counts = np.array(metadata.num_draft_tokens) + 1
        requests = np.repeat(np.arange(len(counts)), counts)
        steps = np.arange(len(requests)) - np.repeat(counts.cumsum() - counts, counts)
        places = tuple(send(torch.from_numpy(numbers), logits.device) for numbers in (requests, steps))
        log_probs = torch.log_softmax(scaled, -1)
        drawn = self._draw(scaled, requests, steps)
        log_probs = log_probs.gather(-1, drawn[:, None])[:, 0]
        drafts = torch.full_like(drawn, -1)
        drafts[metadata.target_logits_indices.long()] = metadata.draft_token_ids.long()

        def table(rows: Tensor, padding: float) -> Tensor:
            return rows.new_full((len(counts), int(counts.max())), padding).index_put_(places, rows)

        accepted = table((drawn == drafts).long(), 0).cumprod(1)
        tokens = table(drawn, -1)
        tokens[:, 1:].masked_fill_(accepted[:, :-1] == 0, -1)
        ids = tokens.clamp(min=0).view(-1, 1).int()
        ranks = torch.zeros_like(ids[:, 0])  # unused
        return SamplerOutput(tokens.int(), LogprobsTensors(ids, table(log_probs, 0.0).view(-1, 1), ranks))

    def _draw(self, logits: Tensor, requests: Any = slice(None), steps: NDArray[np.int64] | int = 0) -> Tensor:
        """Sample: logits [rows, vocabulary] divided by temperature -> token ids [rows]. Overwrites the logits.

        requests: the request of each row, if it has several rows. steps: number of tokens of the request before the
        token of the row.
        """
        self._noted(logits)
        runner = self._runner()
        assert runner is not None
        batch = runner.input_batch
        count = len(self._names)
        # The position is the number of the request's tokens, so a rejected draft consumes no random number. With
        # asynchronous scheduling this includes tokens that the host has not seen yet.
        tokens = batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count]
        numbers = random_numbers(self._seeds[requests], (self._starts + tokens)[requests] + steps)
        # There are no requests while vLLM profiles itself.
        noise = np.zeros(len(logits), dtype=np.float32)
        noise[: len(numbers)] = numbers
        # The numbers do not depend on the logits, so the host need not wait for the forward pass.
        noise_there = send(torch.from_numpy(noise), logits.device)
        return choose(self._without_never(logits), noise_there, replace(self._sampling, temperature=1.0))[0]

    def _noted(self, logits: Tensor) -> Tensor:
        """Return the logits unchanged, after recording random streams and routing of their requests."""
        runner = self._runner()
        assert runner is not None
        names = runner.input_batch.req_ids
        if names != self._names:  # unchanged: every request keeps its row
            self._names = list(names)
            self._streams = [RandomStream.of(runner.requests[name].sampling_params) for name in self._names]
            self._seeds = np.array([stream.seed for stream in self._streams], dtype=np.uint64)
            self._starts = np.array([stream.start for stream in self._streams], dtype=np.int64)
        if self._experts and self._names:
            self._experts.note(self._streams)
        return logits

    def _without_never(self, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, self._never, -torch.inf) if len(self._never) else logits
