"""Keys under actor_rollout_ref.rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_ACTOR = "${actor_rollout_ref.actor."


@dataclass
class ValKwargs:
    """How validation answers are sampled."""

    do_sample: bool = False
    """Sample; False: greedy, whatever the temperature."""
    n: int = 1
    """Answers per validation prompt."""
    temperature: float = 0.0
    """Sampling temperature; 0: greedy."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that hold this probability."""


@dataclass
class MultiTurnConfig:
    """Conversations with tools or an environment."""

    enable: bool = False
    """Let an answer take several turns."""


@dataclass
class RolloutConfig:
    """Generation, and the pass that recomputes the log-probs of what was generated."""

    name: str = "hf"
    """Engine: hf (embedded decode loop), vllm (and vllm-ascend) or sglang."""
    mode: str = "sync"
    """No effect: every step generates with the current weights."""
    n: int = 1
    """Answers per prompt."""
    temperature: float = 1.0
    """Sampling temperature; log-probs in training are those of this temperature."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1, 0, or more than the vocabulary: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that hold this probability."""
    do_sample: bool = True
    """Sample; False: greedy."""
    ignore_eos: bool = False
    """Go on to max_response_length past the end token."""
    seed: int | None = None
    """Decides all sampling; null: data.seed."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    """Validation sampling."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    """Several turns."""
    dtype: str = "auto"
    """dtype of the engine's weights: auto is bfloat16 on NPU and GPU, float32 on CPU."""
    tensor_model_parallel_size: int = 1
    """Devices per engine replica (1 with name=hf and name=sglang)."""
    data_parallel_size: int = 1
    """No effect: the number of replicas follows from the devices."""
    gpu_memory_utilization: float = 0.5
    """Share of device memory for the engine (name=hf: of what is free before generation, for keys and values)."""
    max_num_seqs: int = 256
    """Most answers an engine decodes at once."""
    max_num_batched_tokens: int = 8192
    """Most tokens an engine computes at once (name=hf: tokens of prompts)."""
    max_model_len: int | None = None
    """Longest prompt with its answer; null: prompt plus response limit."""
    enforce_eager: bool = True
    """Run the engine without graphs (no effect with name=hf)."""
    enable_chunked_prefill: bool = True
    """Prefill prompts longer than max_num_batched_tokens in pieces."""
    enable_prefix_caching: bool = True
    """Reuse the cache of common prefixes (no effect with name=hf: the answers to a prompt always share its prefill)."""
    free_cache_engine: bool = True
    """Free the engine's weights and cache outside generation (no effect with name=hf: it has none of its own then)."""
    load_format: str = "auto"
    """No effect: the engine gets its weights from the trainer."""
    layered_summon: bool = False
    """No effect: weights are always gathered bucket by bucket (update_weights_bucket_megabytes)."""
    multi_stage_wake_up: bool = False
    """No effect: the engine is always woken in stages."""
    calculate_log_probs: bool = True
    """No effect: the engine always returns log-probs."""
    disable_log_stats: bool = True
    """Do not collect the engine's statistics (no effect with name=hf) (no effect with name=sglang)."""
    update_weights_bucket_megabytes: int = 512
    """Weights are gathered and handed to the engine in pieces that together take no more than this."""
    tail: str = "off"
    """What to do about the few longest answers: off (wait for them), exact (speculative decoding; vllm), oversample (start more prompts,
    and throw away what has not ended when there are enough), carry_over (the same, but go on with it in the next step)."""
    oversample_ratio: float = 1.25
    """oversample, carry_over: prompts started in a step, as a multiple of data.train_batch_size."""
    tail_max_age: int = 4
    """oversample, carry_over: a step waits for a prompt that this many steps have ended without."""
    tail_draft_tokens: int = 4
    """exact: tokens guessed at once, from where the last ones stood before in prompt or answer."""
    log_prob_gap_limit: float | None = None
    """Alarm where engine and trainer differ by more per token; null: 1e-3 if both compute in float32, else 0.1."""
    on_log_prob_gap: str = "warn"
    """On such an alarm over the answers of a step: warn, or stop before the update (with bypass_mode: after it, and nothing is saved).
    After a weight sync it always stops."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Free-form arguments of the engine, under its name (no effect with name=hf)."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """old_log_prob pass: samples per forward on one device, when log_prob_use_dynamic_bsz=False."""
    log_prob_micro_batch_size: int | None = None
    """Old: the same over all data-parallel ranks."""
    log_prob_use_dynamic_bsz: bool = _ACTOR + "use_dynamic_bsz}"  # type: ignore[assignment]
    """old_log_prob pass: cut by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: int = _ACTOR + "ppo_max_token_len_per_gpu}"  # type: ignore[assignment]
    """old_log_prob pass: tokens per forward on one device."""

    @property
    def stops_early(self) -> bool:
        """Whether a step ends before all answers that it has started."""
        return self.tail in ("oversample", "carry_over")

    @property
    def prompt_lookup(self) -> dict[str, Any] | None:
        """vLLM's ``speculative_config`` for ``tail=exact``: drafts looked up in the text so far (Saxena 2023)."""
        if self.tail != "exact":
            return None
        return {
            "method": "ngram",
            "num_speculative_tokens": self.tail_draft_tokens,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
