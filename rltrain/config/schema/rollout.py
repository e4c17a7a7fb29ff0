"""Keys under actor_rollout_ref.rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rltrain.common.plugin import is_plugin
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.fields import key, section
from rltrain.config.schema.model import ACTOR, Dtype

_STOPS_EARLY = "tail=oversample|carry_over"
_NO_SAMPLING = "validation is greedy with val_kwargs.do_sample=False; leave that out to sample"
_SAMPLES = {
    "val_kwargs.do_sample!=False": _NO_SAMPLING,
    "val_kwargs.temperature>0": "validation is greedy; set val_kwargs.temperature=1.0 to sample",
}
TOOLS = {
    "function_tool_path or tool_config_path or environment or enable or agent.default_agent_loop": (
        "there are no tools and no environment: see multi_turn.function_tool_path"
    )
}
_OLD_LOG_PROB_PASS = {
    "algorithm.rollout_correction.bypass_mode=False": "with bypass_mode there is no old_log_prob pass"
}


@dataclass
class ValKwargs:
    """Sampling of validation responses."""

    do_sample: bool | None = key(
        None, only_with={"do_sample!=True or temperature>0": "val_kwargs.temperature=0 is greedy"}
    )
    """False: greedy, whatever the temperature. Otherwise only the temperature decides."""
    n: int = key(
        1, least=1, only_with={f"n=1 or {when}": f"one response is enough: {why}" for when, why in _SAMPLES.items()}
    )
    """Responses per validation prompt; one if they are greedy."""
    temperature: float = key(0.0, least=0, only_with={"temperature=0.0 or do_sample!=False": _NO_SAMPLING})
    """Sampling temperature; 0: greedy."""
    top_k: int = key(-1, only_with=_SAMPLES)
    """Sample among the k most likely tokens; -1: all."""
    top_p: float = key(1.0, over=0, most=1, only_with=_SAMPLES)
    """Sample among the most likely tokens that together have this probability."""
    min_p: float = key(0.0, least=0, most=1, only_with=_SAMPLES)
    """Sample among tokens at least this many times as likely as the most likely one; 0: all."""
    repetition_penalty: float = key(1.0, over=0)
    """As rollout.repetition_penalty, which does not apply to validation."""
    max_tokens: int | None = key(None, least=1)
    """Maximum tokens of a validation response; null: data.max_response_length."""
    stop: list[str] | None = None
    """Texts that end a validation response; null: rollout.stop."""

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.do_sample is False or self.temperature == 0


@dataclass
class MultiTurnConfig:
    """Responses of several turns, between which tools reply to the policy (docs/agents.md)."""

    enable: bool | None = None
    """Allow several turns; null: if there are tools."""
    function_tool_path: str | None = None
    """FILE.py (or package.module) whose functions the policy may call; each has types and a docstring."""
    tool_config_path: str | None = None
    """YAML file of tools that are classes, in verl's format: tools: with class_name, config and tool_schema of each."""
    environment: str | None = None
    """FILE.py:NAME of a class with one instance per response; its methods are tools, or it has a method step."""
    environment_kwargs: dict[str, Any] = key({}, only_with={"environment": "multi_turn.environment is not set"})
    """Arguments of the instances."""
    format: str = key("auto", only_with=TOOLS)
    """Format of a tool call: a format by verl's name, or a user's function, FILE.py:NAME; auto: the format of the
    model's chat template."""
    max_assistant_turns: int | None = key(None, least=1, only_with=TOOLS)
    """Maximum turns of the policy; null: limited only by data.max_response_length."""
    max_parallel_calls: int = key(1, least=1, only_with=TOOLS)
    """Calls of one turn that are run; further calls get the reply "not run"."""
    max_tool_response_length: int = key(256, least=1, only_with=TOOLS)
    """Characters of a result that the policy reads."""
    tool_response_truncate_side: str = key("middle", among=("left", "middle", "right"), only_with=TOOLS)
    """Treatment of a result longer than max_tool_response_length: keep its end (left), its beginning (right), or both
    without the middle (middle).
    """
    images: bool | None = key(None, only_with=TOOLS)
    """Allow images in results of tools and in messages of environments and agents; null: if training prompts have
    images."""
    tool_timeout_s: float = key(30.0, over=0, only_with=TOOLS)
    """Timeout of a call in seconds; the policy then reads that it timed out."""
    tool_memory_mb: int = key(4096, least=0, only_with=TOOLS)
    """MiB of address space of a process that runs tools, environments and agents; 0: unlimited."""
    trajectory_timeout_s: float | None = key(600.0, over=0, only_with=TOOLS)
    """Time limit in seconds of a response without the time that it waits for the policy. A response that exceeds it is
    excluded from the loss. null: no limit."""
    num_tool_processes: int = key(2, least=1, only_with=TOOLS)
    """Processes per engine that run tools, environments and agents, each with many concurrent calls."""
    allow_code_execution: bool = key(False, only_with=TOOLS)
    """Allow tools to run programs that the policy wrote (docs/security.md)."""
    allow_unsandboxed_code: bool = key(False, only_with=TOOLS)
    """Run such programs even on a kernel without user namespaces and Landlock, where only checks inside Python limit
    them.
    """

    @property
    def place(self) -> str:
        """Location of the tools; "" if the run has none."""
        return ", ".join(self.places.values())

    @property
    def places(self) -> dict[str, str]:
        """Locations of the tools, by the full name of their key."""
        names = () if self.enable is False else ("function_tool_path", "tool_config_path", "environment")
        given = {f"actor_rollout_ref.rollout.multi_turn.{name}": getattr(self, name) for name in names}
        return {name: place for name, place in given.items() if place}


@dataclass
class AgentConfig:
    """The agents that run conversations."""

    default_agent_loop: str | None = None
    """Agent of rows without a column agent_name: single_turn_agent, tool_agent, env_agent, or FILE.py:NAME of a user's
    agent; null: tool_agent if there are tools or an environment, else single_turn_agent."""
    agent_loops: list[str] = key([])
    """Further agents, FILE.py:NAME each, that the column agent_name of a row may select. Other code is not loaded."""

    @property
    def own(self) -> tuple[str, ...]:
        """The user's agents: the only code that a row can select."""
        default = self.default_agent_loop or ""
        return (*([default] if is_plugin(default) else []), *self.agent_loops)


@dataclass
class RolloutConfig:
    """Generation, and the pass that recomputes the log-probs of the responses."""

    # hf needs no additional package, so that a first run works anywhere.
    name: str = key(
        "${engine_here:${trainer.device},${actor_rollout_ref.rollout.tensor_model_parallel_size}}", among=tuple(ENGINES)
    )
    """Engine: hf (embedded decode loop), vllm (and vllm-ascend) or sglang. Default: vllm if it is installed and
    trainer.device is an accelerator, and with tensor_model_parallel_size over 1; else hf."""
    n: int = key(1, least=1)
    """Responses per prompt."""
    temperature: float = key(1.0, over=0)
    """Sampling temperature. Log-probs in training are computed with it."""
    top_k: int = -1
    """Sample among the k most likely tokens; -1, 0, or more than the vocabulary: all."""
    top_p: float = key(1.0, over=0, most=1)
    """Sample among the most likely tokens that together have this probability."""
    min_p: float = key(0.0, least=0, most=1)
    """Sample among tokens at least this many times as likely as the most likely one; 0: all. As with top_k and top_p,
    log-probs in training are those over all tokens."""
    repetition_penalty: float = key(1.0, over=0)
    """Divide positive logits of tokens that occur in the prompt or in the response so far, and multiply negative ones;
    1: none. Log-probs in training are computed without it."""
    stop: list[str] = key([])
    """Texts that end a response or turn, with the token that completes one; the text stays in the response."""
    do_sample: bool = True
    """Sample; False: greedy."""
    ignore_eos: bool = False
    """Generate up to max_response_length, past the end token."""
    # A separate key, so that new responses can be sampled for the same prompts in the same order.
    seed: int | None = None
    """Seed of all sampling; null: data.seed."""
    val_kwargs: ValKwargs = section(ValKwargs)
    """Validation sampling."""
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    """Tools between turns."""
    agent: AgentConfig = section(AgentConfig)
    """The agents that run conversations."""
    dtype: Dtype = "auto"
    """dtype of the engine's weights: auto is bfloat16 on NPU and GPU, float32 on CPU."""
    tensor_model_parallel_size: int = key(1, least=1)
    """Devices per engine replica. More than 1 needs name=vllm or name=sglang."""
    expert_parallel_size: int = key(1, least=1)
    """1: every device of an engine has a part of each expert. The value of tensor_model_parallel_size: each device has
    some experts whole (vllm, on accelerators)."""
    gpu_memory_utilization: float = key(0.5, over=0, most=1)
    """Share of device memory for the engine (name=hf: share of the memory free before generation, for keys and
    values)."""
    max_num_seqs: int = key(256, least=1)
    """Maximum number of responses that an engine decodes at once."""
    max_num_batched_tokens: int = key(8192, least=1)
    """Maximum number of tokens that an engine computes at once (name=hf: tokens of prompts)."""
    max_model_len: int | None = None
    """Longest prompt with its response; null: the sum of the limits of both."""
    limit_images: int | None = key(None, least=1)
    """Maximum images of a prompt; null: no limit. A row with more ends the run before it begins."""
    enforce_eager: bool | None = None
    """Run the engine without graphs; null: with graphs on accelerators, without on a CPU."""
    enable_chunked_prefill: bool = True
    """Prefill prompts longer than max_num_batched_tokens in pieces."""
    enable_prefix_caching: bool = True
    """Reuse the cache of common prefixes. With name=hf the responses to a prompt always share its prefill."""
    free_cache_engine: bool = True
    """Free the engine's weights and cache outside generation. name=hf always does so."""
    update_weights_bucket_megabytes: int = key(512, least=1)
    """Maximum size of the buckets in which weights are gathered and passed to the engine."""
    tail: Literal["off", "exact", "oversample", "carry_over"] = "off"
    """Treatment of the few longest responses: off (wait for them), exact (speculative decoding; vllm), oversample
    (start more prompts, stop when enough are complete, discard the rest), carry_over (the same, but finish the rest in
    the next step)."""
    oversample_ratio: float = key(1.25, least=1, most=2, only_with=_STOPS_EARLY)
    """oversample, carry_over: prompts started per step, as a multiple of data.train_batch_size."""
    tail_max_age: int = key(
        4, least=1, only_with={_STOPS_EARLY: "", "oversample_ratio>1": "with oversample_ratio=1 no prompt is left over"}
    )
    """oversample, carry_over: a step waits for a prompt that is still incomplete after this number of steps."""
    tail_draft_tokens: int = key(4, least=1, only_with="tail=exact")
    """exact: number of draft tokens, copied from where the last tokens occurred earlier in the prompt or response."""
    log_prob_gap_limit: float | None = key(None, least=0)
    """Limit of the difference of log-probs between engine and trainer per token, above which there is an alarm; null:
    1e-3 if both compute in float32, else 0.1."""
    on_log_prob_gap: Literal["warn", "stop"] = "warn"
    """Reaction to the alarm of log_prob_gap_limit in a step: warn, or stop before the update (with bypass_mode: after
    the update, without saving). After a weight sync the alarm always stops the run.
    """
    engine_kwargs: dict[str, Any] = key({})
    """Free-form arguments of the engine, under its name: engine_kwargs.vllm.block_size=32."""
    log_prob_micro_batch_size_per_gpu: int | None = key(None, least=1, only_with=_OLD_LOG_PROB_PASS)
    """old_log_prob pass: samples per forward on one device; null: as for the actor."""
    log_prob_use_dynamic_bsz: bool | None = key(ACTOR + "use_dynamic_bsz}", only_with=_OLD_LOG_PROB_PASS)
    """old_log_prob pass: as actor.use_dynamic_bsz."""
    log_prob_max_token_len_per_gpu: int | None = key(None, least=1, only_with=_OLD_LOG_PROB_PASS)
    """old_log_prob pass: tokens per forward on one device; null: as for the actor."""

    @property
    def stops_early(self) -> bool:
        """True if a step ends before all its responses are complete."""
        return self.tail in ("oversample", "carry_over")

    @property
    def prompt_lookup(self) -> dict[str, Any] | None:
        """vLLM's ``speculative_config`` for ``tail=exact``: drafts from the text so far (Saxena 2023)."""
        if self.tail != "exact":
            return None
        return {
            "method": "ngram",
            "num_speculative_tokens": self.tail_draft_tokens,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
