"""Metrics of a step under verl's names, from per-sample numbers and from sums that the workers return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.controller.samples import Samples

Metrics = dict[str, float]


def sample_metrics(samples: Samples, max_prompt_length: int) -> Metrics:
    """Scores, rewards, advantages, returns and lengths. ``clip_ratio`` of answers is the share cut off by the limit."""
    lengths = samples["response_length"]
    metrics: Metrics = {}
    for name, values in (("critic/score", samples["score"]), ("critic/rewards", samples["reward"])):
        metrics |= _spread(name, values)
    # Every token of an answer carries its advantage, so the mean is weighted by length.
    for name in ("critic/advantages", "critic/returns"):
        metrics |= _spread(name, samples["advantage"], weights=lengths)
    metrics |= _spread("response_length", lengths) | {"response_length/clip_ratio": float(samples["truncated"].mean())}
    prompts = samples["prompt_length"]
    metrics |= _spread("prompt_length", prompts) | {
        "prompt_length/clip_ratio": float((prompts >= max_prompt_length).mean())
    }
    return metrics


def _spread(name: str, values: NDArray[Any], weights: NDArray[Any] | None = None) -> Metrics:
    if weights is not None and not weights.sum():
        weights = None
    return {
        f"{name}/mean": float(np.average(values, weights=weights)),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def reward_metrics(samples: Samples) -> Metrics:
    """How often scoring failed (not: how often answers were wrong)."""
    failed, timeout = samples["reward_failed"], samples["reward_timeout"]
    return {"reward/error_rate": float(failed.mean()), "reward/timeout_rate": float(timeout.mean())}


def update_metrics(results: Sequence[dict[str, Any]], tokens: NDArray[np.int64]) -> Metrics:
    """Sum over ranks, divide token sums by the tokens of each mini-batch [optimizer steps], then mean over optimizer steps."""
    metrics: Metrics = {}
    for key in results[0]:
        kind, _, name = key.partition("/")
        if kind == "share":
            metrics[f"actor/{name}"] = float(np.mean(sum(result[key] for result in results)))
        elif kind == "token":
            metrics[f"actor/{name}"] = float(np.mean(sum(result[key] for result in results) / np.maximum(tokens, 1)))
    metrics["actor/grad_norm"] = float(np.mean(results[0]["grad_norm"]))
    metrics["actor/steps_skipped"] = float(np.sum(results[0]["skipped"]))
    return metrics | peak_memory(results)


def peak_memory(results: Sequence[dict[str, Any]]) -> Metrics:
    """Largest over ranks of the memory peaks."""
    names = [name for name in results[0] if name.startswith("perf/")]
    return {name: max(float(result[name]) for result in results) for name in names}


def engine_gap_metrics(results: Sequence[dict[str, Any]], tokens: int) -> Metrics:
    """How far the engine's log-probs and probabilities are from the trainer's, over all sampled tokens."""
    total = max(tokens, 1)
    having = [result for result in results if "gap_sum" in result]
    return {
        "rollout/log_prob_gap/mean": sum(result["gap_sum"] for result in having) / total,
        "rollout/log_prob_gap/max": max((result["gap_max"] for result in having), default=0.0),
        "training/rollout_probs_diff_mean": sum(result["prob_gap_sum"] for result in having) / total,
        "training/rollout_probs_diff_max": max((result["prob_gap_max"] for result in having), default=0.0),
    }


def balance_metrics(before: Sequence[int], after: Sequence[int]) -> Metrics:
    """Tokens per data-parallel rank if samples stayed where they were generated, and as they are spread."""
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": float(np.mean(after)),
    }


def throughput_metrics(samples: Samples, timing: Metrics, num_devices: int) -> Metrics:
    """Tokens per second and device. perf/throughput counts prompt and response tokens over the whole step."""
    response = int(samples["response_length"].sum())
    total = response + int(samples["prompt_length"].sum())
    step = timing["timing_s/step"]
    metrics = {
        "perf/total_num_tokens": float(total),
        "perf/time_per_step": step,
        "perf/throughput": total / (step * num_devices),
        "perf/gen_throughput": response / (timing["timing_s/generate_sequences"] * num_devices),
    }
    if timing.get("timing_s/old_log_prob"):
        metrics["perf/old_log_prob_throughput"] = total / (timing["timing_s/old_log_prob"] * num_devices)
    for name, tokens in (("gen", response), ("ref", total), ("adv", total), ("update_actor", total)):
        if f"timing_s/{name}" in timing:
            metrics[f"timing_per_token_ms/{name}"] = 1000 * timing[f"timing_s/{name}"] / max(tokens, 1)
    return metrics


def flops_metrics(
    samples: Samples, timing: Metrics, model: dict[str, Any], num_devices: int, epochs: int
) -> Metrics:
    """``perf/mfu/actor``: model FLOPs of the update without recompute / (seconds x devices x bf16 peak); nothing where the peak is unknown.

    6 FLOPs a weight and token (forward and backward, input embedding not counted), and causal attention: 6 x layers x heads x
    head size x length^2 a sequence (Narayanan et al. 2021, appendix, halved for causality).
    """
    if not model.get("peak_flops"):
        return {}
    lengths = (samples["prompt_length"] + samples["response_length"]).astype(np.float64)
    flops = 6 * model["matmul_parameters"] * lengths.sum() + 6 * model["attention_width"] * np.square(lengths).sum()
    return {"perf/mfu/actor": float(epochs * flops / (timing["timing_s/update_actor"] * num_devices * model["peak_flops"]))}


def worker_timing(results: Sequence[dict[str, Any]]) -> Metrics:
    """``timing_s/<name>``: mean over ranks of what the workers measured themselves, and ``_max``: the slowest rank."""
    timing: Metrics = {}
    for key in results[0]:
        kind, _, name = key.partition("/")
        if kind == "timing":
            seconds = [float(result[key]) for result in results]
            timing[f"timing_s/{name}"] = float(np.mean(seconds))
            timing[f"timing_s/{name}_max"] = max(seconds)
    return timing
