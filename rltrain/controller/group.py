"""WorkerGroup: spawn one worker process a device, call a method on all of them, hear of the first real error."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import operator
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rltrain.controller.cluster import ray_logs
from rltrain.controller.hang import Deadlines
from rltrain.controller.samples import Request, assemble, driver_bytes
from rltrain.device import Device
from rltrain.env import adopt, driver_environment, use_interface, worker_environment
from rltrain.errors import RltrainError, WorkerError, WorkerLost
from rltrain.logs import open_worker_log

log = logging.getLogger(__name__)

# After the first error, how long to listen for the error that caused it.
_ROOT_CAUSE_S = 3.0
# How long one look at what a worker hands out may wait.
_POLL_S = 0.5
# How long workers may take to show their stacks; one that does not is stopped, or its node is gone.
_STACKS_S = 5.0
# The driver has deadlines of its own, which come first and say more.
_COLLECTIVE_TIMEOUT = timedelta(days=7)
_NAMED_RANKS = 4
_SYMPTOM = 2
_SYMPTOMS = ("gloo", "nccl", "hccl", "connection closed", "connection reset", "broken pipe")


class _Host:
    """The process of one rank. It resolves requests into batches, so that workers know nothing of Ray."""

    def __init__(self, rank: int, world: int, threads: int, logs: str | None, environment: dict[str, str]) -> None:
        adopt(environment)
        self._rank, self._world, self._threads = rank, world, threads
        if logs:
            open_worker_log(logs, rank)
        self._worker: Any = None

    def open_store(self) -> tuple[str, int]:
        """Rank 0: listen on a port the system picks, so that no other process can take it in between."""
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, self._world, True, _COLLECTIVE_TIMEOUT, wait_for_workers=False)
        return host, self._store.port

    def who(self) -> dict[str, Any]:
        """Which process this is, and where."""
        return {"pid": os.getpid(), "node": socket.gethostname()}

    def join(self, host: str, port: int, backend: str, num_nodes: int) -> None:
        """Enter the process group."""
        if num_nodes > 1:
            use_interface(ray.util.get_node_ip_address())
        torch.set_num_threads(self._threads)
        store = self._store if self._rank == 0 else dist.TCPStore(host, port, self._world, False, _COLLECTIVE_TIMEOUT)
        dist.init_process_group(backend, None, _COLLECTIVE_TIMEOUT, self._world, self._rank, store)

    def build(self, worker: str, kwargs: dict[str, Any]) -> None:
        """Make the worker: ``module:Class``, with references in ``kwargs`` fetched."""
        module, _, name = worker.partition(":")
        fetched = {key: _fetch(value) for key, value in kwargs.items()}
        # What is imported lives as long as the process: no collection need look at its half a million objects, now or later.
        gc.disable()
        kind = getattr(importlib.import_module(module), name)
        gc.freeze()
        gc.enable()
        self._worker = kind(**fetched)

    def run(self, method: str, args: Sequence[Any]) -> Any:
        """Call the worker's method ("role.method" for one of a role); a Request among the arguments arrives as a Batch."""
        try:
            return operator.attrgetter(method)(self._worker)(*[_resolve(arg) for arg in args])
        except Exception:
            log.exception("%s failed", method)
            raise

    @ray.method(concurrency_group="control")
    def poll(self, method: str, args: Sequence[Any]) -> Any:
        """As ``run``, while ``run`` is busy."""
        return self.run(method, args)

    def leave(self) -> None:
        """Leave the process group together."""
        dist.barrier()
        dist.destroy_process_group()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """The Python stacks of all threads, also while ``run`` is busy."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read()


# No restarts and no retries: a repeated optimizer step would be applied twice.
_REMOTE_HOST: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(_Host)  # type: ignore[call-overload]


def _fetch(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fetch(each) for key, each in value.items()}
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


def _resolve(arg: Any) -> Any:
    if not isinstance(arg, Request):
        return arg
    return assemble(arg, ray.get([piece.ref[0] for piece in arg.pieces]))


@dataclass(frozen=True)
class Stream:
    """What workers hand out while a call runs: ``method`` (wait_s) -> (object, numbers with ``done``) is polled on every rank.

    arrived(rank, reference of the object, numbers): something came. tick(): called every now and then.
    """

    method: str
    arrived: Callable[[int, Any, dict[str, Any]], None]
    tick: Callable[[], None]


class WorkerGroup:
    """One worker a device. Errors of any rank surface as one RltrainError that names role, rank and cause.

    check(): called every now and then while workers are waited for; what it raises ends the wait.
    """

    def __init__(
        self,
        role: str,
        placement: Sequence[PlacementGroup],
        device: Device,
        threads: int,
        logs: Path | None = None,
        check: Callable[[], None] = lambda: None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._role = role
        self._deadlines = deadlines or Deadlines()
        self._check = check
        self._device = device
        self._logs = logs
        self.bytes_through_driver = 0
        bundles = [(group, index) for group in placement for index in range(group.bundle_count)]
        self.world, self._num_nodes = len(bundles), len(placement)
        self._hosts = [self._spawn(rank, group, index, threads) for rank, (group, index) in enumerate(bundles)]
        self._who: list[dict[str, Any]] = []

    def _spawn(self, rank: int, group: PlacementGroup, index: int, threads: int) -> Any:
        resource = self._device.ray_resource
        demand: dict[str, Any] = {"num_cpus": 1}
        if resource == "GPU":
            demand["num_gpus"] = 1
        elif resource != "CPU":
            demand["resources"] = {resource: 1}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        environment = {"env_vars": worker_environment(self._device.kind, threads)}
        return _REMOTE_HOST.options(scheduling_strategy=strategy, runtime_env=environment, **demand).remote(
            rank, self.world, threads, str(self._logs) if self._logs else None, driver_environment()
        )

    def start(self, worker: str, kwargs: dict[str, Any]) -> None:
        """Connect the ranks and build ``worker`` ("module:Class") on each."""
        self._who = self._gather([each.who.remote() for each in self._hosts], "start")
        host, port = self._gather([self._hosts[0].open_store.remote()], "start")[0]
        self._gather(
            [each.join.remote(host, port, self._device.backend, self._num_nodes) for each in self._hosts], "connect"
        )
        self._gather([each.build.remote(worker, kwargs) for each in self._hosts], "build")

    @property
    def pids(self) -> list[int]:
        return [who["pid"] for who in self._who]

    @property
    def hosts(self) -> list[str]:
        """The machines of the workers, by name."""
        return list(dict.fromkeys(who["node"] for who in self._who))

    def call(self, method: str, args: Sequence[Any] = (), per_rank: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        """Run ``method`` on all ranks with ``args``, or with ``per_rank[rank]``, and wait for all results."""
        return [numbers for *_, numbers in self.call_with_payload(method, args, per_rank, num_objects=0)]

    def call_with_payload(
        self,
        method: str,
        args: Sequence[Any] = (),
        per_rank: Sequence[Sequence[Any]] | None = None,
        *,
        num_objects: int,
        stream: Stream | None = None,
    ) -> list[list[Any]]:
        """As `call`, for methods that return (object, ..., numbers): objects stay in the store, as references."""
        all_args = per_rank if per_rank is not None else [args] * self.world
        self.bytes_through_driver += sum(driver_bytes(each) for each in all_args)
        calls = [
            host.run.options(num_returns=num_objects + 1).remote(method, each)
            for host, each in zip(self._hosts, all_args, strict=True)
        ]
        returned = [refs if isinstance(refs, list) else [refs] for refs in calls]
        numbers = self._gather([refs[-1] for refs in returned], method, stream)
        self.bytes_through_driver += sum(driver_bytes(each) for each in numbers)
        return [[*refs[:-1], each] for refs, each in zip(returned, numbers, strict=True)]

    def stop(self) -> None:
        """End all workers, the orderly way if they still answer."""
        leaving = [host.leave.remote() for host in self._hosts]
        ray.wait(leaving, num_returns=len(leaving), timeout=10)
        self.kill()

    def kill(self) -> None:
        """End all workers at once."""
        for host in self._hosts:
            ray.kill(host, no_restart=True)

    def _poll(self, stream: Stream, rank: int) -> tuple[Any, tuple[int, Any]]:
        found, numbers = self._hosts[rank].poll.options(num_returns=2).remote(stream.method, [_POLL_S])
        return numbers, (rank, found)

    def _gather(self, refs: list[Any], phase: str, stream: Stream | None = None) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        polls = dict(self._poll(stream, rank) for rank in range(len(refs))) if stream else {}
        deadline, started, warned = float("inf"), time.monotonic(), False
        limit_s = self._deadlines.limit_s(phase)
        while (waiting or (polls and not errors)) and time.monotonic() < deadline:
            self._check()
            seconds = time.monotonic() - started
            if seconds > limit_s / 2 and not errors:
                late = sorted(set(waiting.values()) or {rank for rank, _ in polls.values()})
                if seconds > limit_s:
                    raise self._hung(phase, late, seconds)
                if not warned:
                    log.warning(
                        "%s: not done after %.0f s; the run ends after %.0f s",
                        self._place(late, phase),
                        seconds,
                        limit_s,
                    )
                warned = True
            ready, _ = ray.wait([*waiting, *polls], num_returns=1, timeout=_POLL_S)
            for ref in ready:
                rank = waiting.pop(ref) if ref in waiting else polls[ref][0]
                try:
                    found = ray.get(ref)
                except (ray.exceptions.RayError, Exception) as error:  # noqa: BLE001 - every error is reported by _explain
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + _ROOT_CAUSE_S)
                    polls.pop(ref, None)
                    continue
                if ref not in polls:
                    results[rank] = found
                elif stream:
                    stream.arrived(rank, polls.pop(ref)[1], found)
                    polls |= {} if found["done"] else dict([self._poll(stream, rank)])
            if stream:
                stream.tick()
        if errors:
            self.kill()
            raise self._explain(errors, phase)
        self._deadlines.took(phase, time.monotonic() - started)
        return [results[rank] for rank in range(len(refs))]

    def _place(self, ranks: Sequence[int], phase: str) -> str:
        """Who is meant: role, ranks, processes, nodes, and what they do."""
        who = [self._who[rank] if rank < len(self._who) else {"pid": "?", "node": "?"} for rank in ranks[:_NAMED_RANKS]]
        names = [
            f"rank {rank} of {self.world} (pid {each['pid']} on {each['node']})"
            for rank, each in zip(ranks, who, strict=False)
        ]
        more = f" and {len(ranks) - len(names)} more" if len(ranks) > len(names) else ""
        return f"{self._role} worker, {', '.join(names)}{more}, in {phase}"

    def _hung(self, phase: str, late: list[int], seconds: float) -> WorkerLost:
        """Write down where everybody is, end all workers, and say who is late: those that do not even answer, if there are any."""
        asked = {host.stacks.remote(): rank for rank, host in enumerate(self._hosts)}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_STACKS_S)
        stacks: dict[int, str] = {}
        for ref in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # a process that is gone has no stack
                stacks[asked[ref]] = ray.get(ref)
        self.kill()
        silent = [rank for rank in late if rank not in stacks]
        for who in (self._who[rank] for rank in silent if rank < len(self._who)):
            # Ray asks a process to end itself, and one that is stopped does not hear.
            if who["node"] == socket.gethostname():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(who["pid"], signal.SIGKILL)
        said = self._deadlines.write_stacks(
            phase, {self._place([rank], phase): stack for rank, stack in sorted(stacks.items())}
        )
        return WorkerLost(
            f"{self._place(silent or late, phase)}: not done after {seconds:.0f} s "
            f"({'and not answering: stopped, or its node is gone' if silent else 'though answering: hung, or waiting for one that is'}; "
            f"trainer.hang_floor_s={self._deadlines.floor_s}, trainer.hang_factor={self._deadlines.factor}).{said} All workers were "
            "ended. Run the same command again: it continues from the newest checkpoint."
        )

    def _explain(self, errors: dict[int, Exception], phase: str) -> RltrainError:
        """The error that most likely caused the others: a death before an exception before a broken connection."""
        rank = min(errors, key=lambda each: (_severity(errors[each]), each))
        error = errors[rank]
        place = self._place([rank], phase)
        if isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError):
            return WorkerLost(
                f"{place}: the process died ({_first_line(error)}). "
                f"Run the same command again: it continues from the newest checkpoint. Ray's logs: {ray_logs()} on every node."
            )
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, RltrainError):
            return cause
        if "out of memory" in str(cause).lower() or isinstance(cause, MemoryError):
            return WorkerLost(
                f"{place}: out of memory: {_first_line(cause)}. Lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or the "
                "micro-batch size), actor_rollout_ref.rollout.max_num_seqs, or set actor_rollout_ref.actor.fsdp_config.param_offload=True."
            )
        if _severity(error) == _SYMPTOM and re.search("timeout|timed out", str(cause).lower()):
            return WorkerLost(
                f"{place}: waited in vain for another worker: {_first_line(cause)}. "
                "Run the same command again: it continues from the newest checkpoint."
            )
        return WorkerError(f"{place}: {type(cause).__name__}: {cause}\n{getattr(error, 'traceback_str', '')}")


def _severity(error: Exception) -> int:
    if isinstance(error, ray.exceptions.ActorDiedError):
        return 0
    text = str(getattr(error, "cause", None) or error).lower()
    return _SYMPTOM if any(symptom in text for symptom in _SYMPTOMS) else 1


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
