"""Weight loading into vLLM's model: written in place, or by vLLM's reload if the model computes with derived weights.

When loading a model, vLLM packs weights for its CPU kernels, rearranges experts for some GPUs, and precomputes products
for latent attention (MLA). Overwriting the original weights would not update these derived weights. vLLM's reload
derives them again, layer by layer, in the memory that graphs use; meanwhile one layer exists twice. Without derived
weights, writing in place is faster and needs no memory.

vLLM drops weights with unknown names, silently in some families. So the names that its model reports as loaded are
compared with its parameters. Not run on CUDA and NPUs. vllm-ascend transposes experts when loading; its worker has a
reload since 0.24, which cannot follow a sleep before 0.26, because `wake_up` transposes them back and vLLM's reload
then copies transposed weights onto them. Its latent attention is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from rltrain.common.errors import ConfigError, SyncError
from rltrain.models.routing import num_experts
from rltrain.models.weights.names import Weight
from rltrain.models.weights.partial import Record

# First releases of vllm-ascend that reload experts, and that do so after vLLM's sleep mode. Known from their code.
_RELOADS, _RELOADS_AFTER_SLEEP = (0, 24), (0, 26)


def derived_weights(config: Any) -> str:
    """Return the part of a model whose weights vLLM derives when loading: "experts", "latent attention", or ""."""
    settings = config.get_text_config().to_dict()
    if settings.get("kv_lora_rank"):
        return "latent attention"
    return "experts" if num_experts(config) else ""


def refuse_on_npu(config: Any, sleeps: bool, release: str | None) -> None:
    """Raise ConfigError for a model whose derived weights vllm-ascend does not replace at a sync.

    sleeps: rollout.free_cache_engine. release: of vllm-ascend, or None if it is not installed here.
    """
    weights = derived_weights(config)
    if weights == "latent attention":
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm on an NPU cannot load new weights of {type(config).__name__}: "
            f"vllm-ascend converts its {weights} only once, at startup. Use rollout.name=hf, or another model."
        )
    needed = _RELOADS_AFTER_SLEEP if sleeps else _RELOADS
    found = tuple(int(number) for number in re.findall(r"\d+", release or "")[:2])
    if weights and release and found < needed:
        now = found >= _RELOADS
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm with vllm-ascend {release} cannot load new {weights} of "
            f"{type(config).__name__}{' after its sleep mode' if now else ''}. Install vllm-ascend "
            f"{'.'.join(map(str, _RELOADS_AFTER_SLEEP))} or later with its vllm (docs/npu.md), "
            f"{'set actor_rollout_ref.rollout.free_cache_engine=False' if now else 'use rollout.name=hf'}, or use a "
            "dense model."
        )


class WeightLoader:
    """Loader of weights with checkpoint names into the model of a vLLM worker.

    num_ranks: tensor-parallel ranks of vLLM. record: the parts of the weights that this rank copies.
    """

    def __init__(self, worker: Any, config: Any, num_ranks: int = 1, *, on_cpu: bool) -> None:
        self.record = Record(num_ranks) if num_ranks > 1 else None
        self.reload = on_cpu or bool(derived_weights(config))
        self._worker = worker
        self._on_cpu = on_cpu
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        if on_cpu and derived_weights(config) == "latent attention":
            self._rotate_all_heads()

    def load(self, weights: Iterator[Weight]) -> None:
        """Load the weights. Raises SyncError that names parameters of the engine that were not loaded."""
        model = self._worker.model_runner.get_model()
        missing: set[str] = set()
        load = model.load_weights

        def checked(tensors: Iterable[tuple[str, Tensor]]) -> set[str] | None:
            # Names are read here, because a reload may leave other names. Tied weights are listed once. vLLM's layers
            # with adapters hold the weight one level deeper, and are named without it.
            names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
            loaded = load(tensors)
            missing.update(
                names - (names if loaded is None else loaded)
            )  # None: only the canary detects missing weights
            return loaded

        model.load_weights = checked
        try:
            if self.reload:
                if self._on_cpu:
                    _forget_packed_experts(model)
                self._worker.reload_weights(weights_iterator=self._named(weights))
            else:
                model.load_weights(self._named(weights))
        finally:
            del model.load_weights  # restores the method of the class
        if self.record:
            self.record.complete = True
        if missing:
            raise SyncError(
                f"vLLM's {type(model).__name__} did not get {len(missing)} of its weights from the trainer: "
                f"{', '.join(sorted(missing)[:4])}{', …' if len(missing) > 4 else ''}. This version of vLLM uses other "
                "names for them than transformers. Try another one, or actor_rollout_ref.rollout.name=hf."
            )

    def _named(self, weights: Iterator[Weight]) -> Iterator[tuple[str, Tensor]]:
        for name, values, in_checkpoint in weights:
            if self.record and in_checkpoint and not self.record.complete:
                values = self.record.observed(name, values)
            if in_checkpoint:
                yield name, values
            if self.reload and self._tied and name.endswith("embed_tokens.weight"):
                # The CPU backend keeps a packed copy of the head, tied or not.
                yield "lm_head.weight", values

    def _rotate_all_heads(self) -> None:
        """Use vLLM's plain rotary code, which rotates all heads of latent attention. Its CPU kernel would rotate only
        one, because their rotary dimension differs."""
        for module in self._worker.model_runner.get_model().modules():
            if hasattr(module, "rotary_dim") and hasattr(module, "_forward_method"):
                module._forward_method = module.forward_native


def _forget_packed_experts(model: Any) -> None:
    """Drop vLLM's CPU expert kernel: it packs weights at creation, and would later get unpacked weights."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
