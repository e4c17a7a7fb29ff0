"""WorkerGroup: one worker process per device. `submit` sends calls, `Handle.collect` waits for the results.

They are separate so that in between the driver can work or queue the next call, and so that each call can have a
deadline. Workers run calls in the order of submission. Calls are not retried, because a repeated optimizer step would
be applied twice. So any error ends all workers, and the run resumes from a checkpoint.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.device import Device
from rltrain.common.env import driver_environment, worker_environment
from rltrain.common.errors import AGAIN, RltrainError, WorkerLost
from rltrain.runtime import ray_watchdog
from rltrain.runtime.actors import Actors
from rltrain.runtime.calls import Call, Polls, Stream, bind
from rltrain.runtime.cluster import lost_node
from rltrain.runtime.cross_node import RowsByReader, route_calls
from rltrain.runtime.failures import LOST, errors_of, explain, get
from rltrain.runtime.hang import Deadlines, different_collectives
from rltrain.runtime.host import HOST
from rltrain.runtime.samples import driver_bytes

log = logging.getLogger(__name__)
_Role = TypeVar("_Role")
_Arguments = ParamSpec("_Arguments")
_Object = TypeVar("_Object")
_Other = TypeVar("_Other")
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
_Ranks = range | None

# Timeout of one poll of results and streams.
_POLL_S = 0.5
# Time for workers to leave the process group; busy ones are then killed.
_LEAVE_S = 10.0


class Handle(Generic[_Result]):
    """Call that runs on every rank, or waits there for earlier calls.

    references[i]: outputs of rank first_rank + i: objects that stay in the store, and last the result for the driver.
    since: send time of a call that is not queued; its deadline counts from then.
    """

    def __init__(
        self,
        group: WorkerGroup,
        phase: str,
        references: list[list[Any]],
        first_rank: int = 0,
        since: float | None = None,
    ) -> None:
        self._group = group
        self._phase = phase
        self._references = references
        self._first_rank = first_rank
        self._since = since
        # Results so far by rank; pending references with their ranks.
        self._results: dict[int, Any] = {}
        self._waiting: dict[Any, int] = {
            rank_references[-1]: first_rank + place for place, rank_references in enumerate(references)
        }

    def collect(self, deadline_s: float | None = None, stream: Stream[Any] | None = None) -> list[_Result]:
        """Wait for the results of all ranks. Objects stay in the store, as references.

        An error of any rank ends all workers and is raised as one RltrainError. So is a timeout after ``deadline_s``
        (None: the limit of `Deadlines` for this kind of call), counted from now or from ``since``.
        """
        group, deadlines, waiting = self._group, self._group.deadlines, self._waiting
        limit_s = (
            deadlines.limit_s(self._phase) if deadline_s is None else min(deadline_s, deadlines.fixed_s or math.inf)
        )
        polls = Polls(group.workers, stream)
        started, warned, waits = self._since or group.clock.monotonic(), False, bool(waiting or polls.open)
        while waiting or polls.open:
            group.check()
            ray_watchdog.raise_if_lost()
            seconds = group.clock.monotonic() - started
            # If all results have arrived, ranks whose stream is still open are late.
            late = sorted(waiting.values() or polls.ranks)
            # An available result is on time, even if it is collected late.
            if seconds > limit_s and not _look(waiting)[0]:
                raise group.hung(self._phase, late, seconds)
            if seconds > limit_s / 2 and not warned:
                text = "%s: not done after %.0f s; the run ends after %.0f s"
                log.warning(text, group.actors.place(late, self._phase), seconds, limit_s)
                warned = True
            # Wait for one reference, to process a chunk or an error at once. The timeout is for `check` and the
            # deadline, if nothing arrives.
            ready, _ = ray.wait([*waiting, *polls.open], num_returns=1, timeout=_POLL_S)
            for reference in ready:
                result, error = get(reference)
                if error:
                    rank = waiting.pop(reference) if reference in waiting else polls.open[reference][0]
                    raise group.failed(self._phase, errors_of(waiting) | {rank: error})
                if reference in waiting:
                    self._results[waiting.pop(reference)] = result
                    group.bytes_through_driver += driver_bytes(result)
                else:
                    polls.receive(reference, result)
            polls.tick()
        if waits:  # not if the results were collected before
            deadlines.took(self._phase, group.clock.monotonic() - started)
        returned = [
            (*objects, self._results[rank]) if objects else self._results[rank]
            for rank, (*objects, _) in enumerate(self._references, self._first_rank)
        ]
        return cast(list[_Result], returned)

    def ready(self) -> bool:
        """Return True if `collect` would not block. Raises WorkerLost if the deadline has passed."""
        finished, late = _look(self._waiting)
        if any(get(reference)[1] for reference in finished):
            return True
        seconds = self._group.clock.monotonic() - (self._since or math.inf)
        if late and seconds > self._group.deadlines.limit_s(self._phase):
            raise self._group.hung(self._phase, sorted({self._waiting[reference] for reference in late}), seconds)
        return not late


def _look(waiting: dict[Any, Any]) -> tuple[list[Any], list[Any]]:
    """Return the available and the pending references."""
    return ray.wait([*waiting], num_returns=len(waiting), timeout=0) if waiting else ([], [])


class WorkerGroup:
    """Workers of a run.

    check(): called periodically while the driver waits for workers; its exceptions end the wait. before_end(): called
    after an error if all processes live, before they are ended. environment: environment variables of the workers'
    processes (None: `worker_environment` for the device and threads).
    """

    def __init__(
        self,
        role: str,
        placement: Sequence[PlacementGroup],
        device: Device,
        threads: int,
        logs: Path | None = None,
        check: Callable[[], object] = lambda: None,
        deadlines: Deadlines | None = None,
        environment: dict[str, str] | None = None,
        before_end: Callable[[], object] = lambda: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.clock = clock
        self.deadlines = deadlines or Deadlines()
        self.check = check
        self._before_end = before_end
        self.ended = False
        self._device = device
        self._environment = environment or worker_environment(device.kind, threads)
        self._logs = logs
        self.bytes_through_driver = 0
        self._bundle_bytes: list[tuple[str, Any]] = []
        self._bytes_between_nodes: Counter[str] = Counter()
        bundles = [(group, index) for group in placement for index in range(group.bundle_count)]
        self.world, self._num_nodes = len(bundles), len(placement)
        self.workers = [self._spawn(rank, group, index, threads) for rank, (group, index) in enumerate(bundles)]
        self.actors = actors = Actors(self.workers, "rank", f"{role} worker, ")
        self._identities: list[dict[str, Any]] = []
        self.deadlines.show(
            "workers", lambda: {f"{role} worker, rank {rank}": stack for rank, stack in actors.stacks().items()}
        )
        # Node of each rank, numbered by first ranks; known once all ranks have started.
        self.nodes = [0] * self.world

    def ask(self, function: Callable[[_Argument], _Result], arguments: Sequence[_Argument]) -> Handle[_Result]:
        """Call ``function`` in every worker process, with one argument per rank, before workers are built."""
        self._identify_ranks()
        calls = [[host.ask.remote(function, argument)] for host, argument in zip(self.workers, arguments, strict=True)]
        return Handle(self, function.__name__, calls)

    def _identify_ranks(self) -> None:
        """Get process and node of every rank, so that errors of later phases can name them."""
        if not self._identities:
            self._identities = self._wait("start", self.actors.identities)
            node_ids = [identity["node_id"] for identity in self._identities]
            numbers = {node_id: number for number, node_id in enumerate(dict.fromkeys(node_ids))}
            self.nodes = [numbers[node_id] for node_id in node_ids]

    def _spawn(self, rank: int, group: PlacementGroup, index: int, threads: int) -> Any:
        resource = self._device.ray_resource
        demand: dict[str, Any] = {"num_cpus": 1}
        # Ray has a dedicated argument only for GPUs; an NPU is a named resource.
        if resource == "GPU":
            demand["num_gpus"] = 1
        elif resource != "CPU":
            demand["resources"] = {resource: 1}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        # Ray sets OMP_NUM_THREADS to the CPU slots of an actor, here 1, unless its environment already has it.
        environment = {"env_vars": self._environment}
        return HOST.options(scheduling_strategy=strategy, runtime_env=environment, **demand).remote(
            rank, self.world, threads, str(self._logs) if self._logs else None, driver_environment()
        )

    def start(self, worker: str, kwargs: dict[str, Any]) -> None:
        """Connect the ranks and build ``worker`` ("module:Class") on each."""
        backend, workers = self._device.backend, self.workers
        self._identify_ranks()
        ((host, port),) = self._wait("start", [workers[0].open_store.remote(self._num_nodes)])
        meeting = (host, port, backend, self._num_nodes, secrets.token_bytes(32))
        self._wait("connect", [rank_host.join.remote(*meeting) for rank_host in workers])
        self._wait("build", [rank_host.build.remote(worker, kwargs) for rank_host in workers])

    def _wait(self, phase: str, references: list[Any]) -> list[Any]:
        return Handle[Any](self, phase, [[reference] for reference in references]).collect()

    @property
    def hosts(self) -> list[str]:
        """Host names of the workers."""
        return list(dict.fromkeys(identity["node"] for identity in self._identities))

    @property
    def names(self) -> list[str]:
        """Host name and address of every rank's node."""
        self._identify_ranks()
        return [f"{identity['node']} ({identity['address']})" for identity in self._identities]

    @property
    def firsts(self) -> dict[int, str]:
        """Mapping from the first rank of every node to the node's address."""
        self._identify_ranks()
        firsts = [self.nodes.index(node) for node in dict.fromkeys(self.nodes)]
        return {rank: self._identities[rank]["address"] for rank in firsts}

    @overload
    def submit(
        self, calls: Sequence[Call[tuple[_Object, _Other, _Result]]], ranks: _Ranks = None, concurrent: bool = False
    ) -> Handle[tuple[Any, Any, _Result]]: ...  # references of the objects, and the result
    @overload
    def submit(
        self, calls: Sequence[Call[tuple[_Object, _Result]]], ranks: _Ranks = None, concurrent: bool = False
    ) -> Handle[tuple[Any, _Result]]: ...
    @overload
    def submit(
        self, calls: Sequence[Call[_Result]], ranks: _Ranks = None, concurrent: bool = False
    ) -> Handle[_Result]: ...
    def submit(self, calls: Sequence[Call[Any]], ranks: _Ranks = None, concurrent: bool = False) -> Handle[Any]:
        """Send calls of one method to all workers, or to consecutive ranks (``ranks``).

        One call per worker, or per group of consecutive workers of equal size, so a single call goes to all.
        concurrent: run concurrently with other calls, without queueing.
        """
        ranks = range(self.world) if ranks is None else ranks
        copies, num_returns = len(ranks) // len(calls), calls[0].num_objects + 1
        nodes = [self.nodes[rank] for rank in ranks]
        pack = partial(self._pack, calls[0].name)
        of_rank = route_calls([calls[place // copies] for place in range(len(ranks))], nodes, pack)
        self.bytes_through_driver += sum(driver_bytes([rank_call.args, rank_call.kwargs]) for rank_call in of_rank)
        runs = [self.workers[rank].run_concurrently if concurrent else self.workers[rank].run for rank in ranks]
        replies = [run.options(num_returns=num_returns).remote(call) for run, call in zip(runs, of_rank, strict=True)]
        # Ray returns a list only if there are several return values.
        references = [reply if isinstance(reply, list) else [reply] for reply in replies]
        return Handle(self, calls[0].name, references, ranks.start, self.clock.monotonic() if concurrent else None)

    def _pack(self, call: str, node: int, rows_by_reader: RowsByReader) -> dict[int, Any]:
        """Pack the bundles for ``call`` on the first worker of ``node``."""
        self.bytes_through_driver += driver_bytes(rows_by_reader)
        worker = self.workers[self.nodes.index(node)]
        *bundles, size = worker.pack.options(num_returns=len(rows_by_reader) + 1).remote(list(rows_by_reader.values()))
        self._bundle_bytes.append((call, size))
        return dict(zip(rows_by_reader, bundles, strict=True))

    def bytes_between_nodes(self) -> Counter[str]:
        """Return the bytes of samples sent between nodes so far, by `Call.name`. Waits for bundles in progress."""
        sizes = ray.get([size for _, size in self._bundle_bytes])
        for (call, _), size in zip(self._bundle_bytes, sizes, strict=True):
            self._bytes_between_nodes[call] += size
        self._bundle_bytes.clear()
        return Counter(self._bytes_between_nodes)

    def call(
        self,
        method: Callable[Concatenate[_Role, _Arguments], _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> list[_Result]:
        """Run ``method`` with the same arguments on all ranks, and wait for all results."""
        return self.submit([bind(method, *args, **kwargs)]).collect()

    def run_concurrently(self, method: Callable[[_Role], None]) -> None:
        """Run ``method`` on the first worker, concurrently with its current call. The result is not awaited."""
        self.workers[0].poll.remote(bind(method))

    def stop(self) -> None:
        """End all workers, gracefully if they respond."""
        if ray_watchdog.lost():
            return
        leaving = [host.leave.remote() for host in self.workers]
        ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_S)
        self.kill()

    def kill(self) -> None:
        """Kill all workers."""
        self.ended = True
        if ray_watchdog.lost():
            return
        for host in self.workers:
            ray.kill(host, no_restart=True)

    def failed(self, phase: str, errors: dict[int, Exception]) -> RltrainError:
        """End all workers and return the error that caused the others."""
        if not self.ended and not any(isinstance(error, LOST) for error in errors.values()):
            self._before_end()
        self.kill()
        return explain(errors, lambda ranks: self.actors.place(ranks, phase), self._lost)

    def _lost(self, wait_s: float) -> tuple[list[int], str]:
        """Return the ranks and the name of a lost node (never the driver's)."""
        ids = [identity["node_id"] for identity in self._identities]
        node, name = lost_node(set(ids) - {ray.get_runtime_context().get_node_id()}, wait_s)
        return [rank for rank, node_id in enumerate(ids) if node_id == node], name

    def hung(self, phase: str, late: list[int], seconds: float) -> WorkerLost:
        """Write all stacks, end all workers, and return an error with the silent ranks, or else the late ones."""
        stacks, place = self.actors.stacks(), self.actors.place
        self.kill()
        # A process that does not return its stack is stopped or lost, so it is reported.
        silent = [rank for rank in late if rank not in stacks]
        self.actors.kill_here(silent)
        stack_of_place = {place([rank], phase): stack for rank, stack in stacks.items()}
        stacks_file = self.deadlines.write_stacks(phase, workers=stack_of_place)
        state = (
            "and not responding: stopped, or its node is lost"
            if silent
            else "but responding: hung, or waiting for a hung rank"
        )
        return WorkerLost(
            f"{place(silent or late, phase)}: not done after {seconds:.0f} s ({state}; "
            f"{self.deadlines.keys}).{stacks_file} All workers were terminated. "
            + (different_collectives(stacks, self.world) or AGAIN)
        )
