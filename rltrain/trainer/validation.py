"""Validation: responses to all validation prompts, their scores, and metrics under verl's names. It needs only engines
and scorers, so an evaluation runs just this.

Metrics per data source are mean, best, worst and majority over the responses to a prompt. Problem: verl bootstraps
every metric by 1000 draws in Python, which takes minutes on large sets and adds noise. Choice: best and worst are the
expectation of that bootstrap. Left out: the majority, which has no cheap closed form because of ties and counts, so its
votes are still drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.common.columns import names as c
from rltrain.common.stop import Stop
from rltrain.config.schema import DataConfig
from rltrain.config.schema.rollout import RolloutConfig, ValKwargs
from rltrain.rewards.scorers.registry import summary_of
from rltrain.runtime.samples import Samples
from rltrain.trainer.masked_samples import failed_of, raise_on_failures
from rltrain.trainer.metrics.step import Answered, turn_metrics
from rltrain.trainer.metrics.timing import StepTimer
from rltrain.trainer.plan import Plan
from rltrain.trainer.rewards import Rewards
from rltrain.trainer.roles import Policy
from rltrain.workers.interface.tasks import GenerateTask
from rltrain.workers.rollout.contract import Sampling

Floats = NDArray[np.float64]
Column = NDArray[Any]
Rows = NDArray[np.int32]

# verl's values: the scorer's column to vote on, and the draws and seed of the bootstrap.
_VOTES = "pred"
_DRAWS, _SEED = 1000, 42
# This many responses keep an engine replica busy.
_BUSY_ENGINE = 128


class Validation:
    """Generation and scoring of the validation prompts.

    folder: the run folder, for messages. on_phase(name): called at the start of a phase.
    """

    _reads_images = False
    """True if a pass of the trainer reads the responses, with the images of their prompts."""

    def __init__(
        self,
        rollout: RolloutConfig,
        data: DataConfig,
        plan: Plan,
        policy: Policy,
        rewards: Rewards,
        folder: str,
        on_phase: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._rollout, self._data, self._plan, self._policy = rollout, data, plan, policy
        self._rewards, self._folder, self._on_phase = rewards, folder, on_phase

    @property
    def num_prompts(self) -> int:
        """Number of validation prompts."""
        return self._rewards.num_rows("val")

    @property
    def num_samples(self) -> int:
        """Responses per prompt."""
        settings = self._rollout.val_kwargs
        return 1 if settings.greedy else settings.n

    @property
    def prompts_at_once(self) -> int:
        """Prompts per chunk. A chunk has about as many samples as a step, so that a stop request takes effect as fast
        as during training."""
        step_size = self._plan.samples_per_step * self._plan.passes.trains
        return max(1, max(step_size, _BUSY_ENGINE * self._plan.num_engine_replicas) // self.num_samples)

    def answer(self, rows: Rows, step: int) -> Answered:
        """Generate and score responses to the prompts ``rows`` as `run` does, without metrics."""
        samples = self._generate(rows, step)
        samples.update(self._rewards.score("val", samples))
        return Answered(step, {}, samples, self.num_samples)

    def run(self, step: int, stop: Stop) -> Answered | None:
        """Generate and score ``val_kwargs.n`` responses to every validation prompt.

        step: completed steps. Returns None if ``stop`` is requested meanwhile.
        """
        timer = StepTimer(self._on_phase)
        with timer("testing"):
            answered = self._answer(step, stop)
        if answered is None:
            return None
        samples, scores, num_samples = answered
        samples.update(scores)
        # In a validation no penalty is subtracted from the score, so `score` and `reward` are equal; verl calls it
        # reward.
        hidden = {c.SCORE, c.REWARD_FAILED, c.REWARD_TIMEOUT, c.REWARD_ERROR}
        # Without a penalty or a reward model, the rule score equals the reward.
        hidden |= set() if {c.MODEL_SCORE, c.OVERLONG} & scores.keys() else {c.RULE_SCORE}
        extras = {name.removeprefix(c.SCORER): values for name, values in scores.items() if name.startswith(c.SCORER)}
        columns = extras | {name: scores[name] for name in scores if name not in hidden and c.SCORER not in name}
        # A failed trajectory carries no information about the policy.
        failed = failed_of(samples)
        columns |= {name: np.where(failed, np.nan, each) for name, each in columns.items() if each.dtype != object}
        metrics = validation_metrics(self._rewards.data_sources("val"), columns, num_samples)
        metrics |= self.summaries(columns)
        metrics |= {f"val-aux/{name}": value for name, value in self._rewards.judged.items()}
        metrics |= timer.metrics() | {"val-aux/response_length/mean": float(samples[c.RESPONSE_LENGTH].mean())}
        most_turns = self._rollout.multi_turn.max_assistant_turns
        metrics |= {f"val-aux/{name}": value for name, value in turn_metrics(samples, most_turns).items()}
        return Answered(step, metrics, samples, num_samples)

    def summaries(self, columns: dict[str, Column]) -> dict[str, float]:
        """Return `summary_metrics` of all prompts."""
        sources = self._rewards.data_sources("val")
        if not any(map(summary_of, set(sources))):
            return {}
        return summary_metrics(sources, self._rewards.extra_infos("val"), columns, self.num_samples)

    def _answer(self, step: int, stop: Stop) -> tuple[Samples, dict[str, Column], int] | None:
        """Return the responses to all validation prompts, their scores, and the number of responses per prompt."""
        rows, num_samples, at_once = np.arange(self.num_prompts, dtype=np.int32), self.num_samples, self.prompts_at_once
        parts = []
        # Chunks have equal sizes, because in a small last chunk more than half of the responses may fail by chance,
        # which would stop the run (`raise_on_failures`).
        for part in np.array_split(rows, -(-len(rows) // at_once)):
            parts.append(self._generate(part, step))
            if stop.requested:
                return None
        samples = Samples.join([(part, np.arange(len(part))) for part in parts])
        # Each chunk numbers its groups from 0; after joining the numbers must be unique.
        samples.update({c.GROUP: np.arange(len(rows)).repeat(num_samples)})
        # Score in chunks too, because a single call would take many times as long as in a step, and time out.
        scores = self._rewards.score("val", samples, at_once=at_once * num_samples)
        return samples, scores, num_samples

    def _generate(self, rows: Rows, step: int) -> Samples:
        settings = self._rollout.val_kwargs
        sampling = sampling_of(settings, self._rollout, self._data, greedy=settings.greedy)
        seed = rollout_seed(self._rollout, self._data)
        task = GenerateTask("val", rows, self.num_samples, sampling, seed, step, is_learnt_from=self._reads_images)
        samples = self._policy.generate(task)[0]
        raise_on_failures(samples, self._policy.failure, self._folder)
        return samples


def sampling_of(keys: RolloutConfig | ValKwargs, rollout: RolloutConfig, data: DataConfig, *, greedy: bool) -> Sampling:
    """Return the sampling parameters of ``keys``, with the values of ``rollout`` for keys that have none."""
    most = (keys.max_tokens if isinstance(keys, ValKwargs) else None) or data.max_response_length
    stop = tuple(rollout.stop if keys.stop is None else keys.stop)
    return Sampling(
        most, keys.temperature or 1.0, keys.top_k, keys.top_p, greedy, rollout.ignore_eos, keys.min_p,
        keys.repetition_penalty, stop,
    )  # fmt: skip


def rollout_seed(rollout: RolloutConfig, data: DataConfig) -> int:
    """Return the seed of all responses."""
    return data.seed if rollout.seed is None else rollout.seed


def validation_metrics(sources: Sequence[str], columns: dict[str, Column], num_samples: int) -> dict[str, float]:
    """Return metrics by data source.

    sources: data source per prompt [p]. columns[name]: a number (NaN: missing) or text per response [p * num_samples].
    The core variable of a source is ``acc`` if its scorer returns it, else ``reward``. Its mean@N, best@N/mean and
    maj@N/mean go under val-core/, all others under val-aux/. ``pred``: text of a response in the majority vote.
    """
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        rows = np.array([row_source == source for row_source in sources])
        numbers_here = {name: values.reshape(len(sources), num_samples)[rows] for name, values in columns.items()}
        votes = _vote_shares(numbers_here[_VOTES]) if _VOTES in numbers_here else {}
        numbers = {name: values for name, values in numbers_here.items() if values.dtype != object}
        # A column that only some rows' scorers return is averaged over those rows.
        rows_with_number = {name: ~np.isnan(values).all(1) for name, values in numbers.items()}
        core = "acc" if rows_with_number.get("acc", np.zeros(1)).any() else "reward"
        for name, has_number in rows_with_number.items():
            if not has_number.any():
                continue
            shares = {k: share[has_number] for k, share in votes.items()}
            for kind, value in _statistics(numbers[name][has_number], shares):
                is_core = kind in {f"mean@{num_samples}", f"best@{num_samples}/mean", f"maj@{num_samples}/mean"}
                metrics[f"{'val-core' if name == core and is_core else 'val-aux'}/{source}/{name}/{kind}"] = value
            means = np.nanmean(numbers[name][has_number], 1)
            if name == core and len(means) > 1:
                error = means.std(ddof=1) / np.sqrt(len(means))
                metrics[f"val-aux/{source}/{name}/sem@{num_samples}"] = float(error)
    return metrics


def summary_metrics(
    sources: Sequence[str], extra_infos: Sequence[dict[str, Any]], columns: dict[str, Column], num_samples: int
) -> dict[str, float]:
    """Return a scorer's summary over all rows of a source (`summary_of`), as ``val-core/<source>/acc/<name>``.

    sources, extra_infos: per prompt [p]. columns["acc"] [p * num_samples]. The i-th responses to all prompts are
    summarised together, and the N summaries are averaged.
    """
    metrics: dict[str, list[float]] = {}
    if "acc" not in columns:
        return {}
    accs = columns["acc"].reshape(len(sources), num_samples)
    for source in dict.fromkeys(sources):
        summary, rows = summary_of(source), [row for row, its_source in enumerate(sources) if its_source == source]
        for number in range(num_samples) if summary else ():
            values = summary([extra_infos[row] for row in rows], accs[rows, number].tolist()) if summary else {}
            for name, value in values.items():
                metrics.setdefault(f"val-core/{source}/acc/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in metrics.items()}


def _statistics(values: Floats, votes: dict[int, Floats]) -> Iterator[tuple[str, float]]:
    """Yield statistics of N responses per prompt [p, N], as means over prompts. votes[k] [p, N]: `_vote_shares`.

    best@k, worst@k, maj@k: mean and standard deviation over k responses drawn with replacement from the N, as in verl's
    bootstrap; best and worst are its limit. pass@k: k drawn without replacement.
    """
    n = values.shape[1]
    yield f"mean@{n}", float(np.nanmean(values, 1).mean())
    if n == 1:
        return
    yield f"std@{n}", float(np.nanstd(values, 1).mean())
    binary = np.isin(values[~np.isnan(values)], (0.0, 1.0)).all()
    for k in sizes(n)[1:]:
        pairs = {"best": _expected_best(values, k), "worst": _expected_best(-values, k)}
        # The worst of v is minus the best of -v; the second moment is the same.
        pairs["worst"] = (-pairs["worst"][0], pairs["worst"][1])
        if k in votes:
            shares = np.where(np.isnan(values), 0.0, votes[k])
            # A response without a number cannot represent the majority, so the others share its votes.
            shares, numbers = shares / np.maximum(shares.sum(1, keepdims=True), 1e-12), np.nan_to_num(values)
            pairs["maj"] = ((shares * numbers).sum(1), (shares * numbers**2).sum(1))
        for kind, (first, second) in pairs.items():
            yield f"{kind}@{k}/mean", float(first.mean())
            yield f"{kind}@{k}/std", float(np.sqrt(np.maximum(second - first**2, 0.0)).mean())
    if binary:
        for k in sizes(n):
            yield f"pass@{k}", float(pass_at(values, k).mean())


def _expected_best(values: Floats, k: int) -> tuple[Floats, Floats]:
    """Return first and second moment [p] of the largest of k draws with replacement: P(max <= v_(i)) = (i / N)^k."""
    ascending = np.sort(values, 1)  # NaN last
    counts = (~np.isnan(values)).sum(1, keepdims=True)
    below = np.minimum(np.arange(values.shape[1] + 1) / counts, 1.0) ** k
    weights, numbers = np.diff(below, axis=1), np.nan_to_num(ascending)
    return (weights * numbers).sum(1), (weights * numbers**2).sum(1)


def _vote_shares(votes: Column) -> dict[int, Floats]:
    """Return, for every k, the chance [p, N] of each response to represent the majority of k draws (ties: uniform)."""
    n = votes.shape[1]
    # The generator is seeded for each source, so that no metric depends on the other sources.
    random = np.random.default_rng(_SEED)
    shares = {k: np.zeros(votes.shape) for k in sizes(n)[1:]}
    for prompt, texts in enumerate(votes.astype(str)):
        _, codes = np.unique(texts, return_inverse=True)
        counts_of_texts = np.bincount(codes)
        rows = len(counts_of_texts) * np.arange(_DRAWS)[:, None]
        for k, share in shares.items():
            drawn = codes[random.integers(n, size=(_DRAWS, k))]
            # Each draw has a separate range of codes, so that a single bincount counts the votes of all draws.
            counts = np.bincount((rows + drawn).ravel(), minlength=_DRAWS * len(counts_of_texts)).reshape(_DRAWS, -1)
            winners = counts == counts.max(1, keepdims=True)
            # Responses with the winning text are equally likely to be evaluated, hence the division by their number.
            share[prompt] = ((winners / winners.sum(1, keepdims=True)).mean(0) / counts_of_texts)[codes]
    return shares


def sizes(n: int) -> list[int]:
    """Return the k of pass@k and maj@k: 1, 2, 4, 8 … below n, and n."""
    return [*(2**power for power in range(n.bit_length()) if 2**power < n), n]


def pass_at(values: Floats, k: int) -> Floats:
    """Return the chance [p] that one of k responses is right: 1 - C(N - c, k) / C(N, k)   (Chen et al. 2021, eq. 1)."""
    counts = (~np.isnan(values)).sum(1)
    wrong = counts - np.nansum(values, 1)
    all_wrong = np.ones(len(values))
    for drawn in range(k):
        left = counts - drawn  # if a prompt has fewer than k responses, `pass_at` uses all of them
        all_wrong *= np.where(left > 0, np.maximum(wrong - drawn, 0) / np.maximum(left, 1), 1.0)
    return 1.0 - all_wrong
