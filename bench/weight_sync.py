"""Training shards -> engine weights: in buckets, against gathering weight by weight and gathering everything.

    python -m bench.weight_sync [--ranks 2] [--syncs 50] [--tensor-ranks 4]

Every way runs in fresh processes on the same shards and fills the same engine. Peak: resident memory minus the memory
before the sync, beyond the engine's weights. The second table has engines of 1, 2 and 4 tensor-parallel ranks, with
loaders that copy rows or columns, as vLLM's do. Writes bench/results/weight_sync_cpu.md.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from bench.table import parse, table, write
from rltrain.common.device import get_device
from rltrain.config.schema.rollout import RolloutConfig
from rltrain.models.forward import PolicyModel
from rltrain.models.weights.names import CheckpointNames, Weight, gathered_weights, huggingface_name
from rltrain.models.weights.partial import Parts, Record, parts_of
from rltrain.models.weights.shard import sharded_model
from rltrain.models.weights.spec import ModelSpec
from rltrain.workers.rollout.embedded.engine import HFRollout
from rltrain.workers.rollout.queue import Replica
from rltrain.workers.rollout.settings import EngineSettings

MIB = 2**20
WAYS = {
    "in buckets of 16 MiB": 16,
    "in buckets of 64 MiB": 64,
    "weight by weight": None,
    "all weights, then load": None,
}


def model_config(hidden: int = 512, layers: int = 8, vocabulary: int = 32_000) -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip


def sync(way: str, bucket_bytes: int, policy: PolicyModel, engine: HFRollout, dtype: torch.dtype) -> None:
    engine.load_weights(weights(way, bucket_bytes, policy, dtype))


def weights(way: str, bucket_bytes: int, policy: PolicyModel, dtype: torch.dtype) -> Iterator[Weight]:
    """Yield all weights and buffers, in one of the `WAYS`."""
    if way == "weight by weight":
        for name, parameter in policy.named_parameters():
            yield Weight(huggingface_name(name), parameter.full_tensor().to(dtype))
    elif way == "all weights, then load":
        state = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
        box = [state]
        dist.broadcast_object_list(box, 0)
        names = {name for name, _ in policy.named_parameters()}
        yield from [Weight(huggingface_name(n), values.to(dtype)) for n, values in box[0].items() if n in names]
    else:
        yield from gathered_weights(policy, dtype, bucket_bytes)
        return
    yield from (Weight(huggingface_name(name), buffer, False) for name, buffer in policy.named_buffers())


def peak_mib(action: Callable[[], None]) -> float:
    """Return the highest resident memory during ``action`` minus the memory before it, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    action()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name + ":")).split()[1])


class CutEngine:
    """One rank of a tensor-parallel engine: holds rows or columns of the matrices, and vectors completely."""

    def __init__(self, policy: PolicyModel, dtype: torch.dtype, size: int, member: int) -> None:
        self._size, self._member, self.record = size, member, Record(size)
        whole = {huggingface_name(name): each for name, each in policy.named_parameters()}
        self._weights = {
            name: torch.zeros_like(self._part(name, torch.empty(each.shape, device="meta")), dtype=dtype, device="cpu")
            for name, each in whole.items()
        }

    def load(self, weights: Iterator[Weight]) -> int:
        """Copy the parts of this rank. Returns the received bytes."""
        received = 0
        for name, values, in_checkpoint in weights:
            received += values.nbytes
            if not self.record.complete:
                values = self.record.observed(name, values)
            if in_checkpoint:
                self._weights[name].copy_(self._part(name, values))
        self.record.complete = True
        return received

    def _part(self, name: str, weight: Tensor) -> Tensor:
        if weight.dim() < 2:
            return weight
        dim = int("o_proj" in name or "down_proj" in name)
        num = weight.shape[dim] // self._size
        return weight.narrow(dim, num * self._member, num)


def sync_parts(folder: Path, policy: PolicyModel, size: int, bucket: int, syncs: int, dtype: torch.dtype) -> None:
    """Sync engines of ``size`` ranks. Saves the seconds, peak and received bytes of each sync."""
    engine, names = CutEngine(policy, dtype, size, dist.get_rank() % size), CheckpointNames(policy.model)
    parts: Parts | None = None
    measured, received = [], []

    def action() -> None:
        received.append(engine.load(gathered_weights(policy, dtype, bucket, names, parts=parts)))

    for _ in range(syncs):
        dist.barrier()
        started = time.perf_counter()
        peak = peak_mib(action)
        measured.append((time.perf_counter() - started, peak, received[-1] / MIB))
        if size > 1 and not parts:
            parts = parts_of(engine.record.boxes, size)
    if dist.get_rank() == 0:
        torch.save(measured, folder / f"{size} ranks.pt")


def rank_main(
    rank: int, world: int, folder: Path, way: str | int, bucket_mib: float, syncs: int, dtype: torch.dtype
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store {way}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    device = get_device("cpu")
    spec = ModelSpec(str(folder))
    policy = sharded_model(PolicyModel, spec, device)
    if isinstance(way, int):
        sync_parts(folder, policy, way, int(bucket_mib * MIB), syncs, dtype)
        dist.barrier()
        return
    engine = HFRollout(EngineSettings(RolloutConfig(), spec, dtype, device, Replica(0, 1, 0, 1), [1], 64))
    measured = []
    for _ in range(syncs):
        engine.sleep()
        dist.barrier()
        started = time.perf_counter()
        peak = peak_mib(lambda: sync(way, int(bucket_mib * MIB), policy, engine, dtype))
        measured.append((time.perf_counter() - started, peak))
    if rank == 0:
        engine_bytes = sum(p.numel() for p in policy.parameters()) * dtype.itemsize
        torch.save((measured, engine_bytes / MIB), folder / f"{way}.pt")
    dist.barrier()


def measure(folder: Path, way: str, *, ranks: int, bucket_mib: float, syncs: int, dtype: torch.dtype, start="spawn"):
    """Return ([(seconds, peak in MiB above the memory before)] of every sync, MiB of the engine's weights)."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory is returned to the system at once
    mp.start_processes(rank_main, (ranks, folder, way, bucket_mib, syncs, dtype), nprocs=ranks, start_method=start)
    return torch.load(folder / f"{way}.pt", weights_only=False)


PARTS_BUCKET_MIB = 16


def measure_parts(folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the rows of the second table."""
    rows = []
    for size in [size for size in (1, 2, 4) if size <= options.tensor_ranks]:
        arguments = (options.tensor_ranks, folder, size, PARTS_BUCKET_MIB, options.syncs, torch.bfloat16)
        mp.start_processes(rank_main, arguments, nprocs=options.tensor_ranks, start_method=options.start)
        first, *later = torch.load(folder / f"{size} ranks.pt", weights_only=False)
        seconds, peaks, received = zip(*later, strict=True)
        rows.append(
            f"| {size} | {first[2]:.1f}, {max(received):.1f} | {first[0]:.3f}, {statistics.median(seconds):.3f} | "
            f"{first[1]:.0f}, {max(peaks):.0f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=50)
    parser.add_argument("--tensor-ranks", type=int, default=4, help="ranks of the second table")
    parser.set_defaults(sizes=(512, 8, 32_000), start="spawn")
    smoke = {"ranks": 1, "syncs": 3, "sizes": (128, 1, 1000), "start": "fork", "tensor_ranks": 2}
    options = parse(parser, out="weight_sync_cpu.md", **smoke)
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(model_config(*options.sizes)).save_pretrained(folder)
        for way, bucket in WAYS.items():
            measured, size = measure(
                folder,
                way,
                ranks=options.ranks,
                bucket_mib=bucket or 0,
                syncs=options.syncs,
                dtype=torch.bfloat16,
                start=options.start,
            )
            seconds, peaks = zip(*measured[1:], strict=True)
            found.append((way, statistics.median(seconds), [peak - size for peak in peaks]))
        by_size = measure_parts(folder, options)
    naive = next(seconds for way, seconds, _ in found if way == "weight by weight")
    rows = [
        f"| {way} | {seconds:.3f} | {size / 1024 / seconds:.2f} | {naive / seconds:.2f}x | "
        f"{statistics.median(peaks):.0f}, {max(peaks):.0f} |"
        for way, seconds, peaks in found
    ]
    peak = "peak beyond engine and shards, MiB (median, worst)"
    write(
        options,
        f"{options.ranks} ranks over gloo, fp32 shards to bf16 engine weights ({size:.0f} MiB), {options.syncs} syncs.",
        table(["way", "seconds (median)", "GB/s", "against weight by weight", peak], rows)
        + f"\n\nEngines by their tensor-parallel ranks; {options.tensor_ranks} training ranks, buckets of "
        f"{PARTS_BUCKET_MIB} MiB. The first sync sends complete weights and observes which part each rank copies.\n\n"
        + table(
            ["tensor-parallel ranks", "received by a rank, MiB: first, later", "seconds: first, later (median)",
             "peak beyond engine and shards, MiB: first, later (worst)"],
            by_size,
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
