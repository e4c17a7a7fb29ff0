"""The training loop. `fit` is bookkeeping; `step` is the algorithm."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from rltrain.algorithms.advantages import ADVANTAGE_ESTIMATORS, OutcomeInputs
from rltrain.algorithms.aggregation import Denominators
from rltrain.config.schema import Config
from rltrain.controller.samples import Samples
from rltrain.data.order import BatchOrder
from rltrain.errors import NonFiniteError, RewardError
from rltrain.models.optim import learning_rate
from rltrain.trainer import metrics as m
from rltrain.trainer.balance import Ids, Layout, lay_out, rank_tokens
from rltrain.trainer.metrics import Metrics
from rltrain.trainer.plan import Plan
from rltrain.trainer.roles import Policy, Scorers
from rltrain.trainer.saving import Saver
from rltrain.trainer.timing import StepTimer
from rltrain.trainer.tracking import Tracker
from rltrain.trainer.validation import validation_metrics
from rltrain.workers.actor_rollout_ref import GenerateTask, MiniBatch
from rltrain.workers.rollout.base import Sampling

log = logging.getLogger(__name__)

# Validation draws its random numbers from another stream than training.
_VALIDATION_SEED = 0x5EED
_MAX_SKIPPED_STEPS = 3


@dataclass
class StopFlag:
    """Set by a signal; looked at between steps."""

    requested: bool = False


class PPOTrainer:
    """Drives policy, reference and scorers through the steps of ``plan``."""

    def __init__(
        self,
        cfg: Config,
        plan: Plan,
        policy: Policy,
        scorers: Scorers,
        order: BatchOrder,
        tracker: Tracker,
        saver: Saver,
        stop: StopFlag,
    ) -> None:
        self.cfg = cfg
        self.plan = plan
        self.actor = policy
        self.rewards = scorers
        self._order = order
        self._tracker = tracker
        self._saver = saver
        self._stop = stop
        self._rollout = cfg.actor_rollout_ref.rollout
        self._seed = cfg.data.seed if self._rollout.seed is None else self._rollout.seed
        self._skipped_in_a_row = 0

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def step(self, step: int) -> Metrics:
        """One PPO iteration (Schulman et al. 2017, algorithm 1); with adv_estimator=grpo, Shao et al. 2024, algorithm 1."""
        timer = StepTimer()
        metrics: Metrics = {}
        with timer("step"):
            rows = self._order.rows(step - 1)
            with timer("gen"):
                samples, generated = self.actor.generate(
                    self._training_task(rows, step)
                )  # y ~ pi_old(. | x), n answers each
            with timer("reward"):
                samples.update(self.rewards.score("train", samples))  # r(x, y)
            mini_batches = self._mini_batches(samples)
            layout = self._lay_out(mini_batches, samples)
            with timer("old_log_prob"):
                metrics |= self.actor.log_probs(
                    samples, layout.score
                )  # log pi_old(y | x), by the trainer's own weights
            if self.actor.has_reference:
                with timer("ref"):
                    self.actor.ref_log_probs(samples, layout.reference)  # log pi_ref(y | x)
            with timer("adv"):
                samples.update(self._advantages(samples))  # A(x, y)
            with timer("update_actor"):
                metrics |= self._update(samples, mini_batches, layout.update, step)  # maximise the clipped surrogate
        timing = timer.metrics() | generated
        metrics |= timing | m.throughput_metrics(samples, timing, self.plan.num_devices)
        metrics |= m.flops_metrics(samples, timing, self.actor.model, self.plan.num_devices, self.cfg.actor_rollout_ref.actor.ppo_epochs)
        return metrics | self._describe(samples, layout.update, step)

    def _training_task(self, rows: list[int], step: int) -> GenerateTask:
        sampling = Sampling(
            num_samples=self._rollout.n,
            max_tokens=self.cfg.data.max_response_length,
            temperature=self._rollout.temperature,
            top_k=self._rollout.top_k,
            top_p=self._rollout.top_p,
            greedy=not self._rollout.do_sample,
            ignore_eos=self._rollout.ignore_eos,
        )
        return GenerateTask("train", tuple(rows), sampling, self._seed, step)

    def _mini_batches(self, samples: Samples) -> list[Ids]:
        """Ids of the samples of each optimizer step: consecutive prompts with all their answers, once per epoch over the batch."""
        prompts = np.arange(self.plan.prompts_per_step)
        size = self.plan.prompts_per_mini_batch
        answers = np.arange(self._rollout.n)
        chunks = prompts.reshape(-1, size)
        one_pass = [(chunk[:, None] * self._rollout.n + answers).ravel() for chunk in chunks]
        return one_pass * self.cfg.actor_rollout_ref.actor.ppo_epochs

    def _lay_out(self, mini_batches: list[Ids], samples: Samples) -> StepLayout:
        lengths = samples["prompt_length"] + samples["response_length"]
        ranks = self.plan.data_parallel_size
        once = mini_batches[: len(mini_batches) // self.cfg.actor_rollout_ref.actor.ppo_epochs]
        return StepLayout(
            score=lay_out(once, lengths, ranks, self.plan.log_prob_budget),
            reference=lay_out(once, lengths, ranks, self.plan.ref_budget),
            update=lay_out(mini_batches, lengths, ranks, self.plan.update_budget),
        )

    def _advantages(self, samples: Samples) -> dict[str, np.ndarray]:
        algorithm = self.cfg.algorithm
        inputs = OutcomeInputs(torch.from_numpy(samples["reward"]), torch.from_numpy(samples["group"]))
        advantages = ADVANTAGE_ESTIMATORS[algorithm.adv_estimator](inputs, algorithm.norm_adv_by_std_in_grpo)
        return {"advantage": advantages.numpy()}

    def _update(self, samples: Samples, mini_batches: list[Ids], layout: Layout, step: int) -> Metrics:
        lengths = samples["response_length"]
        counts = [
            Denominators(int(lengths[ids].sum()), int((lengths[ids] > 0).sum()), self.cfg.data.max_response_length)
            for ids in mini_batches
        ]
        work = [
            [MiniBatch(sizes, count) for sizes, count in zip(layout.micro_sizes[rank], counts, strict=True)]
            for rank in range(self.plan.data_parallel_size)
        ]
        rate = learning_rate(
            step - 1, self.cfg.actor_rollout_ref.actor.optim, self.plan.lr_warmup_steps, self.plan.total_steps
        )
        results = self.actor.update(samples, layout, work, rate)
        metrics = m.update_metrics(results, np.array([count.tokens for count in counts])) | {"actor/lr": rate}
        if self.actor.has_reference:
            metrics["actor/kl_coef"] = self.cfg.actor_rollout_ref.actor.kl_loss_coef
        self._watch_skipped(metrics)
        return metrics

    def _watch_skipped(self, metrics: Metrics) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if metrics["actor/steps_skipped"] else 0
        if self._skipped_in_a_row >= _MAX_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{_MAX_SKIPPED_STEPS} steps in a row had a loss or gradient that is not finite; stopping in spite of "
                "trainer.on_nonfinite=skip. Lower actor_rollout_ref.actor.optim.lr and resume from the newest checkpoint."
            )

    def _describe(self, samples: Samples, layout: Layout, step: int) -> Metrics:
        lengths = samples["prompt_length"] + samples["response_length"]
        tokens_where_generated = [int(lengths[ids].sum()) for ids in self.actor.generated_ids]
        return (
            m.sample_metrics(samples, self.cfg.data.max_prompt_length)
            | m.reward_metrics(samples)
            | m.balance_metrics(tokens_where_generated, rank_tokens(layout, lengths))
            | {
                "training/global_step": float(step),
                "training/epoch": float(self._order.epoch(step - 1)),
                "perf/driver_bytes_per_sample": self.actor.take_driver_bytes() / len(samples),
            }
        )

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def fit(self, first_step: int) -> int:
        """Run steps ``first_step`` + 1 to the last of the plan, with validation and saving. Returns the last step done."""
        trainer = self.cfg.trainer
        if self.rewards.has_validation and (trainer.val_only or (trainer.val_before_train and not first_step)):
            self._tracker.log(first_step, self.validate(first_step))
        if trainer.val_only:
            return first_step
        if first_step >= self.plan.total_steps:
            log.info("nothing left to do: the run already has its %d steps (trainer.total_training_steps)", self.plan.total_steps)
        step = first_step
        for step in range(first_step + 1, self.plan.total_steps + 1):
            started = time.perf_counter()
            try:
                metrics = self.step(step)
            except RewardError:
                self._saver.rescue(step - 1)
                raise
            last = step == self.plan.total_steps
            if self.rewards.has_validation and trainer.test_freq > 0 and (last or step % trainer.test_freq == 0):
                metrics |= self.validate(step)
            stopping = last or self._stop.requested
            if self._saver.due(step, stopping):
                metrics |= self._saver.save(step)
            metrics["timing_s/wall"] = time.perf_counter() - started
            self._tracker.log(step, metrics)
            if stopping:
                break
        return step

    def validate(self, step: int) -> Metrics:
        """Answer every validation prompt ``val_kwargs.n`` times and score it."""
        timer = StepTimer()
        with timer("testing"):
            val = self._rollout.val_kwargs
            greedy = not val.do_sample or val.temperature == 0
            num_samples = 1 if greedy else val.n
            sampling = Sampling(
                num_samples,
                self.cfg.data.max_response_length,
                val.temperature or 1.0,
                val.top_k,
                val.top_p,
                greedy,
                self._rollout.ignore_eos,
            )
            rows = tuple(range(self.rewards.num_rows("val")))
            samples, _ = self.actor.generate(GenerateTask("val", rows, sampling, self._seed ^ _VALIDATION_SEED, step))
            scores = self.rewards.score("val", samples)
        numbers = {
            name: values for name, values in scores.items() if name not in ("score", "reward_failed", "reward_timeout")
        }
        metrics = validation_metrics(self.rewards.data_sources("val"), numbers, num_samples)
        return metrics | timer.metrics() | {"val-aux/response_length/mean": float(samples["response_length"].mean())}


@dataclass(frozen=True)
class StepLayout:
    """Who computes what in the passes of one step."""

    score: Layout
    reference: Layout
    update: Layout
