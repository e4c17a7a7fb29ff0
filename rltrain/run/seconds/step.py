"""Estimated time of a step by phase, with an explanation of each.

Passes over samples are timed with a run's layout code and the FLOPs of its metrics. Ranks synchronise at every
micro-batch, so each micro-batch takes as long as the rank with the most work. The weights of a layer are gathered while
the previous layer computes, so only the longer of the two times is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rltrain.common.chips import Chip
from rltrain.common.device import get_device, resolve_dtype
from rltrain.common.errors import ConfigError
from rltrain.config.passes import PASSES, ROLES, Role, step_phases, updates_of
from rltrain.config.schema import ActorConfig, Config
from rltrain.config.schema.keys import get
from rltrain.models.forward import model_numbers
from rltrain.models.optim import moments_dtype
from rltrain.models.vision import image_cost
from rltrain.models.weights.shard import empty_packed
from rltrain.models.weights.spec import ModelSpec, specs_of
from rltrain.run.seconds.assumptions import Assumptions
from rltrain.run.seconds.engine import EngineSpeed, Generation, generate
from rltrain.run.seconds.lengths import Ints, Lengths
from rltrain.trainer.batching.balance import Workload, cost_of, lay_out
from rltrain.trainer.batching.mini_batches import cut_prompts
from rltrain.trainer.metrics.timing import flops_metrics
from rltrain.trainer.plan import Plan, devices_per_copy

Sizes = Mapping[str, float]


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of a step."""

    seconds: dict[str, float]
    """Seconds by phase, in the order of a report. generate_sequences and reshard are parts of gen."""
    why: dict[str, str]
    """Explanation of the seconds, by phase."""
    tokens: int
    """Tokens of prompts and responses."""
    response_tokens: int
    num_devices: int

    @property
    def step_s(self) -> float:
        return self.seconds["step"]

    @property
    def throughput(self) -> float:
        """Tokens/s per device, prompts and responses, as ``perf/throughput``."""
        return self.tokens / (self.step_s * self.num_devices)


def sizes_of(cfg: Config, plan: Plan) -> dict[str, float]:
    """Return the sizes of the models as workers report them (`workers.hybrid`), from configs only.

    Raises ConfigError.
    """
    sizes: dict[str, float] = {}
    for role, (kind, spec) in specs_of(cfg, get_device(cfg.trainer.device), plan.passes).items():
        numbers = model_numbers(empty_packed(kind, spec, spec.load_config()))
        sizes |= numbers if role == "actor" else {}
        sizes |= {f"{role}_{name}": number for name, number in numbers.items()}
    return sizes


def estimate_step(
    cfg: Config, plan: Plan, lengths: Lengths, chip: Chip, assumed: Assumptions, device_bytes: int | None = None
) -> StepEstimate:
    """Estimate a step of ``plan`` with responses of ``lengths`` on devices of ``chip``.

    device_bytes: memory of one device (None: unknown, and the cache is never full). Raises ConfigError if the model has
    no config, or if a response does not fit in an engine's memory.
    """
    sizes = sizes_of(cfg, plan)
    lengths = lengths.cut(cfg.data.max_prompt_length, cfg.data.max_response_length)
    rollout = cfg.actor_rollout_ref.rollout
    started = plan.prompts_started
    prompts, answers = lengths.draw(started, plan.answers_per_prompt)
    speed = engine_speed(cfg, sizes, chip, assumed, device_bytes)
    try:
        enough = plan.prompts_per_step if rollout.stops_early else None
        generation = generate(prompts, answers, speed, plan.num_engine_replicas, enough)
    except ValueError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}: {error}. Raise it, "
            "or actor_rollout_ref.rollout.tensor_model_parallel_size."
        ) from None
    # The first complete prompts are trained on.
    complete = np.flatnonzero(~np.isnan(generation.ended_s).any(1))[: plan.prompts_per_step]
    prompts, answers = prompts[complete], answers[complete]
    model_bytes = sizes["num_parameters"] * resolve_dtype(rollout.dtype, get_device(cfg.trainer.device)).itemsize
    seconds = {"generate_sequences": generation.seconds, "reshard": model_bytes / (assumed.sync_gb_per_s * 1e9)}
    why = {"generate_sequences": _told(generation), "reshard": f"{model_bytes / 1e9:,.2f} GB to each device"}
    if plan.passes.greedy_baseline:
        greedy = generate(prompts, answers[:, :1], speed, plan.num_engine_replicas)
        seconds["gen_max"], why["gen_max"] = greedy.seconds, _told(greedy)
    if plan.images:
        rows = plan.images.most_rows * np.ones(len(prompts), dtype=np.int64)
        flops = 2 * sizes["matmul_parameters"] * float(image_cost(sizes, rows, np.ones_like(rows), updates=False).sum())
        tower_s = flops / (speed.flops * plan.num_engine_replicas)
        seconds["generate_sequences"] += tower_s
        why["generate_sequences"] += f", {tower_s:,.2f} s for images"
    passes = _passes(cfg, plan, sizes, chip, assumed, prompts, answers)
    seconds |= {name: found for name, (found, _) in passes.items()}
    why |= {name: text for name, (_, text) in passes.items()}
    seconds |= {"reward": answers.size * assumed.reward_ms / 1e3, "adv": answers.size * assumed.adv_us / 1e6}
    return StepEstimate(
        _in_order(seconds),
        why,
        int(prompts.sum() * plan.answers_per_prompt + answers.sum()),
        int(answers.sum()),
        plan.num_devices,
    )


def _in_order(seconds: dict[str, float]) -> dict[str, float]:
    names = ("generate_sequences", "reshard", *step_phases())
    found = seconds | {"gen": seconds["generate_sequences"] + seconds["reshard"]}
    ordered = {name: found[name] for name in dict.fromkeys(names) if name in found}
    together = sum(value for name, value in ordered.items() if name not in ("generate_sequences", "reshard"))
    return ordered | {"step": together}


def _told(generation: Generation) -> str:
    text = f"{generation.decode_steps:,} decode steps, the last {generation.tail_s:,.1f} s for the last 10 % of the "
    return f"{text}responses, {generation.idle_share:.0%} of the replicas' time idle"


def engine_speed(cfg: Config, sizes: Sizes, chip: Chip, assumed: Assumptions, device_bytes: int | None) -> EngineSpeed:
    """Return the speed of a replica of the run's engine."""
    rollout = cfg.actor_rollout_ref.rollout
    devices, size = rollout.tensor_model_parallel_size, resolve_dtype(rollout.dtype, get_device(cfg.trainer.device))
    per_token, weights = size.itemsize * sizes["cache_width"], size.itemsize * sizes["num_parameters"]
    cache = None
    if device_bytes is not None:
        room = rollout.gpu_memory_utilization * device_bytes * devices - weights
        # An embedded engine gets its share of the free memory, which is at most that share of the whole device.
        cache = max(0, int(room / per_token))
    step_s = assumed.step_ms / 1e3
    if devices > 1:
        spec = specs_of(cfg, get_device(cfg.trainer.device))["actor"][1]
        step_s += 2 * spec.load_config().get_text_config().num_hidden_layers * assumed.all_reduce_us / 1e6
    chosen = (1 - sizes["idle_share"]) * sizes["expert_parameters"]
    return EngineSpeed(
        weight_bytes=size.itemsize * (sizes["matmul_parameters"] - chosen),
        bytes_per_token=per_token,
        flops_per_token=2 * sizes["matmul_parameters"],
        flops_per_pair=4 * sizes["attention_width"],
        bandwidth=devices * chip.peak_bandwidth * assumed.bandwidth_share,
        flops=devices * chip.peak_flops * assumed.forward_share,
        step_s=step_s,
        max_rows=rollout.max_num_seqs,
        cache_tokens=cache,
        expert_bytes=size.itemsize * sizes["expert_parameters"],
        idle_share=sizes["idle_share"],
    )


def _passes(
    cfg: Config, plan: Plan, sizes: Sizes, chip: Chip, assumed: Assumptions, prompts: Ints, answers: Ints
) -> dict[str, tuple[float, str]]:
    """Return the seconds of each pass of a step, with an explanation."""
    n = plan.answers_per_prompt
    pair_cost = 2 * sizes["attention_width"] / sizes["matmul_parameters"]
    groups = np.arange(len(prompts)).repeat(n)
    text = Workload.of_groups(prompts.repeat(n), answers.ravel(), groups, pair_cost)
    everyone = np.arange(answers.size)
    outside = text.tokens(everyone) / text.cost(everyone)
    found = {}
    for name, row in PASSES.items():
        if row.rate is None or not plan.passes.makes(name, plan.num_mini_batches):
            continue
        work = text
        if plan.images and name != "reward":
            rows = plan.images.most_rows * np.ones_like(groups)
            work = text.with_images(groups, rows, image_cost(sizes, rows, np.ones_like(rows), updates=row.updates))
        speed = pass_speed(name, cfg, plan, sizes, chip, assumed, outside)
        keys = cfg.actor_rollout_ref.actor, cfg.critic.ppo_epochs, cfg.data.seed
        mini_batches = mini_batches_of(name, *keys, plan, assumed)
        seconds, parts = time_pass(name, mini_batches, work, plan, sizes, speed)
        moved = _moved_bytes(name, cfg, plan, sizes, len(mini_batches)) / (assumed.host_gb_per_s * 1e9)
        found[name] = seconds + moved, parts + (f", host memory {moved:,.2f} s" if moved else "")
    return found


def pass_speed(
    name: str, cfg: Config, plan: Plan, sizes: Sizes, chip: Chip, assumed: Assumptions, outside: float
) -> PassSpeed:
    """Return the speed of the devices of a rank in the pass ``name``.

    outside: share of a forward's FLOPs outside of attention.
    """
    role, learns = PASSES[name].role, PASSES[name].updates
    spec = _spec(role, cfg, plan)
    # Recomputation costs up to one more forward pass, in addition to the update's three.
    again = 1 + _recomputed(spec, outside) / 3 if learns else 1.0
    share = assumed.update_share if learns else assumed.forward_share
    shards = devices_per_copy(spec.fsdp.fsdp_size, plan.num_devices)
    weight_bytes = _of(role, "num_parameters", sizes) * spec.compute_dtype.itemsize
    devices = plan.num_devices // plan.ranks[role]
    # A backward writes and reads about twice as much as a forward.
    traffic, passed = _traffic(spec) * (3 if learns else 1) * again, _passed_bytes(spec) * (2 if learns else 1)
    link = assumed.node_gb_per_s if shards <= plan.devices_per_node else assumed.network_gb_per_s
    return PassSpeed(
        flops=devices * chip.peak_flops * share / again,
        token_s=traffic / (devices * chip.peak_bandwidth * assumed.bandwidth_share)
        + passed * spec.tensor_size / devices / (assumed.node_gb_per_s * 1e9),
        gather_s=weight_bytes * (1 / spec.tensor_size - 1 / shards) / (link * 1e9),
        micro_batch_s=assumed.micro_batch_ms / 1e3,
        sample_s=assumed.sample_us / 1e6,
        optimizer_s=assumed.optimizer_ms / 1e3,
    )


def _recomputed(spec: ModelSpec, outside: float) -> float:
    """Return the share of a forward that the backward pass repeats."""
    if isinstance(spec.gradient_checkpointing, str):
        return outside
    if isinstance(spec.gradient_checkpointing, bool):
        return float(spec.gradient_checkpointing)
    return float(spec.gradient_checkpointing / spec.load_config().get_text_config().num_hidden_layers)


def _traffic(spec: ModelSpec) -> float:
    """Return the bytes of a token's activations between the matrix products of a forward.

    This is a rough count, in two bytes per element. A layer writes or reads its width about 20 times (norms, residuals,
    rotations, inputs and outputs of the products) and the width of its MLP 7 times. Logits are written in two bytes and
    converted to log-probs in four, about 24 bytes per vocabulary entry. Ranks that share matrices split the MLP's width
    and the vocabulary, but not the layer's width.
    """
    config = spec.load_config().get_text_config()
    experts = getattr(config, "num_experts_per_tok", None) or 1
    inner = getattr(config, "moe_intermediate_size", None) or getattr(
        config, "intermediate_size", 4 * config.hidden_size
    )
    widths = 40 * config.hidden_size * spec.tensor_size + 14 * experts * inner
    return float(config.num_hidden_layers * widths + 24 * config.vocab_size)


def _passed_bytes(spec: ModelSpec) -> float:
    """Return the bytes per token that a rank sends in a forward pass to ranks that share its matrices: two all-reduces
    of the layer's width per layer, in two bytes per element."""
    config = spec.load_config().get_text_config()
    return 2 * 2 * 2 * (1 - 1 / spec.tensor_size) * float(config.num_hidden_layers * config.hidden_size)


def _spec(role: Role, cfg: Config, plan: Plan) -> ModelSpec:
    """Return the model spec of ``role``. The reference may be the actor without its adapters."""
    specs = specs_of(cfg, get_device(cfg.trainer.device), plan.passes)
    return specs[role if role in specs else "actor"][1]


def _of(role: Role, name: str, sizes: Sizes) -> float:
    """Return the size ``name`` of the model of ``role``."""
    return sizes.get(f"{role}_{name}", sizes[name])


def _moved_bytes(name: str, cfg: Config, plan: Plan, sizes: Sizes, num_steps: int) -> float:
    """Return the bytes that a device loads from host memory for a pass, and writes back after an update.

    Each of ``num_steps`` optimizer steps loads and writes the moments at the same time, so they count once.
    """
    role: Role = PASSES[name].role if f"{PASSES[name].role}_num_parameters" in sizes else "actor"
    fsdp, spec = ROLES[role].fsdp, _spec(role, cfg, plan)
    shards = devices_per_copy(spec.fsdp.fsdp_size, plan.num_devices)
    size, learns = spec.master_dtype.itemsize, name in updates_of(role)
    moved = (1 + learns) * size * _of(role, "num_parameters", sizes) if get(cfg, f"{fsdp}.param_offload") else 0.0
    if learns and get(cfg, f"{fsdp}.optimizer_offload"):
        dtype = moments_dtype(get(cfg, f"{ROLES[role].section}.optim"), spec.trained_dtype)
        moved += num_steps * 2 * dtype.itemsize * _of(role, "trained_parameters", sizes)
    return moved / shards


# Transfers of a pass, by whether it is an update: an update gathers weights for the forward and again for the backward
# pass, and sends as many gradients. Its samples also have three times as much data.
_ROUNDS = {True: 3, False: 1}


@dataclass(frozen=True)
class PassSpeed:
    """Speed of the devices in a pass, and fixed times."""

    flops: float
    """FLOP/s of all devices of a data-parallel rank."""
    token_s: float
    """Time to write and read the activations of a token between the matrix products."""
    gather_s: float
    """Time to gather the weights of a micro-batch."""
    micro_batch_s: float
    sample_s: float
    optimizer_s: float
    """Fixed time of an optimizer step. (The two times above are per micro-batch and per sample.)"""


def time_pass(
    name: str, mini_batches: Sequence[Ints], work: Workload, plan: Plan, sizes: Mapping[str, float], speed: PassSpeed
) -> tuple[float, str]:
    """Return the seconds of the pass ``name`` over the samples of ``mini_batches``, and their parts as text.

    sizes: sizes of the models, as reported by workers.
    """
    mini_batches = [ids for ids in mini_batches if len(ids)]
    if not mini_batches:
        return 0.0, ""
    ranks = plan.ranks[PASSES[name].role]
    nodes = [rank * plan.num_nodes // ranks for rank in range(ranks)]
    layout = lay_out(mini_batches, work, ranks, plan.budgets[name], nodes)
    cost = cost_of(layout, work)
    metrics = flops_metrics({name: cost}, {f"timing_s/{name}": 1.0}, sizes, 1)
    per_cost = metrics[f"perf/tflops/{PASSES[name].rate}"] * 1e12 / max(cost.cost, 1e-9)

    def micro_batch_s(ids: Ints) -> float:
        return work.cost(ids) * per_cost / speed.flops + work.tokens(ids) * speed.token_s

    turns = zip(*(layout.micro_batches(rank) for rank in range(ranks)), strict=True)
    slowest = np.array([max(map(micro_batch_s, turn)) for turn in turns])
    learning = PASSES[name].updates
    fixed = len(slowest) * speed.micro_batch_s + (len(mini_batches) * speed.optimizer_s if learning else 0.0)
    fixed += max(map(len, layout.ids)) * speed.sample_s * _ROUNDS[learning]
    together = float(np.maximum(slowest, speed.gather_s * _ROUNDS[learning]).sum())
    compute = (cost.cost * per_cost / speed.flops + cost.tokens * speed.token_s) / ranks
    # Compute time with equally busy ranks; time waiting for slower ranks, and for weights.
    parts = f"compute {compute:,.2f}, waiting {together - compute:,.2f}, fixed {fixed:,.2f} s"
    return together + fixed, f"{len(slowest):,} micro-batch{'es' * (len(slowest) != 1)} of a rank: {parts}"


def mini_batches_of(
    name: str, actor: ActorConfig, critic_epochs: int, seed: int, plan: Plan, assumed: Assumptions
) -> list[Ints]:
    """Return the samples of each optimizer step of an update, or all samples for another pass."""
    everything = np.arange(plan.samples_per_step)
    if name == "update_critic":
        return cut_prompts(plan, plan.critic_prompts_per_mini_batch, critic_epochs, 1, seed)
    cut = cut_prompts(plan, plan.prompts_per_mini_batch, actor.ppo_epochs, 1, seed if actor.shuffle else None)
    if name == "old_log_prob" and plan.passes.waits_for_update(max(1, plan.passes.first_actor_step)):
        return [np.setdiff1d(everything, cut[0])]
    if name != "update_actor":
        return [everything]
    if not plan.passes.skips_silent:
        return cut
    # Groups without a gradient: every n-th prompt.
    zero_advantage = np.arange(plan.prompts_per_step) < round(assumed.silent_share * plan.prompts_per_step)
    zero_advantage = np.random.default_rng(0).permutation(zero_advantage).repeat(plan.answers_per_prompt)
    return [ids[~zero_advantage[ids]] for ids in cut]
