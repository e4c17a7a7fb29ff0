"""Metrics of a step under verl's names, from per-sample numbers and from sums that the workers return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain import columns as c
from rltrain.controller.samples import Samples
from rltrain.trainer.balance import LayoutCost

Metrics = dict[str, float]
_RATES = {"error": c.REWARD_FAILED, "timeout": c.REWARD_TIMEOUT}


def sample_metrics(samples: Samples, max_prompt_length: int) -> Metrics:
    """Scores, rewards and lengths. ``clip_ratio`` of answers is the share cut off by the limit."""
    lengths, having = samples[c.RESPONSE_LENGTH], samples[c.RESPONSE_LENGTH] > 0
    metrics: Metrics = {"response/aborted_ratio": float((~having).mean())}
    for name, values in (("critic/score", samples[c.SCORE]), ("critic/rewards", samples[c.REWARD])):
        metrics |= _spread(name, values)
    for name, some in (("response_length", np.ones_like(having)), ("response_length_non_aborted", having)):
        if some.any():
            metrics |= _spread(name, lengths[some]) | {f"{name}/clip_ratio": float(samples[c.TRUNCATED][some].mean())}
    prompts = samples[c.PROMPT_LENGTH]
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


def outcome_advantage_metrics(samples: Samples) -> Metrics:
    """Advantages and returns, where every token of an answer carries the answer's: the mean is weighted by length."""
    lengths, values = samples[c.POLICY_TOKENS], samples[c.ADVANTAGE]
    return _spread("critic/advantages", values, lengths) | _spread("critic/returns", values, lengths)


def token_advantage_metrics(sums: dict[str, float], shift: float, scale: float) -> Metrics:
    """Whitened advantages, returns, and of a critic its values and the share of the returns' variance they explain."""
    metrics: Metrics = {}
    for name, (offset, factor) in {"advantages": (shift, scale), "returns": (0.0, 1.0), "values": (0.0, 1.0)}.items():
        if sums.get(f"{name}/count"):
            mean = sums[f"{name}/total"] / max(sums[f"{name}/count"], 1)
            for kind, value in (("mean", mean), ("max", sums[f"{name}/max"]), ("min", sums[f"{name}/min"])):
                metrics[f"critic/{name}/{kind}"] = (value - offset) * factor
    if sums.get("errors/count"):
        unexplained = _variance(sums, "errors") / (_variance(sums, "returns") + 1e-5)
        metrics["critic/vf_explained_var"] = 1.0 - unexplained
    return metrics


def _variance(sums: dict[str, float], name: str) -> float:
    count = max(sums[f"{name}/count"], 1)
    return max(sums[f"{name}/squares"] / count - (sums[f"{name}/total"] / count) ** 2, 0.0)


def reward_metrics(samples: Samples, right: NDArray[np.float64], *, weighted: bool = False) -> Metrics:
    """How often scoring failed (not: how often answers were wrong), what the score is made of, and what groups can teach.

    right [n]: accuracy of each answer. weighted: the rule reward is a sum of the scorer's numbers.
    """
    metrics = {f"reward/{name}_rate": float(samples[column].mean()) for name, column in _RATES.items()}
    terms = {"rule": c.RULE_SCORE, "model": c.MODEL_SCORE, "overlong": c.OVERLONG}
    terms = {name: column for name, column in terms.items() if column in samples.numbers}
    if not weighted and terms.keys() == {"rule"}:
        terms = {}  # it is the score itself
    extras = {name.removeprefix(c.SCORER): name for name in samples.numbers if name.startswith(c.SCORER)}
    for name, column in (extras | terms).items():
        values = samples[column]
        if values.dtype != object and not np.isnan(values).all():
            metrics[f"reward/{name}/mean"] = float(np.nanmean(values))
    metrics["reward/truncated_and_wrong"] = float((samples[c.TRUNCATED] & (right <= 0)).mean())
    return metrics | group_metrics(samples[c.GROUP], samples[c.REWARD], right)


def group_metrics(groups: NDArray[np.int64], rewards: NDArray[np.float64], right: NDArray[np.float64]) -> Metrics:
    """reward/std: standard deviation of the rewards of a group, mean over groups. Shares of groups whose answers are all right
    (the same, over 0), all wrong (the same, not over 0), or mixed. Nothing where a prompt has one answer.
    """
    _, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if sizes.max() < 2:
        return {}
    means = np.bincount(place, rewards) / sizes
    spread = np.sqrt(np.bincount(place, (rewards - means[place]) ** 2) / sizes)
    high, low = np.full(len(sizes), -np.inf), np.full(len(sizes), np.inf)
    np.maximum.at(high, place, right)
    np.minimum.at(low, place, right)
    return {
        "reward/std": float(spread.mean()),
        "reward/groups_all_right": float(((high == low) & (high > 0)).mean()),
        "reward/groups_all_wrong": float(((high == low) & (high <= 0)).mean()),
        "reward/groups_mixed": float((high != low).mean()),
    }


def add_up(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sums over ranks; of names that begin with ``max/`` or end so the largest, of ``/min`` the smallest."""
    total: dict[str, float] = {}
    for result in results:
        for name, value in result.items():
            if name.startswith("max/") or name.endswith("/max"):
                total[name] = max(total.get(name, -np.inf), value)
            elif name.endswith("/min"):
                total[name] = min(total.get(name, np.inf), value)
            else:
                total[name] = total.get(name, 0.0) + value
    return total


def update_metrics(results: Sequence[dict[str, Any]], tokens: NDArray[np.int64], prefix: str) -> Metrics:
    """Sum over ranks, divide token sums by the tokens of each mini-batch [optimizer steps], then mean over optimizer steps."""
    metrics: Metrics = {}
    for key in dict.fromkeys(name for result in results for name in result):
        kind, _, name = key.partition("/")
        total = sum(result.get(key, 0.0) for result in results)
        if kind == "share":
            metrics[f"{prefix}/{name}"] = float(np.mean(total))
        elif kind == "token" and not name.startswith("measured/") and (tokens > 0).any():
            # A step without tokens has no mean.
            metrics[f"{prefix}/{name}"] = float(np.mean((total / np.maximum(tokens, 1))[tokens > 0]))
    metrics[f"{prefix}/grad_norm"] = float(np.mean(results[0]["grad_norm"]))
    metrics[f"{prefix}/steps_skipped"] = float(np.sum(results[0]["skipped"]))
    return metrics | peak_memory(results)


def peak_memory(results: Sequence[dict[str, Any]]) -> Metrics:
    """Largest over ranks of the memory peaks."""
    names = [name for name in results[0] if name.startswith("perf/")]
    return {name: max(float(result[name]) for result in results) for name in names}


def first_step_sums(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What was measured in the first optimizer step of an update, whose forward still has the weights that were sampled with."""
    mark = "token/measured/"
    return add_up(
        [
            {name.removeprefix(mark): value[0] for name, value in each.items() if name.startswith(mark)}
            for each in results
            if mark + "tokens" in each and each[mark + "tokens"][0]
        ]
    )


def policy_metrics(sums: dict[str, float]) -> Metrics:
    """Entropy before the update, and `mismatch_metrics`, of the samples whose log-probs were computed."""
    entropy = {"actor/entropy": sums["entropy"] / sums["tokens"]} if sums.get("tokens") and "entropy" in sums else {}
    return entropy | mismatch_metrics(sums)


def mismatch_metrics(sums: dict[str, float]) -> Metrics:
    """How far the engine's policy is from the trainer's on the sampled tokens, and what the rollout correction did about it.

    kl, k3_kl: estimates of KL(engine || trainer) per token. ppl: exp of the mean negative log-prob of an answer, mean over
    answers. chi2: mean of w^2 - 1 over tokens (seq: of the product of w over answers), w = pi_trainer / pi_engine.
    """
    if not sums.get("tokens"):
        return {}
    tokens, sequences = max(sums["tokens"], 1), max(sums["sequences"], 1)
    metrics = {
        "rollout/log_prob_gap/mean": sums["gap"] / max(sums.get("gap_tokens", tokens), 1),
        "training/rollout_probs_diff_mean": sums["prob_gap"] / tokens,
        "training/rollout_probs_diff_std": _std(sums["prob_gap"], sums["prob_gap_squared"], tokens),
        "training/rollout_actor_probs_pearson_corr": _correlation(sums, tokens),
        "rollout_corr/kl": sums["k1"] / tokens,
        "rollout_corr/k3_kl": sums["k3"] / tokens,
        "rollout_corr/training_ppl": sums["train_ppl"] / sequences,
        "rollout_corr/rollout_ppl": sums["engine_ppl"] / sequences,
        "rollout_corr/log_ppl_diff": (sums["engine_log_ppl"] - sums["train_log_ppl"]) / sequences,
        "rollout_corr/log_ppl_abs_diff": sums["log_ppl_gap"] / sequences,
        "rollout_corr/chi2_token": sums["w_squared"] / tokens - 1,
        "rollout_corr/chi2_seq": sums["w_product_squared"] / sequences - 1,
    }
    if "max/gap" in sums:
        metrics |= {
            "rollout/log_prob_gap/max": sums["max/gap"],
            "training/rollout_probs_diff_max": sums["max/prob_gap"],
        }
    if "is" in sums:
        metrics |= {
            "rollout_corr/rollout_is_mean": sums["is_answers"] / sequences
            if "is_answers" in sums
            else sums["is"] / tokens,
            "rollout_corr/rollout_is_max": sums["max/is"],
            "rollout_corr/rollout_is_min": -sums["max/minus_is"],
            "rollout_corr/rollout_is_eff_sample_size": sums["is"] ** 2 / (tokens * max(sums["is_squared"], 1e-12)),
            "rollout_corr/rollout_is_ratio_fraction_high": sums["is_high"] / tokens,
            "rollout_corr/rollout_is_ratio_fraction_low": sums["is_low"] / tokens,
        }
    if "rejected" in sums:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = sums["rejected"] / tokens
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = sums["sequences_rejected"] / sequences
    return metrics


def _std(total: float, squares: float, count: float) -> float:
    return float(np.sqrt(max(squares / count - (total / count) ** 2, 0.0)))


def _correlation(sums: dict[str, float], count: float) -> float:
    """Pearson's, of the probabilities that trainer and engine give the sampled tokens; 1 where either never varies."""
    stds = [_std(sums[name], sums[f"{name}_squared"], count) for name in ("train_prob", "engine_prob")]
    covariance = sums["prob_product"] / count - sums["train_prob"] * sums["engine_prob"] / count**2
    return covariance / (stds[0] * stds[1]) if min(stds) > 1e-6 else 1.0


def balance_metrics(samples: Samples, num_engines: int, after: Sequence[int]) -> Metrics:
    """Tokens per data-parallel rank if samples stayed where they were generated, and as they are spread."""
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


def throughput_metrics(samples: Samples, timing: Metrics, num_devices: int) -> Metrics:
    """Tokens per second and device. perf/throughput counts prompt and response tokens over the whole step.

    perf/gen_throughput alone counts every token of this step's generation, whether the step learns from it or not.
    """
    response = int(samples[c.RESPONSE_LENGTH].sum())
    total = response + int(samples[c.PROMPT_LENGTH].sum())
    step = timing["timing_s/step"]
    thrown_away = timing.get("filter_groups/tokens_thrown_away", 0.0)
    generated = timing.get("rollout/tail/tokens_generated", response + thrown_away)
    metrics = {
        "perf/total_num_tokens": float(total),
        "perf/time_per_step": step,
        "perf/throughput": total / (step * num_devices),
        "perf/gen_throughput": generated / (timing["timing_s/generate_sequences"] * num_devices),
    }
    if c.HAS_OLD_LOG_PROBS in samples.numbers and samples[c.HAS_OLD_LOG_PROBS].any():
        scored = int((samples[c.PROMPT_LENGTH] + samples[c.RESPONSE_LENGTH])[samples[c.HAS_OLD_LOG_PROBS]].sum())
        metrics["perf/old_log_prob_throughput"] = scored / (timing["timing_s/old_log_prob"] * num_devices)
    for name, tokens in (
        ("gen", response),
        ("ref", total),
        ("values", total),
        ("adv", total),
        ("update_critic", total),
        ("update_actor", total),
    ):
        if f"timing_s/{name}" in timing:
            metrics[f"timing_per_token_ms/{name}"] = 1000 * timing[f"timing_s/{name}"] / max(tokens, 1)
    return metrics


def flops_metrics(costs: Mapping[str, LayoutCost], timing: Metrics, model: dict[str, Any], num_devices: int) -> Metrics:
    """``perf/mfu/actor``: model FLOPs of the update without recompute / (seconds x devices x bf16 peak); nothing where the peak is unknown.

    ``perf/mfu/actor_infer``: likewise of the old_log_prob pass, which is a forward. costs: by phase, in tokens, their attention
    included. A token takes 6 FLOPs per weight, input embedding not counted (Narayanan et al. 2021, appendix, halved for causality).
    """
    if not model.get("peak_flops"):
        return {}
    possible, weights = num_devices * model["peak_flops"], model["matmul_parameters"]
    metrics: Metrics = {}
    if scored := costs.get("old_log_prob"):
        metrics["perf/mfu/actor_infer"] = 2 * weights * scored.cost / (timing["timing_s/old_log_prob"] * possible)
    if update := costs.get("update_actor"):
        # Forward and gradient of the activations, two each; that of the weights two more (LoRA: of the adapters alone).
        frozen = weights - min(model["trained_parameters"], weights)
        flops = 6 * weights * update.cost - 2 * frozen * update.tokens
        metrics["perf/mfu/actor"] = float(flops / (timing["timing_s/update_actor"] * possible))
    return metrics


def generation_metrics(results: Sequence[dict[str, Any]]) -> Metrics:
    """What the rollout workers measured: phases (``timing_s/<name>``: mean over ranks, ``_max``: slowest rank) and the weight sync."""
    metrics: Metrics = {}
    for key in results[0]:
        kind, _, name = key.partition("/")
        if kind == "timing":
            seconds = [float(result[key]) for result in results]
            metrics[f"timing_s/{name}"] = float(np.mean(seconds))
            metrics[f"timing_s/{name}_max"] = max(seconds)
            if name == "reshard":
                metrics["timing_s/update_weights"] = metrics["timing_s/reshard"]  # newer verl's name of it
    if "sync/seconds" in results[0]:
        slowest = max(float(result["sync/seconds"]) for result in results)
        metrics["perf/weight_sync_gb"] = float(results[0]["sync/gigabytes"])
        metrics["perf/weight_sync_gb_per_s"] = metrics["perf/weight_sync_gb"] / max(slowest, 1e-9)
        metrics["rollout/canary_gap"] = max(float(result["sync/canary_gap"]) for result in results)
    return metrics


def rollout_metrics(rounds: Sequence[Samples], num_replicas: int) -> Metrics:
    """Lengths of the answers, and how long replicas waited for the last of them, over one or more rounds of generation.

    rollout/response_length/p*: percentiles over answers that ended. perf/rollout_tail_s: from the end of 90 % of the answers to the end
    of the last, summed over rounds. perf/rollout_idle_share: share of the replicas' time, from the start of a round to the end of
    its last answer, in which they had nothing left to do.
    """
    tail = busy = total = 0.0
    lengths = []
    for samples in rounds:
        served = samples[c.SERVED]
        ended = samples[c.ENDED_S][served]
        last = np.zeros(num_replicas)
        np.maximum.at(last, samples[c.ENGINE][served], ended)
        tail += float(ended.max() - np.quantile(ended, 0.9))
        busy += float(last.sum())
        total += float(last.max()) * num_replicas
        lengths.append(samples[c.RESPONSE_LENGTH][served & samples[c.COMPLETE]])
    all_lengths = np.concatenate(lengths)
    percentiles = {f"rollout/response_length/p{q}": float(np.percentile(all_lengths, q)) for q in (50, 90, 99)}
    return {"perf/rollout_tail_s": tail, "perf/rollout_idle_share": 1 - busy / max(total, 1e-9)} | percentiles


def join_rounds(rounds: Sequence[Metrics]) -> Metrics:
    """Metrics of several rounds of generation: seconds add up; of anything else the newest is kept."""
    joined: Metrics = {}
    for found in rounds:
        for name, value in found.items():
            seconds = name.startswith("timing_s/") or (name.endswith("_s") and not name.endswith("_per_s"))
            joined[name] = joined.get(name, 0.0) + value if seconds else value
    return joined
