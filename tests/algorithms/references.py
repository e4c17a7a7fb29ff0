"""Slow second implementations of all formulas, with lists, loops and floats, written from the papers."""

import math

import torch


def mean(values):
    return sum(values) / len(values)


def std(values):
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))


def clip(value, low, high):
    return max(low, min(high, value))


def members(groups, i):
    return [j for j, group in enumerate(groups) if group == groups[i]]


# -- advantages of whole responses: scores, groups, lengths -> one number per response -----------------------------


def grpo(scores, groups, by_std=True):
    advantages = []
    for i, score in enumerate(scores):
        group = [scores[j] for j in members(groups, i)]
        advantages.append((score - mean(group)) / (std(group) + 1e-6) if by_std else score - mean(group))
    return advantages


def rloo(scores, groups):
    return [score - mean([scores[j] for j in members(groups, i) if j != i]) for i, score in enumerate(scores)]


def opo(scores, groups, lengths):
    advantages = []
    for i, score in enumerate(scores):
        group = members(groups, i)
        tokens = sum(lengths[j] for j in group)
        baseline = sum(lengths[j] * scores[j] for j in group) / max(tokens, 1)
        advantages.append(0.0 if len({scores[j] for j in group}) == 1 else score - baseline)
    return advantages


def grpo_passk(scores, groups, by_std=True):
    advantages = []
    for i, score in enumerate(scores):
        group = sorted([scores[j] for j in members(groups, i)], reverse=True)
        lead = group[0] - group[1] if score == group[0] else 0.0
        advantages.append(lead / (std(group) + 1e-6) if by_std else lead)
    return advantages


def maxrl(scores, groups):
    """Tajwar et al. 2026: the gradient of log p, where p is the pass rate of the group."""
    means = [mean([scores[j] for j in members(groups, i)]) for i in range(len(scores))]
    return [(score - m) / m if m > 1e-9 else 0.0 for score, m in zip(scores, means, strict=True)]


def lite_ppo(scores, groups):
    """Liu et al. 2025: the mean of the group and the standard deviation of all rewards."""
    return [
        (score - mean([scores[j] for j in members(groups, i)])) / (std(scores) + 1e-6) for i, score in enumerate(scores)
    ]


def normalise(advantages, groups, lengths, mean_level, std_level):
    """AReaL's adv_norm, computed token by token. Every token of a response has its advantage."""

    def tokens(values, level, i):
        return [
            values[j]
            for j in range(len(values))
            if level == "batch" or groups[j] == groups[i]
            for _ in range(lengths[j])
        ]

    if mean_level:
        of_level = [tokens(advantages, mean_level, i) for i in range(len(advantages))]
        advantages = [a - (mean(of) if of else 0.0) for a, of in zip(advantages, of_level, strict=True)]
    if std_level:
        of_level = [tokens(advantages, std_level, i) for i in range(len(advantages))]
        advantages = [a / (std(of) + 1e-5) if len(of) > 1 else a for a, of in zip(advantages, of_level, strict=True)]
    return advantages


def gpg(scores, groups):
    alpha = len(scores) / max(sum(score != 0 for score in scores), 1)
    return [alpha * (score - mean([scores[j] for j in members(groups, i)])) for i, score in enumerate(scores)]


def gpg_paper(scores, groups):
    useful = sum(len({scores[j] for j in members(groups, i)}) > 1 for i in range(len(scores)))
    alpha = len(scores) / max(useful, 1)
    return [alpha * (score - mean([scores[j] for j in members(groups, i)])) for i, score in enumerate(scores)]


def whiten_answers(advantages, lengths):
    """Every token of response i has advantages[i]. Responses without tokens are shifted in the same way."""
    tokens = [a for a, length in zip(advantages, lengths, strict=True) for _ in range(length)]
    if len(tokens) < 2:
        return advantages
    center = mean(tokens)
    variance = sum((value - center) ** 2 for value in tokens) / (len(tokens) - 1)
    return [(a - center) / math.sqrt(variance + 1e-8) for a in advantages]


def gdpo(terms, weights, groups, lengths):
    total = [0.0] * len(groups)
    for term, weight in zip(terms, weights, strict=True):
        total = [a + weight * b for a, b in zip(total, grpo(term, groups), strict=True)]
    return whiten_answers(total, lengths)


# -- advantages of tokens: rows of rewards -> rows of advantages ----------------------------------------------------


def gae(rewards, values, gamma, lam):
    rows = []
    for row, v in zip(rewards, values, strict=True):
        advantages, following, value = [], 0.0, 0.0
        for t in reversed(range(len(row))):
            delta = row[t] + gamma * value - v[t]
            following = delta + gamma * lam * following
            value = v[t]
            advantages.insert(0, following)
        rows.append(advantages)
    return rows


def returns(rewards, gamma):
    return [[sum(gamma ** (u - t) * row[u] for u in range(t, len(row))) for t in range(len(row))] for row in rewards]


# -- policy losses: log-probs and advantages of one response -> its token losses -------------------------------------


def vanilla(new, old, advantages, low, high, dual):
    losses = []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = math.exp(n - o)
        loss = max(-a * ratio, -a * clip(ratio, 1 - low, 1 + high))
        losses.append(min(loss, -a * dual) if a < 0 else loss)
    return losses


def gspo(new, old, advantages, low, high, mask):
    counted = max(sum(mask), 1)
    ratio = math.exp(sum((n - o) * m for n, o, m in zip(new, old, mask, strict=True)) / counted)
    return [max(-a * ratio, -a * clip(ratio, 1 - low, 1 + high)) for a in advantages]


def gpg_loss(new, old, advantages):
    return [-a * n for n, a in zip(new, advantages, strict=True)]


def cispo(new, old, advantages, low, high):
    return [-clip(math.exp(n - o), 1 - low, 1 + high) * a * n for n, o, a in zip(new, old, advantages, strict=True)]


def sapo(new, old, advantages, tau_pos, tau_neg):
    losses = []
    for n, o, a in zip(new, old, advantages, strict=True):
        tau = tau_pos if a > 0 else tau_neg
        losses.append(-a * 4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1))))
    return losses


def geo_mean(new, old, advantages, low, high, mask):
    total, counted = 0.0, max(sum(mask), 1)
    for n, o, a, m in zip(new, old, advantages, mask, strict=True):
        ratio = n - o
        if a > 0:
            ratio = min(ratio, high)
        elif a < 0:
            ratio = max(ratio, -low)
        total += m * ratio
    a = sum(a * m for a, m in zip(advantages, mask, strict=True)) / counted
    return [-a * math.exp(total / counted)] * len(new)


def clip_cov(new, old, advantages, low, high, selected):
    losses = vanilla(new, old, advantages, low, high, math.inf)
    return [0.0 if chosen else loss for loss, chosen in zip(losses, selected, strict=True)]


def m2po(new, old, advantages, selected):
    return [-a * math.exp(n - o) * chosen for n, o, a, chosen in zip(new, old, advantages, selected, strict=True)]


def real_of(new, old, advantages, mask, weight):
    score = sum((n - o) * m for n, o, m in zip(new, old, mask, strict=True)) / max(sum(mask), 1)
    total = sum(a * m for a, m in zip(advantages, mask, strict=True))
    label = (total > 0) - (total < 0)
    return [-weight * label * score] * len(new)


def real(scores, labels, groups, tau):
    """The paper's L, averaged over groups, as a differentiable torch scalar."""
    losses = []
    for group in sorted(set(groups)):
        of_label = {1: 1.0, -1: 1.0}
        for score, label, other in zip(scores, labels, groups, strict=True):
            if other == group and label:
                of_label[label] = of_label[label] + (-label * score / tau).exp()
        losses += [sum(torch.log(torch.as_tensor(total, dtype=torch.float64)) for total in of_label.values())]
    return sum(losses) / len(losses)


def kl_cov(new, old, advantages, coef, selected):
    return [
        -a * math.exp(n - o) + (coef * abs(n - o) if chosen else 0.0)
        for n, o, a, chosen in zip(new, old, advantages, selected, strict=True)
    ]


def dppo(new, old, advantages, low, high, cap, kind):
    losses = []
    for n, o, a in zip(new, old, advantages, strict=True):
        p, q = math.exp(n), math.exp(o)
        if kind == "tv":
            moved = abs(p - q)
        else:
            moved = q * math.log((q + 1e-8) / (p + 1e-8)) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        outside = (a > 0 and p > q and moved > high) or (a < 0 and p < q and moved > low)
        losses.append(0.0 if outside else -min(p / q, cap) * a * n)
    return losses


def dro(new, old, advantages, beta):
    return [-(a * n - beta / 2 * (n - o) ** 2) for n, o, a in zip(new, old, advantages, strict=True)]


def sequence_ratio(new, old, mask):
    return math.exp(sum((n - o) * m for n, o, m in zip(new, old, mask, strict=True)))


def vespo(new, old, advantages, mask, good, bad):
    """good, bad: (k, lambda)."""
    w, losses = sequence_ratio(new, old, mask), []
    for n, a in zip(new, advantages, strict=True):
        k, rate = good if a >= 0 else bad
        losses.append(-(w**k) * math.exp(-rate * w) / math.exp(-rate) * a * n)
    return losses


def topr(new, old, advantages, mask):
    w = sequence_ratio(new, old, mask)
    return [-(clip(w, 0, 1) if a < 0 else 1) * a * n for n, a in zip(new, advantages, strict=True)]


def influences(new, old, advantages, mask, dual, decay_rate, width, high_only, safe):
    """Return FIPO's f_t."""
    logs, gamma, weights = [n - o for n, o in zip(new, old, strict=True)], 0.5 ** (1 / decay_rate), []
    for t, a in enumerate(advantages):
        future = sum(gamma ** (k - t) * logs[k] for k in range(t, len(logs)) if mask[k] and logs[k] <= math.log(dual))
        f = clip(math.exp(future), 1 if high_only else 1 - width, 1 + width)
        weights.append(clip(f, 0.8, 1) if a < 0 and math.exp(logs[t]) > safe else f)
    return weights


def future_kl(new, old, advantages, mask, low, high, dual, *keys):
    weights = influences(new, old, advantages, mask, dual, *keys)
    return vanilla(new, old, [a * f for a, f in zip(advantages, weights, strict=True)], low, high, dual)


# -- other formulas --------------------------------------------------------------------------------------------------


def aggregate(mode, losses, masks, horizon):
    """Reduce rows of token losses and masks to one number over the whole batch."""
    having = [sum(mask) for mask in masks]
    sums = [sum(x * m for x, m in zip(row, mask, strict=True)) for row, mask in zip(losses, masks, strict=True)]
    rows = max(sum(count > 0 for count in having), 1)
    if mode == "token-mean":
        return sum(sums) / max(sum(having), 1)
    if mode == "token-sum":
        return sum(sums)
    if mode == "seq-mean-token-sum":
        return sum(sums) / rows
    if mode == "seq-mean-token-mean":
        return sum(total / max(count, 1) for total, count in zip(sums, having, strict=True)) / rows
    return sum(sums) / rows / horizon


def kl_value(kind, delta):
    kind = kind.rstrip("+")
    if kind in ("kl", "k1"):
        return delta
    if kind == "abs":
        return abs(delta)
    if kind in ("mse", "k2"):
        return delta**2 / 2
    bounded = clip(-delta, -20, 20)
    return clip(math.exp(bounded) - bounded - 1, -10, 10)


def value_loss(values, old, returned, width):
    losses = []
    for v, o, r in zip(values, old, returned, strict=True):
        losses.append(max((v - r) ** 2, (clip(v, o - width, o + width) - r) ** 2) / 2)
    return losses


def importance(log_ratios, kind, low, high):
    weights_of_rows = []
    for row in log_ratios:
        weights = []
        for log_ratio in row:
            w = math.exp(clip(log_ratio if kind == "token" else sum(row), -20, 20))
            weights.append(min(w, high) if low is None else (w if low <= w <= high else 0.0))
        weights_of_rows.append(weights)
    return weights_of_rows


def optimal_token_baseline(rewards, groups, log_probs, squares, weights):
    gains, energies = returns(rewards, 1.0), []
    for row in zip(log_probs, squares, weights, strict=True):
        each = [max(0.0, 1 - 2 * math.exp(p) + s) * w * w for p, s, w in zip(*row, strict=True)]
        energies.append([sum(each[: t + 1]) for t in range(len(each))])
    advantages = []
    for i, row in enumerate(gains):
        advantages.append([])
        for t, gain in enumerate(row):
            there = [j for j, other in enumerate(gains) if groups[j] == groups[i] and len(other) > t]
            energy = sum(energies[j][t] for j in there)
            baseline = sum(gains[j][t] * energies[j][t] for j in there) / energy if len(there) > 1 else 0.0
            advantages[-1].append(gain - baseline)
    return advantages


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def accepted(log_ratios, rules):
    """rules: (over, measure, low, high). The engine's probability of every token is exp(-5)."""
    engine = math.exp(-5)
    measures = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    measures["binary_kl"] = lambda x: max(
        binary_kl(engine, engine * math.exp(x)), binary_kl(engine * math.exp(x), engine)
    )
    reductions = {"seq_sum": sum, "seq_mean": mean, "seq_max": max}
    masks = []
    for row in log_ratios:
        keep = [1.0] * len(row)
        for over, measure, low, high in rules:
            values = [measures[measure](x) for x in row]
            if over != "token" and values:
                values = [reductions[over](values)] * len(row)
            keep = [k * (low <= value <= high) for k, value in zip(keep, values, strict=True)]
        masks.append(keep)
    return masks


def overlong(length, limit, buffer, factor):
    expected = limit - buffer
    return 0.0 if length <= expected else max(-factor, -(length - expected) / buffer * factor)


# -- advantages of turns: rewards of every turn, groups -> one number per turn ---------------------------------------


def discounted(rewards, gamma):
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def turn_rloo(rewards, groups, gamma):
    returns = [discounted(row, gamma) for row in rewards]
    advantages = []
    for i, row in enumerate(returns):
        others = [returns[j] for j in members(groups, i) if j != i]
        advantages.append([value - mean([o[min(t, len(o) - 1)] for o in others]) for t, value in enumerate(row)])
    return advantages


def gigpo(rewards, groups, states, gamma, weight, by_std=True):
    returns = [discounted(row, gamma) for row in rewards]
    of_answers = grpo([sum(row) for row in rewards], groups, by_std)
    advantages = []
    for i, row in enumerate(returns):
        advantages.append([])
        for t, value in enumerate(row):
            fellows = [
                returns[j][k] for j in members(groups, i) for k, state in enumerate(states[j]) if state == states[i][t]
            ]
            step = 0.0
            if len(fellows) > 1:
                step = (value - mean(fellows)) / (std(fellows) + 1e-6) if by_std else value - mean(fellows)
            advantages[-1].append(of_answers[i] + weight * step)
    return advantages
