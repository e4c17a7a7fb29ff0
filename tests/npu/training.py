"""What the tests of fast training run in a process with the stand-in device. Each public function is one process."""

import functools
import gc
import re
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from bench import device_memory as bench
from rltrain.batch import Batch
from rltrain.config.load import load_config
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.device import get_device
from rltrain.errors import WorkerLost
from rltrain.trainer.plan import make_plan
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.residency import Residency
from rltrain.workers.rollout.kv import KeyValues
from rltrain.workers.tasks import MiniBatch, SaveTask, UpdateTask
from tests.distance import distance
from tests.tiny import save_tiny_model, write_arithmetic
from tests.workers.test_actor import denominators_of, make_worker, scored

OFFLOAD = {
    "actor_rollout_ref__actor__fsdp_config__param_offload": True,
    "actor_rollout_ref__actor__fsdp_config__optimizer_offload": True,
    "actor_rollout_ref__ref__fsdp_config__param_offload": True,
}
FLOAT32 = {"actor_rollout_ref__actor__fsdp_config__compute_dtype": "float32", "actor_rollout_ref__rollout__name": "hf"}
# As workers know the phases, and as messages tell them.
PHASES = {
    "start": "start", "sync": "sync", "rollout": "gen", "log_prob": "old_log_prob", "ref": "ref", "values": "values",
    "train_critic": "update_critic", "train_actor": "update_actor", "save": "save",
}  # fmt: skip


@contextmanager
def waits() -> Iterator[list[str]]:
    """Why the host waited for the device, each with the lines of the library that made it."""
    found: list[str] = []

    def heard(why: str) -> None:
        stack = traceback.extract_stack()
        if "doubles" in stack[-2].filename:  # a double checks its arguments, which no kernel does
            return
        lines = [f"{Path(each.filename).name}:{each.lineno}" for each in stack]
        found.append(f"{why}: {' '.join(lines[-12:-1])}")

    torch_npu.npu.standin.listen(heard)
    try:
        yield found
    finally:
        torch_npu.npu.standin.listen(None)


def workers(folder: str) -> Any:
    """make(device, **changes) -> an actor worker of this process alone."""
    dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
    model = save_tiny_model(Path(folder) / "model")
    files = (
        write_arithmetic(Path(folder) / "train.parquet", range(24)),
        write_arithmetic(Path(folder) / "val.parquet", range(6)),
    )
    return lambda device, **changes: make_worker(
        model, files, Path(folder), trainer__device=device, **FLOAT32, **changes
    )


def update(batch: Batch, parts: int, minis: int = 1) -> UpdateTask:
    """``minis`` optimizer steps of the batch's samples, each in ``parts`` micro-batches."""
    size = len(batch) // (parts * minis)
    return UpdateTask(tuple(MiniBatch((size,) * parts, denominators_of(batch)) for _ in range(minis)), 1e-3)


def no_wait_per_micro_batch(folder: str) -> None:
    """However many micro-batches there are, the host waits as often."""
    worker = workers(folder)("npu")
    batch = scored(worker)
    worker.update(batch, update(batch, 2))
    calls = {
        "log_probs": lambda parts: worker.log_probs(batch, [16 // parts] * parts),
        "ref_log_probs": lambda parts: worker.ref_log_probs(batch, [16 // parts] * parts),
        "update": lambda parts: worker.update(batch, update(batch, parts)),
    }
    for name, call in calls.items():
        counts = []
        for parts in (2, 8):
            with waits() as found:
                call(parts)
            counts.append(len(found))
            print(name, parts, len(found), Counter(found).most_common(), sep="\n  ")
        assert counts[0] == counts[1], name


def offloads(folder: str) -> None:
    """What rests on the host and comes back trains to the weights of what stays on the device, bit for bit."""
    make = workers(folder)
    results = []
    for changes in ({}, OFFLOAD):
        worker = make("npu", **changes)
        for _ in range(2):
            batch = scored(worker)
            worker.update(batch, update(batch, 2, minis=2))
        results.append([batch.ragged("old_log_probs").values, *trained(worker)])
    for found, expected in zip(*reversed(results), strict=True):
        assert torch.equal(found, expected)
    worker.residency.enter("rollout")
    moved = [*worker.policy.parameters(), *worker.reference.parameters(), *states(worker)]
    assert {each.to_local().device.type for each in moved} == {"cpu"}
    assert all(each.to_local().is_pinned() for each in moved)
    addresses = [each.to_local().data_ptr() for each in moved]
    with waits() as found:
        worker.residency.enter("ref")
        assert {each.to_local().device.type for each in worker.reference.parameters()} == {"npu"}
    assert found == [], "weights come back while the host goes on"
    copies = count_copies_to_host(worker.residency, "rollout")
    assert copies == 0, "a frozen model is not copied out again"
    worker.residency.enter("log_prob", whole=True)
    worker.policy.unshard()  # as a forward may leave it
    assert count_copies_to_host(worker.residency, "ref") == 0, "nor are weights that nothing has written to"
    worker.residency.enter("rollout")
    worker.residency.enter("train_actor")
    assert count_copies_to_host(worker.residency, "rollout") > 0
    assert [each.to_local().data_ptr() for each in moved] == addresses, "host memory is kept"
    assert all(map(torch.equal, trained(worker), results[-1][1:])), "what a checkpoint reads has arrived"
    dist.destroy_process_group()
    padded_shards_rest_too()


def padded_shards_rest_too() -> None:
    """Of 5 rows on 3 ranks the last has one, and FSDP pads it: neither the row nor its copy for gathers is lost."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    model = fully_shard(torch.nn.Linear(4, 5).to("npu"), mesh=init_device_mesh("npu", (3,)))
    residency = Residency(get_device("npu"))
    residency.add_model(model, "ref", offload=True)
    gathered = [each._sharded_param_data for each in model._get_fsdp_state()._fsdp_param_group.fsdp_params]
    before = [each.cpu().clone() for each in [*(weight.to_local() for weight in model.parameters()), *gathered]]
    for _ in range(2):
        residency.enter("rollout")
        residency.enter("ref")
        model._get_fsdp_state()._fsdp_param_group.lazy_init()
        gathered = [each._sharded_param_data for each in model._get_fsdp_state()._fsdp_param_group.fsdp_params]
        after = [each.cpu() for each in [*(weight.to_local() for weight in model.parameters()), *gathered]]
        assert all(map(torch.equal, after, before))
    dist.destroy_process_group()


def states(worker: Any) -> list[torch.Tensor]:
    """AdamW's moments."""
    return [each for state in worker.updater.optimizer.state.values() for each in state.values() if each.dim()]


def trained(worker: Any) -> list[torch.Tensor]:
    """Weights and moments, on the host."""
    worker.residency.enter("save")
    return [each.full_tensor().cpu().clone() for each in [*worker.policy.parameters(), *states(worker)]]


def count_copies_to_host(residency: Any, phase: str) -> int:
    """Copies from the device to the host while a phase is entered."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += op is torch.ops.aten.copy_.default and args[0].is_cpu and not args[1].is_cpu
            return op(*args, **(kwargs or {}))

    with Counting() as counting:
        residency.enter(phase)
    return counting.count


def fuses(folder: str) -> None:
    """With the key, norms, MLPs and rotary embeddings go through torch_npu's kernels, and train to the same weights."""
    called: Counter[str] = Counter()
    for name in ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul"):
        counted = functools.partial(_count, called, name, getattr(torch_npu, name))
        setattr(torch_npu, name, counted)
    make = workers(folder)
    results = []
    for wanted in (False, True):
        worker = make("npu", actor_rollout_ref__model__use_liger=wanted)
        batch = scored(worker)
        worker.update(batch, update(batch, 2))
        results.append([batch.ragged("old_log_probs").values, *trained(worker)])
        assert (sum(called.values()) > 0) == wanted
    assert set(called) == {"npu_rms_norm", "npu_swiglu", "npu_rotary_mul"}
    assert distance(*results) < 1e-5


def _count(called: Counter[str], name: str, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    called[name] += 1
    return kernel(*args, **kwargs)


def tells_a_full_device(folder: str) -> None:
    """A device that gets no more memory than it has when a phase begins: the phase is named, and what to type."""
    dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
    save_tiny_model(Path(folder) / "model")
    write_arithmetic(Path(folder) / "train.parquet", range(bench.PROMPTS))
    cfg = load_config(bench.arguments(Path(folder), "gae, all offloaded")).config
    prompts = {"train": encode_prompts(read_rows(f"{folder}/train.parquet"), chat_encoder(cfg), bench.PROMPT, True)}
    passes = make_plan(cfg, len(prompts["train"])).passes
    standin, enter, decode = torch_npu.npu.standin, Residency.enter, KeyValues.decode
    for phase, name in PHASES.items():

        def entered(self: Residency, entering: str, *, whole: bool = False, phase: str = phase) -> None:
            if entering == phase != "rollout":
                standin.set_cap(0, standin.allocated(0))
            enter(self, entering, whole=whole)

        def decoded(*args: Any, phase: str = phase) -> torch.Tensor:  # the engine has looked what is free
            if phase == "rollout":
                standin.set_cap(0, standin.allocated(0))
            return decode(*args)

        worker = HybridWorker(cfg, prompts)
        standin.set_cap(0, standin.allocated(0) if phase == "start" else 4 << 30)
        try:
            worker.init_models(passes)
            Residency.enter, KeyValues.decode = entered, decoded
            bench.make_step(worker, cfg, 0)
            worker.actor.stage(SaveTask(f"{folder}/{name}", export=f"{folder}/{name} export"))
            raise AssertionError(f"{phase} takes no memory of the device")
        except RuntimeError as error:
            told = worker.explain(error)
        assert isinstance(told, WorkerLost)
        assert re.match(rf"rank 0, {name}: the device \(.*\) is out of memory", str(told)), told
        assert re.search("Make room with one of\n  (.*=|more devices)", str(told)), told
        Residency.enter, KeyValues.decode = enter, decode
        del told, worker
        gc.collect()
