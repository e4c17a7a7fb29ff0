"""Workers in real processes: errors have role, rank and cause. Time is virtual and advances where a test sets it, at
every poll of the driver."""

import os
import queue
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import ray
import torch

from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import get_device
from rltrain.common.errors import NonFiniteError, WorkerError, WorkerLost
from rltrain.runtime.calls import Stream, bind
from rltrain.runtime.failures import explain
from rltrain.runtime.group import WorkerGroup
from rltrain.runtime.hang import Deadlines, different_collectives
from rltrain.runtime.samples import Samples, whole
from tests.clock import VirtualClock, eventually, hang
from tests.faults.plug import below, ended


@dataclass(frozen=True)
class Chunk:
    done: bool


class Toy(Protocol):
    """The calls of a worker, successful and failing."""

    def who(self) -> str: ...
    def pid(self) -> int: ...
    def make(self, start: int) -> tuple[Batch, dict]: ...
    def read(self, batch: Batch) -> dict: ...
    def stream(self, go: Path, fail: bool) -> None: ...
    def take(self, wait_s: float) -> tuple[list[str], Chunk]: ...
    def fail(self) -> None: ...
    def fail_with_ours(self) -> None: ...
    def out_of_memory(self) -> None: ...
    def texts(self, found: list[str]) -> int: ...
    def wait(self, go: Path) -> str: ...
    def hang(self, here: Path) -> None: ...


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

    def stream(self, go: Path, fail: bool) -> None:
        for number in range(3):
            self.out.put(number)
        if fail and self.rank == 1:
            raise ValueError("the answer was 41")
        eventually(go.exists)
        self.out.put(None)

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

    def wait(self, go: Path) -> str:
        eventually(go.exists)
        return self.who()

    def hang(self, here: Path) -> None:
        if self.rank == 0:
            torch.distributed.barrier()
        here.touch()
        hang()


class SlowToBuild:
    """A model that never finishes loading."""

    def __init__(self, here: Path) -> None:
        here.touch()
        hang()


@pytest.fixture
def make(local_ray, tmp_path):
    """Make groups of two workers. ``passes()`` seconds pass at every poll of the driver."""
    made, placement = [], ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")

    def group(passes=lambda: 0.0, before_end=lambda: None):
        clock, deadlines = VirtualClock(manual=True), Deadlines(60.0, 5.0, tmp_path / "incidents")
        keys = {"threads": 1, "deadlines": deadlines, "before_end": before_end, "clock": clock}
        check = lambda: clock.advance(passes())  # noqa: E731
        made.append(WorkerGroup("toy", [placement], get_device("cpu"), check=check, **keys))
        return made[-1]

    yield group
    for each in made:
        each.kill()
    ray.util.remove_placement_group(placement)


@pytest.fixture
def at_end():
    """Called before the workers of a group are ended after an error."""
    return []


@pytest.fixture
def passing():
    """Seconds that pass at every poll of the driver."""
    return [0.0]


@pytest.fixture
def group(make, at_end, passing):
    group = make(lambda: passing[0], lambda: [each() for each in at_end])
    group.start("tests.runtime.test_group:ToyWorker", {"tag": ray.put("w")})
    return group


def test_a_local_ray_has_no_process_that_nobody_asks(local_ray):
    lines = below(os.getpid()).values()
    assert any("raylet/raylet" in line for line in lines)
    helpers = r"python\S* \S*(dashboard|log_monitor|autoscaler)\S*\.py"
    assert not [line for line in lines if re.search(helpers, line)]


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
    (memory,) = ray.get([group.workers[0].measure.remote()])
    assert memory.keys() >= {"drift/worker_gb", "drift/ray_gb", "drift/object_store_gb"}
    assert all(0 < value < 64 for name, value in memory.items() if name != "drift/object_store_gb"), memory


def test_chunks_of_workers_arrive_while_the_call_runs(group, tmp_path):
    texts, ticks = [], []

    def arrived(rank, ref, chunk):
        texts.extend((rank, text) for text in ray.get(ref))
        if len(texts) == 6:
            (tmp_path / "go").touch()  # until then the call runs

    handle = group.submit([bind(Toy.stream, tmp_path / "go", False)])
    handle.collect(stream=Stream(bind(Toy.take, 0.5), arrived, lambda: ticks.append(1)))
    assert sorted(texts[:6]) == [(rank, f"text {rank}.{number}") for rank in range(2) for number in range(3)]
    assert ticks
    handle = group.submit([bind(Toy.stream, tmp_path / "go", True)])
    with pytest.raises(WorkerError, match="the answer was 41"):
        handle.collect(stream=Stream(bind(Toy.take, 0.5), arrived, lambda: None))


def test_two_calls_in_flight_are_collected_in_any_order(group, tmp_path):
    first, second = group.submit([bind(Toy.wait, tmp_path / "go")]), group.submit([bind(Toy.who)])
    assert not first.ready()
    (tmp_path / "go").touch()
    assert second.collect() == ["w0", "w1"]
    assert first.collect(deadline_s=-1) == ["w0", "w1"], "it has ended already, so no deadline is an obstacle"


def test_a_deadline_of_a_call_ends_the_workers(group, passing, tmp_path):
    handle, passing[0] = group.submit([bind(Toy.wait, tmp_path / "never")]), 1.0
    with pytest.raises(WorkerLost, match=r"in Toy\.wait: not done after 11 s \(but responding"):
        handle.collect(deadline_s=10.0)


def test_a_call_beside_others_is_timed_from_when_it_was_sent(group, tmp_path):
    quick = group.submit([bind(Toy.wait, tmp_path / "go")], concurrent=True)
    (tmp_path / "go").touch()
    eventually(quick.ready)
    group.clock.advance(100)
    assert quick.collect(), "it was done in time, although it was not asked then"
    assert group.deadlines.limit_s("Toy.wait") == 5 * 100
    late = group.submit([bind(Toy.wait, tmp_path / "never")], concurrent=True)
    assert not late.ready()
    group.clock.advance(501)
    with pytest.raises(WorkerLost, match=r"in Toy\.wait: not done after 501 s \(but responding"):
        late.ready()


def test_a_call_beside_others_may_end_before_an_error_ends_all(group, at_end, tmp_path):
    writing, written = group.submit([bind(Toy.wait, tmp_path / "go")], concurrent=True), []
    at_end.append((tmp_path / "go").touch)
    at_end.append(lambda: written.extend(writing.collect()))
    with pytest.raises(WorkerError, match="the answer was 41") as caught:
        group.call(Toy.fail)
    assert len(written) == 2
    assert group.ended
    message = str(caught.value)
    for words in ("toy worker, rank 1 of 2", "ValueError: the answer was 41", "in Toy.fail"):
        assert words in message
    assert re.search(r'test_group.py", line \d+, in fail\n', message), "the worker's own traceback"
    assert "\x1b" not in message


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        (Toy.fail_with_ours, NonFiniteError, "nothing finite here"),
        (Toy.out_of_memory, WorkerLost, "ppo_max_token_len_per_gpu"),
    ],
)
def test_errors_of_ours_keep_their_type_and_a_full_device_says_what_to_lower(group, method, error, words):
    with pytest.raises(error, match=words):
        group.call(method)


@pytest.mark.parametrize(
    "words",
    ["Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1) was 22.85GB / 23.54GB",
     "3 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1) was 22.85GB "
     "used / 23.54GB limit (0.97). To avoid out of memory, lower its use."],
)  # fmt: skip
@pytest.mark.parametrize("died", [False, True])
def test_a_full_host_is_told_apart_from_a_full_device(words, died):
    """Offloaded tensors are in the host's memory, so advice for a full device would make it worse."""
    error = ray.exceptions.OutOfMemoryError(words)
    if died:
        error = ray.exceptions.ActorDiedError()
        error.error_msg = f"The actor died unexpectedly.\n{words}"
    found = explain({0: error}, lambda ranks: f"ranks {ranks}", lambda seconds: ([], ""))
    assert isinstance(found, WorkerLost)
    assert "the host is out of memory: Memory on the node (IP: 10.0.0.1) was 22.85GB" in str(found)
    assert "param_offload=False" in str(found)
    assert "ppo_max_token_len_per_gpu" not in str(found)


@pytest.mark.long
@pytest.mark.fault("A worker that dies because its host has no memory, even for an error, is reported as such")
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
    assert "ranks [0]: the host is out of memory: " in str(found)


@pytest.mark.fault("Data that was on a node which is gone ends the run as lost, exit 75")
def test_an_object_whose_owner_is_gone_is_a_lost_worker(group):
    class Owner:
        def put(self):
            return [ray.put(["text"])]

    owner = ray.remote(num_cpus=0)(Owner).remote()
    references = ray.get(owner.put.remote())
    assert group.call(Toy.texts, references) == [1, 1]
    ray.kill(owner)
    with pytest.raises(WorkerLost, match=r"did not arrive \(OwnerDiedError\)"):  # with its owner, a moment later
        eventually(lambda: not group.call(Toy.texts, references))


@pytest.mark.smoke("A killed worker is named, and the run ends")
@pytest.mark.fault("A worker killed in a collective is named within seconds")
def test_a_killed_worker_is_reported_within_ten_seconds(group, at_end, tmp_path):
    """The end of the process is noticed before any deadline."""
    pid, waited = group.call(Toy.pid)[1], []
    at_end.append(lambda: waited.append(1))
    handle = group.submit([bind(Toy.hang, tmp_path / "here")])
    eventually((tmp_path / "here").exists)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost) as caught:
        handle.collect()
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


@pytest.mark.parametrize(
    ("innermost", "said"),
    [
        (["all_to_all_single", "all_gather_into_tensor"], "rank 0 in all_to_all_single, rank 1 in all_gather_into_"),
        (["all_reduce", "all_reduce", "barrier"], "(rank 0 in all_reduce, rank 2 in barrier)"),
        (["all_reduce", "all_reduce"], ""),
        (["all_reduce", "load_weights"], ""),
        (["all_reduce", None, "barrier"], ""),  # rank 1 is silent: the others may wait for it
    ],
)
def test_ranks_that_wait_in_different_collectives_are_a_fault_of_rltrain(innermost, said):
    line = '  File "/x/torch/distributed/c10d.py", line 31 in {}\n  File "/x/torch/distributed/l.py", line 8 in wrapper'
    message = different_collectives({rank: f"Thread 0x1 (most recent call first):\n{line.format(name)}"
                                     for rank, name in enumerate(innermost) if name}, len(innermost))  # fmt: skip
    assert bool(message) == bool(said)
    assert said in message


@pytest.mark.fault("A stopped worker is named, the stacks of the others are kept, and all end")
def test_a_stopped_worker_is_named_and_all_stacks_are_kept(group, passing, tmp_path, caplog):
    pids = group.call(Toy.pid)
    os.kill(pids[1], signal.SIGSTOP)
    handle, passing[0] = group.submit([bind(Toy.hang, tmp_path / "here")]), 1.0
    name = rf"toy worker, rank 1 of 2 \(pid {pids[1]} on .*\), in Toy.hang"
    with pytest.raises(WorkerLost, match=rf"{name}: not done after 5 s \(and not responding") as caught:
        handle.collect(deadline_s=4.0)
    assert caught.value.exit_code == 75
    assert "rank 0" not in str(caught.value)
    assert "not done after 3 s; the run ends after 4 s" in caplog.text
    (file,) = (tmp_path / "incidents").glob("hang_Toy.hang_*.txt")
    assert str(file) in str(caught.value)
    assert f"pid {pids[0]}" in file.read_text()
    assert "in Toy.hang" in file.read_text()
    ended(pids)


@pytest.mark.fault("A model that never finishes loading ends the run")
def test_a_hang_before_the_first_call_is_noticed_too(make, tmp_path):
    group = make(lambda: 100.0 * (tmp_path / "here").exists())  # connecting takes no time
    with pytest.raises(WorkerLost, match=r"rank 0 of 2 .*, rank 1 of 2 .*, in build: .*but responding"):
        group.start("tests.runtime.test_group:SlowToBuild", {"here": tmp_path / "here"})
    (file,) = (tmp_path / "incidents").glob("hang_build_*.txt")
    assert file.read_text().count("most recent call first") >= 2
    ended([int(pid) for pid in re.findall(r"\(pid (\d+) on", file.read_text())])
