"""The hybrid worker: one process on one device that hosts actor, rollout engine and reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rltrain.algorithms.actor_loss import ActorLoss, actor_loss
from rltrain.algorithms.aggregation import Denominators
from rltrain.algorithms.policy_losses import PolicyLossInputs
from rltrain.batch import Batch
from rltrain.config.schema import Config
from rltrain.data.chat import PromptStore, chat_encoder
from rltrain.device import get_device, resolve_dtype
from rltrain.errors import NonFiniteError
from rltrain.models.export import export_huggingface
from rltrain.models.forward import PolicyModel, model_numbers, pack
from rltrain.models.load import load_config
from rltrain.models.optim import clip_gradients, make_optimizer
from rltrain.models.shard import make_mesh, sharded_policy
from rltrain.models.state import load_training_state, save_training_state
from rltrain.ragged import Ragged
from rltrain.workers.residency import Residency
from rltrain.workers.rollout.base import Sampling, sample_seeds
from rltrain.workers.rollout.hf import HFRollout
from rltrain.workers.weight_sync import WeightSync

Numbers = dict[str, Any]


@dataclass(frozen=True)
class GenerateTask:
    """Answer these prompts. rows: places in the prompt store; (seed, step, row, sample) decides every random number."""

    split: str
    rows: tuple[int, ...]
    sampling: Sampling
    seed: int
    step: int


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: the sizes of this rank's micro-batches, and the counts of the whole global mini-batch."""

    micro_sizes: tuple[int, ...]
    denominators: Denominators


class ActorRolloutRefWorker:
    """Every method is called on all ranks at once; each gets its own samples and returns its own share."""

    def __init__(self, cfg: Config, prompts: dict[str, PromptStore], *, with_reference: bool) -> None:
        self._cfg = cfg
        self._prompts = prompts
        self._model_cfg = cfg.actor_rollout_ref.model
        self._actor_cfg = cfg.actor_rollout_ref.actor
        self._rollout_cfg = cfg.actor_rollout_ref.rollout
        self._device = get_device(cfg.trainer.device)
        self._with_reference = with_reference
        self._version = 0

    def init_model(self) -> Numbers:
        """Load actor, reference and engine. Returns sizes, for the log and for counting FLOPs."""
        self._device.activate()
        model_cfg, fsdp_cfg = self._model_cfg, self._actor_cfg.fsdp_config
        self._config = load_config(
            model_cfg.path, trust_remote_code=model_cfg.trust_remote_code, override=dict(model_cfg.override_config)
        )
        self._encoder = chat_encoder(self._cfg)
        self._policy = self._load_policy(
            resolve_dtype(fsdp_cfg.model_dtype, self._device), model_cfg.enable_gradient_checkpointing
        )
        self._optimizer = make_optimizer(self._policy.parameters(), self._actor_cfg.optim)
        self._reference = None
        if self._with_reference:
            self._reference = self._load_policy(resolve_dtype("auto", self._device), False).requires_grad_(False).eval()
            self._park_reference()
        self._engine = HFRollout(
            self._config,
            dtype=resolve_dtype(self._rollout_cfg.dtype, self._device),
            device=self._device,
            eos_token_ids=self._encoder.eos_token_ids,
            max_num_seqs=self._rollout_cfg.max_num_seqs,
            trust_remote_code=model_cfg.trust_remote_code,
        )
        self._sync = WeightSync(self._policy, self._engine)
        self._residency = Residency(
            self._policy,
            self._optimizer,
            self._engine,
            self._device,
            param_offload=fsdp_cfg.param_offload,
            optimizer_offload=fsdp_cfg.optimizer_offload,
        )
        return model_numbers(self._policy) | {"peak_flops": self._device.peak_flops()}

    def _load_policy(self, master_dtype: torch.dtype, gradient_checkpointing: bool) -> PolicyModel:
        fsdp_cfg = self._actor_cfg.fsdp_config
        return sharded_policy(
            self._model_cfg.path,
            self._config,
            make_mesh(self._device, fsdp_cfg.fsdp_size),
            self._device,
            master_dtype=master_dtype,
            compute_dtype=resolve_dtype(fsdp_cfg.compute_dtype, self._device),
            gradient_checkpointing=gradient_checkpointing,
            reshard_after_forward=fsdp_cfg.reshard_after_forward,
            trust_remote_code=self._model_cfg.trust_remote_code,
        )

    def _park_reference(self) -> None:
        if self._reference is not None and self._cfg.actor_rollout_ref.ref.fsdp_config.param_offload:
            self._reference.to("cpu")

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(self, task: GenerateTask) -> tuple[Batch, list[str], Numbers]:
        """Sample answers. Returns payload columns, the answers as text, and per-sample numbers, prompt-major."""
        started = time.perf_counter()
        if self._sync.needed(self._version):
            self._residency.enter("sync")
            self._sync.run(self._version)
        self._residency.enter("rollout")
        self._device.synchronize()
        synced = time.perf_counter()
        store = self._prompts[task.split]
        prompts = [store.prompt(row) for row in task.rows]
        seeds = sample_seeds(task.seed, task.step, task.rows, task.sampling.num_samples)
        generation = self._engine.generate(prompts, seeds, task.sampling) if prompts else None
        self._device.synchronize()
        timing = {"timing/reshard": synced - started, "timing/generate_sequences": time.perf_counter() - synced}
        if generation is None:
            return Batch(), [], timing
        self._validate_answers(generation.tokens, generation.log_probs)
        payload = _join(prompts, generation.tokens, task.sampling.num_samples)
        payload.update({"rollout_log_probs": generation.log_probs})
        texts = self._encoder.decode_batch([row.tolist() for row in generation.tokens.rows()])
        numbers: Numbers = {
            "prompt_length": payload.dense("prompt_length").numpy(),
            "response_length": generation.tokens.lengths.numpy(),
            "truncated": generation.truncated.numpy(),
        }
        return payload, texts, numbers | timing

    def _validate_answers(self, tokens: Ragged, log_probs: Ragged) -> None:
        vocabulary = self._config.get_text_config().vocab_size
        if bool(((tokens.values < 0) | (tokens.values >= vocabulary)).any()) or not bool(
            log_probs.values.isfinite().all()
        ):
            raise NonFiniteError(
                f"the rollout engine '{self._rollout_cfg.name}' returned token ids outside the vocabulary of {vocabulary} "
                "or log-probs that are not finite; the weights it generates with are probably damaged."
            )

    # -- scoring -------------------------------------------------------------------------------------------------------

    def log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, Numbers]:
        """log pi(answer) under the actor's own weights, and how far the engine's log-probs are from it."""
        self._residency.enter("score")
        self._sync.lost()
        log_probs, entropy = self._score(self._policy, batch, micro_sizes, with_entropy=True)
        numbers: Numbers = {"entropy_sum": float(entropy.values.double().sum())}
        if "rollout_log_probs" in batch:
            numbers |= _engine_gap(log_probs.values, batch.ragged("rollout_log_probs").values)
        return Batch({"old_log_probs": log_probs}), numbers

    def ref_log_probs(self, batch: Batch, micro_sizes: Sequence[int]) -> tuple[Batch, Numbers]:
        """log pi_ref(answer) under the frozen reference."""
        assert self._reference is not None
        self._residency.enter("score")
        self._sync.lost()
        self._reference.to(self._device.torch_device)
        log_probs, _ = self._score(self._reference, batch, micro_sizes, with_entropy=False)
        self._park_reference()
        return Batch({"ref_log_probs": log_probs}), {}

    @torch.no_grad()
    def _score(
        self, model: PolicyModel, batch: Batch, micro_sizes: Sequence[int], with_entropy: bool
    ) -> tuple[Ragged, Ragged]:
        model.eval()
        all_log_probs, all_entropy = [], []
        for micro in batch.split(micro_sizes):
            inputs = pack(micro, self._device.torch_device)
            log_probs, entropy = model(inputs, self._rollout_cfg.temperature, with_entropy)
            all_log_probs.append(log_probs.cpu())
            all_entropy.append(entropy.cpu() if entropy is not None else log_probs[:0].cpu())
        lengths = batch.dense("response_length") if len(batch) else torch.zeros(0, dtype=torch.long)
        log_prob = Ragged(torch.cat(all_log_probs), lengths)
        return log_prob, log_prob.like(torch.cat(all_entropy)) if with_entropy else log_prob

    # -- update --------------------------------------------------------------------------------------------------------

    def update(self, batch: Batch, mini_batches: Sequence[MiniBatch], learning_rate: float) -> Numbers:
        """One optimizer step a mini-batch. ``batch`` holds their samples in order, micro-batch after micro-batch.

        Returns arrays with one entry an optimizer step: ``shares`` and ``token_sums`` of this rank, global ``grad_norm``.
        """
        self._residency.enter("train")
        self._sync.lost()
        self._policy.train()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        sizes = [size for mini in mini_batches for size in mini.micro_sizes]
        micros = iter(batch.split(sizes))
        steps = [
            self._optimizer_step([next(micros) for _ in mini.micro_sizes], mini.denominators) for mini in mini_batches
        ]
        self._device.synchronize()
        numbers: Numbers = {name: np.array([step[name] for step in steps]) for name in steps[0]}
        return numbers | self._device.peak_memory_gb()

    def _optimizer_step(self, micros: Sequence[Batch], denominators: Denominators) -> dict[str, float]:
        sums: dict[str, Tensor] = {}
        for micro in micros:
            result = self._backward(micro, denominators)
            for name, value in [
                ("share/loss", result.loss.detach()),
                *_named("share", result.shares),
                *_named("token", result.token_sums),
            ]:
                sums[name] = sums.get(name, torch.zeros((), device=value.device)) + value
        norm = clip_gradients(self._policy.parameters(), self._actor_cfg.optim.clip_grad)
        health = torch.stack([sums["share/loss"], norm.to(sums["share/loss"].device)])
        dist.all_reduce(health)
        finite = bool(health.isfinite().all())
        if finite:
            self._optimizer.step()
            self._version += 1
        elif self._cfg.trainer.on_nonfinite == "stop":
            self._report_nonfinite(micros, sums)
        self._optimizer.zero_grad(set_to_none=True)
        values = {name: float(value) for name, value in sums.items()}
        return values | {"grad_norm": float(norm), "skipped": float(not finite)}

    def _backward(self, micro: Batch, denominators: Denominators) -> ActorLoss:
        device = self._device.torch_device
        inputs = pack(micro, device)
        log_probs, entropy = self._policy(inputs, self._rollout_cfg.temperature, self._actor_cfg.entropy_coeff != 0)
        result = self._loss(micro.to(device), log_probs, entropy, denominators)
        # FSDP averages gradients over the ranks; the denominators are global already, so undo the average.
        (result.loss * dist.get_world_size()).backward()
        return result

    def _loss(self, micro: Batch, log_probs: Tensor, entropy: Tensor | None, denominators: Denominators) -> ActorLoss:
        empty = log_probs.detach()[:0]
        lengths = micro.dense("response_length") if len(micro) else empty.long()
        old = micro.ragged("old_log_probs").values if len(micro) else empty
        advantages = micro.dense("advantage").float().repeat_interleave(lengths) if len(micro) else empty
        ref = None
        if self._actor_cfg.use_kl_loss:
            ref = micro.ragged("ref_log_probs").values if len(micro) else empty
        inputs = PolicyLossInputs(log_probs, old, advantages)
        return actor_loss(inputs, lengths, denominators, self._actor_cfg, entropy=entropy, ref_log_probs=ref)

    def _report_nonfinite(self, micros: Sequence[Batch], sums: dict[str, Tensor]) -> None:
        folder = Path(self._cfg.trainer.default_local_dir) / "incidents"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"nonfinite_version_{self._version}_rank_{dist.get_rank()}.pt"
        torch.save([dict(micro.items()) for micro in micros], file)
        parts = ", ".join(
            f"{name.removeprefix('share/')}={float(value):.4g}" for name, value in sums.items() if "share/" in name
        )
        raise NonFiniteError(
            f"loss or gradient is not finite on some rank (rank {dist.get_rank()} has {parts}); no optimizer step was made. "
            f"The mini-batch is in {file}. To go on past such batches set trainer.on_nonfinite=skip."
        )

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Write this rank's shards of model and optimizer into ``folder`` (a collective)."""
        self._residency.enter("save")
        self._sync.lost()
        save_training_state(self._policy, self._optimizer, folder)

    def load(self, folder: str, weights_only: bool) -> None:
        """Read model and optimizer back, on any number of ranks (a collective)."""
        self._residency.enter("save")
        self._sync.lost()
        load_training_state(self._policy, None if weights_only else self._optimizer, folder)
        self._version += 1

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder (a collective; rank 0 writes)."""
        self._residency.enter("score")
        self._sync.lost()
        export_huggingface(self._policy, self._config, self._model_cfg.path, folder)


def _join(prompts: Sequence[NDArray[np.int32]], answers: Ragged, num_samples: int) -> Batch:
    """Prompt and answer of each sample as one row of ``tokens``."""
    heads = [torch.from_numpy(np.asarray(prompt, dtype=np.int32)) for prompt in prompts for _ in range(num_samples)]
    rows = [torch.cat(pair) for pair in zip(heads, answers.rows(), strict=True)]
    return Batch(
        {
            "tokens": Ragged.from_rows(rows),
            "prompt_length": torch.tensor([len(head) for head in heads]),
            "response_length": answers.lengths,
        }
    )


def _engine_gap(trainer: Tensor, engine: Tensor) -> Numbers:
    """Sums of |log-prob difference| and |probability difference| between engine and trainer, over this rank's tokens."""
    gap = (trainer - engine).abs().double()
    prob_gap = (trainer.exp() - engine.exp()).abs().double()
    return {
        "gap_sum": float(gap.sum()),
        "gap_max": float(gap.max()) if len(gap) else 0.0,
        "prob_gap_sum": float(prob_gap.sum()),
        "prob_gap_max": float(prob_gap.max()) if len(prob_gap) else 0.0,
    }


def _named(prefix: str, values: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"{prefix}/{name}", value) for name, value in values.items()]
