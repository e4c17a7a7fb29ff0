"""Actor, reference and teacher: the training side of the policy in a worker process.

`StepPasses` decides which passes run and their outputs; this module does not read the underlying config keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.aggregation import loss_mask
from rltrain.algorithms.correction import accepted, compare, correct, importance_weights, keeps
from rltrain.algorithms.distillation import TeacherLoss, divergence_of
from rltrain.algorithms.kl import kl_per_token
from rltrain.algorithms.losses import LossShare, Measured, actor_loss
from rltrain.algorithms.moments import Moments, join
from rltrain.algorithms.policy_losses import PolicyLossInputs, find_policy_loss
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import resolve_dtype
from rltrain.config.schema import Config
from rltrain.config.step_passes import StepPasses
from rltrain.data.chat import chat_encoder
from rltrain.data.images import EncodedPrompt
from rltrain.models.attention.packing import pack, per_computed_token, per_policy_token
from rltrain.models.forward import PolicyModel, model_numbers
from rltrain.models.weights.export import Export
from rltrain.models.weights.lora import adapter_weights, adapters_off, write_adapter
from rltrain.models.weights.shard import reshard
from rltrain.models.weights.spec import Specs, actor_spec
from rltrain.models.weights.state import load_training_state
from rltrain.runtime.samples import take_fetch_seconds
from rltrain.workers.inference_models import InferenceWorker, ReferenceDistribution, load_role, measure
from rltrain.workers.interface.results import PassNumbers, UpdateNumbers
from rltrain.workers.interface.roles import Actor
from rltrain.workers.interface.tasks import MiniBatch, SaveTask, UpdateTask, Written
from rltrain.workers.state.offload_manager import OffloadManager
from rltrain.workers.state.saving import StateWriter, told_as_disk_error
from rltrain.workers.updates.expert_balance import ExpertBalance
from rltrain.workers.updates.selection import add_batch_level_selection
from rltrain.workers.updates.updater import Updater, empty_loss, split_mini_batches

# Columns that the loss reads on the device. Prompts, responses and images reach the device packed.
_IN_LOSS = (c.OLD_LOG_PROBS, c.ROLLOUT_LOG_PROBS, c.REF_LOG_PROBS, c.TEACHER_LOG_PROBS, c.ADVANTAGE, c.ADVANTAGES,
            c.IS_WEIGHTS, c.LOSS_MASK, c.SELECTED, c.HIGH_ENTROPY, c.GROUP_WEIGHT)  # fmt: skip


class ActorRefWorker(Actor):
    """Training side of the policy. Every method is called on all ranks, each with its local samples."""

    def __init__(self, cfg: Config, specs: Specs, passes: StepPasses, offloader: OffloadManager) -> None:
        self._cfg, self._specs = cfg, specs
        self._passes = passes
        self._model_cfg = cfg.actor_rollout_ref.model
        self._actor_cfg = cfg.actor_rollout_ref.actor
        self._rollout_cfg = cfg.actor_rollout_ref.rollout
        self._correction = cfg.algorithm.rollout_correction
        self._rules = self._correction.rejection_rules()
        self.offloader = offloader
        self._device = offloader.device
        self._entry = find_policy_loss(passes.policy_loss)
        # Policy version of the last old_log_prob pass, whose log-probs a selection reuses until the version changes.
        self._log_probs_at: int | None = None
        self._load_models()

    def _load_models(self) -> None:
        passes, fsdp = self._passes, self._actor_cfg.fsdp_config
        self.policy: PolicyModel = load_role("actor", self._specs, passes, self.offloader)
        if not passes.trains:
            self.policy.eval()
            return
        self.updater = Updater("actor", self.policy, self._actor_cfg.optim, fsdp, self._cfg.trainer, self._device)
        self._writer = StateWriter(self.policy, self.updater.optimizer, self.updater.loss_scale, self._device)
        self._export: Export | None = None
        self._adapters: dict[str, Tensor] = {}
        self.inference_models = InferenceWorker(self._specs, passes, self.offloader, self._rollout_cfg.temperature)
        # With adapters, the policy with its adapters disabled is the reference.
        self.reference: PolicyModel = self.inference_models.models.get("ref", self.policy)
        self._exact_reference = ReferenceDistribution(self.reference)
        self._balance = ExpertBalance(self.policy, self._device, passes, self._actor_cfg.router_bias_update_rate)
        self._reference_distribution = self._exact_reference if passes.exact_kl_in_loss else None
        """Reference distribution for the update's exact KL."""
        if passes.exact_teacher:
            teacher, loss = self.inference_models.models["teacher"], self._cfg.distillation.distillation_loss
            self._reference_distribution = ReferenceDistribution(teacher, divergence_of(loss))
        self.offloader.add_optimizer(self.updater.optimizer, offload=fsdp.optimizer_offload)

    @property
    def num_updates(self) -> int:
        """Optimizer steps since the start of the process, used as the policy version."""
        return self.updater.num_steps if self._passes.trains else 0

    def sizes(self) -> dict[str, Any]:
        """Return sizes of the policy and peak rates of the device, for the log and for counting FLOPs and bytes."""
        chip, size = self._device.chip(), resolve_dtype(self._rollout_cfg.dtype, self._device).itemsize
        peaks = {"peak_flops": chip.peak_flops, "peak_bandwidth": chip.peak_bandwidth} if chip else {}
        numbers = model_numbers(self.policy)
        decode = {"decode_bytes": size * numbers["matmul_parameters"]}
        return numbers | decode | {"cache_bytes_per_token": size * numbers["cache_width"]} | peaks

    # -- scoring -------------------------------------------------------------------------------------------------------

    def log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """Compute log pi(response) with the actor's weights, the gap to the engine's, and the rollout correction.

        Columns: ``old_log_probs``; ``is_weights`` and ``loss_mask`` if the correction has them; ``sum_pi_squared`` and
        ``entropy`` if needed; ``routed_experts`` if the update replays them. Numbers: moments, and ``loss_tokens`` [n].
        """
        self.offloader.enter_phase("old_log_prob")
        self._log_probs_at = self.updater.num_steps
        squares = self._passes.estimator.sum_pi_squared
        experts = self._passes.router_replay == "R2"
        arguments = self._rollout_cfg.temperature, True, None, squares, experts
        outputs = measure(self.policy, batch.split(micro_sizes), self._device, *arguments)
        if not len(batch):
            return Batch(), PassNumbers()
        routed = {c.ROUTED_EXPERTS: per_computed_token(outputs.pop(), batch)} if experts else {}
        log_probs, entropy, *others = (per_policy_token(output, batch) for output in outputs)
        columns, moments = self._compare(log_probs, batch)
        columns |= {c.SUM_PI_SQUARED: others[0]} if squares else {}
        columns |= {c.ENTROPY: entropy} if self._passes.masks_certain else {}
        columns |= routed
        per_sample = {c.LOSS_TOKENS: columns[c.LOSS_MASK].sum().numpy()} if self._rules else {}
        per_sample |= {c.LOG_PROB_SUM: log_probs.sum().double().numpy()} if self._passes.supervised else {}
        there = ~entropy.broadcast(batch.dense(c.AGENT_FAILED)).values.bool() if c.AGENT_FAILED in batch else ...
        moments["entropy"] = Moments.of(entropy.values[there])
        return Batch({c.OLD_LOG_PROBS: log_probs, **columns}), PassNumbers(per_sample, moments)

    @torch.no_grad()
    def ref_log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, PassNumbers]:
        """Compute log pi_ref(response) with the frozen reference.

        With a KL in the reward also returns ``ref_kl`` per token and ``kl_sum`` [n].
        """
        self.offloader.enter_phase("ref")
        passes = self._passes
        columns: dict[str, Ragged] = {}
        if passes.ref_log_probs:
            micros, temperature = batch.split(micro_sizes), self._rollout_cfg.temperature
            with adapters_off(self.reference):
                (log_probs,) = measure(self.reference, micros, self._device, temperature)
            columns[c.REF_LOG_PROBS] = per_policy_token(log_probs, batch)
        if passes.exact_kl_in_reward:
            self.policy.eval()
            kl = torch.cat([self._exact_kl(micro) for micro in batch.split(micro_sizes)])
            columns[c.REF_KL] = per_policy_token(kl.cpu(), batch)
            self._exact_reference.free()
            reshard(self.policy)
        if not len(batch) or not passes.kl_in_reward:
            return Batch(columns), PassNumbers()
        if not passes.exact_kl_in_reward:
            ref = columns[c.REF_LOG_PROBS]
            columns[c.REF_KL] = ref.like(
                kl_per_token(self._old(batch).values, ref.values, self._cfg.algorithm.kl_penalty)
            )
        return Batch(columns), PassNumbers({c.KL_SUM: columns[c.REF_KL].sum().double().numpy()})

    def _exact_kl(self, micro: Batch) -> Tensor:
        inputs = pack(micro, self._device.torch_device)
        return self.policy(inputs, self._rollout_cfg.temperature, False, self._exact_reference.states(inputs)).kl

    @torch.no_grad()
    def text_log_probs(self, text: EncodedPrompt) -> Tensor:
        """Return log pi(token) at temperature 1 of all tokens but the first, or of the tokens after the last image.

        The forward pass is the same as in the update: the text is packed after another text, and its second half is
        packed again as a response that shares a prompt. The comparison with an engine therefore also detects models
        that mix the samples of a packed row.
        """
        self.policy.eval()
        tokens, images = torch.tensor(text.tokens), text.images
        half = text.image_end or max(len(tokens) // 2, 1)
        # Sample 0 is the reversed text, packed in front of sample 1, the text itself. Samples 2 and 3 share its first
        # half as their prompt. Images have no log-probs, so with an image only the text after it is used.
        whole = tokens[half if images else 0 :]
        prompts = Ragged.from_rows([whole[-1:], whole[:1], tokens[:half]])
        answers = Ragged.from_rows([whole.flip(0)[1:], whole[1:], tokens[half:], tokens[half:]])
        index = torch.tensor([0, 1, 2, 2])
        rows = Batch({c.PROMPT: DictionaryColumn(prompts, index), c.RESPONSE: answers})
        if images:
            rows.update({c.IMAGES: DictionaryColumn([None, None, text.until(half).images], index)})
        rows.update({c.RESPONSE_MASK: answers.like(torch.ones_like(answers.values, dtype=torch.bool))})
        log_probs: Tensor = self.policy(pack(rows, self._device.torch_device), 1.0).log_probs.cpu()
        reshard(self.policy)
        # Only samples 1 and 3 are read: the text packed after another one, and a response not adjacent to its prompt.
        alone, shared = log_probs.split(answers.lengths.tolist())[1::2]
        return shared if images else torch.cat([alone[: half - 1], shared])

    def _compare(self, log_probs: Ragged, batch: Batch) -> tuple[dict[str, Ragged], dict[str, Moments]]:
        engine = batch.ragged(c.ROLLOUT_LOG_PROBS)
        columns = correct(log_probs, engine, self._correction, weighs=self._passes.importance_weights)
        carried = batch.dense(c.CARRIED_LENGTH) if c.CARRIED_LENGTH in batch else None
        return columns, compare(log_probs, engine, columns, self._correction, carried)

    def _old(self, batch: Batch) -> Ragged:
        """Return log pi_old: the trainer's log-probs, or with ``bypass`` the engine's."""
        return batch.ragged(c.ROLLOUT_LOG_PROBS if self._passes.bypass else c.OLD_LOG_PROBS)

    # -- update --------------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, task: UpdateTask) -> UpdateNumbers:
        """Run one optimizer step per mini-batch."""
        self.offloader.enter_phase("update_actor")
        if not self._actor_cfg.fsdp_config.use_torch_compile:
            self.policy.measure_load()
        terms = {
            name: getattr(task, name) for name in ("shift", "scale", "weight_scale", "noise_seed", "entropy_coeff")
        }
        steps = []
        self.updater.begin(task.learning_rate)
        for mini, micros in split_mini_batches(batch, task.mini_batches):
            self._add_selection(micros, mini, task)
            share = self.updater.forward_backward(micros, partial(self._loss, mini=mini, task=task))
            steps.append(self.updater.optim_step(share, micros, mini, terms))
            if steps[-1].made:
                self._balance.move_biases()
        numbers = self.updater.numbers(steps)
        if steps:
            numbers = replace(numbers, measured=self._measure(steps[0].share.measured))
        if self._reference_distribution:
            self._reference_distribution.free()
        if (load := self.policy.load()) is not None:
            dist.all_reduce(load)
            numbers = replace(numbers, expert_load=load.cpu().numpy())
        return replace(numbers, maxima=self.offloader.memory_gb() | take_fetch_seconds())

    def _loss(self, micro: Batch, mini: MiniBatch, task: UpdateTask) -> LossShare:
        inputs = pack(micro, self._device.torch_device)
        states = self._reference_distribution.states(inputs) if self._reference_distribution else None
        temperature, with_entropy = self._rollout_cfg.temperature, task.entropy_coeff != 0
        # If no earlier pass compared the log-probs of actor and engine, the update's forward pass does.
        measures = (not mini.has_old_log_probs or self._passes.bypass) and not self._passes.supervised
        log_probs, entropy, kl, *_ = outputs = self.policy(inputs, temperature, with_entropy or measures, states)
        if not len(micro):
            return empty_loss(log_probs, outputs.balance_loss)
        measured = ((micro, log_probs.detach(), None if entropy is None else entropy.detach()),) if measures else ()
        micro = self._for_loss(micro)
        if not mini.has_old_log_probs and not self._passes.bypass:
            engine = micro.ragged(c.ROLLOUT_LOG_PROBS)
            old = engine.like(log_probs.detach())
            columns = correct(old, engine, self._correction, weighs=self._passes.importance_weights)
            micro.update({c.OLD_LOG_PROBS: old, **columns})
        teacher = self._teacher_loss(micro, kl)
        if self._passes.exact_teacher:
            kl = None
        if self._passes.sampled_kl_in_loss:
            kl = kl_per_token(log_probs, micro.ragged(c.REF_LOG_PROBS).values, self._actor_cfg.kl_loss_type)
        mask, weights = self._correct(micro, log_probs.detach(), task)
        advantages = _advantages(micro, mask, task)
        selected = micro.ragged(c.SELECTED).values if c.SELECTED in micro else None
        weight = mask.broadcast(micro.dense(c.GROUP_WEIGHT)).values if c.GROUP_WEIGHT in micro else None
        policy_inputs = PolicyLossInputs(log_probs, self._old(micro).values, advantages, mask, selected, weight)
        kept, threshold = dict[str, Tensor](), self._actor_cfg.off_policy_mask_threshold
        if threshold is not None:
            sampled = micro.ragged(c.ROLLOUT_LOG_PROBS).values
            kept["off_policy_masked"] = keeps(mask, log_probs.detach(), sampled, advantages, threshold)
        if c.HIGH_ENTROPY in micro:
            kept["low_entropy_masked"] = micro.ragged(c.HIGH_ENTROPY).values
        share = actor_loss(
            policy_inputs,
            mini.denominators,
            self._actor_cfg,
            self._entry.function,
            self._passes.aggregation,
            weights=weights,
            kept=kept,
            entropy=entropy if with_entropy else None,
            entropy_coeff=task.entropy_coeff,
            kl=kl,
            teacher=teacher,
            expert_balance=outputs.balance_loss,
        )
        return replace(share, measured=measured)

    def _teacher_loss(self, micro: Batch, divergence: Tensor | None) -> TeacherLoss | None:
        """Return the teacher's part of the loss. divergence: computed by the forward pass, if the update runs the
        teacher."""
        cfg = self._cfg.distillation.distillation_loss
        if self._passes.exact_teacher:
            return TeacherLoss(cfg, divergence=divergence)
        return TeacherLoss(cfg, micro.ragged(c.TEACHER_LOG_PROBS).values) if self._passes.teacher else None

    def _for_loss(self, micro: Batch) -> Batch:
        """Return the columns that the loss reads, on the device."""
        columns = {name: micro[name] for name in _IN_LOSS if name in micro}
        if c.ADVANTAGE in columns:
            columns[c.ADVANTAGE] = micro.dense(c.ADVANTAGE).float()  # not every accelerator has float64
        return Batch(columns).to(self._device.torch_device)

    def _measure(self, measured: Sequence[Measured]) -> dict[str, Moments]:
        """Return the moments of an old_log_prob pass, measured in the update's forward pass on the first mini-batch."""
        parts = []
        for micro, log_probs, entropy in measured:
            moments = self._compare(micro.ragged(c.ROLLOUT_LOG_PROBS).like(log_probs.cpu()), micro)[1]
            parts.append(moments if entropy is None else moments | {"entropy": Moments.of(entropy.cpu())})
        return join(parts)

    def _correct(self, micro: Batch, log_probs: Tensor, task: UpdateTask) -> tuple[Ragged, Tensor | None]:
        """Return (loss mask, importance weights). With ``bypass``, both are computed from the current policy."""
        old = self._old(micro)
        if not self._passes.bypass:
            weights = micro.ragged(c.IS_WEIGHTS).values * task.weight_scale if c.IS_WEIGHTS in micro else None
            return loss_mask(micro, old), weights
        log_ratio = old.like(log_probs - old.values)
        weighs = self._passes.importance_weights
        weights = importance_weights(log_ratio, self._correction).values if weighs else None
        accepted_tokens = accepted(old.like(log_probs), old, self._rules)
        return accepted_tokens.like(accepted_tokens.values.float()), weights

    @torch.no_grad()
    def _add_selection(self, micros: Sequence[Batch], mini: MiniBatch, task: UpdateTask) -> None:
        """Add columns that depend on the whole mini-batch to its micro-batches (`add_batch_level_selection`)."""
        self._balance.begin(micros)
        if not self._passes.looks_ahead:
            return
        having = [micro for micro in micros if len(micro)]
        if self._log_probs_at == self.updater.num_steps or not self._passes.reads_policy_ahead:
            current = [self._old(micro).values for micro in having]
        else:
            # Empty micro-batches run too, because the forward pass is a collective.
            (measured,) = measure(self.policy, micros, self._device, self._rollout_cfg.temperature)
            current = list(measured.split([len(self._old(micro).values) for micro in having]))
            # `measure` leaves the model in eval mode, in which transformers does not recompute activations.
            self.policy.train()
        masks = [self._correct(micro, values, task)[0].to("cpu") for micro, values in zip(having, current, strict=True)]
        # The empty part lets a rank without samples join the collectives.
        empty = torch.zeros(0)
        mask = Ragged.concat([Ragged(empty, empty.long()), *masks])
        advantages = [_advantages(micro, kept, task) for micro, kept in zip(having, masks, strict=True)]
        old = [self._old(micro).values for micro in having]
        log_probs, old_log_probs, own = (torch.cat([empty, *parts]) for parts in (current, old, advantages))
        inputs = PolicyLossInputs(log_probs, old_log_probs, own, mask)
        # Mini-batches are compared by identity, because equal ones occur in every epoch.
        number = [other is mini for other in task.mini_batches].index(True)
        seeds = task.noise_seed, number
        add_batch_level_selection(having, inputs, seeds, mini.denominators, self._entry, self._actor_cfg)

    # -- saving --------------------------------------------------------------------------------------------------------

    def stage(self, task: SaveTask) -> bool:
        """Snapshot model and optimizer, adapters, and the weights of an export (a collective)."""
        self._task = task
        self._writer.reshard_and_synchronize()
        if task.export and self._export is None:
            self._export = Export(
                self.policy, actor_spec(self._cfg, self._device).load_config(), chat_encoder(self._cfg)
            )
        copies = self._writer.room(task.copies, self._export.num_bytes if self._export and task.export else 0)
        # Full weights are gathered between devices: exchange between hosts is many times slower. After an update the
        # shards are on the device. Otherwise they are onloaded as for a pass, which the next sync would do anyway.
        if (task.export or self._model_cfg.uses_lora) and not self.offloader.is_here(self.policy):
            self.offloader.enter_phase("old_log_prob", whole=True)
        if self._export and task.export:
            self._export.gather(copies)
        if self._model_cfg.uses_lora:
            self._adapters = adapter_weights(self.policy.model)
        return self._writer.stage(task.folder, copies)

    def write(self) -> tuple[list[Any], Written]:
        """Write the snapshot: every rank its shards, rank 0 adapters and export. Raises DiskError."""
        task, problems = self._task, list[str]()
        places, digests = self._writer.write()
        with told_as_disk_error(task.folder):
            if self._adapters:
                base, folder = self._model_cfg.path, f"{task.folder}/lora_adapter"
                write_adapter(self.policy.model, self._adapters, base, folder, digests)
                self._adapters = {}
            if self._export and task.export and dist.get_rank() == 0:
                problems = self._export.write(Path(task.export), task.card, digests)
        return places, Written(digests, problems)

    def seal(self, places: list[list[Any]]) -> dict[str, str]:
        """Write ``.metadata``, the index of the checkpoint (rank 0)."""
        return self._writer.seal(places)

    def load(self, folder: str, weights_only: bool) -> list[str]:
        """Load model and optimizer, on any number of ranks (a collective). Returns notes for the log."""
        self.offloader.enter_phase("update_actor" if self._passes.trains else "sync", whole=True)
        optimizer = self.updater.optimizer if self._passes.trains and not weights_only else None
        scale = self.updater.loss_scale if optimizer else None
        texts_alone = not self._passes.trains and not self._passes.images
        return load_training_state(self.policy, optimizer, folder, scale, texts_alone=texts_alone)


def _advantages(micro: Batch, mask: Ragged, task: UpdateTask) -> Tensor:
    """Return the advantage of each token of ``mask``: its whitened advantage, or the advantage of its response."""
    if c.ADVANTAGES in micro:
        return (micro.ragged(c.ADVANTAGES).values - task.shift) * task.scale
    return mask.broadcast(micro.dense(c.ADVANTAGE).float()).values
