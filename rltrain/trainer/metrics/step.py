"""Metrics of a step under verl's names.

Three sources: numbers per sample from the driver, moments per quantity from passes, and sums per optimizer step from
updates. All reductions over ranks happen here or in `moments.join`, and never depend on a metric's name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rltrain.algorithms.moments import Moments
from rltrain.common.columns import names as c
from rltrain.config.passes import PASS_OF_CALL, UPDATES, step_phases
from rltrain.runtime.samples import Samples
from rltrain.workers.interface.results import UpdateNumbers, largest

Metrics = dict[str, float]
# Phases for which verl logs no time per token.
_NOT_PER_TOKEN = ("reward", "gen_max", "old_log_prob")
_RATES = {"error": c.REWARD_FAILED, "timeout": c.REWARD_TIMEOUT}


@dataclass(frozen=True)
class Answered:
    """Result of a completed step or validation."""

    step: int
    metrics: Metrics
    samples: Samples
    """All samples with their numbers; the samples of one prompt are adjacent."""
    answers_per_prompt: int


def sample_metrics(samples: Samples, max_prompt_length: int) -> Metrics:
    """Return scores, rewards and lengths. ``response_length/clip_ratio``: share of responses truncated by the limit."""
    lengths, has_tokens = samples[c.RESPONSE_LENGTH], samples[c.RESPONSE_LENGTH] > 0
    metrics: Metrics = {"response/aborted_ratio": float((~has_tokens).mean())}
    for name, values in (("critic/score", samples[c.SCORE]), ("critic/rewards", samples[c.REWARD])):
        metrics |= _spread(name, values)
    for name, rows in (("response_length", np.ones_like(has_tokens)), ("response_length_non_aborted", has_tokens)):
        if rows.any():
            metrics |= _spread(name, lengths[rows]) | {f"{name}/clip_ratio": float(samples[c.TRUNCATED][rows].mean())}
    metrics |= _standard_error(samples[c.GROUP], samples[c.SCORE])
    prompts = samples[c.PROMPT_LENGTH]
    metrics |= _spread("prompt_length", prompts) | {
        "prompt_length/clip_ratio": float((prompts >= max_prompt_length).mean())
    }
    return metrics


def _standard_error(groups: NDArray[np.int64], scores: NDArray[np.float64]) -> Metrics:
    """Return critic/score/sem: the standard error of the mean score. Empty for a single prompt.

    Prompts are the independent samples, because responses to one prompt are correlated.
    """
    means = pd.Series(scores).groupby(groups).mean()
    return {"critic/score/sem": float(means.sem())} if len(means) > 1 else {}


def _spread(name: str, values: NDArray[Any], weights: NDArray[Any] | None = None) -> Metrics:
    if weights is not None and not weights.sum():
        # If no response has a token, return the unweighted mean instead of raising.
        weights = None
    return {
        f"{name}/mean": float(np.average(values, weights=weights)),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def outcome_advantage_metrics(samples: Samples) -> Metrics:
    """Return advantages and returns. All tokens of a response share its value, so the mean is weighted by length."""
    lengths, values = samples[c.POLICY_TOKENS], samples[c.ADVANTAGE]
    return _spread("critic/advantages", values, lengths) | _spread("critic/returns", values, lengths)


def token_advantage_metrics(moments: dict[str, Moments], shift: float, scale: float) -> Metrics:
    """Return whitened advantages and returns; with a critic also its values and the returns' explained variance."""
    metrics: Metrics = {}
    for name, (offset, factor) in {"advantages": (shift, scale), "returns": (0.0, 1.0), "values": (0.0, 1.0)}.items():
        moment = moments.get(name, Moments())
        if moment.count:
            for kind, value in (("mean", moment.mean), ("max", moment.largest), ("min", moment.smallest)):
                # Mean and extremes commute with an affine map, so raw moments suffice.
                metrics[f"critic/{name}/{kind}"] = (value - offset) * factor
    if "errors" in moments and moments["errors"].count:
        # 1e-5 as in verl: if all returns are equal there is no variance to explain.
        metrics["critic/vf_explained_var"] = 1.0 - moments["errors"].variance / (moments["returns"].variance + 1e-5)
    return metrics


def reward_metrics(samples: Samples, right: NDArray[np.float64], *, weighted: bool = False) -> Metrics:
    """Return rates of failed scoring (not of wrong responses), parts of the score, and shares of informative groups.

    right [n]: accuracy of each response. weighted: the rule reward is a weighted sum of the scorer's numbers.
    """
    metrics = {f"reward/{name}_rate": float(samples[column].mean()) for name, column in _RATES.items()}
    terms = {"rule": c.RULE_SCORE, "model": c.MODEL_SCORE, "overlong": c.OVERLONG}
    terms = {name: column for name, column in terms.items() if column in samples.numbers}
    if not weighted and terms.keys() == {"rule"}:
        terms = {}  # it equals the score
    extras = {name.removeprefix(c.SCORER): name for name in samples.numbers if name.startswith(c.SCORER)}
    for name, column in (extras | terms).items():
        values = samples[column]
        if values.dtype != object and not np.isnan(values).all():
            metrics[f"reward/{name}/mean"] = float(np.nanmean(values))
    metrics["reward/truncated_and_wrong"] = float((samples[c.TRUNCATED] & (right <= 0)).mean())
    return metrics | group_metrics(samples[c.GROUP], samples[c.REWARD], right)


def source_metrics(samples: Samples, sources: NDArray[np.object_], right: NDArray[np.float64]) -> Metrics:
    """Return means by data source. sources, right [n]: source and accuracy per response. share: share of all
    responses."""
    metrics: Metrics = {}
    values = {"score": samples[c.SCORE], "acc": right, "response_length": samples[c.RESPONSE_LENGTH]}
    values["clip_ratio"] = samples[c.TRUNCATED]
    for source in dict.fromkeys(sources.tolist()):
        own = sources == source
        metrics[f"train/{source}/share"] = float(own.mean())
        metrics |= {f"train/{source}/{name}/mean": float(numbers[own].mean()) for name, numbers in values.items()}
    return metrics


def group_metrics(groups: NDArray[np.int64], rewards: NDArray[np.float64], right: NDArray[np.float64]) -> Metrics:
    """Return the spread of rewards within groups, and shares of groups by accuracy. Empty with one response per prompt.

    reward/std: standard deviation within a group, mean over groups. all_right: equal accuracies above 0. all_wrong:
    equal accuracies, not above 0. mixed: different accuracies.
    """
    by_group = pd.DataFrame({"reward": rewards, "right": right}).groupby(groups)
    if by_group.size().max() < 2:
        return {}
    high, low = by_group["right"].max(), by_group["right"].min()
    return {
        "reward/std": float(by_group["reward"].std(ddof=0).mean()),
        "reward/groups_all_right": float(((high == low) & (high > 0)).mean()),
        "reward/groups_all_wrong": float(((high == low) & (high <= 0)).mean()),
        "reward/groups_mixed": float((high != low).mean()),
    }


def update_metrics(
    results: Sequence[UpdateNumbers], tokens: NDArray[np.int64], counted: NDArray[np.int64], prefix: str
) -> Metrics:
    """Sum over ranks, divide token sums by ``tokens``, and average over the optimizer steps that were taken.

    tokens, counted [mini-batches]: tokens whose gradient was computed, and tokens that count in the loss. There is no
    optimizer step for a mini-batch with counted = 0. prefix: added to names without one.
    """
    metrics: Metrics = {}
    # The gradient norm covers the shards of all ranks, so every rank has the same value; likewise for `skipped`.
    first_rank, has_tokens = results[0], tokens > 0
    made = (counted > 0) & (first_rank.skipped == 0)
    if first_rank.loss_scale is not None:
        made &= first_rank.overflowed == 0
    if made.any():
        for name, total in _over_ranks([result.shares for result in results]).items():
            metrics[_named(prefix, name)] = float(np.mean(total[made]))
        metrics[f"{prefix}/grad_norm"] = float(np.mean(first_rank.grad_norm[made]))
    if has_tokens.any():
        for name, total in _over_ranks([result.token_sums for result in results]).items():
            metrics[_named(prefix, name)] = float(np.mean(total[has_tokens] / tokens[has_tokens]))
    if first_rank.loss_scale is not None:
        metrics[f"{prefix}/loss_scale"] = first_rank.loss_scale
        metrics[f"{prefix}/steps_overflowed"] = float(np.sum(first_rank.overflowed))
    metrics[f"{prefix}/steps_skipped"] = float(np.sum(first_rank.skipped))
    return metrics | largest([result.maxima for result in results])


def _named(prefix: str, name: str) -> str:
    return name if "/" in name else f"{prefix}/{name}"


def _over_ranks(parts: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    names = dict.fromkeys(name for part in parts for name in part)
    # A rank that has no samples in any step returns only the loss.
    return {name: np.sum([part[name] for part in parts if name in part], axis=0) for name in names}


def policy_metrics(moments: dict[str, Moments]) -> Metrics:
    """Return the entropy before the update and `mismatch_metrics`, over the samples whose log-probs were computed."""
    entropy = moments.get("entropy", Moments())
    return ({"actor/entropy": entropy.mean} if entropy.count else {}) | mismatch_metrics(moments)


# Metrics that are the mean of a quantity, if it was measured.
_MEANS = {
    "gap": "rollout/log_prob_gap/mean",
    "prob_gap": "training/rollout_probs_diff_mean",
    "k1": "rollout_corr/kl",
    "k3": "rollout_corr/k3_kl",
    "train_ppl": "rollout_corr/training_ppl",
    "engine_ppl": "rollout_corr/rollout_ppl",
    "log_ppl_gap": "rollout_corr/log_ppl_abs_diff",
    "is": "rollout_corr/rollout_is_mean",
    "is_answers": "rollout_corr/rollout_is_mean",  # with one weight per response, the mean is over responses
    "is_high": "rollout_corr/rollout_is_ratio_fraction_high",
    "is_low": "rollout_corr/rollout_is_ratio_fraction_low",
    "rejected": "rollout_corr/rollout_rs_masked_fraction",
    "rejected_answers": "rollout_corr/rollout_rs_seq_masked_fraction",
}


def mismatch_metrics(moments: dict[str, Moments]) -> Metrics:
    """Return the mismatch between engine and trainer on the sampled tokens, and the effect of the rollout correction.

    kl, k3_kl: estimates of KL(engine || trainer) per token. ppl: exp of the mean negative log-prob of a response, mean
    over responses. chi2: mean of w^2 - 1 over tokens (seq: of the product of w over responses), w = pi_trainer /
    pi_engine.
    """
    if "k1" not in moments or not moments["k1"].count:
        return {}
    metrics = {metric: moments[name].mean for name, metric in _MEANS.items() if name in moments}
    train_log_ppl, engine_log_ppl = moments["train_log_ppl"], moments["engine_log_ppl"]
    metrics |= {
        # If all responses were carried over without a token of this step, the maximum of no gaps is -inf. It is logged
        # as 0.
        "rollout/log_prob_gap/max": max(moments["gap"].largest, 0.0),
        "training/rollout_probs_diff_max": moments["prob_gap"].largest,
        "training/rollout_probs_diff_std": math.sqrt(moments["prob_gap"].variance),
        "training/rollout_actor_probs_pearson_corr": _correlation(moments),
        "rollout_corr/log_ppl_diff": (engine_log_ppl.total - train_log_ppl.total) / max(train_log_ppl.count, 1),
        # For tokens sampled by the engine E[w] = 1, so E[w^2] - 1 is the variance of w, the chi-square divergence.
        "rollout_corr/chi2_token": moments["w_squared"].mean - 1,
        "rollout_corr/chi2_seq": moments["w_product_squared"].mean - 1,
    }
    if "is" in moments:
        weights = moments["is"]
        metrics |= {
            "rollout_corr/rollout_is_max": weights.largest,
            "rollout_corr/rollout_is_min": weights.smallest,
            "rollout_corr/rollout_is_eff_sample_size": weights.total**2 / (weights.count * max(weights.squares, 1e-12)),
        }
    return metrics


def _correlation(moments: dict[str, Moments]) -> float:
    """Return Pearson's correlation of trainer and engine probabilities of sampled tokens; 1 if either is constant."""
    train, engine = moments["train_prob"], moments["engine_prob"]
    stds = [math.sqrt(side.variance) for side in (train, engine)]
    covariance = moments["prob_product"].mean - train.total * engine.total / train.count**2
    # A policy that is certain of every token has no variance to correlate; that is not a mismatch.
    return covariance / (stds[0] * stds[1]) if min(stds) > 1e-6 else 1.0


def balance_metrics(samples: Samples, num_engines: int, after: Sequence[int]) -> Metrics:
    """Return tokens per data-parallel rank before balancing (on the rank that generated them) and after it."""
    lengths = samples[c.PROMPT_LENGTH] + samples[c.RESPONSE_LENGTH]
    before = np.bincount(samples[c.ENGINE], weights=lengths, minlength=num_engines)
    return {
        "global_seqlen/min": float(before.min()),
        "global_seqlen/max": float(before.max()),
        "global_seqlen/minmax_diff": float(before.max() - before.min()),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": float(np.mean(after)),
    }


def throughput_metrics(samples: Samples, timing: Metrics, num_devices: int, pass_tokens: Mapping[str, int]) -> Metrics:
    """Return tokens per second and device.

    perf/throughput counts prompt and response tokens over the whole step; perf/total_throughput is its sum over
    devices. perf/gen_throughput counts every token that this step generated, even if the step does not learn from it.
    pass_tokens: tokens that each phase computed in its own time, excluding tokens computed during generation.
    """
    response = int(samples[c.RESPONSE_LENGTH].sum())
    total = response + int(samples[c.PROMPT_LENGTH].sum())
    step = timing["timing_s/step"]
    thrown_away = timing.get("filter_groups/tokens_thrown_away", 0.0)
    # With `rollout.tail` the batch includes tokens of earlier steps and lacks some of this step, so its size does not
    # measure the speed of the engines.
    sampled = int(samples[c.POLICY_TOKENS].sum())
    generated = timing.get("rollout/tail/tokens_generated", sampled + thrown_away)
    metrics = {
        "perf/total_num_tokens": float(total),
        "perf/time_per_step": step,
        "perf/throughput": total / (step * num_devices),
        "perf/total_throughput": total / step,
        "perf/gen_throughput": generated / (timing["timing_s/generate_sequences"] * num_devices),
    }
    if scored := pass_tokens.get("old_log_prob"):
        metrics["perf/old_log_prob_throughput"] = scored / (timing["timing_s/old_log_prob"] * num_devices)
    for name in step_phases():
        # An update iterates over the tokens several times; they are counted once.
        tokens = response if name == "gen" else total if name in UPDATES else pass_tokens.get(name, 0)
        if tokens and name not in _NOT_PER_TOKEN and f"timing_s/{name}" in timing:
            metrics[f"timing_per_token_ms/{name}"] = 1000 * timing[f"timing_s/{name}"] / tokens
    return metrics


def turn_metrics(samples: Samples, most_turns: int | None) -> Metrics:
    """Return metrics of tool calls and turns; empty without tools.

    - num_turns: as in verl, turns of the policy, the replies to them, and the prompt.
    - agent/*: sums over trajectories (failed: failed trajectories; images: shown by tools and environments).
    - context_share: share of the response tokens that the policy did not generate.
    - tool_s: seconds of a trajectory's calls.
    - stop: shares of the trajectories by stop reason; each has exactly one.

    most_turns: limit per trajectory (None: unlimited).
    """
    if c.NUM_TURNS not in samples.numbers:
        return {}
    totals = {name: float(samples[name].sum()) for name in c.OF_TURNS if name != c.NUM_TURNS}
    return _spread("num_turns", 2 * samples[c.NUM_TURNS]) | {
        **{f"agent/{name}": total for name, total in totals.items()},
        "agent/failed": float(samples[c.AGENT_FAILED].sum()),
        "agent/images": float(samples[c.ANSWER_IMAGES].sum()),
        "agent/context_share": 1 - float(samples[c.POLICY_TOKENS].sum() / max(1, samples[c.RESPONSE_LENGTH].sum())),
        "agent/tool_s/mean": float(samples[c.TOOL_S].mean()),
        "agent/tool_s/max": float(samples[c.TOOL_S].max()),
        **{f"agent/stop/{why}": float(ended.mean()) for why, ended in _stops(samples, most_turns).items()},
    }


def _stops(samples: Samples, most_turns: int | None) -> dict[str, NDArray[np.bool_]]:
    failed, turns = samples[c.AGENT_FAILED].astype(bool), samples[c.NUM_TURNS]
    cut = samples[c.TRUNCATED] & ~failed
    last = (turns >= most_turns if most_turns else np.zeros_like(failed)) & ~failed & ~cut
    return {"answered": ~(failed | cut | last), "turns": last, "length": cut, "failed": failed}


def flow_metrics(
    before: tuple[int, Counter[str]], now: tuple[int, Counter[str]], num_samples: int, num_nodes: int
) -> Metrics:
    """Return the bytes that the samples of a step moved: through the driver, and between nodes by pass.

    before, now: bytes through the driver, and bytes between nodes by call, in the run so far.
    """
    metrics = {"perf/driver_bytes_per_sample": (now[0] - before[0]) / num_samples}
    if num_nodes > 1:
        moved = now[1] - before[1]
        metrics["perf/node_bytes_per_sample"] = moved.total() / num_samples
        for call, size in moved.items():
            name = f"perf/node_bytes/{PASS_OF_CALL.get(call, 'other')}"
            metrics[name] = metrics.get(name, 0.0) + size
    return metrics
