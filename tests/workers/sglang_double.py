"""A double of SGLang's engine: it accepts the arguments of the recorded API, keeps weights and caches as the real one,
and computes with transformers. Over several devices it has a process for each, which takes over weights by its own
handle and computes the logits of its own share of the vocabulary; where one dies, the process that started it does too.
"""

import asyncio
import functools
import importlib.util
import io
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rltrain.config.schema.rollout import RolloutConfig
from rltrain.models.vision import takes_images
from rltrain.models.weights.names import CheckpointNames
from rltrain.workers.rollout.contract import RolloutEngine, Sampling
from rltrain.workers.rollout.sampling import choose, random_numbers
from tests.clock import hang
from tests.conformance.record import recorded
from tests.conformance.uses import SGLANG
from tests.workers.engines import engine_of

# What is recorded of the real one (tests/conformance), by the names that are used here.
_ENGINE, _MANAGER = "sglang.srt.entrypoints.engine:Engine", "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_LISTED = {
    "ServerArgs": "sglang.srt.server_args:*",
    "SamplingParams": "sglang.srt.sampling.sampling_params:SamplingParams",
    "memory tags": "sglang.srt.constants",
}


@contextmanager
def sglang_engine(path: str, rollout: RolloutConfig, *, double: bool) -> Iterator[RolloutEngine]:
    """Return the adapter on the real engine, or on the double (which samples by seeds, as the real one on
    accelerators)."""
    if not double and not importlib.util.find_spec("sglang"):
        pytest.skip("SGLang is not installed (rltrain[sglang])")
    if double:
        rollout.engine_kwargs = {"sglang": {"enable_deterministic_inference": True}}
    with mock.patch.dict(sys.modules, MODULES) if double else nullcontext():
        engine = engine_of("sglang", path, rollout)
    yield engine
    engine.close()


def known(what: str, names) -> None:
    """Check the names, because the real engine would refuse others."""
    if what in _LISTED:
        takes = SGLANG.texts[_LISTED[what]].split()
    else:
        takes = recorded("sglang", what.replace("Engine.", f"{_ENGINE}.").replace("TokenizerManager.", f"{_MANAGER}."))
    if unknown := set(names) - set(takes):
        raise TypeError(f"{what} got an unexpected keyword argument {sorted(unknown)}")


def as_recorded(method):
    """Require all arguments by keyword, and no others than the real method has."""

    @functools.wraps(method)
    def call(self, **arguments):
        known(f"Engine.{method.__name__}", arguments)
        self.calls.append(method.__name__)
        return method(self, **arguments)

    return call


class Loader:
    """A model whose weights are loaded by their checkpoint names."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.weights = model, {name: weight.data for name, weight in model.named_parameters()}
        self.weights |= CheckpointNames(model)(self.weights)

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            self.weights[name].copy_(weight)


class MultiprocessingSerializer:
    """``sglang.srt.utils.MultiprocessingSerializer``."""

    @staticmethod
    def serialize(obj) -> bytes:
        file = io.BytesIO()
        ForkingPickler(file).dump(obj)
        return file.getvalue()

    @staticmethod
    def deserialize(data: bytes):
        return pickle.loads(data)


@dataclass
class LocalSerializedTensor:
    """``sglang.srt.model_executor.model_runner_components.weight_updater.LocalSerializedTensor``."""

    values: list[bytes]


def monkey_patch_torch_reductions() -> None:
    """``sglang.srt.utils.patch_torch.monkey_patch_torch_reductions``."""
    raise AssertionError("afterwards the real one's serializer takes no tensors on the CPU")


# What the adapter imports, with the packages above it.
_PARTS = ["utils", "utils.patch_torch", "model_executor", "model_executor.model_runner_components"]
_PARTS.append("model_executor.model_runner_components.weight_updater")
MODULES = dict.fromkeys(["sglang", "sglang.srt", *(f"sglang.srt.{part}" for part in _PARTS)], sys.modules[__name__])


class Part:
    """One device's part of an engine."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        config = AutoConfig.from_pretrained(path)
        kind = AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM
        self.model = Loader(kind.from_config(config).eval())

    def load(self, payload: bytes, loader: str) -> None:
        named = MultiprocessingSerializer.deserialize(payload)
        if self._size > 1:
            assert all(len(values.values) == self._size for _, values in named)
            named = [(name, MultiprocessingSerializer.deserialize(found.values[self._rank])) for name, found in named]
        module, function = loader.rsplit(".", 1)
        getattr(importlib.import_module(module), function)(self.model, named)

    def release(self) -> None:
        for weight in self.model.weights.values():
            weight.normal_()

    @torch.inference_mode()
    def logits(self, ids: list[int], images: dict[str, torch.Tensor]) -> np.ndarray:
        """Return the logits of this device's share of the vocabulary: [position, token]."""
        model, tokens = self.model.model, torch.tensor([ids])
        if images:
            # Without an attention mask, transformers would take the positions of the request before.
            images = images | {"mm_token_type_ids": (tokens == model.config.image_token_id).int()}
        logits = model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **images).logits[0]
        return logits.tensor_split(self._size, -1)[self._rank].numpy()


class Process:
    """A part in a separate process."""

    def __init__(self, *settings) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_answer, args=(other, *settings), daemon=True)
        self.process.start()
        self.ended = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self.process.join()
        if not self.ended:
            os.kill(os.getpid(), signal.SIGQUIT)

    def ask(self, name: str, args: tuple) -> None:
        self._wait_if_gone(self._pipe.send, (name, args))

    def answer(self):
        return self._wait_if_gone(self._pipe.recv)

    def _wait_if_gone(self, method, *args):
        try:
            return method(*args)
        except (EOFError, OSError):
            hang()  # as for an answer of the real one, which raises nothing


def _answer(pipe: Connection, *settings) -> None:
    torch.set_num_threads(1)
    part = Part(*settings)
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:  # the engine is gone
            return
        pipe.send(getattr(part, name)(*args))


def _inputs(image_data: list[dict] | None) -> dict[str, torch.Tensor]:
    """The model's inputs. The real engine takes processed images as a single entry."""
    if image_data is None:
        return {}
    (entry,) = image_data
    assert entry["format"] == "processor_output"
    return {name: values for name, values in entry.items() if name != "format"}


class Engine:
    """``sglang.Engine``."""

    def __init__(self, **settings) -> None:
        known("ServerArgs", settings)
        self.settings = settings
        size = settings["tp_size"]
        os.environ["NCCL_ALGO"] = "allreduce:tree"  # for its processes, as the real one with deterministic inference
        parts = [(settings["model_path"], rank, size) for rank in range(size)]
        self.processes = [Process(*part) for part in parts] if size > 1 else []
        self._here = [] if self.processes else [Part(*parts[0])]
        self.calls: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort)
        config = AutoConfig.from_pretrained(settings["model_path"])
        for name, value in json.loads(settings["json_model_override_args"]).items():
            setattr(config, name, value)
        self._eos = config.eos_token_id
        self._released: set[str] = set()
        self._updating = False
        self._cache: dict[tuple, torch.Tensor] = {}
        self._running: set[object] = set()
        self._abort_before: set[object] = set()
        self.most_running = 0

    def _all(self, name: str, *args) -> list:
        """Call a method of all parts at once."""
        for process in self.processes:
            process.ask(name, args)
        return [getattr(part, name)(*args) for part in self._here] or [each.answer() for each in self.processes]

    @as_recorded
    def shutdown(self) -> None:
        self.loop.close()
        for process in self.processes:
            process.ended = True
            process.process.kill()
            process.process.join()

    @as_recorded
    def flush_cache(self):
        if not self._running:
            self._cache.clear()
        return SimpleNamespace(success=not self._running, message="")

    @as_recorded
    def release_memory_occupation(self, tags) -> None:
        assert not self._running
        known("memory tags", tags)
        assert not self._released & set(tags)
        self._released |= set(tags)
        if "weights" in tags:
            self._all("release")

    @as_recorded
    def resume_memory_occupation(self, tags) -> None:
        for tag in tags:
            self._released.remove(tag)

    @as_recorded
    def begin_weight_update(self):
        before, self._updating = self._updating, True
        return not before, "a session is open"

    @as_recorded
    def end_weight_update(self):
        before, self._updating = self._updating, False
        return before, "no session is open"

    @as_recorded
    def update_weights_from_tensor(self, named_tensors, load_format, flush_cache):
        assert "weights" not in self._released
        assert load_format in self.settings["custom_weight_loader"]
        if not self._updating:
            return False, "no session is open"
        self._all("load", MultiprocessingSerializer.serialize(named_tensors), load_format)
        if flush_cache:
            self._cache.clear()
        return True, "Success"

    @as_recorded
    def generate(self, **arguments):
        """Without a response, return the log-probs of the prompt."""
        assert arguments["sampling_params"]["max_new_tokens"] == arguments["logprob_start_len"] == 0
        ids = arguments["input_ids"]
        log_probs = torch.log_softmax(self._forward(ids, _inputs(arguments["image_data"]))[:-1], -1)
        values = [None, *log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]
        return {
            "meta_info": {"input_token_logprobs": [(value, id, None) for value, id in zip(values, ids, strict=True)]}
        }

    async def async_generate(self, *, input_ids, image_data, sampling_params, return_logprob):
        known("SamplingParams", sampling_params)
        known("Engine.async_generate", ["input_ids", "image_data", "sampling_params", "return_logprob"])
        assert return_logprob
        images = _inputs(image_data)
        request = object()
        self._running.add(request)
        self.most_running = max(self.most_running, len(self._running))
        found, reason = [], "length"
        while len(found) < sampling_params["max_new_tokens"]:
            if request in self._abort_before:
                reason = "abort"
                break
            tick = self.loop.create_future()
            self.loop.call_soon(tick.set_result, None)
            await tick  # the others' turn
            logits = self._logits((*input_ids, *(entry[1] for entry in found)), images).clone()
            for banned, bias in (sampling_params.get("logit_bias") or {}).items():
                logits[..., int(banned)] += bias
            token, log_prob = self._draw(logits, len(input_ids) + len(found), sampling_params)
            found.append((log_prob, token, None))
            if token in self._eos and not sampling_params["ignore_eos"]:
                reason = "stop"
                break
        self._running.remove(request)
        meta = {"finish_reason": {"type": reason}} | ({"output_token_logprobs": found} if found else {})
        return {"output_ids": [entry[1] for entry in found], "meta_info": meta}

    def _abort(self, **arguments) -> None:
        known("TokenizerManager.abort_request", arguments)
        assert arguments == {"abort_all": True}
        self._abort_before |= self._running

    def _logits(self, ids: tuple[int, ...], images: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return logits, cached until the cache is flushed, as the engine caches prefixes."""
        key = (*ids, *(values.numpy().tobytes() for values in images.values()))
        if key not in self._cache:
            self._cache[key] = self._forward([*ids], images)[-1]
        return self._cache[key]

    def _forward(self, ids: list[int], images: dict[str, torch.Tensor]) -> torch.Tensor:
        assert not self._released
        return torch.from_numpy(np.concatenate(self._all("logits", ids, images), -1))

    def _draw(self, logits, number, params):
        """number: the position of the token in the sequence, as SGLang's sampler counts."""
        greedy = params["temperature"] == 0
        seed = params["sampling_seed"] if not greedy and self.settings["enable_deterministic_inference"] else None
        assert seed is None or -(2**63) <= seed < 2**63
        seeds = np.array([np.random.randint(2**60) if seed is None else seed]).astype(np.uint64)
        noise = random_numbers(seeds, np.array([number]))
        sampling = Sampling(
            1, params["temperature"], params.get("top_k", -1), params.get("top_p", 1.0), greedy=greedy,
            min_p=params.get("min_p", 0.0),
        )  # fmt: skip
        tokens, log_probs = choose(logits[None].clone(), torch.from_numpy(noise), sampling)
        return int(tokens), float(log_probs)
