"""Checks of fast training, run in a process with the stand-in device. Each public function is one process."""

import functools
import gc
import itertools
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
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._python_dispatch import TorchDispatchMode

from bench import device_memory as bench
from rltrain.common.columns.batch import Batch
from rltrain.common.errors import WorkerLost
from rltrain.config.load import load_config
from rltrain.config.passes import device_phases
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import encode_prompts
from rltrain.data.rows import read_rows
from rltrain.models.files.safe import read_metadata
from rltrain.models.weights.shard import local_shard
from rltrain.trainer.plan import make_plan
from rltrain.workers.hybrid import HybridWorker
from rltrain.workers.interface.tasks import MiniBatch, SaveTask, UpdateTask
from rltrain.workers.rollout.embedded.kv import KeyValues
from rltrain.workers.state.offload_manager import OffloadManager
from tests.distance import distance
from tests.tiny import save_tiny_model, write_arithmetic
from tests.workers.test_actor import TASK, denominators_of, make_worker, scored

OFFLOAD = {
    "actor_rollout_ref__actor__fsdp_config__param_offload": True,
    "actor_rollout_ref__actor__fsdp_config__optimizer_offload": True,
    "actor_rollout_ref__ref__fsdp_config__param_offload": True,
}
FLOAT32 = {"actor_rollout_ref__actor__fsdp_config__compute_dtype": "float32", "actor_rollout_ref__rollout__name": "hf"}


@contextmanager
def waits() -> Iterator[list[str]]:
    """Return the reasons why the host waited for the device, each with the library's lines that caused it."""
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


def workers(folder: str, layers: int = 2) -> Any:
    """make(device, **changes): return an actor worker of this process only."""
    dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
    model = save_tiny_model(Path(folder) / "model", layers=layers)
    files = (
        write_arithmetic(Path(folder) / "train.parquet", range(24)),
        write_arithmetic(Path(folder) / "val.parquet", range(6)),
    )
    return lambda device, **changes: make_worker(
        model, files, Path(folder), trainer__device=device, **FLOAT32, **changes
    )


def update(batch: Batch, parts: int, minis: int = 1) -> UpdateTask:
    """Make ``minis`` optimizer steps with the batch's samples, each in ``parts`` micro-batches."""
    size = len(batch) // (parts * minis)
    return UpdateTask(tuple(MiniBatch((size,) * parts, denominators_of(batch)) for _ in range(minis)), 1e-3)


def no_wait_per_micro_batch(folder: str) -> None:
    """The number of host waits does not depend on the number of micro-batches."""
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
        assert 0 < counts[0] == counts[1], name


def offloads(folder: str) -> None:
    """Offloaded tensors that return to the device train to the same weights as tensors that stay there, bit for bit."""
    make = workers(folder)
    results, early, all_workers = [], [], []
    for changes in ({}, OFFLOAD):
        worker = make("npu", **changes)
        for step in range(2):
            batch = scored(worker)
            if step == 0:  # AdamW has made no moments yet, and a save leaves that to it
                early.append(save(worker, Path(folder) / f"early {len(changes)}", export=False))
                assert not any(worker.updater.optimizer.state.values())
            worker.update(batch, update(batch, 2, minis=2))
        results.append([batch.ragged("old_log_probs").values, *trained(worker)])
        all_workers.append(worker)
    for found, expected in zip(*reversed(results), strict=True):
        assert torch.equal(found, expected)
    assert early[0] == early[1]
    saves_move_nothing(*all_workers, Path(folder))
    worker.offloader.enter_phase("gen")
    moved = [*worker.policy.parameters(), *worker.reference.parameters(), *states(worker)]
    assert {each.to_local().device.type for each in moved} == {"cpu"}
    assert all(each.to_local().is_pinned() for each in moved)
    addresses = [each.to_local().data_ptr() for each in moved]
    with waits() as found:
        worker.offloader.enter_phase("ref")
        assert {parameter.to_local().device.type for parameter in worker.reference.parameters()} == {"npu"}
    assert found == [], "weights come back while the host goes on"
    copies = count_copies_to_host(worker.offloader, "gen")
    assert copies == 0, "a frozen model is not copied out again"
    worker.offloader.enter_phase("old_log_prob", whole=True)
    worker.policy.unshard()  # as a forward may leave it
    assert count_copies_to_host(worker.offloader, "ref") == 0, "nor are weights that nothing has written to"
    worker.offloader.enter_phase("gen")
    worker.offloader.enter_phase("update_actor")
    assert count_copies_to_host(worker.offloader, "gen") > 0
    assert [each.to_local().data_ptr() for each in moved] == addresses, "host memory is kept"
    assert all(map(torch.equal, trained(worker), results[-1][1:])), "what a checkpoint reads has arrived"


def streams(folder: str) -> None:
    """Offloaded moments are on the device for two layers at most, in every step and when a checkpoint is loaded."""
    standin = torch_npu.npu.standin
    worker = workers(folder, layers=8)("npu", **OFFLOAD)
    optimizer, step = worker.updater.optimizer, worker.updater.optimizer.step

    def counted() -> None:
        standin.reset_peak(0)
        before.append(standin.allocated(0))
        step()
        peaks.append(standin.peak(0))

    optimizer.step = counted
    before: list[int] = []
    peaks: list[int] = []
    batch = scored(worker)
    worker.update(batch, update(batch, 2, minis=4))
    sizes = [sum(2 * local_shard(each).nbytes for each in group["params"]) for group in optimizer.param_groups]
    most = max(a + b for a, b in itertools.pairwise(sorted(sizes)))
    print(sizes, before, peaks)
    # torch's foreach kernels need as much as one moment of a layer.
    assert len(peaks) == 4
    assert max(peaks) - min(before) < 1.5 * most < sum(sizes) / 2
    assert worker.offloader.resident_bytes()["optimizer"] == 0
    save(worker, Path(folder) / "saved")
    worker.offloader.enter_phase("gen")
    held = standin.allocated(0)
    standin.reset_peak(0)
    worker.load(str(Path(folder) / "saved"), False)
    weights = sum(local_shard(each).nbytes for each in worker.policy.parameters())
    assert standin.peak(0) - held <= weights


def states(worker: Any) -> list[torch.Tensor]:
    """Return AdamW's moments."""
    of_weights = (worker.updater.optimizer.state[weight] for weight in worker.policy.parameters())
    return [each for state in of_weights for each in state.values() if each.dim()]


def trained(worker: Any) -> list[torch.Tensor]:
    """Return weights and moments, on the host."""
    worker.offloader.enter_phase("update_actor", whole=True)
    return [local_shard(each).cpu().clone() for each in [*worker.policy.parameters(), *states(worker)]]


def save(role: Any, folder: Path, copies: bool = True, export: bool = True, meanwhile: Any = None) -> dict[str, Any]:
    """Return what a save writes: the description of the tensors, and digests of tensor files and exported weights."""
    role.stage(SaveTask(str(folder), copies, str(folder / "export") if export else ""))
    if meanwhile:
        meanwhile()
    places, written = role.write()
    role.seal([places])
    found: dict[str, Any] = {"described": read_metadata(str(folder)).state_dict_metadata}
    if copies:
        return found | {"digests": {Path(file).name: digest for file, digest in written.digests.items()}}
    dcp_to_torch_save(folder, folder / "whole.pt")
    tensors = flatten_state_dict(torch.load(folder / "whole.pt"))[0]
    return found | {"tensors": {name: each.numpy().tobytes() for name, each in tensors.items()}}


def saves_move_nothing(plain: Any, worker: Any, folder: Path) -> None:
    """In every phase a save reads tensors where they are, and uses no device memory."""
    standin, offloader = torch_npu.npu.standin, worker.offloader
    expected = save(plain, folder / "expected") | save(plain, folder / "at once", False, False)
    worker.generate(TASK)
    version = worker.rollout.weight_sync.version
    assert version == worker.num_updates
    for phase in ("gen", "old_log_prob", "update_actor"):
        for copies in (True, False):
            offloader.enter_phase(phase)  # what comes is still under way
            kept = [*worker.policy.parameters(), *states(worker)]
            before = [local_shard(each).clone() for each in kept] if copies and phase == "gen" else []
            places = [local_shard(each).data_ptr() for each in kept]
            if phase == "old_log_prob":
                worker.policy.unshard()  # as a forward may leave it
            count, held = standin.num_allocations(0), standin.allocated(0)

            def goes_on(before: list[torch.Tensor] = before, kept: list[torch.Tensor] = kept) -> None:
                for each in kept if before else ():
                    local_shard(each).fill_(7.0)

            found = save(worker, folder / f"{phase} {copies}", copies, False, goes_on)
            assert standin.num_allocations(0) == count, "a save takes no memory of the device"
            assert standin.allocated(0) <= held
            assert [local_shard(each).data_ptr() for each in [*worker.policy.parameters(), *states(worker)]] == places
            assert offloader.phase == phase
            for name, values in found.items():  # files with tensors
                wanted = expected[name]
                assert values == ({file: wanted[file] for file in values} if name == "digests" else wanted), name
            for each, values in zip(kept if before else (), before, strict=True):
                local_shard(each).copy_(values)
        if phase == "gen":
            assert worker.rollout.weight_sync.version == version, "the engine stays awake"
        if phase != "old_log_prob":
            assert save(worker, folder / f"{phase} with export")["digests"] == expected["digests"]
    assert offloader.phase == "update_actor"


def count_copies_to_host(offloader: Any, phase: str) -> int:
    """Count copies from the device to the host while a phase is entered."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += op is torch.ops.aten.copy_.default and args[0].is_cpu and not args[1].is_cpu
            return op(*args, **(kwargs or {}))

    with Counting() as counting:
        offloader.enter_phase(phase)
    return counting.count


def fuses(folder: str) -> None:
    """With the key, norms, MLPs and rotary embeddings use torch_npu's kernels, and train to the same weights."""
    called: Counter[str] = Counter()
    names = ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul")
    for name in names:

        def counted(kernel: Any, *given: Any, **keys: Any) -> Any:
            called[kernel.__name__] += 1
            return kernel(*given, **keys)

        setattr(torch_npu, name, functools.partial(counted, getattr(torch_npu, name)))
    make = workers(folder)
    results = []
    for wanted in (False, True):
        worker = make("npu", actor_rollout_ref__model__use_liger=wanted)
        batch = scored(worker)
        worker.update(batch, update(batch, 2))
        results.append([batch.ragged("old_log_probs").values, *trained(worker)])
        assert (sum(called.values()) > 0) == wanted
    assert set(called) == set(names)
    assert distance(*results) < 1e-5


def tells_a_full_device(folder: str) -> None:
    """The device cannot get more memory than it has when a phase begins: the error names the phase and the
    keys to set."""
    dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
    save_tiny_model(Path(folder) / "model")
    write_arithmetic(Path(folder) / "train.parquet", range(bench.PROMPTS))
    cfg = load_config(bench.arguments(Path(folder), "gae, all offloaded")).config
    prompts = {"train": encode_prompts(read_rows(f"{folder}/train.parquet"), chat_encoder(cfg), bench.PROMPT, True)}
    passes = make_plan(cfg, len(prompts["train"])).passes
    standin, enter, decode = torch_npu.npu.standin, OffloadManager.enter_phase, KeyValues.decode
    absent = {"reward", "judge", "teacher"}  # models that this run lacks
    for phase in ("start", *(name for name in device_phases() if name not in absent)):

        def entered(self: OffloadManager, entering: str, *, whole: bool = False, phase: str = phase) -> None:
            if entering == phase != "gen":
                standin.set_cap(0, standin.allocated(0))
            enter(self, entering, whole=whole)

        def decoded(*args: Any, phase: str = phase) -> torch.Tensor:  # the engine has looked what is free
            if phase == "gen":
                standin.set_cap(0, standin.allocated(0))
            return decode(*args)

        worker = HybridWorker(cfg, prompts)
        standin.set_cap(0, standin.allocated(0) if phase == "start" else 4 << 30)
        try:
            worker.init_models(passes)
            OffloadManager.enter_phase, KeyValues.decode = entered, decoded
            bench.make_step(worker, cfg, 0)
            worker.actor.stage(SaveTask(f"{folder}/{phase}", export=f"{folder}/{phase} export"))
            raise AssertionError(f"{phase} takes no memory of the device")
        except RuntimeError as error:
            told = worker.explain(error)
        assert isinstance(told, WorkerLost)
        assert re.match(rf"rank 0, {phase}: the device \(.*\) is out of memory", str(told)), told
        assert re.search("Make room with one of\n  (.*=|.* less than |more devices)", str(told)), told
        OffloadManager.enter_phase, KeyValues.decode = enter, decode
        del told, worker
        gc.collect()
