"""The algorithm: `PPOTrainer.step` is one iteration. The loop around it, with saving and trackers, is `Trainer.fit` in run.py."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from rltrain import columns as c
from rltrain.algorithms.aggregation import Denominators
from rltrain.config.schema import Config
from rltrain.controller.samples import Samples
from rltrain.errors import NonFiniteError, SyncError
from rltrain.models.optim import learning_rate
from rltrain.seeds import stream
from rltrain.stop import Stop
from rltrain.trainer import metrics as m
from rltrain.trainer.advantage import Advantages, Whitening
from rltrain.trainer.archive import Archive
from rltrain.trainer.balance import Ids, Layout, Workload, lay_out, rank_tokens, slack_metrics
from rltrain.trainer.callbacks import Callbacks
from rltrain.trainer.experience import Experience
from rltrain.trainer.metrics import Metrics
from rltrain.trainer.plan import PassBudget, Plan
from rltrain.trainer.progress import Progress
from rltrain.trainer.rewards import Rewards, accuracy
from rltrain.trainer.roles import Critic, Policy
from rltrain.trainer.timing import StepTimer
from rltrain.trainer.validation import validation_metrics
from rltrain.workers.tasks import MiniBatch, UpdateTask

log = logging.getLogger(__name__)

_MAX_SKIPPED_STEPS = 3


class PPOTrainer:
    """Drives policy, critic, reference and rewards through the steps of ``plan``."""

    def __init__(
        self,
        cfg: Config,
        plan: Plan,
        policy: Policy,
        critic: Critic | None,
        rewards: Rewards,
        experience: Experience,
        model_sizes: dict[str, float],
        callbacks: Callbacks | None = None,
        archive: Archive | None = None,
    ) -> None:
        self.cfg = cfg
        self.plan = plan
        self.actor = policy
        self.critic = critic
        self.rewards = rewards
        self.experience = experience
        self.archive = archive
        self.advantages = Advantages(cfg, plan.passes)
        self.callbacks = callbacks or Callbacks()
        self._actor_cfg = cfg.actor_rollout_ref.actor
        self.model_sizes = model_sizes
        self._skipped_in_a_row: dict[str, int] = {}
        self.on_phase: Callable[[str], None] = lambda name: None

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def step(self, step: int) -> Metrics:
        """One PPO iteration (Schulman et al. 2017, algorithm 1). GRPO (Shao et al. 2024, algorithm 1): the same, without a critic."""
        passes, timer = self.plan.passes, StepTimer(self.on_phase)
        self._take_driver_bytes()  # those of validation and saving
        with timer("step"):
            samples, generated = self.experience.collect(timer)  # y ~ pi_old(. | x), n answers each, and r(x, y)
            if passes.greedy_baseline:
                self.experience.add_greedy_baseline(samples, timer)
            measured: Metrics = {}
            alarm: Metrics = {}
            if not passes.bypass:
                with timer("old_log_prob"):  # log pi_old(y | x), by the trainer's own weights
                    measured = self._old_log_probs(samples, step)
                alarm = self._watch_gap(m.policy_metrics(measured)) if measured else {}
            if passes.ref:
                with timer("ref"):  # log pi_ref(y | x)
                    layout = self._pass(samples, self.plan.ref_budget, self.plan.ref_data_parallel_size)
                    self.actor.ref_log_probs(samples, layout)
            if self.critic:
                with timer("values"):  # V(x, y_<t)
                    layout = self._pass(samples, self.plan.values_budget, self.plan.critic_data_parallel_size)
                    self.critic.values(samples, layout)
            with timer("adv"):  # A(x, y)
                layout = self._pass(samples, self.plan.log_prob_budget)
                whitening, metrics = self.advantages.estimate(samples, self.actor, layout)
            if self.critic:
                with timer("update_critic"):  # fit V to the returns
                    metrics |= self._update_critic(samples, step)
            if passes.updates_actor(step):
                with timer("update_actor"):  # maximise the clipped surrogate
                    found, measured = self._update_actor(samples, whitening, step, measured)
                    metrics |= found
        metrics |= m.policy_metrics(measured)
        metrics |= alarm or self._watch_gap(metrics)
        timing = timer.metrics() | generated
        metrics |= timing | m.throughput_metrics(samples, timing, self.plan.num_devices)
        cost, tokens = (metrics.get(f"perf/balance/{name}", 0.0) for name in ("cost", "tokens"))
        scored_cost = measured.get("cost", 0.0)
        metrics |= m.flops_metrics(cost, tokens, timing, self.model_sizes, self.plan.num_devices, scored_cost)
        if self.archive:
            self.archive.keep("train", step, samples, self.plan.answers_per_prompt)
        metrics |= self._describe(samples, layout, step)
        return metrics | self.callbacks.on_step(step, metrics, samples.numbers)

    def _pass(
        self, samples: Samples, budget: PassBudget, num_ranks: int | None = None, ids: Ids | None = None
    ) -> Layout:
        """Every sample (or those of ``ids``) once, spread over the data-parallel ranks, the actor's unless said."""
        ids = np.arange(len(samples)) if ids is None else ids
        return lay_out([ids], self._workload(samples), num_ranks or self.plan.data_parallel_size, budget)

    def _old_log_probs(self, samples: Samples, step: int) -> Metrics:
        """The pass over all samples but those whose log-probs the update itself will compute before its first optimizer step."""
        scored = np.ones(len(samples), dtype=bool)
        if self.plan.passes.waits_for_update(step):
            scored[self._actor_mini_batches(step)[0]] = False
        samples.update({c.HAS_OLD_LOG_PROBS: scored})
        if not scored.any():
            return {}
        layout = self._pass(samples, self.plan.log_prob_budget, ids=np.flatnonzero(scored))
        cost = slack_metrics(layout, self._workload(samples))["perf/balance/cost"]
        return self.actor.log_probs(samples, layout) | {"cost": cost}

    def _actor_mini_batches(self, step: int) -> list[Ids]:
        cfg = self._actor_cfg
        return self._mini_batches(self.plan.prompts_per_mini_batch, cfg.ppo_epochs, cfg.shuffle, step)

    def _workload(self, samples: Samples) -> Workload:
        """A pair of query and key costs 4 FLOPs a layer and element of its heads, a token 2 for each weight of a matrix product."""
        pair_cost = 2 * self.model_sizes["attention_width"] / self.model_sizes["matmul_parameters"]
        prompts, answers = samples[c.PROMPT_LENGTH], samples[c.RESPONSE_LENGTH]
        return Workload.of_groups(prompts, answers, samples[c.GROUP], pair_cost)

    def _mini_batches(self, size: int, epochs: int, shuffle: bool, step: int) -> list[Ids]:
        """Ids of the samples of each optimizer step: prompts with all their answers, every prompt once an epoch over the batch."""
        n = self.plan.answers_per_prompt
        found: list[Ids] = []
        for epoch in range(epochs):
            prompts = np.arange(self.plan.prompts_per_step)
            if shuffle:
                keys = stream(self.cfg.data.seed, "mini_batches", step, epoch)
                prompts = np.argsort(keys.random_raw(len(prompts)), kind="stable")
            found += [(chunk[:, None] * n + np.arange(n)).ravel() for chunk in prompts.reshape(-1, size)]
        return found

    def _update_actor(
        self, samples: Samples, whitening: Whitening, step: int, measured: Metrics
    ) -> tuple[Metrics, Metrics]:
        """Returns metrics, and ``measured`` with what the update measured before its first optimizer step."""
        cfg = self._actor_cfg
        mini_batches = self._actor_mini_batches(step)
        counts = [self._denominators(samples, ids) for ids in mini_batches]
        # Samples without any gradient are left out after everything was counted: the loss is the same, the work is not.
        silent = self.advantages.silent(samples)
        mini_batches = [ids[~silent[ids]] for ids in mini_batches]
        work = self._workload(samples)
        layout = lay_out(mini_batches, work, self.plan.data_parallel_size, self.plan.update_budget)
        rate = learning_rate(step - 1, cfg.optim, self.plan.lr_warmup_steps, self.plan.total_steps)
        weight_scale = 1.0
        if self.cfg.algorithm.rollout_correction.rollout_is_batch_normalize:
            weight_scale = 1.0 / max(m.mismatch_metrics(measured).get("rollout_corr/rollout_is_mean", 1.0), 1e-8)
        samples.update({c.SAMPLE_ID: np.arange(len(samples))})
        seed = int(stream(self.cfg.data.seed, "selection", step).random_raw())
        tasks = [
            UpdateTask(tuple(each), rate, whitening.shift, whitening.scale, weight_scale, seed)
            for each in _work(layout, counts, self.plan.passes.waits_for_update(step))
        ]
        results = self.actor.update(samples, layout, tasks)
        computed = np.array([self._loss_tokens(samples)[ids].sum() for ids in mini_batches])
        metrics = m.update_metrics(results, computed, "actor") | {"actor/lr": rate}
        samples.update({c.SILENT: silent})
        metrics |= slack_metrics(layout, work)
        metrics["perf/update_tokens_skipped"] = float(_tokens(samples)[silent].sum() * cfg.ppo_epochs)
        if cfg.use_kl_loss:
            metrics["actor/kl_coef"] = cfg.kl_loss_coef
        self._watch_skipped("actor", metrics)
        return metrics, m.add_up([measured, m.first_step_sums(results)])

    def _update_critic(self, samples: Samples, step: int) -> Metrics:
        assert self.critic is not None
        cfg = self.cfg.critic
        mini_batches = self._mini_batches(self.plan.critic_prompts_per_mini_batch, cfg.ppo_epochs, cfg.shuffle, step)
        counts = [self._denominators(samples, ids) for ids in mini_batches]
        layout = lay_out(
            mini_batches, self._workload(samples), self.plan.critic_data_parallel_size, self.plan.critic_budget
        )
        rate = learning_rate(step - 1, cfg.optim, self.plan.critic_lr_warmup_steps, self.plan.total_steps)
        results = self.critic.update(samples, layout, _work(layout, counts), rate)
        metrics = m.update_metrics(results, np.array([count.tokens for count in counts]), "critic")
        self._watch_skipped("critic", metrics)
        return metrics | {"critic/lr": rate}

    def _loss_tokens(self, samples: Samples) -> np.ndarray:
        """Tokens of each sample that count in the loss: all, but for what the rollout correction rejected."""
        return samples.numbers.get(c.LOSS_TOKENS, samples[c.RESPONSE_LENGTH])

    def _denominators(self, samples: Samples, ids: Ids) -> Denominators:
        tokens = self._loss_tokens(samples)[ids]
        horizon = self._actor_cfg.loss_scale_factor or self.cfg.data.max_response_length
        return Denominators(int(tokens.sum()), int((tokens > 0).sum()), horizon)

    def _watch_gap(self, metrics: Metrics) -> Metrics:
        """Say so, or stop, where the engine did not sample from the policy that is trained: before the update, if it is known then."""
        gap, limit = metrics.get("rollout/log_prob_gap/mean", 0.0), self.model_sizes["log_prob_gap_limit"]
        if gap <= limit:
            return {"rollout/log_prob_gap/alarm": 0.0}
        text = (
            f"rollout engine and trainer differ by {gap:.3g} in the log-prob of a sampled token (mean; limit {limit:.3g}, "
            "actor_rollout_ref.rollout.log_prob_gap_limit): stale weights, a stale cache, or kernels that compute otherwise. "
            "algorithm.rollout_correction.rollout_is=token corrects for a small gap."
        )
        if self.cfg.actor_rollout_ref.rollout.on_log_prob_gap == "stop":
            raise SyncError(text)
        log.warning(text)
        return {"rollout/log_prob_gap/alarm": 1.0}

    def _watch_skipped(self, role: str, metrics: Metrics) -> None:
        self._skipped_in_a_row[role] = (
            self._skipped_in_a_row.get(role, 0) + 1 if metrics[f"{role}/steps_skipped"] else 0
        )
        if self._skipped_in_a_row[role] >= _MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{role}: {_MAX_SKIPPED_STEPS} steps in a row had a loss or gradient that is not finite; stopping in spite of "
                "trainer.on_nonfinite=skip. Lower its optim.lr and resume from the newest checkpoint."
            )

    def _describe(self, samples: Samples, layout: Layout, step: int) -> Metrics:
        return (
            m.sample_metrics(samples, self.cfg.data.max_prompt_length)
            | m.reward_metrics(samples, accuracy(samples), weighted=bool(self.cfg.reward.weights))
            | m.balance_metrics(samples, self.plan.num_engine_replicas, rank_tokens(layout, _tokens(samples)))
            | {
                "training/global_step": float(step),
                "training/epoch": float(self.experience.epoch),
                "perf/driver_bytes_per_sample": self._take_driver_bytes() / len(samples),
            }
        )

    def _take_driver_bytes(self) -> int:
        return self.actor.take_driver_bytes() + (self.archive.take_driver_bytes() if self.archive else 0)

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """What a resumed run needs besides the weights."""
        drawn, sampler, line = self.experience.batches_drawn, self.experience.sampler, self.experience.line
        return Progress(drawn, self.advantages.kl_coef, sampler.state(), line.state())

    def restore(self, progress: Progress) -> None:
        """Go on where ``progress`` was."""
        self.experience.batches_drawn = progress.batches_drawn
        self.experience.line.restore(progress.in_flight)
        if progress.sampler:
            self.experience.sampler.restore(progress.sampler)
        if progress.kl_coef is not None and self.cfg.algorithm.kl_ctrl.type == "adaptive":
            self.advantages.kl_coef = progress.kl_coef

    def validate(self, step: int, stop: Stop) -> Metrics:
        """Answer every validation prompt ``val_kwargs.n`` times and score it. Nothing where ``stop`` is requested meanwhile."""
        timer = StepTimer(self.on_phase)
        with timer("testing"):
            found = self.experience.validation(step, stop)
        if found is None:
            return {}
        samples, scores, num_samples = found
        if self.archive:
            samples.update(scores)
            self.archive.keep("val", step, samples, num_samples)
            self.archive.show_validation(step, samples, num_samples)
        hidden = {c.SCORE, c.REWARD_FAILED, c.REWARD_TIMEOUT, c.REWARD_ERROR}
        hidden |= (
            set() if {c.MODEL_SCORE, c.OVERLONG} & scores.keys() else {c.RULE_SCORE}
        )  # else it is the reward itself
        extras = {name.removeprefix(c.SCORER): values for name, values in scores.items() if name.startswith(c.SCORER)}
        columns = extras | {name: each for name, each in scores.items() if name not in hidden and c.SCORER not in name}
        metrics = validation_metrics(self.rewards.data_sources("val"), columns, num_samples)
        metrics |= timer.metrics() | {"val-aux/response_length/mean": float(samples[c.RESPONSE_LENGTH].mean())}
        return metrics | self.callbacks.on_validation(step, metrics)


def _tokens(samples: Samples) -> np.ndarray:
    return samples[c.PROMPT_LENGTH] + samples[c.RESPONSE_LENGTH]


def _work(layout: Layout, counts: list[Denominators], first_waits: bool = False) -> list[list[MiniBatch]]:
    """The mini-batches of every rank. first_waits: the first of them has no old log-probs yet."""
    have = [not first_waits] + [True] * (len(counts) - 1)
    return [[MiniBatch(*each) for each in zip(mine, counts, have, strict=True)] for mine in layout.micro_sizes]
