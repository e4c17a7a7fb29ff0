"""Cost and savings of expert parallelism: received bytes and memory, by the number of ranks that share the experts.

    python -m bench.experts [--ranks 16] [--tokens 16384]

The update of one micro-batch of Qwen3-30B-A3B, in bfloat16, runs on simulated ranks: torch computes shapes only, and
every collective is counted by the bytes that a rank receives. Routers are assumed to balance perfectly. Then a small
model is really trained on four ranks, and weights are compared; and the update of one with 64 experts is timed with and
without the load-balancing loss, in turns. Writes bench/results/experts_cpu.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from bench.table import parse, table, write
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.device import DEVICES, get_device
from rltrain.config.load import load_config
from rltrain.config.schema.model import OptimConfig, ShardingConfig
from rltrain.config.step_passes import make_step_passes
from rltrain.models.attention.packing import pack, per_computed_token
from rltrain.models.forward import PolicyModel
from rltrain.models.optim import clip_gradients, make_optimizer
from rltrain.models.weights.names import gathered_weights
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.run.preflight.meta_run import Owners, peak_of, update
from rltrain.workers.updates.expert_balance import ExpertBalance
from tests.batches import batch_of_rows
from tests.config.test_recipes import TEXT
from tests.distance import distance
from tests.models.kinds import SIZES
from tests.ranks import run_on_ranks

LARGE = TEXT["Qwen3-30B-A3B"]
# Layers of the two models that are run; memory and bytes are linear in them.
SHORT, LONG = 3, 6
GIB = 2**30
STEPS = 20
# The timed model.
TIMED = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
}  # fmt: skip


KINDS = {"_allgather_base_": "weights", "_reduce_scatter_base_": "gradients", "alltoall_base_": "tokens"}


class Arrivals(TorchDispatchMode):
    """Counter of the bytes that a rank receives from collectives, by kind. size: number of ranks that
    exchange tokens.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._size = size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind := KINDS.get(func._schema.name.removeprefix("c10d::")):
            # The larger tensor has a part of every rank, and the rank's part is not sent.
            small, large = sorted(each.nbytes for each in args[:2])
            self.bytes[kind] += large - (large // self._size if kind == "tokens" else small)
        return func(*args, **(kwargs or {}))


def pretended(folder: Path, size: int, ranks: int, tokens: int) -> str:
    """Return a line of the first table."""
    spec = ModelSpec(
        str(folder), fsdp=ShardingConfig(expert_parallel_size=size), compute_dtype=torch.bfloat16,
        gradient_checkpointing=True,
    )  # fmt: skip
    batch = one_row(tokens)
    seen: list[Counter[str]] = []
    work = update(OptimConfig(), 1, False, False)

    def counted(*model: Any) -> list[Owners]:
        with Arrivals(size) as arrivals:
            found = work(*model)
        seen.append(arrivals.bytes)
        return found

    peak = peak_of(PolicyModel, spec, DEVICES["cuda"], ranks, batch, counted)
    short, longer = seen
    layers = LARGE.num_hidden_layers
    arrived = {kind: short[kind] + (longer[kind] - short[kind]) / (LONG - SHORT) * (layers - SHORT) for kind in short}
    parts = [arrived.get(kind, 0) for kind in ("weights", "gradients", "tokens")]
    memory = [peak["weights"] + peak["optimizer"] + peak["gradients"], peak["gathered"], peak["activations"]]
    cells = " | ".join(f"{part / GIB:.1f}" for part in (*parts, sum(parts), *memory, peak.total()))
    return f"| {size} | {cells} |"


def one_row(tokens: int) -> Batch:
    return batch_of_rows([torch.zeros(tokens, dtype=torch.int32)], [1024])


def learn(rank: int, world: int, folder: Path, sizes: list[int]) -> None:
    """Train a small model for `STEPS` steps with every size."""
    found = {}
    for size in sizes:
        spec = ModelSpec(str(folder), fsdp=ShardingConfig(expert_parallel_size=size))
        policy = sharded_model(PolicyModel, spec, get_device("cpu")).train()
        optimizer = make_optimizer(policy, OptimConfig(lr=1e-3), get_device("cpu"))
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            rows = [torch.randint(2, 128, (24,), generator=generator, dtype=torch.int32) for _ in range(4)]
            policy(pack(batch_of_rows(rows, [8] * 4), torch.device("cpu"))).log_probs.mean().neg().backward()
            clip_gradients(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        kept = gathered_weights(policy, torch.float32)
        found[size] = {name: each.clone() for name, each, in_checkpoint in kept if in_checkpoint}
    if rank == 0:
        torch.save(found, folder / "found.pt")


def time_balance(rank: int, world: int, folder: Path, rounds: int) -> None:
    """Measure the seconds of an update's forward and backward passes, with and without the load-balancing loss."""
    policy = sharded_model(PolicyModel, ModelSpec(str(folder)), get_device("cpu")).train()
    rows = [torch.randint(2, 128, (128,), dtype=torch.int32) for _ in range(8)]
    free, replayed = (batch_of_rows(rows, [32] * 8) for _ in range(2))
    with torch.no_grad():
        experts = policy(pack(free, torch.device("cpu")), with_experts=True).experts
    replayed.update({c.ROUTED_EXPERTS: per_computed_token(experts, free)})
    passes = make_step_passes(load_config(["actor_rollout_ref.actor.router_aux_loss_coef=0.001"]).config)
    kinds = {
        "without": (free, None),
        "with": (free, ExpertBalance(policy, get_device("cpu"), passes, 0.0)),
        "without, replayed": (replayed, None),
        "with, replayed": (
            replayed,
            ExpertBalance(policy, get_device("cpu"), replace(passes, router_replay="R3"), 0.0),
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name in [*kinds, *reversed(kinds)]:
            batch, balance = kinds[name]
            policy.balance(None)
            started = time.perf_counter()
            micros = batch.split([4, 4])
            if balance:
                balance.begin(micros)
            for micro in micros:
                outputs = policy(pack(micro, torch.device("cpu")))
                loss = outputs.log_probs.mean() + (0.001 * outputs.balance_loss if balance else 0.0)
                loss.backward()
            seconds[name] += [time.perf_counter() - started] if number else []  # the first round warms up
            policy.zero_grad()
    torch.save({name: statistics.median(each) for name, each in seconds.items()}, folder / "seconds.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the timed updates")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a micro-batch of each rank")
    options = parse(parser, out="experts_cpu.md", ranks=2, rounds=1, tokens=256)
    sizes = [size for size in (1, 2, 4, 8, 16) if options.ranks % size == 0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LARGE.save_pretrained(folder / "large")
        rows = [pretended(folder / "large", size, options.ranks, options.tokens) for size in sizes]
        small = Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(small).save_pretrained(folder / "small")
        start = dict(AutoModelForCausalLM.from_pretrained(folder / "small").named_parameters())
        run_on_ranks(learn, 4, folder / "small", [1, 2, 4])
        found = torch.load(folder / "small" / "found.pt")
        timed = Qwen3MoeConfig(**SIZES | TIMED)
        AutoModelForCausalLM.from_config(timed).save_pretrained(folder / "timed")
        run_on_ranks(time_balance, 1, folder / "timed", options.rounds)
        seconds = torch.load(folder / "timed" / "seconds.pt")
    moved = distance(found[1], {name: start[name] for name in found[1]})
    apart = ", ".join(f"{size}: {distance(found[size], found[1]):.1e}" for size in (2, 4))
    what = (
        f"Qwen3-30B-A3B, the update of one micro-batch of {options.tokens:,} tokens on each of {options.ranks} "
        "ranks, activations computed again, master weights in float32. GiB that a device receives, and GiB at the peak."
    )
    titles = (
        "`expert_parallel_size`", "weights", "gradients", "tokens", "all that arrives", "weights, gradients, optimizer",
        "gathered", "activations", "peak",
    )  # fmt: skip
    notes = (
        "None of this was timed. Of gradients a device sends as much as it receives. Tokens are sent once per chosen "
        "expert, in both directions, three times (forward, computed again, backward).\n\n"
        f"A small Qwen3-MoE on four real ranks, {STEPS} steps of AdamW: the weights have moved by {moved:.1e} of their "
        f"norm, and those of each size are apart from those of size 1 by {apart}.\n\n"
        "Seconds of an update's forward and backward passes over 1,024 tokens in two micro-batches, of a Qwen3-MoE of "
        f"four layers with 64 experts, 8 of them a token; medians of {2 * options.rounds}, in turns: "
        f"{seconds['without']:.3f} without `router_aux_loss_coef`, {seconds['with']:.3f} with it "
        f"({seconds['with'] / seconds['without']:.2f} times, one more forward); with replayed experts "
        f"{seconds['without, replayed']:.3f} and {seconds['with, replayed']:.3f} "
        f"({seconds['with, replayed'] / seconds['without, replayed']:.2f} times)."
    )
    write(options, what, table(titles, rows), notes)


if __name__ == "__main__":
    main()
