"""Estimated device memory of every phase by owner, from the run's and the model's configuration.

Resident memory follows from sizes and from the rules of `workers.state.offload_manager`. The additional memory of a
pass is measured by running the worker's code on fake tensors (`run.preflight.meta_run`), with the fullest micro-batch
that its budget allows. Memory of drivers, communicators and fragmentation is not estimated; a share of the device is
kept free for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import DEVICES, Device, get_device, resolve_dtype
from rltrain.config.budgets import PassBudget, judge_lengths, longest_text
from rltrain.config.passes import JUDGE_PHASE, PASSES, ROLES, Role, device_phases, updates_of
from rltrain.config.schema import Config
from rltrain.config.schema.engines import ENGINES
from rltrain.config.schema.keys import get
from rltrain.config.schema.model import FSDPConfig, OptimConfig
from rltrain.models.attention.packing import pays_to_share
from rltrain.models.experts import parts_with_experts
from rltrain.models.forward import PolicyModel
from rltrain.models.optim import moments_dtype
from rltrain.models.weights.lora import ranks_of
from rltrain.models.weights.names import ADAPTER, Part, gathered_weights
from rltrain.models.weights.shard import empty_packed, local_shard
from rltrain.models.weights.spec import ModelSpec, actor_spec, judge_spec, specs_of
from rltrain.run.preflight.meta_run import Owners, Work, fake_model, forward_only, peak_of, update
from rltrain.trainer.plan import Plan
from rltrain.workers.rollout.embedded.engine import bytes_per_token
from rltrain.workers.rollout.embedded.kv import ROOM
from rltrain.workers.rollout.queue import samples_per_job
from rltrain.workers.rollout.vllm.adapters import slot_rank

OWNERS = ("weights", "gradients", "optimizer", "engine weights", "cache", "gathered", "activations")
_CANARY_TOKENS = 64


@dataclass(frozen=True)
class _Writing:
    """Limits of the generation of an embedded engine: the policy's responses, or a judge's replies."""

    dtype: torch.dtype
    memory_share: float
    max_num_seqs: int
    num_samples: int
    """Samples on one device."""
    prompt: int
    answer: int
    """Maximum tokens of the response (``prompt``: of the prompt)."""
    longest: int
    """Maximum tokens of prompt and response together."""
    per_prompt: int = 1
    """Responses that share a prompt."""
    per_job: int = 1
    """Responses of a job, which are added to the batch together."""

    @classmethod
    def of_policy(cls, cfg: Config, plan: Plan, device: Device) -> _Writing:
        """Return the limits of the responses of a step."""
        rollout, data = cfg.actor_rollout_ref.rollout, cfg.data
        return cls(
            resolve_dtype(rollout.dtype, device),
            rollout.gpu_memory_utilization,
            rollout.max_num_seqs,
            plan.samples_per_replica,
            data.max_prompt_length,
            data.max_response_length,
            rollout.max_model_len or longest_text(cfg),
            plan.answers_per_prompt,
            samples_per_job(
                plan.prompts_started, plan.answers_per_prompt, plan.num_engine_replicas, rollout.max_num_seqs
            ),
        )

    @classmethod
    def of_judge(cls, cfg: Config, plan: Plan, device: Device) -> _Writing:
        """Return the limits of the judge's replies of a step."""
        rollout, (message, reply) = cfg.reward_model.rollout, judge_lengths(cfg)
        num_samples = -(-plan.prompts_started * plan.answers_per_prompt // plan.num_devices)
        dtype = judge_spec(cfg, device).compute_dtype
        sizes = (num_samples, message, reply, message + reply)
        return cls(dtype, rollout.gpu_memory_utilization, rollout.max_num_seqs, *sizes)


@dataclass(frozen=True)
class _Role:
    """A model on a device and its optimizer, in bytes of one rank."""

    kind: type[Any]
    spec: ModelSpec
    phases: tuple[str, ...]
    offload: bool
    ranks: int
    learns: tuple[str, ...] = ()
    """Phases that need the optimizer (``phases``: that need the weights)."""
    optimizer_offload: bool = False
    optim: OptimConfig | None = None

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the weights, bytes of the trained weights, and number of elements on all ranks without adapters."""
        shards = self.ranks if self.spec.fsdp.fsdp_size in (-1, 0) else min(self.spec.fsdp.fsdp_size, self.ranks)
        packed = empty_packed(self.kind, self.spec, self.spec.load_config())
        kept = parts_with_experts(packed.model) if self.spec.fsdp.expert_parallel_size > 1 else []
        even = {id(weight) for part in kept for weight in part.parameters()}
        elements = sum(each.numel() for name, each in packed.named_parameters() if ADAPTER not in name)
        if self.spec.tensor_size > 1:
            # Computed from a split model, because some weights are split in two dimensions and others not at all.
            with fake_model(self.kind, self.spec, DEVICES["cpu"], self.ranks) as (split, _, _):
                own = [(local_shard(each).nbytes, each.requires_grad) for each in split.parameters()]
            return sum(size for size, _ in own), sum(size for size, learns in own if learns), elements
        weights = learning = 0
        for each in packed.parameters():
            # FSDP2 shards rows, and the first rank's shard is the largest.
            rows = len(each) / shards if id(each) in even else -(-len(each) // shards)
            size = round(rows * math.prod(each.shape[1:])) * each.dtype.itemsize
            weights += size
            learning += size if each.requires_grad else 0
        return weights, learning, elements

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's moments, on the device or on the host."""
        if not self.learns or self.optim is None:
            return 0
        weights = self.spec.trained_dtype
        return 2 * self.sizes[1] * moments_dtype(self.optim, weights).itemsize // weights.itemsize

    @cached_property
    def slot(self) -> int:
        """Elements of a slot for the role's adapters in an engine whose slots have fixed ranks."""
        packed = empty_packed(self.kind, self.spec, self.spec.load_config())
        ranks = ranks_of(packed.model)
        elements = sum(each.numel() for name, each in packed.named_parameters() if ADAPTER in name)
        return elements * slot_rank(ranks) // min(ranks.values())

    def resting(self, phase: str) -> Owners:
        """Return the resident memory in ``phase``, without the memory of its computation."""
        return Counter({
            "weights": self.sizes[0] if phase in self.phases or not self.offload else 0,
            "optimizer": 0 if self.optimizer_offload else self.moments,
        })  # fmt: skip

    def peak(self, device: Device, batch: Batch, work: Work, key: str) -> Owners:
        """Return `peak_of`, cached."""
        # A tower's forward depends on values, so it is estimated separately. Offloading does not change a pass.
        fsdp = self.spec.fsdp
        stays: dict[str, Any] = {field.name: False for field in fields(fsdp) if field.name.endswith("_offload")}
        spec = replace(self.spec, tower="rests", fsdp=replace(fsdp, **stays))
        known = f"{self.kind} {spec} {device} {self.ranks} {key}"
        if known not in _PEAKS:
            _PEAKS[known] = peak_of(self.kind, spec, device, self.ranks, batch, work)
        return _PEAKS[known]


_PEAKS: dict[str, Owners] = {}


def forecast(
    cfg: Config, plan: Plan, device_bytes: int | None, phases: Container[str] | None = None
) -> dict[str, Owners]:
    """Return the bytes by owner at the peak of each phase on the fullest device.

    phases: only these phases of a step (None: all). device_bytes: memory of one device. If it is None, the memory share
    of the engine is not counted.
    """
    device = get_device(cfg.trainer.device).sized_for(device_bytes)
    roles, rollout = roles_of(cfg, plan, device), cfg.actor_rollout_ref.rollout
    engine = Counter() if ENGINES[rollout.name].embedded else engine_memory(cfg, device, roles["actor"], device_bytes)
    stays = Counter() if rollout.free_cache_engine else engine
    phases = device_phases() if phases is None else phases
    if not plan.passes.trains:
        phases = [phase for phase in ("sync", "gen", JUDGE_PHASE, "reward") if phase in phases]
    if plan.passes.supervised:  # supervised fine-tuning has no engine
        phases = [phase for phase in PASSES if phase in phases]

    def together(phase: str, own: Mapping[str, int]) -> Owners:
        resting = sum((role.resting(phase) for role in roles.values()), Counter())
        # The mask of npu_fusion_attention is created once and kept.
        own = dict(own) | {"activations": max(own.get("activations", 0), 2048**2 * (device.attention == "npu"))} | stays
        return Counter(own | {"weights": resting["weights"], "optimizer": resting["optimizer"]})

    passes = {phase: own for phase, own in _passes(cfg, plan, device, roles).items() if phase in phases}
    peaks = {phase: together(phase, own()) for phase, own in passes.items()}
    if "gen" in phases:
        peaks["gen"] = together("gen", engine)
    if "sync" in phases or ("gen" in phases and not engine):
        writing = _Writing.of_policy(cfg, plan, device)
        parts, weights = _load(cfg, device, roles["actor"], writing.dtype)
        # Compared with all resident memory, because the mask is not part of a pass's activations.
        peaks["sync"] = max((together("sync", part) for part in parts), key=Counter.total)
        if "gen" in phases and not engine:
            peaks["gen"] += _generation(writing, device, roles["actor"], weights, peaks["gen"], device_bytes)
    if JUDGE_PHASE in phases and "judge" in roles:
        writing = _Writing.of_judge(cfg, plan, device)
        parts, weights = _load(cfg, device, roles["judge"], writing.dtype, embedded=True)
        resting = together(JUDGE_PHASE, {})
        replies = resting + _generation(writing, device, roles["judge"], weights, resting, device_bytes)
        peaks[JUDGE_PHASE] = max((*(together(JUDGE_PHASE, part) for part in parts), replies), key=Counter.total)
    return {phase: peaks[phase] for phase in device_phases() if phase in peaks and phase in phases}


def roles_of(cfg: Config, plan: Plan, device: Device) -> dict[str, _Role]:
    """Return the models of a run, with the phases in which `OffloadManager` has them on the device."""
    roles: dict[str, _Role] = {}
    for role, (kind, spec) in specs_of(cfg, device, plan.passes).items():
        rests = plan.passes.needs(role), spec.rests_on_host, plan.num_devices
        learns, row = updates_of(role) if role in plan.passes.roles else (), ROLES[role]
        optimizer = (get(cfg, f"{row.fsdp}.optimizer_offload"), get(cfg, f"{row.section}.optim")) if learns else ()
        roles[role] = _Role(kind, spec, *rests, learns, *optimizer)
    return roles


# -- passes ------------------------------------------------------------------------------------------------------------


def _passes(cfg: Config, plan: Plan, device: Device, roles: Mapping[str, _Role]) -> dict[str, Callable[[], Owners]]:
    """Return a function for each pass that computes the pass's peak."""
    passes, policy = plan.passes, roles["actor"]

    def forward(name: str, role: Role) -> Owners:
        budget, samples = plan.budgets[name], -(-plan.samples_per_step // plan.ranks[role])
        model, entropy = roles.get(role, policy), name == "old_log_prob"  # the reference may be the policy itself
        return model.peak(device, fullest(cfg, budget, samples), forward_only(entropy), f"{budget} {samples} {entropy}")

    def learn(name: str, num_samples: int, entropy: bool = False, learns: bool = False) -> Owners:
        model, budget = roles[PASSES[name].role], plan.budgets[name]
        samples = -(-num_samples // plan.ranks[PASSES[name].role])
        batch = fullest(cfg, budget, samples)
        assert model.optim is not None
        once = isinstance(model.spec.fsdp, FSDPConfig) and model.spec.fsdp.use_no_sync_for_gradient_accumulation
        work = update(model.optim, -(-samples // len(batch)), entropy, learns, once, model.optimizer_offload)
        moments = f"{model.optim.moments} {model.optimizer_offload}"
        return model.peak(device, batch, work, f"{budget} {samples} {entropy} {learns} {moments} learns")

    def update_critic() -> Owners:
        return learn("update_critic", plan.critic_prompts_per_mini_batch * plan.answers_per_prompt)

    def update_actor() -> Owners:
        learns = passes.learns_entropy
        measures = learns or passes.bypass or (passes.old_log_probs != "all" and not passes.supervised)
        own = Counter(learn("update_actor", plan.samples_per_mini_batch, measures, learns))
        if passes.exact_kl_in_loss:
            # The reference's embedding and head stay gathered during the update.
            own["gathered"] += forward("update_actor", "ref")["gathered"]
        if passes.exact_teacher:
            # The teacher's embedding and head stay gathered too. Its layers run before the policy's, and may need more
            # memory.
            teacher = forward("update_actor", "teacher")
            own["gathered"] += teacher["gathered"]
            own["activations"] = max(own["activations"], teacher["activations"])
        if passes.images_in_training and plan.images:
            own["activations"] += _of_tower(policy.spec, plan)
        return own

    updates = {"update_critic": update_critic, "update_actor": update_actor}
    return {
        name: updates[name] if row.updates else partial(forward, name, row.role)
        for name, row in PASSES.items()
        if passes.makes(name, plan.num_mini_batches)
    }


def fullest(cfg: Config, budget: PassBudget, num_samples: int) -> Batch:
    """Return the samples of one micro-batch that fills ``budget``, up to ``num_samples`` samples.

    They have the longest prompts and the longest responses. The last response takes the remaining tokens.
    """
    prompt, answer, together = cfg.data.max_prompt_length, cfg.data.max_response_length, cfg.actor_rollout_ref.rollout.n
    most, room = min(budget.max_samples or num_samples, num_samples), budget.max_tokens or math.inf
    lengths: list[int] = []
    while len(lengths) < most:
        shares = len(lengths) % together and pays_to_share(prompt, answer)
        own = 0 if shares else prompt
        length = int(min(answer, room - own))
        if length < 1:
            break
        lengths.append(length)
        room -= own + length
    lengths = lengths or [answer]
    index = torch.arange(len(lengths)) // together
    prompts = Ragged(
        torch.zeros((int(index[-1]) + 1) * prompt, dtype=torch.int32), torch.full((int(index[-1]) + 1,), prompt)
    )
    answers = Ragged(torch.zeros(sum(lengths), dtype=torch.int32), torch.tensor(lengths))
    mask = answers.like(torch.ones(len(answers.values), dtype=torch.bool))
    return Batch({c.PROMPT: DictionaryColumn(prompts, index), c.RESPONSE: answers, c.RESPONSE_MASK: mask})


def _of_tower(spec: ModelSpec, plan: Plan) -> int:
    """Return a rough estimate of a vision tower's activations.

    It counts one state per row and layer if the tower is trained, and the activations of one layer.
    """
    config: Any = spec.load_config().vision_config
    assert plan.images
    width = getattr(config, "embed_dim", None) or config.hidden_size
    layers = getattr(config, "depth", None) or config.num_hidden_layers
    rows = plan.budgets["update_actor"].max_rows or plan.prompts_per_mini_batch * plan.images.most_rows
    return int(rows * width * spec.compute_dtype.itemsize * ((layers if spec.tower == "trained" else 1) + 16))


# -- the engine --------------------------------------------------------------------------------------------------------


def _load(
    cfg: Config, device: Device, policy: _Role, dtype: torch.dtype, *, embedded: bool | None = None
) -> tuple[tuple[Owners, Owners], int]:
    """Return the memory of the two parts of a weight sync, load and canary, and the engine's weights afterwards.

    embedded: whether the engine is embedded (None: as the policy's).
    """
    rollout = cfg.actor_rollout_ref.rollout
    embedded = ENGINES[rollout.name].embedded if embedded is None else embedded
    rows = PassBudget(None, 4)
    short = deepcopy(cfg)
    short.data.max_prompt_length = short.data.max_response_length = _CANARY_TOKENS // 2
    canary = policy.peak(device, fullest(short, rows, 4), forward_only(False), "canary")
    bucket = rollout.update_weights_bucket_megabytes << 20
    parts: tuple[Part, ...] = ("merged",) if cfg.actor_rollout_ref.model.merges else ("base", "adapters")
    known = f"load {policy.spec} {device} {policy.ranks} {dtype} {bucket} {embedded} {parts}"
    if known not in _PEAKS:
        with fake_model(PolicyModel, policy.spec, device, policy.ranks) as (packed, ledger, _):
            kept = []
            with ledger.owner("gathered"):
                for part in parts:
                    for weight in gathered_weights(packed, dtype, bucket, part=part):
                        if embedded:
                            kept.append(weight.values)  # the engine keeps the tensor itself
                            ledger.claim("engine weights", [weight.values], but="weights")
            _PEAKS[known] = ledger.cut()
            _PEAKS[f"{known} after"] = Counter(ledger.live)
    load = Counter(_PEAKS[known])
    if not embedded:
        load["engine weights"] = engine_memory(cfg, device, policy, None)["engine weights"]
    return (load, canary), _PEAKS[f"{known} after"]["engine weights"]


def engine_memory(cfg: Config, device: Device, policy: _Role, device_bytes: int | None) -> Owners:
    """Return the memory of an engine that manages its memory itself."""
    rollout = cfg.actor_rollout_ref.rollout
    itemsize = resolve_dtype(rollout.dtype, device).itemsize
    weights = policy.sizes[2] * itemsize // rollout.tensor_model_parallel_size
    if not cfg.actor_rollout_ref.model.merges:
        # An upper bound: each device of an engine has all of A or B, and a share of the other.
        weights += policy.slot * itemsize
    share = round(rollout.gpu_memory_utilization * device_bytes) if device_bytes else 0
    return Counter({"engine weights": weights, "cache": max(share - weights, 0)})


def longest_cache_bytes(cfg: Config) -> int:
    """Return the minimum bytes per device for the keys and values of one longest sequence, for engines that manage
    their memory.
    """
    rollout, device = cfg.actor_rollout_ref.rollout, get_device(cfg.trainer.device)
    config = actor_spec(cfg, device).load_config()
    text = config.get_text_config()
    if hasattr(text, "kv_lora_rank") or {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}:
        return 1  # engines store only some of the keys and values
    longest, size = rollout.max_model_len or longest_text(cfg), rollout.tensor_model_parallel_size
    return longest * bytes_per_token(config, resolve_dtype(rollout.dtype, device)) // size


def _generation(
    writing: _Writing, device: Device, writer: _Role, weights: int, others: Owners, device_bytes: int | None
) -> Owners:
    """Return the memory of an embedded engine during generation. others: resident memory of other owners."""
    config, dtype = writer.spec.load_config(), writing.dtype
    of_token, block = bytes_per_token(config, dtype), device.cache_columns
    rows = min(writing.max_num_seqs, writing.num_samples)
    if device_bytes is not None:
        free = device_bytes - others.total() - weights
        rows = min(rows, int(writing.memory_share * free / ROOM / ((writing.longest + block) * of_token)))
    # Responses to a prompt are added together, and later ones reuse their columns.
    rows = max(rows, 0) // writing.per_job * writing.per_job
    answer, rounds = writing.answer, -(-writing.num_samples // max(rows, 1))
    columns = min(-(-answer // block) + 1, -(-answer * rounds // block)) * block
    prompts = -(-rows // writing.per_prompt) * writing.prompt
    logits = rows * config.get_text_config().vocab_size
    drawn = min(logits, device.sampling_elements)
    return Counter({
        "engine weights": weights,
        "cache": (rows * columns + prompts) * of_token,
        "activations": logits * (4 + dtype.itemsize) + 8 * drawn,
    })  # fmt: skip
