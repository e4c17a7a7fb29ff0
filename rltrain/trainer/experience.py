"""Prompts, responses and scores of a step. Dynamic sampling adds rounds until enough groups are informative.

Problem: dynamic sampling may never find enough informative groups once the policy solves nearly all prompts. Choice:
the number of rounds is bounded and rejected groups fill the batch, so every batch has the planned size. Left out:
keeping surplus groups for the next step, because the policy of that step is a different one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rltrain.algorithms.groups import SCORE_ROUNDING
from rltrain.common.columns import names as c
from rltrain.config.schema import Config
from rltrain.data.sampler import Sampler
from rltrain.runtime.samples import Samples
from rltrain.trainer.batching.balance import Ids
from rltrain.trainer.masked_samples import failed_of, raise_on_failures
from rltrain.trainer.metrics.generation import join_rounds, rollout_metrics
from rltrain.trainer.metrics.step import Metrics
from rltrain.trainer.metrics.timing import StepTimer
from rltrain.trainer.partial_rollout import PendingPrompts, Prompt
from rltrain.trainer.plan import Plan
from rltrain.trainer.progress import Progress
from rltrain.trainer.rewards import Rewards, accuracy, known_number
from rltrain.trainer.roles import Policy
from rltrain.trainer.validation import rollout_seed, sampling_of
from rltrain.workers.interface.tasks import GenerateTask

log = logging.getLogger(__name__)
# Number of rounds after which dynamic sampling logs its progress.
_SAY_ROUNDS = 10


@dataclass
class _Round:
    """A round of generation."""

    samples: Samples
    """Samples available for training, with scores."""
    generated: Samples
    """All samples of the round."""
    metrics: Metrics


class Experience:
    """Generation and scoring. ``batches_drawn`` (rounds of prompts so far) and ``pending`` are the run's data
    position."""

    def __init__(self, cfg: Config, plan: Plan, policy: Policy, rewards: Rewards, sampler: Sampler) -> None:
        self.batches_drawn = 0
        self._cfg = cfg
        self._plan = plan
        self._policy = policy
        self._rewards = rewards
        self.sampler = sampler
        self.pending = PendingPrompts(cfg.actor_rollout_ref.rollout, plan)
        self._rollout = cfg.actor_rollout_ref.rollout
        self._sampling = partial(sampling_of, self._rollout, self._rollout, cfg.data)
        self._seed = rollout_seed(self._rollout, cfg.data)

    def restore(self, progress: Progress, answers: Samples | None) -> None:
        """Restore the data position. answers: partial responses of the pending prompts, in a resumed run."""
        self.batches_drawn = progress.batches_drawn
        self.pending.restore(progress.in_flight, answers)
        if progress.sampler:
            self.sampler.restore(progress.sampler)

    @property
    def epoch(self) -> int:
        """Epoch (from 0) of the newest prompts."""
        return self.sampler.epoch(max(self.batches_drawn - 1, 0))

    def collect(self, timer: StepTimer) -> tuple[Samples, Metrics]:
        """Generate and score the prompts of one step: y ~ pi_old(. | x) and r(x, y), prompt-major."""
        rounds = [self._round(timer)]
        samples = rounds[0].samples
        metrics: Metrics = {}
        if self._cfg.algorithm.filter_groups.enable:
            useful = [self._useful_prompts(samples)]
            needed, most = self._plan.prompts_per_step, self._plan.max_generation_rounds
            while (have := sum(map(len, useful))) < needed and len(rounds) < most:
                if len(rounds) % _SAY_ROUNDS == 0:
                    log.info("dynamic sampling: %d of %d informative groups, %d rounds", have, needed, len(rounds))
                fills_up = len(rounds) * self._plan.prompts_per_round < needed
                rounds.append(self._round(timer))
                useful.append(self._useful_prompts(rounds[-1].samples))
                # A round without informative groups is dropped to free memory in the store, if earlier rounds have
                # enough samples to fill the batch.
                if not (len(useful[-1]) or fills_up):
                    rounds[-1].samples.forget()
            if have < needed:
                log.warning(
                    "dynamic sampling: %d of %d groups are informative after %d rounds; rejected groups fill the "
                    "batch. Raise algorithm.filter_groups.max_num_gen_batches for more rounds",
                    have, needed, len(rounds)
                )  # fmt: skip
            samples, metrics = self._choose([one_round.samples for one_round in rounds], useful)
        replicas, at_once = self._plan.num_engine_replicas, self._rollout.max_num_seqs
        shape = rollout_metrics([one_round.generated for one_round in rounds], replicas, at_once)
        return samples, join_rounds([one_round.metrics for one_round in rounds]) | shape | metrics

    def _round(self, timer: StepTimer) -> _Round:
        started = self.pending.next_prompts(self._draw)
        n = self._plan.answers_per_prompt
        sampling = self._sampling(greedy=not self._rollout.do_sample)
        # Scoring is started before generation, so that the first responses are scored while the last are still
        # generated.
        arrivals = self._rewards.begin_scoring("train", len(started) * n)
        rows = np.array([prompt.row for prompt in started], dtype=np.int32)
        # The seed uses the draw number of each prompt instead of the number of this round. A prompt that is retried in
        # a later step then gets the same random numbers.
        draws = np.array([prompt.draw for prompt in started])
        terms = self.pending.terms(started) | {"stream": arrivals is not None}
        task = GenerateTask("train", rows, n, sampling, self._seed, draws, **terms)
        with timer("gen"):
            generated, metrics = self._policy.generate(task, arrivals, self.pending.begun(started))
        raise_on_failures(generated, self._policy.failure, self._cfg.trainer.default_local_dir)
        samples = generated
        if self.pending.stops_early:
            samples, ids, waiting = self.pending.collect_complete(started, generated)
            metrics |= waiting
            if arrivals:
                arrivals.select(ids)
        with timer("reward"):
            samples.update(self._rewards.score("train", samples, arrivals))
        # The sampler observes rule scores only: a reward model's score has no fixed scale, so it is not a solve rate.
        if c.RULE_SCORE in samples.numbers:
            # Scorers without `acc` may return any number, but samplers expect a rate from 0 to 1. Unscored responses
            # are excluded: they would count as never solved.
            is_valid = ~(failed_of(samples) | (samples[c.REWARD_FAILED] > 0)).reshape(-1, n)
            solved = (accuracy(samples).clip(0, 1).reshape(-1, n) * is_valid).sum(1) / is_valid.sum(1).clip(1)
            known = is_valid.any(1)
            self.sampler.observe(samples[c.ROW][::n][known].tolist(), solved[known])
        return _Round(samples, generated, metrics | self._rewards.costs)

    def _draw(self) -> list[Prompt]:
        rows = self.sampler.rows(self.batches_drawn)
        self.batches_drawn += 1
        # Draws are numbered from 1, so increment first. Changing this would change the seeds of all responses.
        return [Prompt(row, self.batches_drawn) for row in rows]

    def _useful_prompts(self, samples: Samples) -> Ids:
        """Return prompts whose responses differ in ``filter_groups.metric``   (Yu et al. 2025, DAPO, section 3.2)."""
        metric = self._cfg.algorithm.filter_groups.metric
        if metric == "acc":
            values = accuracy(samples)
        elif metric in ("seq_reward", "seq_final_reward"):
            values = samples[c.SCORE]
        elif metric == "score":
            values = samples[c.RULE_SCORE if c.RULE_SCORE in samples.numbers else c.MODEL_SCORE]
        else:
            values = known_number(samples, metric, self._cfg.reward.on_error)
        values = _without_failed(values, failed_of(samples), self._plan.answers_per_prompt)
        if self._plan.answers_per_prompt < 2:  # there is nothing to compare, so all prompts are kept, as in verl
            return np.arange(len(values))
        # Any difference is a signal, however small, unless it is the rounding error of a sum.
        return np.flatnonzero(np.ptp(values, 1) > SCORE_ROUNDING * np.abs(values).max(1))

    def _choose(self, rounds: list[Samples], useful: list[Ids]) -> tuple[Samples, Metrics]:
        """Return useful groups in order, filled up with rejected groups if there are too few."""
        wanted, n = self._plan.prompts_per_step, self._plan.answers_per_prompt
        groups: list[Ids] = []
        for prompts_of_round in useful:
            groups.append(prompts_of_round[: wanted - sum(map(len, groups))])
        num_useful = sum(map(len, groups))
        # A batch of fixed size keeps mini-batches and ranks as planned. Most rejected groups have zero advantage, so
        # they only change the denominators.
        for number, samples in enumerate(rounds):
            rejected = np.setdiff1d(np.arange(len(samples) // n), useful[number])
            groups[number] = np.sort(np.concatenate([groups[number], rejected[: wanted - sum(map(len, groups))]]))
        ids = [(prompts[:, None] * n + np.arange(n)).ravel() for prompts in groups]
        samples = Samples.join(list(zip(rounds, ids, strict=True)))
        # Each round numbers its groups from 0; in the joined batch the numbers must be unique.
        samples.update({c.GROUP: np.arange(wanted).repeat(n)})
        generated = sum(map(len, rounds))
        tokens = sum(int(part[c.POLICY_TOKENS].sum()) for part in rounds)
        return samples, {
            "filter_groups/rounds": float(len(rounds)),
            "filter_groups/prompts_generated": generated / n,
            "filter_groups/prompts_thrown_away": generated / n - num_useful,
            "filter_groups/prompts_filled_up": float(wanted - num_useful),
            "filter_groups/tokens_thrown_away": float(tokens - int(samples[c.POLICY_TOKENS].sum())),
        }

    def add_greedy_baseline(self, samples: Samples, timer: StepTimer) -> Metrics:
        """Add ``baseline`` [n]: the score of the greedy response to the same prompt (ReMax). Returns cost metrics."""
        n = self._plan.answers_per_prompt
        # One greedy response per prompt: a second one would be identical.
        rows = samples[c.ROW][::n]
        with timer("gen_max"):
            sampling, drawn = self._sampling(greedy=True), self.batches_drawn
            task = GenerateTask("train", rows, 1, sampling, self._seed, drawn, is_learnt_from=False)
            greedy, _ = self._policy.generate(task)
            raise_on_failures(greedy, self._policy.failure, self._cfg.trainer.default_local_dir)
            samples.update({c.BASELINE: self._rewards.score("train", greedy)[c.SCORE].repeat(n)})
            # A response whose baseline failed gets an advantage of 0.
            failed = failed_of(greedy).repeat(n)
            samples.update({name: samples[name] | failed for name in (c.MASKED, c.EXCLUDED_FROM_BASELINE)})
        return self._rewards.costs


def _without_failed(values: NDArray[np.float64], failed: NDArray[np.bool_], n: int) -> NDArray[np.float64]:
    """Return values [prompts, n] with failed responses replaced by another response to the same prompt."""
    values, failed = values.reshape(-1, n), failed.reshape(-1, n)
    other = np.take_along_axis(values, failed.argmin(axis=1, keepdims=True), 1)
    return np.where(failed, np.where(failed.all(axis=1, keepdims=True), 0.0, other), values)
