"""Workers in real processes: errors surface with role, rank and cause, within seconds."""

import os
import queue
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import ray
import torch

from rltrain.base.columns.batch import Batch
from rltrain.base.columns.ragged import Ragged
from rltrain.base.device import get_device
from rltrain.base.errors import NonFiniteError, WorkerError, WorkerLost
from rltrain.controller.calls import Stream, bind
from rltrain.controller.cluster import start_ray
from rltrain.controller.failures import explain
from rltrain.controller.group import WorkerGroup
from rltrain.controller.hang import Deadlines
from rltrain.controller.samples import Samples, whole
from tests.tiny import small_config


@dataclass(frozen=True)
class Chunk:
    done: bool


class Toy(Protocol):
    """What a worker may do, good and bad."""

    def who(self) -> str: ...
    def pid(self) -> int: ...
    def make(self, start: int) -> tuple[Batch, dict]: ...
    def read(self, batch: Batch) -> dict: ...
    def stream(self, fail: bool) -> float: ...
    def take(self, wait_s: float) -> tuple[list[str], Chunk]: ...
    def fail(self) -> None: ...
    def fail_with_ours(self) -> None: ...
    def out_of_memory(self) -> None: ...
    def texts(self, found: list[str]) -> int: ...
    def wait(self, seconds: float) -> float: ...
    def hang(self) -> None: ...


class ToyWorker(Toy):
    def __init__(self, tag: str) -> None:
        self.roles = [self]
        self.tag = tag
        self.rank = torch.distributed.get_rank()
        self.out = queue.SimpleQueue()

    def who(self) -> str:
        return f"{self.tag}{self.rank}"

    def pid(self) -> int:
        return os.getpid()

    def make(self, start: int):
        return Batch({"tokens": Ragged.from_rows([torch.full((2,), start), torch.full((3,), start + 1)])}), {"made": 2}

    def read(self, batch: Batch):
        return {"sum": int(batch.ragged("tokens").values.sum()), "rows": len(batch)}

    def stream(self, fail: bool):
        for number in range(3):
            self.out.put(number)
            time.sleep(0.7)
        if fail and self.rank == 1:
            raise ValueError("the answer was 41")
        self.out.put(None)
        return time.time()

    def take(self, wait_s: float):
        try:
            found = self.out.get(timeout=wait_s)
        except queue.Empty:
            return [], Chunk(False)
        return [f"text {self.rank}.{found}"], Chunk(found is None)

    def fail(self) -> None:
        if self.rank == 1:
            raise ValueError("the answer was 41")
        torch.distributed.barrier()

    def fail_with_ours(self) -> None:
        raise NonFiniteError("nothing finite here")

    def out_of_memory(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def texts(self, found: list[str]) -> int:
        return len(found)

    def wait(self, seconds: float) -> float:
        time.sleep(seconds)
        return time.time()

    def hang(self) -> None:
        torch.distributed.barrier() if self.rank == 0 else time.sleep(60)


@pytest.fixture(scope="module", autouse=True)
def local_ray(forked_workers):
    start_ray(small_config())
    yield
    ray.shutdown()


@pytest.fixture
def at_end():
    """Called before the workers of a group are ended for an error."""
    return []


@pytest.fixture
def group(tmp_path, at_end):
    placement = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    deadlines = Deadlines(60.0, 5.0, tmp_path / "incidents")
    group = WorkerGroup(
        "toy",
        [placement],
        get_device("cpu"),
        threads=1,
        deadlines=deadlines,
        before_end=lambda: [each() for each in at_end],
    )
    group.start("tests.controller.test_group:ToyWorker", {"tag": ray.put("w")})
    yield group
    group.kill()
    ray.util.remove_placement_group(placement)


def test_a_ray_of_its_own_has_no_process_that_nobody_asks():
    assert set(ray._private.worker._global_node.all_processes) <= {"gcs_server", "raylet", "reaper"}


def stream(group, arrived, tick=lambda: None, *, fail: bool) -> list[float]:
    handle = group.submit([bind(Toy.stream, fail)])
    return handle.collect(stream=Stream(bind(Toy.take, 0.5), arrived, tick))


def test_what_workers_hand_out_arrives_while_the_call_runs(group):
    arrived, ticks = [], []
    ended = stream(
        group,
        lambda rank, ref, chunk: arrived.append((time.time(), rank, ray.get(ref))),
        lambda: ticks.append(1),
        fail=False,
    )
    texts = [(rank, found[0]) for _, rank, found in arrived if found and "None" not in found[0]]
    assert sorted(texts) == [(rank, f"text {rank}.{number}") for rank in range(2) for number in range(3)]
    first = min(moment for moment, _, found in arrived if found)
    assert first < min(ended) - 1.0
    assert ticks


def test_a_worker_that_fails_ends_the_stream(group):
    with pytest.raises(WorkerError, match="the answer was 41"):
        stream(group, lambda *found: None, fail=True)


def test_payload_stays_in_the_store_and_finds_its_reader(group):
    assert group.call(Toy.who) == ["w0", "w1"]
    made = group.submit([bind(Toy.make, 10), bind(Toy.make, start=20)]).collect()
    assert all(isinstance(ref, ray.ObjectRef) and numbers == {"made": 2} for ref, numbers in made)
    samples = Samples(4)
    samples.attach(
        [whole(ref, ("tokens",), ids) for (ref, _), ids in zip(made, (np.array([0, 1]), np.array([2, 3])), strict=True)]
    )
    requests = [samples.request(np.array([3, 0]), ["tokens"]), samples.request(np.array([1]), ["tokens"])]
    found = group.submit([bind(Toy.read, request.as_batch) for request in requests]).collect()
    assert found == [{"sum": 3 * 21 + 2 * 10, "rows": 2}, {"sum": 3 * 11, "rows": 1}]


def test_two_calls_in_flight_are_collected_in_any_order(group):
    started = time.time()
    first = group.submit([bind(Toy.wait, 1.0)])
    second = group.submit([bind(Toy.who)])
    assert time.time() - started < 1.0
    assert second.collect() == ["w0", "w1"]
    ended = first.collect(deadline_s=0.5)  # it has ended already, so a short deadline is no obstacle
    assert all(1.0 <= moment - started < 5.0 for moment in ended)


def test_a_node_reports_memory_by_kind_of_process(group):
    (memory,) = ray.get([group.workers[0].measure.remote()])
    assert memory.keys() >= {"drift/worker_gb", "drift/ray_gb", "drift/object_store_gb"}
    assert all(0 < value < 64 for name, value in memory.items() if name != "drift/object_store_gb"), memory


def test_a_deadline_of_ones_own_ends_a_call_that_exceeds_it(group):
    handle = group.submit([bind(Toy.wait, 30.0)])
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=r"in Toy\.wait: not done after [12] s \(though answering"):
        handle.collect(deadline_s=1.0)
    assert time.monotonic() - started < 10


def test_a_call_beside_others_is_timed_from_when_it_was_sent(group):
    deadlines = group.deadlines
    quick = group.submit([bind(Toy.wait, 0.1)], beside=True)
    time.sleep(1.0)
    assert quick.ready()
    deadlines.fixed_s = 0.5
    quick.collect()  # it was done in time, although nobody asked then
    assert deadlines._longest["Toy.wait"] >= 1.0
    late = group.submit([bind(Toy.wait, 30.0)], beside=True)
    assert not late.ready()
    time.sleep(0.6)
    with pytest.raises(WorkerLost, match=r"in Toy\.wait: not done after 1 s \(though answering"):
        late.ready()


def test_what_goes_on_beside_may_end_before_an_error_ends_all(group, at_end):
    writing, written = group.submit([bind(Toy.wait, 1.0)], beside=True), []
    at_end.append(lambda: written.extend(writing.collect()))
    with pytest.raises(WorkerError, match="the answer was 41"):
        group.call(Toy.fail)
    assert len(written) == 2
    assert group.ended


def test_the_first_real_error_names_role_rank_and_cause(group):
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.call(Toy.fail)
    assert time.monotonic() - started < 10
    message = str(caught.value)
    assert "toy worker, rank 1 of 2" in message
    assert "ValueError: the answer was 41" in message
    assert "in Toy.fail" in message
    assert re.search(r'test_group.py", line \d+, in fail\n', message)  # the worker's own traceback
    assert "\x1b" not in message


def test_our_own_errors_keep_their_type(group):
    with pytest.raises(NonFiniteError, match="nothing finite here"):
        group.call(Toy.fail_with_ours)


def test_out_of_memory_says_what_to_lower(group):
    with pytest.raises(WorkerLost, match="ppo_max_token_len_per_gpu"):
        group.call(Toy.out_of_memory)


@pytest.mark.parametrize(
    "words",
    ["Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1) was 22.85GB / 23.54GB",
     "3 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1) was 22.85GB "
     "used / 23.54GB limit (0.97). To avoid out of memory, lower its use."],
)  # fmt: skip
@pytest.mark.parametrize("died", [False, True])
def test_a_full_host_is_told_apart_from_a_full_device(words, died):
    """Its memory holds what is offloaded, so the advice of a full device would make it worse."""
    error = ray.exceptions.OutOfMemoryError(words)
    if died:
        error = ray.exceptions.ActorDiedError()
        error.error_msg = f"The actor died unexpectedly.\n{words}"
    found = explain({0: error}, lambda ranks: f"ranks {ranks}", lambda seconds: ([], ""))
    assert isinstance(found, WorkerLost)
    assert "the host has no memory left: Memory on the node (IP: 10.0.0.1) was 22.85GB" in str(found)
    assert "param_offload=False" in str(found)
    assert "ppo_max_token_len_per_gpu" not in str(found)


@pytest.mark.long
@pytest.mark.fault("A worker that dies because its host has no memory, even for an error, is told as such")
@pytest.mark.parametrize("words", ["terminate called after throwing an instance of 'std::bad_alloc'", "MemoryError"])
def test_a_process_that_dies_of_no_memory_is_told_by_its_last_words(words):
    class Dying:
        def run(self):
            # Packages add what they find when a process ends.
            os.write(2, f"{words}\n{'leaked a type' * 300}\n".encode())
            os.kill(os.getpid(), signal.SIGABRT)

    dying = ray.remote(num_cpus=0)(Dying).remote()
    with pytest.raises(ray.exceptions.ActorDiedError) as died:
        ray.get(dying.run.remote())
    found = explain({0: died.value}, lambda ranks: f"ranks {ranks}", lambda seconds: ([], ""))
    assert isinstance(found, WorkerLost)
    assert "ranks [0]: the host has no memory left: " in str(found)


@pytest.mark.fault("Data that was on a node which is gone ends the run as lost, exit 75")
def test_an_object_whose_owner_is_gone_is_a_lost_worker(group):
    class Owner:
        def put(self):
            return [ray.put(["text"])]

    owner = ray.remote(num_cpus=0)(Owner).remote()
    references = ray.get(owner.put.remote())
    assert group.call(Toy.texts, references) == [1, 1]
    ray.kill(owner)

    def ask_until_it_is_freed():  # with its owner, a moment later
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            group.call(Toy.texts, references)
            time.sleep(0.1)

    with pytest.raises(WorkerLost, match=r"did not come \(OwnerDiedError\)"):
        ask_until_it_is_freed()


@pytest.mark.fault("A worker killed in a collective is named within seconds")
def test_a_killed_worker_is_reported_within_ten_seconds(group, at_end):
    pid, waited = group.call(Toy.pid)[1], []
    at_end.append(lambda: waited.append(1))
    started = time.monotonic()
    threading.Timer(1.0, os.kill, [pid, signal.SIGKILL]).start()
    with pytest.raises(WorkerLost) as caught:
        group.call(Toy.hang)
    assert time.monotonic() - started < 10
    assert f"rank 1 of 2 (pid {pid}" in str(caught.value)
    assert caught.value.exit_code == 75
    assert not waited, "a dead worker writes nothing any more"


def test_a_call_may_take_some_times_the_longest_of_its_kind():
    deadlines = Deadlines(1800.0, 5.0)
    assert deadlines.limit_s("update") == 9000
    for seconds in (100.0, 1000.0, 10.0):
        deadlines.took("update", seconds)
    assert deadlines.limit_s("update") == 5000
    assert deadlines.limit_s("save") == 9000
    deadlines.took("save", 3.0)
    assert deadlines.limit_s("save") == 1800
    assert Deadlines(1800.0, 5.0, fixed_s=600.0).limit_s("update") == 600
    assert Deadlines(None).limit_s("update") == float("inf")


def gone(pids: list[int], within_s: float = 5) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        alive = [
            pid
            for pid in pids
            if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
        ]
        if not alive:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.fault("A stopped worker is named, the stacks of the others are kept, and all end")
def test_a_stopped_worker_is_named_and_all_stacks_are_kept(group, tmp_path, caplog):
    pids = group.call(Toy.pid)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(
        WorkerLost, match=rf"toy worker, rank 1 of 2 \(pid {pids[1]} on .*\), in Toy.hang: not done after [45] s"
    ) as caught:
        group.submit([bind(Toy.hang)]).collect(deadline_s=4.0)
    assert caught.value.exit_code == 75
    assert "not answering" in str(caught.value)
    assert "rank 0" not in str(caught.value)
    assert "not done after 2 s; the run ends after 4 s" in caplog.text
    (file,) = (tmp_path / "incidents").glob("hang_Toy.hang_*.txt")
    assert str(file) in str(caught.value)
    assert f"pid {pids[0]}" in file.read_text()
    assert "in Toy.hang" in file.read_text()
    assert gone(pids)


class SlowToBuild:
    """A model that never finishes loading."""

    def __init__(self) -> None:
        time.sleep(60)


@pytest.mark.fault("A model that never finishes loading ends the run")
def test_a_hang_before_the_first_call_is_noticed_too(tmp_path):
    placement = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    deadlines = Deadlines(60.0, 5.0, tmp_path)
    group = WorkerGroup("toy", [placement], get_device("cpu"), threads=1, deadlines=deadlines)
    # Connecting takes its time; what follows has two seconds.
    deadlines.took = lambda phase, seconds: phase != "connect" or setattr(deadlines, "fixed_s", 2.0)
    with pytest.raises(WorkerLost, match=r"rank 0 of 2 .*, rank 1 of 2 .*, in build: .*though answering"):
        group.start("tests.controller.test_group:SlowToBuild", {})
    (file,) = tmp_path.glob("hang_build_*.txt")
    assert file.read_text().count("most recent call first") >= 2
    assert gone([int(pid) for pid in re.findall(r"\(pid (\d+) on", file.read_text())])
    ray.util.remove_placement_group(placement)
