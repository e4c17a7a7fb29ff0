"""SGLang as rollout engine: it runs in separate processes, one per device, started by the leader of a replica.

SGLang cannot run inside the worker as vLLM does, so tokens and weights are sent to its processes. A multi-device engine
belongs to the replica's first worker (the leader), which gives it the devices of all members; the others get no
prompts. Every member sends weights, because a process can import tensors without a copy only from its own device; the
leader forwards one handle per device. Left out: SGLang's multi-node mode, an engine process per node.

Written against sglang 0.5.23 and run with it on the CPU, over one and two devices. Not run on CUDA or Ascend.
Unverified there: the engine frees memory, weights pass between processes without a copy, the engine finds the devices
of all members, and a response depends only on its seed.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.env import chosen_devices, prepare_sglang, showing
from rltrain.common.errors import ConfigError, SyncError
from rltrain.config.schema.engines import ENGINES
from rltrain.data.images import EncodedPrompt, PromptImages
from rltrain.models.vision import placeholder_ids
from rltrain.models.weights.names import Weight
from rltrain.workers.rollout.contract import Job, Sampling, Source, Turn, turns_of
from rltrain.workers.rollout.settings import EngineSettings
from rltrain.workers.rollout.sglang.weights import load_weights, report_refused

# Import names of the functions that load weights in the engine's process.
_LOAD, _REPORT = (f"{function.__module__}.{function.__name__}" for function in (load_weights, report_refused))
# SGLang's names for the two parts of its memory.
_WEIGHTS, _CACHE = "weights", "kv_cache"
# Seconds between checks for a stop, because the engine does not report single tokens.
_POLL_S = 0.05
# Extra tokens that the engine needs beyond the longest sequence, and maximum time until it is idle after its last
# response.
_SPARE_TOKENS, _IDLE_WITHIN_S = 2, 60.0
# Bias added to a logit so that the token is never sampled.
_NEVER = -1e4


class SGLangRollout:
    """Engine of a replica. Members other than the leader only send weights and wait.

    On the CPU the engine uses an unseeded generator, so responses are not reproducible (its seeded sampling needs
    Triton). If both are set, top_p is relative to all tokens, not to the ``top_k`` most likely.
    """

    names_in_memory = False
    record = None
    holds_base = False

    def __init__(self, settings: EngineSettings, clock: Clock = SYSTEM) -> None:
        rollout, device = settings.rollout, settings.device
        self._device, self._clock = device, clock
        self._replica = settings.replica
        self._max_num_seqs = rollout.max_num_seqs
        self._max_model_len = settings.max_model_len
        self._bucket_bytes = rollout.update_weights_bucket_megabytes << 20
        self._sleeps = rollout.free_cache_engine
        # Image tokens, for which a text-only model has no features. Unlike in the other engines they are also excluded
        # from the softmax of the log-probs.
        self._bias = {str(token): _NEVER for token in placeholder_ids(settings.model.load_config())}
        self._released: set[str] = set()
        length = settings.max_model_len + _SPARE_TOKENS
        arguments = {
            "model_path": settings.model.path,
            "skip_tokenizer_init": True,
            # Random weights suffice, because the first sync precedes the first response.
            "load_format": "dummy",
            "dtype": str(settings.dtype).removeprefix("torch."),
            "device": device.kind,
            "tp_size": settings.replica.size,
            # Without ``sleep_on_idle`` each of the engine's processes keeps a core busy between generations.
            "sleep_on_idle": True,
            # Without seeds per request (on the CPU), replicas must not use the same random numbers.
            "random_seed": settings.replica.number,
            "context_length": length,
            "max_running_requests": rollout.max_num_seqs,
            "mem_fraction_static": rollout.gpu_memory_utilization,
            "max_prefill_tokens": rollout.max_num_batched_tokens,
            "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
            "disable_radix_cache": not rollout.enable_prefix_caching,
            "disable_cuda_graph": settings.eager,
            "enable_memory_saver": self._sleeps and not device.is_cpu,
            "enable_deterministic_inference": not device.is_cpu,
            "custom_weight_loader": [_LOAD, _REPORT],
            # rltrain sets the end tokens instead of reading them from the model's files.
            "json_model_override_args": json.dumps(
                dict(settings.model.override) | {"eos_token_id": list(settings.eos_token_ids)}
            ),
            "trust_remote_code": settings.model.trust_remote_code,
            "log_level": "error",
        }
        if device.is_cpu:
            arguments |= {"attention_backend": "torch_native", "sampling_backend": "pytorch"}
            # Reserve memory for the sequences that can run at once, instead of a share of the machine's memory.
            arguments["max_total_tokens"] = rollout.max_num_seqs * length
        # On the CPU the engine's processes fetch weights from the members, which only accept this key.
        current = multiprocessing.current_process()
        current.authkey = settings.replica.agree(bytes(current.authkey))
        devices = settings.replica.gather(_own_device(settings))  # also a barrier: all members have freed memory
        arguments |= ENGINES["sglang"].handed_on(rollout.engine_kwargs.get("sglang") or {})
        self.engine: Any = _start(arguments, device.kind, devices) if settings.replica.is_leader else None
        self.sleep()

    def close(self) -> None:
        """Terminate the engine's processes (SGLang terminates every child process of this one)."""
        if self.engine:
            self.engine.shutdown()

    def wake_weights(self) -> None:
        self._replica.gather(None)  # barrier: all members have freed memory
        self._resume(_WEIGHTS)

    def wake_cache(self) -> None:
        self._resume(_CACHE)
        if self.engine:
            self._forget()

    def sleep(self) -> bool:
        if self._sleeps and self.engine and not self._released:
            self._forget()  # SGLang must be idle
            self.engine.release_memory_occupation(tags=[_CACHE, _WEIGHTS])
            self._released = {_CACHE, _WEIGHTS}
        self._replica.agree(None)  # barrier: a member may fill its device only now
        return self._sleeps

    def _resume(self, tag: str) -> None:
        if tag in self._released:
            self.engine.resume_memory_occupation(tags=[tag])
            self._released.remove(tag)

    def _forget(self) -> None:
        """Reset the prefix cache after waiting until the engine is idle."""
        if not self._clock.poll(lambda: self.engine.flush_cache().success, _IDLE_WITHIN_S, 0.01):
            raise SyncError(f"SGLang did not reset its cache within {_IDLE_WITHIN_S:.0f} s: requests are still running")

    def load_weights(self, weights: Iterator[Weight]) -> None:
        if self.engine:
            _expect(self.engine.begin_weight_update())
        for chunk in _chunks(weights, self._bucket_bytes // 2):
            self._send(chunk, _LOAD)
        with tempfile.TemporaryDirectory() as folder:
            self._send([(folder, torch.zeros(1, device=self._device.torch_device))], _REPORT)
            # One report per process of the engine, on the leader only.
            reports = [json.loads(file.read_text("utf-8")) for file in Path(folder).iterdir()]
        if self.engine:
            _expect(self.engine.end_weight_update())
        for report in reports:
            if not report["refused"]:
                continue
            name, why = next(iter(report["refused"].items()))
            raise ConfigError(
                f"actor_rollout_ref.rollout.name=sglang: SGLang's {report['model']} does not accept "
                f"{len(report['refused'])} of the trainer's weights, such as {name} ({why}). "
                "Use rollout.name=vllm or hf."
            )

    def _send(self, named: list[tuple[str, Tensor]], loader: str) -> None:
        # On a CPU, a clone is sent, because sending moves a tensor into shared memory. On an accelerator the engine
        # reads the tensor in place.
        handed: Any = [(name, values.clone() if self._device.is_cpu else values) for name, values in named]
        # The engine reads in another process, which does not wait for kernels of this one.
        self._device.synchronize()
        if self._replica.size > 1:
            members = self._replica.gather([_handle(values) for _, values in handed])
            if self.engine:
                by_weight = zip(named, zip(*members, strict=True), strict=True)
                handed = [(name, _by_device(handles)) for (name, _), handles in by_weight]
        if self.engine:
            _expect(self.engine.update_weights_from_tensor(named_tensors=handed, load_format=loader, flush_cache=False))
        self._replica.agree(None)  # the engine reads from every member until then

    def log_probs(self, text: EncodedPrompt) -> Tensor:
        return torch.tensor(self._replica.agree(self._score(text) if self.engine else None))

    def _score(self, text: EncodedPrompt) -> list[float]:
        output = self.engine.generate(
            input_ids=text.tokens.tolist(),
            image_data=_image_data(text.images),
            sampling_params={"max_new_tokens": 0, "temperature": 0.0},
            return_logprob=True,
            logprob_start_len=0,
        )
        return [entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]]

    def generate(self, source: Source, sampling: Sampling) -> None:
        if self.engine:
            self.engine.loop.run_until_complete(self._serve(source, sampling))
        self._replica.agree(None)  # the engine computes on the devices of all members

    async def _serve(self, source: Source, sampling: Sampling) -> None:
        """Keep the engine full until the source is empty."""
        started = time.perf_counter()
        running: dict[asyncio.Future[None], Turn] = {}
        stopped = False
        while True:
            stopped = stopped or (bool(running) and source.stopped())
            if stopped:
                self.engine.tokenizer_manager.abort_request(abort_all=True)
            for job in [] if stopped else source.next_jobs(self._max_num_seqs - len(running)):
                for number, turn in enumerate(turns_of(job)):
                    running[asyncio.ensure_future(self._answer(job, number, sampling, turn, started))] = turn
            if not running:
                if not stopped and source.wait():
                    continue
                return
            finished, _ = await asyncio.wait(running, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()  # re-raise the engine's errors
                source.on_turn_end(running.pop(task))

    async def _answer(self, job: Job, number: int, sampling: Sampling, turn: Turn, started: float) -> None:
        seed = int(job.seeds[number])
        given = job.given[number].tolist() if job.given else []
        prompt = [*job.prompt.tolist(), *given]
        most = min(sampling.max_tokens, self._max_model_len - len(job.prompt)) - len(given)
        params: dict[str, Any] = {"max_new_tokens": most, "ignore_eos": sampling.ignore_eos, "temperature": 0.0}
        if self._bias:
            params["logit_bias"] = self._bias
        if not sampling.greedy:
            params |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k if sampling.top_k > 0 else -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                # SGLang expects the seed as a signed integer with the same bits.
                "sampling_seed": seed - 2**64 if seed >= 2**63 else seed,
            }
        output = await self.engine.async_generate(
            input_ids=prompt, image_data=_image_data(job.images), sampling_params=params, return_logprob=True
        )
        sampled = output["meta_info"].get("output_token_logprobs") or []
        turn.tokens = [entry[1] for entry in sampled]
        turn.log_probs = [entry[0] for entry in sampled]
        turn.reason = output["meta_info"]["finish_reason"]["type"]
        turn.num_reused = output["meta_info"].get("cached_tokens") or 0
        turn.seconds = time.perf_counter() - started


def _chunks(weights: Iterator[Weight], most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield weights in lists of up to ``most_bytes``, because a call to the engine for every weight would cost
    milliseconds each.
    """
    chunk: list[tuple[str, Tensor]] = []
    for name, values, in_checkpoint in weights:
        if chunk and sum(tensor.nbytes for _, tensor in chunk) + values.nbytes > most_bytes:
            yield chunk
            chunk = []
        if in_checkpoint:
            chunk.append((name, values))
    if chunk:
        yield chunk


def _image_data(images: PromptImages | None) -> list[dict[str, Any]] | None:
    """Return the images of a request with the trainer's pixels, which SGLang accepts as its processor's output."""
    if images is None:
        return None
    # Copies, because arrays from the object store are read-only.
    item = {"format": "processor_output", "pixel_values": torch.tensor(images.pixel_values)}
    return [item if images.grids is None else item | {"image_grid_thw": torch.tensor(images.grids)}]


def _own_device(settings: EngineSettings) -> str:
    """Return this member's device id for the visible-devices variable; "" if the engine needs no other devices."""
    device = settings.device
    if device.is_cpu or settings.replica.size == 1:
        return ""
    # torch counts devices only once: now, while the variable contains only this member's device.
    chosen, count = chosen_devices(device.kind), device.count
    if len(chosen) != 1 or count != 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={settings.replica.size} with rollout.name=sglang "
            f"needs workers that see one device each, and this one sees {count} ({','.join(chosen) or 'none chosen'}). "
            "Do not set RAY_EXPERIMENTAL_NOSET_*_VISIBLE_DEVICES, or use rollout.name=vllm."
        )
    return chosen[0]


def _handle(values: Tensor) -> bytes:
    """Serialise a handle by which the engine's process on this device finds the tensor."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    if not values.is_cpu:  # otherwise CPU tensors cannot be serialised
        # Identify the device by its UUID, because each process numbers its visible devices.
        monkey_patch_torch_reductions()
    return MultiprocessingSerializer.serialize(values)


def _by_device(handles: Sequence[bytes]) -> Any:
    """Combine the members' handles of a weight for the engine. Each of its processes uses one handle."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor

    return LocalSerializedTensor(values=list(handles))


def _start(arguments: Mapping[str, Any], device: str, devices: Sequence[str]) -> Any:
    """Start an engine. devices: device ids for its processes, in order ([""]: this process's device)."""
    prepare_sglang(len(devices))
    try:
        from sglang import Engine
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=sglang needs SGLang, which cannot be imported here ({error}). "
            "pip install rltrain[sglang], or use rollout.name=hf."
        ) from error
    try:
        with showing(device, devices):
            return Engine(**arguments)
    except TypeError as error:
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.sglang: {error}") from error


def _expect(answer: tuple[bool, str]) -> None:
    """Raise SyncError if SGLang rejected a request that changes weights."""
    if not answer[0]:
        raise SyncError(f"SGLang did not take over the weights: {answer[1]}")
