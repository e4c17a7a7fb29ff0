"""PPO and its variants: `PPOTrainer.step` is one iteration.

Problem: optional passes, layouts and metrics would obscure the algorithm. Choice: `StepPasses` says which passes a step
has, so `step` has only the lines of the algorithm, and each phase writes its metrics to a `StepRecord`. Left out: the
loop with checkpoints and trackers (`run.fit.Trainer`), and all computations on tokens (the workers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from rltrain.algorithms.aggregation import Denominators
from rltrain.algorithms.moments import Moments, join
from rltrain.common.columns import names as c
from rltrain.common.seeds import stream
from rltrain.config.agents import several_turns
from rltrain.config.notes import compares_nothing
from rltrain.config.passes import PASSES, UPDATES
from rltrain.config.schema import Config
from rltrain.data.prompts import PromptStore
from rltrain.models.optim import learning_rate
from rltrain.models.vision import image_cost
from rltrain.runtime.samples import Samples
from rltrain.trainer.advantage import Advantages, Whitening, regroup_by_prompt
from rltrain.trainer.batching.balance import Ids, Layout, Workload, cost_of, lay_out, rank_tokens
from rltrain.trainer.batching.mini_batches import cut_prompts, denominators, num_tokens, per_rank
from rltrain.trainer.entropy_bonus import EntropyBonus
from rltrain.trainer.experience import Experience
from rltrain.trainer.masked_samples import valid_samples
from rltrain.trainer.metrics import step as m
from rltrain.trainer.metrics.alarms import Alarms
from rltrain.trainer.metrics.experts import ExpertLoad
from rltrain.trainer.metrics.generation import join_rounds
from rltrain.trainer.metrics.step import Answered, Metrics
from rltrain.trainer.metrics.timing import StepTimer, decode_metrics, flops_metrics
from rltrain.trainer.plan import Plan
from rltrain.trainer.progress import ANSWERS, Progress
from rltrain.trainer.rewards import Rewards, accuracy
from rltrain.trainer.roles import Critic, StepModels
from rltrain.trainer.supervised import LossValidation, supervised_metrics
from rltrain.trainer.validation import Validation
from rltrain.workers.interface.tasks import UpdateTask


@dataclass
class StepRecord:
    """Data that the phases of a step collect for its report."""

    step: int
    metrics: Metrics
    bytes_before: tuple[int, Counter[str]]
    """`PPOTrainer._bytes` at the start of the step."""
    measured: dict[str, Moments] = field(default_factory=dict)
    """Moments of entropy, mismatch and correction, of samples with log-probs computed before the first update."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Layout of each phase."""


class PPOTrainer:
    """Driver of policy, critic, reference and rewards through the steps of ``plan``.

    prompts: training prompts, for their image sizes. on_phase(name): called at the start of a phase.
    """

    def __init__(
        self,
        cfg: Config,
        plan: Plan,
        models: StepModels,
        rewards: Rewards,
        experience: Experience,
        prompts: PromptStore | None = None,
        on_phase: Callable[[str], None] = lambda name: None,
        val_prompts: PromptStore | None = None,
    ) -> None:
        self.cfg = cfg
        self.plan = plan
        self.actor, self.critic, self.inference_models = models.policy, models.critic, models.inference_models
        self.reference = models.reference
        self.model_sizes = models.sizes
        self.rewards = rewards
        self.experience = experience
        self.advantages = Advantages(cfg.algorithm, cfg.scoring, plan.passes)
        self.entropy_bonus = EntropyBonus(cfg.actor_rollout_ref.actor)
        self._prompts = prompts
        rollout = cfg.actor_rollout_ref.rollout
        self._alarms = Alarms(
            models.sizes["log_prob_gap_limit"],
            stops_on_gap=rollout.on_log_prob_gap == "stop",
            collapse_steps=cfg.trainer.collapse_steps,
            compares=not compares_nothing(cfg),
        )
        compiled = cfg.actor_rollout_ref.actor.fsdp_config.use_torch_compile
        self._expert_load = ExpertLoad(models.sizes.get("num_experts", 0), compiled=compiled)
        self._metrics: Metrics = {}  # metrics of the newest step
        self._on_phase = on_phase
        sources = np.array(rewards.data_sources("train"), dtype=object)
        # A single source needs no metrics by source.
        self._sources = sources if len(set(sources.tolist())) > 1 else None
        folder = cfg.trainer.default_local_dir
        parts = (rollout, cfg.data, plan, self.actor, rewards, folder, on_phase)
        self.validation = Validation(*parts)
        if plan.passes.supervised:
            self.validation = LossValidation(*parts, lay_out=partial(self._cut_validation, val_prompts))

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def step(self, step: int) -> Answered:
        """Run one PPO iteration (Schulman et al. 2017, algorithm 1).

        GRPO (Shao et al. 2024, algorithm 1) is the same without a critic.
        """
        plan, passes, timer = self.plan, self.plan.passes, StepTimer(self._on_phase)
        bytes_before = self._bytes()
        with timer("step"):
            samples, metrics = self.experience.collect(timer)  # y ~ pi_old(. | x), n responses each, and r(x, y)
            record = StepRecord(step, metrics, bytes_before)
            self.advantages.mask(samples)
            # Check before any update, so that a run that stops here still has the weights of the previous step.
            self._alarms.damaged(metrics)
            if passes.rewarded:
                record.metrics |= self._alarms.collapsed(valid_samples(samples)[c.SCORE])
            if passes.greedy_baseline:
                record.metrics = join_rounds([record.metrics, self.experience.add_greedy_baseline(samples, timer)])
            if passes.old_log_probs != "none":
                with timer("old_log_prob"):  # log pi_old(y | x), with the trainer's weights
                    self._old_log_probs(samples, record)
            if passes.ref:
                with timer("ref"):  # log pi_ref(y | x)
                    self.actor.ref_log_probs(samples, self._lay_out(samples, "ref", record))
            if passes.teacher:
                with timer("teacher"):  # log q(y | x)
                    layout = self._lay_out(samples, "teacher", record)
                    self.inference_models.log_probs("teacher", c.TEACHER_LOG_PROBS, samples, layout)
            if self.critic:
                with timer("values"):  # V(x, y_<t)
                    self.critic.values(samples, self._lay_out(samples, "values", record))
            with timer("adv"):  # A(x, y)
                whitening = self._estimate_advantages(samples, record)
            if self.critic:
                with timer("update_critic"):  # fit V to the returns
                    self._update_critic(self.critic, samples, record)
            if passes.updates_actor(step):
                with timer("update_actor"):  # maximise the clipped surrogate
                    self._update_actor(samples, whitening, record)
                    self._update_reference(record)  # pi_ref <- a pi + (1 - a) pi_ref, every K steps
        self._metrics = self._report(samples, timer, record)
        return Answered(step, self._metrics, samples, plan.answers_per_prompt)

    def _old_log_probs(self, samples: Samples, record: StepRecord) -> None:
        """Compute old log-probs of all samples.

        Skips the first mini-batch if the update's forward pass computes its old log-probs.
        """
        covered = np.ones(len(samples), dtype=bool)
        if self.plan.passes.waits_for_update(record.step):
            # Mini-batches are a function of the step, so the update will use the same ones.
            covered[self._actor_mini_batches(record.step)[0]] = False
        samples.update({c.HAS_OLD_LOG_PROBS: covered})
        record.metrics["perf/old_log_prob_share"] = float(covered.mean())
        if covered.any():
            layout = self._lay_out(samples, "old_log_prob", record, np.flatnonzero(covered))
            record.measured = self.actor.log_probs(samples, layout)
            if self._alarms.stops_on_gap:  # the pass then covers all samples, so that the run stops before an update
                self._alarms.gap(m.policy_metrics(record.measured))

    def _estimate_advantages(self, samples: Samples, record: StepRecord) -> Whitening:
        # This layout only assigns each response to a rank, without micro-batches; the report measures its balance.
        layout = self._cut(samples, "old_log_prob", [np.flatnonzero(~samples[c.MASKED])])
        if self.plan.passes.estimator.sum_pi_squared:
            layout = regroup_by_prompt(layout, samples[c.GROUP])
        record.layouts["adv"] = layout
        whitening, metrics = self.advantages.estimate(samples, self.actor, layout)
        record.metrics |= metrics
        return whitening

    def _update_actor(self, samples: Samples, whitening: Whitening, record: StepRecord) -> None:
        plan, cfg, step = self.plan, self.cfg.actor_rollout_ref.actor, record.step
        mini_batches = self._without_masked(samples, self._actor_mini_batches(step))
        counts = [self._denominators(samples, ids) for ids in mini_batches]
        # Samples without a gradient are dropped only after counting the denominators, so the loss is unchanged.
        zero_advantage = self.advantages.zero_advantage(samples)
        mini_batches = [ids[~zero_advantage[ids]] for ids in mini_batches]
        record.layouts["update_actor"] = layout = self._cut(samples, "update_actor", mini_batches)
        # As in verl the schedule starts with the first step that trains the actor. All optimizer steps of a step share
        # one rate, so the schedule does not depend on `ppo_epochs` and the mini-batch size.
        first = max(1, plan.passes.first_actor_step)
        skipped = self._num_skipped_steps("actor")
        rate = learning_rate(step - first - skipped, cfg.optim, plan.lr_warmup_steps, plan.schedule_steps)
        weight_scale = 1.0
        if self.cfg.algorithm.rollout_correction.rollout_is_batch_normalize:
            # The mean is over the whole batch, not over a mini-batch, so that all optimizer steps share one scale. It
            # is known here because this key makes the old_log_prob pass cover every sample.
            weight_scale = 1.0 / max(m.mismatch_metrics(record.measured).get("rollout_corr/rollout_is_mean", 1.0), 1e-8)
        # A selection seeds its random numbers by the sample's id, not by its position on a rank, so it does not depend
        # on the layout.
        samples.update({c.SAMPLE_ID: np.arange(len(samples)), c.ZERO_ADVANTAGE: zero_advantage})
        seed = int(stream(self.cfg.data.seed, "selection", step).random_raw())
        num_waiting = plan.passes.num_without_old_log_probs(step, len(counts))
        entropy_coef = self.entropy_bonus.weight(record.measured)
        tasks = [
            UpdateTask(tuple(rank_batches), rate, whitening.shift, whitening.scale, weight_scale, seed, entropy_coef)
            for rank_batches in per_rank(layout, counts, num_waiting)
        ]
        results = self.actor.update(samples, layout, tasks)
        # Statistics per token are means over computed tokens; samples without gradient add none.
        computed = np.array([samples[c.LOSS_TOKENS][ids].sum() for ids in mini_batches])
        counted = np.array([count.tokens for count in counts])
        record.metrics |= m.update_metrics(results, computed, counted, "actor") | {"actor/lr": rate}
        record.metrics |= self._expert_load.measure(results[0].expert_load)
        # The skipped tokens would have been computed in every epoch over the batch.
        record.metrics["perf/update_tokens_skipped"] = float(num_tokens(samples)[zero_advantage].sum() * cfg.ppo_epochs)
        if plan.passes.learns_entropy:
            record.metrics["actor/entropy_coeff"] = entropy_coef
        if cfg.use_kl_loss:
            record.metrics["actor/kl_coef"] = cfg.kl_loss_coef
        # Join the moments of the update's forward pass and of the old_log_prob pass, which cover disjoint samples.
        record.measured = join([record.measured, join(result.measured for result in results)])
        self._skipped("actor", results[0].num_made, record, skipped, counts)

    def _update_reference(self, record: StepRecord) -> None:
        if self.reference:
            is_due = self.cfg.actor_rollout_ref.ref.updates_after(record.step)
            record.metrics["actor/ref_moved"] = float(is_due)
            if is_due:
                self.reference.update_reference()

    def _update_critic(self, critic: Critic, samples: Samples, record: StepRecord) -> None:
        plan, cfg, step = self.plan, self.cfg.critic, record.step
        size = plan.critic_prompts_per_mini_batch
        mini_batches = cut_prompts(plan, size, cfg.ppo_epochs, step, self.cfg.data.seed if cfg.shuffle else None)
        mini_batches = self._without_masked(samples, mini_batches)
        counts = [self._denominators(samples, ids) for ids in mini_batches]
        # Samples with zero advantage are kept, because they have returns from which the critic learns.
        record.layouts["update_critic"] = layout = self._cut(samples, "update_critic", mini_batches)
        skipped = self._num_skipped_steps("critic")
        rate = learning_rate(step - 1 - skipped, cfg.optim, plan.critic_lr_warmup_steps, plan.schedule_steps)
        results = critic.update(samples, layout, per_rank(layout, counts), rate)
        counted = np.array([count.tokens for count in counts])
        record.metrics |= m.update_metrics(results, counted, counted, "critic")
        record.metrics["critic/lr"] = rate
        self._skipped("critic", results[0].num_made, record, skipped, counts)

    def _num_skipped_steps(self, role: str) -> int:
        """Return the number of earlier steps in which ``role`` took no optimizer step, so that its schedule did not
        advance."""
        return int(self._metrics.get(f"{role}/steps_held", 0))

    def _skipped(
        self, role: str, num_made: int, record: StepRecord, skipped: int, counts: Sequence[Denominators]
    ) -> None:
        """Log skipped optimizer steps. Raises NonFiniteError if there are too many.

        skipped: `_num_skipped_steps` before the update. counts: loss tokens per mini-batch.
        """
        self._alarms.overflowed(role, record.metrics)
        record.metrics |= self._alarms.skipped(role, record.metrics) | self._alarms.empty(role, counts)
        if skipped := skipped + (num_made == record.metrics[f"{role}/steps_empty"]):
            record.metrics[f"{role}/steps_held"] = float(skipped)

    def _report(self, samples: Samples, timer: StepTimer, record: StepRecord) -> Metrics:
        """Return the metrics of the step."""
        cfg, plan = self.cfg, self.plan
        metrics = timer.metrics() | record.metrics | m.policy_metrics(record.measured)
        # The moments are complete only now if the gap only causes a warning, or with `bypass`. An error here still
        # prevents the checkpoint of this step.
        metrics |= self._alarms.gap(metrics)
        # The phase adv runs no model, so it has no FLOPs.
        costs = {
            phase: cost_of(layout, self._workload(samples, self._prompts, updates=phase in UPDATES))
            for phase, layout in record.layouts.items()
            if phase != "adv"
        }
        metrics |= costs["update_actor"].metrics() if "update_actor" in costs else {}
        tokens = {phase: sum(rank_tokens(layout, num_tokens(samples))) for phase, layout in record.layouts.items()}
        metrics |= m.throughput_metrics(samples, metrics, plan.num_devices, tokens)
        metrics |= flops_metrics(costs, metrics, self.model_sizes, plan.num_devices)
        metrics |= decode_metrics(metrics, self.model_sizes, plan.num_devices)
        seen = valid_samples(samples)
        metrics |= m.sample_metrics(seen, cfg.data.max_prompt_length) | m.turn_metrics(
            samples, cfg.actor_rollout_ref.rollout.multi_turn.max_assistant_turns
        )
        if cfg.algorithm.mask_truncated:
            metrics["response/truncated_masked"] = float(seen[c.TRUNCATED].sum())
        metrics |= m.reward_metrics(seen, accuracy(seen), weighted=bool(cfg.reward.weights))
        if self._sources is not None:
            metrics |= m.source_metrics(seen, self._sources[seen[c.ROW]], accuracy(seen))
        spread = rank_tokens(record.layouts["adv"], num_tokens(samples))
        metrics |= m.balance_metrics(samples, plan.num_engine_replicas, spread)
        metrics |= m.flow_metrics(record.bytes_before, self._bytes(), len(samples), plan.num_nodes)
        metrics |= {
            "training/global_step": float(record.step),
            "training/epoch": float(self.experience.epoch),
        }
        return supervised_metrics(metrics) if plan.passes.supervised else metrics

    # -- layouts of a batch --------------------------------------------------------------------------------------------

    def _lay_out(self, samples: Samples, name: str, record: StepRecord, ids: Ids | None = None) -> Layout:
        """Lay out every sample (or ``ids``) once, over the ranks and within the budget of the pass ``name``."""
        layout = self._cut(samples, name, [np.arange(len(samples)) if ids is None else ids])
        record.layouts[name] = layout
        return layout

    def _cut_validation(self, prompts: PromptStore | None, samples: Samples) -> Layout:
        return self._cut(samples, "old_log_prob", [np.arange(len(samples))], prompts)

    def _cut(self, samples: Samples, name: str, mini_batches: list[Ids], prompts: PromptStore | None = None) -> Layout:
        ranks, updates = self.plan.ranks[PASSES[name].role], PASSES[name].updates
        work = self._workload(samples, prompts or self._prompts, updates=updates)
        return lay_out(mini_batches, work, ranks, self.plan.budgets[name], self.actor.nodes(ranks))

    @staticmethod
    def _without_masked(samples: Samples, mini_batches: list[Ids]) -> list[Ids]:
        """Return the mini-batches without masked samples."""
        return [ids[~samples[c.MASKED][ids]] for ids in mini_batches]

    def _actor_mini_batches(self, step: int) -> list[Ids]:
        cfg = self.cfg.actor_rollout_ref.actor
        seed = self.cfg.data.seed if cfg.shuffle else None
        return cut_prompts(self.plan, self.plan.prompts_per_mini_batch, cfg.ppo_epochs, step, seed)

    def _workload(self, samples: Samples, prompts: PromptStore | None, *, updates: bool = False) -> Workload:
        """Return the workload. A token costs 2 FLOPs per matmul weight, a (query, key) pair 4 x heads x head size.

        prompts: prompts of the samples, for their image sizes. updates: include the backward pass; a frozen vision
        tower has none (`tower_numbers`).
        """
        # Ratio of the two costs above. The actor's ratio is used for every pass: with a different critic model the
        # balance is only approximate, which costs time but does not change results.
        sizes, groups = self.model_sizes, samples[c.GROUP]
        pair_cost = 2 * sizes["attention_width"] / sizes["matmul_parameters"]
        work = Workload.of_groups(samples[c.PROMPT_LENGTH], samples[c.RESPONSE_LENGTH], groups, pair_cost)
        work = replace(work, nodes=samples.nodes(c.RESPONSE))
        if not self.plan.passes.images_in_training:
            return work

        if prompts is not None and prompts.has_images:
            rows, number = (values[samples[c.ROW]] for values in (prompts.image_rows, prompts.num_images))
            work = work.with_images(groups, rows, image_cost(sizes, rows, number, updates=updates))
        if self.plan.passes.images_between_turns and c.ANSWER_IMAGE_ROWS in samples.numbers:
            own = samples[c.ANSWER_IMAGE_ROWS]
            cost = image_cost(sizes, own, samples[c.ANSWER_IMAGES], updates=updates)
            work = replace(work, own_rows=own, own_cost=cost)
        return work

    def _denominators(self, samples: Samples, ids: Ids) -> Denominators:
        loss_scale_factor = self.cfg.actor_rollout_ref.actor.loss_scale_factor or self.cfg.data.max_response_length
        return denominators(samples[c.LOSS_TOKENS][ids], samples[c.GROUP][ids], loss_scale_factor)

    def _bytes(self) -> tuple[int, Counter[str]]:
        """Return the bytes moved in the run so far: through the driver, and samples between nodes by call."""
        # One worker group serves all roles, so the actor's count includes the critic's calls.
        return self.actor.bytes_through_driver, self.actor.bytes_between_nodes()

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """State of the driver for a checkpoint."""
        drawn, sampler, pending = self.experience.batches_drawn, self.experience.sampler, self.experience.pending
        lengths, experts = self.actor.lengths.state(), self._expert_load.state()
        # Save the coefficient only for a controller. Without one the config applies, even if a resumed run enables a
        # controller.
        entropy = self.cfg.actor_rollout_ref.actor.adaptive_entropy
        coef = self.advantages.kl_coef if self.cfg.algorithm.kl_ctrl.type == "adaptive" else None
        entropy_coef, metrics = self.entropy_bonus.coef if entropy.enabled else None, self._metrics
        # State of tools and environments cannot be saved, so a resumed run restarts pending multi-turn trajectories.
        answers = None if several_turns(self.cfg.actor_rollout_ref.rollout) else pending.answers()
        return Progress(drawn, coef, sampler.state(), pending.state(), answers, lengths, metrics, entropy_coef, experts)

    def restore(self, progress: Progress, folder: Path | None = None) -> None:
        """Restore ``progress``. folder: its checkpoint."""
        self.actor.lengths.restore(progress.lengths)
        self._alarms.restore(progress.metrics)
        self._metrics = progress.metrics
        # As in `progress`: pending multi-turn trajectories restart, even if a run without tools has saved responses.
        file = folder / ANSWERS if folder and not several_turns(self.cfg.actor_rollout_ref.rollout) else None
        answers = self.actor.load_answers(str(file)) if progress.in_flight and file and file.exists() else None
        self.experience.restore(progress, answers)
        self.advantages.restore(progress)
        self.entropy_bonus.restore(progress)
        self._expert_load.restore(progress.expert_load)
