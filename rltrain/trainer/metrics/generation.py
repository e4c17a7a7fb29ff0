"""Metrics of generation: engine reports, response lengths, tail latency. Joins the rounds of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rltrain.common.columns import names as c
from rltrain.runtime.samples import Samples
from rltrain.trainer.metrics.step import Metrics
from rltrain.workers.interface.results import WAIT, GenerationNumbers

_DAMAGED = "rollout/damaged_answers"
# Metrics of a weight sync.
OF_SYNC = ("perf/weight_sync_gb", "perf/weight_sync_gb_per_s", "rollout/canary_gap")


def generation_metrics(results: Sequence[GenerationNumbers]) -> Metrics:
    """Return seconds of the rollout workers by phase (mean over ranks, ``_max``: slowest), pixels and weight sync."""
    metrics: Metrics = {_DAMAGED: float(sum(result.num_damaged for result in results))}
    if anew := sum(result.num_begun_anew for result in results):
        metrics["agent/begun_anew"] = float(anew)
    if follow_up := sum(result.num_follow_up_tokens for result in results):
        metrics["agent/reused_share"] = sum(result.num_reused_tokens for result in results) / follow_up
    for name in results[0].seconds:
        seconds = [result.seconds[name] for result in results]
        metrics |= {f"timing_s/{name}": float(np.mean(seconds)), f"timing_s/{name}_max": max(seconds)}
    metrics["timing_s/update_weights"] = metrics["timing_s/reshard"]  # newer verl's name
    if "read_images" in results[0].seconds:
        metrics["perf/image_gb"] = sum(result.image_bytes for result in results) / 2**30
    syncs = [result.sync for result in results if result.sync]
    if syncs:
        # The sync lasts as long as its slowest rank.
        gigabytes = max(sync.gigabytes for sync in syncs)
        speed = gigabytes / max(*(sync.seconds for sync in syncs), 1e-9)
        metrics |= zip(OF_SYNC, (gigabytes, speed, max(sync.canary_gap for sync in syncs)), strict=True)
    return metrics


def rollout_metrics(rounds: Sequence[Samples], num_replicas: int, at_once: int) -> Metrics:
    """Return response lengths and the tail latency of the replicas, over one or more rounds of generation.

    - rollout/response_length/p*: percentiles over complete responses.
    - perf/rollout_tail_s: time from the end of 90 % of the responses to the end of the last, summed over rounds.
    - perf/rollout_idle_share: idle share of the replicas' time, from the start of a round to the end of its last
      response.
    - perf/decode_steps: minimum number of decode steps for these tokens with ``at_once`` responses at a time, summed
      over replicas.
    - perf/decode_context_tokens: context tokens that attention reads for each generated token, summed over all.
    """
    tail = busy = total = steps = context = 0.0
    lengths = []
    for samples in rounds:
        # Responses that were completed in earlier steps have no end time in this step.
        served = samples[c.SERVED]
        ended_s = samples[c.ENDED_S][served]
        last = np.zeros(num_replicas)
        np.maximum.at(last, samples[c.ENGINE][served], ended_s)
        tail += float(ended_s.max() - np.quantile(ended_s, 0.9))
        busy += float(last.sum())
        total += float(last.max()) * num_replicas
        lengths.append(samples[c.RESPONSE_LENGTH][served & samples[c.COMPLETE]])
        carried = samples.numbers.get(c.CARRIED_LENGTH, np.zeros(len(samples)))[served]
        lengths_served, engines = samples[c.POLICY_TOKENS][served] - carried, samples[c.ENGINE][served]
        longest = np.zeros(num_replicas)
        np.maximum.at(longest, engines, lengths_served)
        steps += float(np.maximum(longest, np.ceil(np.bincount(engines, lengths_served, num_replicas) / at_once)).sum())
        context += float((lengths_served * (samples[c.PROMPT_LENGTH][served] + carried + lengths_served / 2)).sum())
    all_lengths = np.concatenate(lengths)
    percentiles = {f"rollout/response_length/p{q}": float(np.percentile(all_lengths, q)) for q in (50, 90, 99)}
    return percentiles | {
        "perf/rollout_tail_s": tail,
        "perf/rollout_idle_share": 1 - busy / max(total, 1e-9),
        "perf/decode_steps": steps,
        "perf/decode_context_tokens": context,
    }


def join_rounds(rounds: Sequence[Metrics]) -> Metrics:
    """Join the metrics of rounds: seconds, damaged responses and judge costs are summed; others keep the newest."""
    joined: Metrics = {}
    for metrics in rounds:
        for name, value in metrics.items():
            seconds = name.startswith("timing_s/") or (name.endswith("_s") and not name.endswith("_per_s"))
            adds_up = seconds or name == _DAMAGED or name.startswith("judge/")
            joined[name] = joined.get(name, 0.0) + value if adds_up else value
    if f"timing_s/{WAIT}" in joined:
        joined["perf/rollout_wait_share"] = joined[f"timing_s/{WAIT}"] / joined["timing_s/generate_sequences"]
    return joined
