"""vLLM's sleep and wake-up around training: rltrain's adapter over a double of vLLM on the stand-in device.

The double's weights and cache lie in the counted memory of the stand-in, are freed by `sleep`, and come back by tag.
New memory holds NaN, because on hardware it is uninitialised.
"""

import gc
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu
from transformers import AutoModelForCausalLM

from rltrain.common.errors import SyncError
from rltrain.data.images import EncodedPrompt
from rltrain.models.weights.names import Weight
from rltrain.workers import rollout_worker
from rltrain.workers.rollout.contract import Sampling, Source
from rltrain.workers.rollout.embedded.engine import HFRollout
from rltrain.workers.rollout.settings import EngineSettings
from rltrain.workers.rollout.vllm.engine import VLLMRollout
from rltrain.workers.rollout.vllm.weights import WeightLoader
from tests.npu.training import OFFLOAD, update, workers
from tests.workers.test_actor import scored

STANDIN = torch_npu.npu.standin
CACHE_BYTES = 4 << 20
NUM_STEPS = 3


class Model(torch.nn.Module):
    """A transformers model with vLLM's `load_weights`."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_config(settings.model.load_config())
        self.inner = model.to(settings.device.torch_device, settings.dtype).requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy the weights. Returns their names."""
        mine, loaded = dict(self.inner.named_parameters()), set()
        for name, values in weights:
            mine[name].copy_(values)
            loaded.add(f"inner.{name}")
        return loaded


class Double:
    """vLLM's `LLM`, as far as the adapter uses it for sleep and wake-up."""

    def __init__(self, settings: EngineSettings) -> None:
        self.model, self.calls = Model(settings), list[str]()
        self.llm_engine = SimpleNamespace()
        cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=settings.device.torch_device)
        self.memory = {"weights": list(self.model.parameters()), "kv_cache": [cache]}
        self.sizes = {id(each): each.untyped_storage().nbytes() for all_of in self.memory.values() for each in all_of}
        self.num_bytes = sum(self.sizes.values())

    def sleep(self, level: int) -> None:
        """Drop the memory of everything."""
        self.calls.append(f"sleep {level}")
        for each in (*self.memory["weights"], *self.memory["kv_cache"]):
            each.untyped_storage().resize_(0)

    def wake_up(self, tags: list[str]) -> None:
        """Allocate the memory of the tags."""
        self.calls.append(f"wake {' '.join(tags)}")
        for each in (each for tag in tags for each in self.memory[tag]):
            assert not each.untyped_storage().nbytes(), "vLLM would map memory over memory"
            each.untyped_storage().resize_(self.sizes[id(each)])
            each.fill_(float("nan") if each.is_floating_point() else 255)

    def reset_prefix_cache(self) -> bool:
        """Touch the cache."""
        self.calls.append("reset")
        self.memory["kv_cache"][0].zero_()
        return True


class Sleeper(VLLMRollout):
    """rltrain's adapter with the double, which generates with the embedded engine from the double's weights."""

    def __init__(self, settings: EngineSettings) -> None:
        self.llm, self._sleeps, self._slot = Double(settings), True, None
        self.holds_base = self._asleep = False
        runner = SimpleNamespace(get_model=lambda: self.llm.model)
        self.loader = WeightLoader(SimpleNamespace(model_runner=runner), settings.model.load_config(), on_cpu=False)
        self._serving = HFRollout(settings)
        self.sleep()

    def wake_cache(self) -> None:
        super().wake_cache()
        model = self.llm.model.inner
        self._serving.load_weights(
            Weight(name, values) for name, values in (*model.named_parameters(), *model.named_buffers())
        )
        self._serving.wake_cache()

    def generate(self, source: Source, sampling: Sampling) -> None:
        self._serving.generate(source, sampling)

    def log_probs(self, text: EncodedPrompt) -> torch.Tensor:
        return self._serving.log_probs(text)

    def sleep(self) -> bool:
        self._serving.sleep()
        return super().sleep()


class Hasty(Sleeper):
    """Control: the cache wakes up with the weights."""

    def wake_weights(self) -> None:
        super().wake_weights()
        self.llm.wake_up(tags=["kv_cache"])

    def wake_cache(self) -> None:
        wake, self.llm.wake_up = self.llm.wake_up, lambda tags: None
        super().wake_cache()
        self.llm.wake_up = wake


class Forgetful(Sleeper):
    """Control: new weights are received, and not loaded."""

    def load_weights(self, weights: Iterable[Weight]) -> None:
        for _ in weights:
            pass


def _worker(make: Any, kind: type[Sleeper]) -> Any:
    rollout_worker.make_engine = kind
    return make("npu", **OFFLOAD)


def _peak_of_sync(worker: Any) -> int:
    """Return the maximum of the bytes on the device during a weight sync."""
    torch_npu.npu.reset_peak_memory_stats()
    worker.offloader.enter_phase("sync", whole=True)
    worker.rollout.weight_sync.run(worker.num_updates, lambda: worker.offloader.enter_phase("gen"))
    return int(torch_npu.npu.max_memory_allocated())


def sleeps_and_wakes(folder: str) -> None:
    """Three steps: the order of the calls, and memory. The canary passes. Two wrong engines are caught."""
    make = workers(folder)
    worker = _worker(make, Sleeper)
    double, offloader, calls = worker.rollout.engine.llm, worker.offloader, list[str]()
    loaded, entered = Model.load_weights, offloader.enter_phase
    double.calls = calls

    def load_weights(model: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        calls.append("load")
        return loaded(model, weights)

    def enter(phase: str, **how: Any) -> None:
        entered(phase, **how)
        calls.append(f"enter {phase}")

    Model.load_weights, offloader.enter_phase = load_weights, enter
    peaks = []
    for step in range(NUM_STEPS):
        calls.clear()
        peaks.append(_peak_of_sync(worker))
        assert calls == ["enter sync", "wake weights", "load", "enter gen", "wake kv_cache", "reset"]
        awake = STANDIN.allocated(0)
        batch = scored(worker)
        assert calls[6:] == ["enter gen", "sleep 2", "enter old_log_prob", "enter ref"], calls
        assert not any(each.untyped_storage().nbytes() for tag in double.memory.values() for each in tag)
        worker.update(batch, update(batch, 2))
        offloader.enter_phase("gen")
        assert awake - STANDIN.allocated(0) >= double.num_bytes, "the engine's memory is free"
        assert worker.rollout.weight_sync.version is None
        assert worker.num_updates == step + 1
    Model.load_weights = loaded
    del worker, double, offloader, batch
    gc.collect()

    hasty = _worker(make, Hasty)
    hasty.offloader.enter_phase("gen")
    STANDIN.set_cap(0, max(peaks))
    with pytest.raises(torch_npu.npu.OutOfMemoryError):
        _peak_of_sync(hasty)
    STANDIN.set_cap(0, 4 << 30)
    del hasty
    gc.collect()

    forgetful = _worker(make, Forgetful)
    with pytest.raises(SyncError, match=r"differs from the trainer: mean .log-prob gap. nan"):
        _peak_of_sync(forgetful)
