"""Root cause of the errors of several ranks.

When a rank fails, all others fail soon after, because their collectives lose a peer. Ray reports errors in any order.
So errors are ranked by kind, and the worst one of the lowest rank is raised, with advice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from rltrain.common.env import shipped
from rltrain.common.errors import AGAIN, RltrainError, WorkerError, WorkerLost, first_line, lacks_memory, no_memory
from rltrain.runtime.cluster import lost_node, ray_logs
from rltrain.runtime.ray_watchdog import lost as ray_lost

_DEATH, _CAUSE, _SYMPTOM = 0, 1, 2
LOST = (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError)
_SYMPTOMS = ("gloo", "nccl", "hccl", "connection closed", "connection reset", "broken pipe")
_COLOUR = re.compile(r"\x1b\[\d*m")
# Time after the first error to wait for the error that caused it.
_ROOT_CAUSE_S = 3.0
# Time within which Ray detects a lost node after its processes are gone.
_NODE_S = 5.0
# Bytes to read of the last output of a dead process.
_WORDS_BYTES = 64 << 10
# Time within which the watchdog notices that Ray caused the death of workers.
_NOTICE_S = 0.5


def get(reference: Any) -> tuple[Any, Exception | None]:
    """Return the result of a call that has ended, or its error."""
    try:
        return ray.get(reference), None
    except Exception as error:  # noqa: BLE001 - every error of a worker is reported by `explain`
        return None, error


def errors_of(waiting: dict[Any, int]) -> dict[int, Exception]:
    """Return errors of other ranks within seconds of the first error, which may be a consequence of them."""
    ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_ROOT_CAUSE_S) if waiting else ([], [])
    errors = {waiting[reference]: get(reference)[1] for reference in ready}
    return {rank: error for rank, error in errors.items() if error}


def explain(
    errors: Mapping[int, Exception],
    place: Callable[[Sequence[int]], str],
    lost: Callable[[float], tuple[Sequence[int], str]],
) -> RltrainError:
    """Return the error that most likely caused the others: a death, else an exception, else a broken connection.

    Among several, the lowest rank's. errors: mapping from rank. place(ranks): describes them and their call.
    lost(seconds): ranks and name of a node that is lost, or will be within that time.
    """
    rank = min(errors, key=lambda failed_rank: (_severity(errors[failed_rank]), failed_rank))
    error, where = errors[rank], place([rank])
    if problem := _host_memory(error):
        return WorkerLost(f"{where}: {problem}")
    if isinstance(error, LOST):
        if message := ray_lost(_NOTICE_S):
            return WorkerLost(message)
        logs = f"Ray's logs: {ray_logs()} on every node."
        # A call also counts as lost if a dead worker was to produce one of its arguments.
        ranks, node = lost(_NODE_S)
        if ranks:
            return WorkerLost(f"{place(ranks)}: {_node_has_left(node)} {AGAIN} {logs}")
        return WorkerLost(f"{where}: the process died ({first_line(error)}). {AGAIN} {logs}")
    # Ray wraps a worker's exception in a RayTaskError with the original as its cause.
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RltrainError):
        # The exit code follows from the type, and the message already contains advice.
        return cause
    if "out of memory" in str(cause).lower():
        return WorkerLost(
            f"{where}: out of memory: {first_line(cause)}. Lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu "
            "(or the micro-batch size) or actor_rollout_ref.rollout.max_num_seqs, or set "
            "actor_rollout_ref.actor.fsdp_config.param_offload=True."
        )
    if _severity(error) == _SYMPTOM and re.search("timeout|timed out", str(cause).lower()):
        return WorkerLost(f"{where}: timed out while waiting for another worker: {first_line(cause)}. {AGAIN}")
    # Ray's error text contains the worker's traceback, in colours.
    return WorkerError(f"{where}: {type(cause).__name__}: {cause}\n{_COLOUR.sub('', str(error))}")


def _host_memory(error: Exception) -> str:
    """Return a message if a host (not a device) is out of memory; else "".

    It is recognised by the error's text, because Ray kills workers before the kernel does, and may report this as the
    death of an actor.
    """
    cause = getattr(error, "cause", None) or error
    text = str(cause)
    if not lacks_memory(cause, _last_words(text) if isinstance(error, LOST) else ""):
        return ""
    report = re.search("Memory on the node.*", text)
    detail = report[0] if report else first_line(cause).rstrip(".")
    return (
        f"{no_memory(detail)}, or use less: set actor_rollout_ref.actor.fsdp_config.param_offload=False and "
        "optimizer_offload=False (also for ref and critic) or trainer.async_save=False, or lower reward.num_workers, "
        f"data.train_batch_size or ray_kwargs.ray_init.object_store_memory. {AGAIN}"
    )


def _last_words(death: str) -> str:
    """Return the last stderr output of a dead process of this node, where C++ reports that it is out of memory."""
    pid, address = (re.search(rf"^\s*{name}: (\S+)$", death, re.MULTILINE) for name in ("pid", "ip"))
    if pid and address and address[1] == ray.util.get_node_ip_address():
        for path in Path(ray_logs()).glob(f"worker-*-{pid[1]}.err"):
            with suppress(OSError), open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - _WORDS_BYTES))
                return file.read().decode(errors="replace")
    return ""


def death_watch() -> Callable[[Exception], str]:
    """Return a function that describes the death of a process that is not a rank, from Ray's error: out of memory, a
    lost node (often noticed first by such a process), or just dead."""
    # Only nodes that are alive now count, because an older cluster may have lost nodes before the run.
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def gone(error: Exception) -> str:
        if message := _host_memory(error) or ray_lost(_NOTICE_S):
            return message
        _, node = lost_node(nodes, _NODE_S)
        cause = _node_has_left(node) if node else "the process died: it was killed, or memory ran out."
        return f"{cause} {AGAIN} Ray's logs: {ray_logs()} on every node."

    return gone


def _node_has_left(node: str) -> str:
    return (
        f"the node {node} has left the cluster: it is down or unreachable, or Ray ended there. If "
        f"{shipped('scripts/ray_start.sh')} ran this command, run it again on every node. If it only started Ray, "
        "start Ray again on that node, or lower trainer.nnodes."
    )


def _severity(error: Exception) -> int:
    if isinstance(error, LOST):
        return _DEATH
    text = str(getattr(error, "cause", None) or error).lower()
    return _SYMPTOM if any(symptom in text for symptom in _SYMPTOMS) else _CAUSE
