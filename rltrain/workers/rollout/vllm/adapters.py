"""Adapters that vLLM applies itself (``actor_rollout_ref.model.lora.merge=False``): one slot, filled by every sync.

vLLM loads adapters from folders when a request names them. Here the slot is filled in advance from memory, by the
functions that vLLM uses, and every request names that adapter. Its name can stay the same, because the prefix cache is
dropped at every sync anyway (`VLLMRollout.wake_cache`).

vLLM's slots have fixed ranks, and it silently ignores adapters of unknown layers; that is an error here. Run with vllm
0.32 on the CPU. Not run on CUDA; vllm-ascend has different kernels and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rltrain.common.errors import ConfigError, SyncError
from rltrain.models.weights.names import ADAPTER, Weight

# Values of `MaxLoRARanks` in vllm.config.lora.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_KEY = "actor_rollout_ref.model.lora.merge=False"
_MERGE = "Leave it out: adapters are then merged into the weights."
_NUMBER = 1


def slot_rank(adapted: Mapping[str, int]) -> int:
    """Return the slot's rank for adapters of these ranks, by layer. Raises ConfigError if they are too large."""
    rank = max(adapted.values())
    if rank > _RANKS[-1]:
        raise ConfigError(f"{_KEY}: vLLM holds adapters of rank {_RANKS[-1]} at most, but these have {rank}. {_MERGE}")
    return next(each for each in _RANKS if each >= rank)


def adapter_arguments(adapted: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM for an adapter slot. adapted: ranks of the adapters by layer name."""
    return {
        "enable_lora": True,
        "max_lora_rank": slot_rank(adapted),
        "max_loras": 1,
        # Slots for other layers would take memory, and a slot for the head would change how logits are computed.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted}),
    }


def refuse_adapters(adapted: Mapping[str, int], beyond: Sequence[str], config: Any, device: str, dtype: Any) -> None:
    """Raise ConfigError for adapters that vLLM cannot hold or would compute differently.

    adapted: ranks by layer. beyond: layers outside the language model. config: the model's config. device: device kind.
    dtype: dtype of the engine.
    """
    slot_rank(adapted)
    why = ""
    if device == "npu":
        why = "vllm-ascend is based on vLLM 0.23, which cannot update weights under adapters"
    elif device == "cuda" and dtype == torch.float32:
        why = "vLLM's adapter kernels on GPUs need half precision (rollout.dtype=bfloat16)"
    elif config.get_text_config().to_dict().get("kv_lora_rank"):
        why = "vLLM precomputes parts of latent attention, so adapters would not affect them"
    elif beyond:
        why = f"{beyond[0]} is not part of the language model, and vLLM supports adapters only there"
    if why:
        raise ConfigError(f"{_KEY} with rollout.name=vllm: {why}. {_MERGE}")


def set_aside(weights: Iterable[Weight], adapters: list[Weight]) -> Iterator[Weight]:
    """Yield the weights that are not adapters, and append the adapters to ``adapters``."""
    for weight in weights:
        if ADAPTER in weight.name:
            adapters.append(weight)
        else:
            yield weight


class AdapterSlot:
    """Adapter slot of a vLLM worker. request: LoRA request of every generation request."""

    def __init__(self, runner: Any) -> None:
        from vllm.lora.layers import BaseLayerWithLoRA
        from vllm.lora.request import LoRARequest

        if not hasattr(BaseLayerWithLoRA, "load_weights"):
            raise ConfigError(f"{_KEY}: this vLLM cannot update weights under adapters; vLLM 0.32 can. {_MERGE}")
        # The path does not exist, so that a missing adapter is an error and is not searched for on the hub.
        self.request = LoRARequest("policy", _NUMBER, "/in memory")
        self._runner = runner
        self._manager = runner.lora_manager._adapter_manager

    def load(self, adapters: Iterable[Weight]) -> None:
        """Replace the adapters in the slot (LAYER.lora_A.weight, LAYER.lora_B.weight).

        Raises SyncError that names adapters for which vLLM has no layer.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        tensors: dict[str, torch.Tensor] = {weight.name: weight.values for weight in adapters}
        rank = max(values.shape[0] for name, values in tensors.items() if name.endswith("A.weight"))
        mapper = getattr(self._runner.get_model(), "hf_to_vllm_mapper", None)
        # B is already multiplied by its scale, so lora_alpha / r = 1.
        lora = LoRAModel.from_lora_tensors(
            _NUMBER,
            tensors,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=self._runner.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        manager = self._manager
        manager.remove_adapter(_NUMBER)
        manager.add_adapter(lora)
        # Layers that vLLM fuses are now merged under the name of the fused layer.
        if lost := sorted(lora.loras.keys() - manager.modules.keys()):
            raise SyncError(
                f"{_KEY}: vLLM's {type(self._runner.get_model()).__name__} does not support the adapters of "
                f"{', '.join(lost[:4])}{', …' if len(lost) > 4 else ''}. {_MERGE}"
            )
        manager.activate_adapter(_NUMBER)
