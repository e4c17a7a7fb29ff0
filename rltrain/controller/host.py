"""The process of one rank, as Ray sees it.

Workers know nothing of Ray: here a call finds its role, a `Request` becomes the batch that it stands for, and the
process joins the others. A control thread answers while a call runs, for texts that are ready early and for stacks of a
hang.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from rltrain.base.device import COLLECTIVE_TIMEOUT, load_backend
from rltrain.base.env import SESSION, adopt, see_own_device, use_interface
from rltrain.base.errors import AGAIN, WorkerLost
from rltrain.base.exchange import sign_objects
from rltrain.base.imports import importing
from rltrain.base.logs import open_worker_log
from rltrain.base.stacks import stacks_here
from rltrain.controller.calls import Call
from rltrain.controller.parcels import cut_parcels
from rltrain.controller.processes import node_memory
from rltrain.controller.samples import Request, StoredRows, assemble

log = logging.getLogger(__name__)


class _Host:
    def __init__(self, rank: int, world: int, threads: int, logs: str | None, environment: dict[str, str]) -> None:
        # An engine ends this process by SIGQUIT when one of its own has died. A run that a script has put into the
        # background (`&`) inherits that this signal is ignored, and would wait for ever.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        # Ray's own handler needs memory: where none is left it calls itself again and again, and hides the reason.
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        node: Any = ray._private.worker._global_node
        adopt(environment | {SESSION: node.session_name})
        see_own_device(ray.get_runtime_context().get_accelerator_ids())
        self._rank, self._world, self._threads = rank, world, threads
        if logs:
            open_worker_log(logs, rank)
        self._worker: Any = None

    def open_store(self, num_nodes: int) -> tuple[str, int]:
        """Rank 0: open the store in which ranks meet; return where. On one node it is a file in a folder of this user's
        alone, because a port is open to every user. Between nodes it listens on a port that the system picks, so that
        no other process can take it in between."""
        if num_nodes == 1:
            node: Any = ray._private.worker._global_node
            session = node.get_session_dir_path()
            closed = not os.stat(Path(session).parents[1]).st_mode & 0o077
            self._folder = tempfile.TemporaryDirectory(prefix="rltrain_store_", dir=session if closed else None)
            self._store: dist.Store = dist.FileStore(f"{self._folder.name}/store", self._world)
            return f"{self._folder.name}/store", 0
        host = ray.util.get_node_ip_address()
        listener = _listen(host)
        port, file = listener.getsockname()[1], listener.detach()
        # The others learn the port only from this call's result, so waiting for them here would never end.
        terms = (self._world, True, COLLECTIVE_TIMEOUT, False)
        store = self._store = dist.TCPStore(host, port, *terms, master_listen_fd=file)
        return host, store.port

    def who(self) -> dict[str, Any]:
        """Process id, node and its address, and the node as Ray knows it."""
        address, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "node": socket.gethostname(), "address": address, "node_id": node_id}

    def ask(self, function: Callable[[Any], Any], question: Any) -> Any:
        """Call a function here, before there is a worker."""
        return function(question)

    def join(self, host: str, port: int, backend: str, num_nodes: int, key: bytes) -> None:
        """Enter the process group. host: with port 0 the file of the store. key: of the run, for `sign_objects`."""
        sign_objects(key)
        use_interface(ray.util.get_node_ip_address(), num_nodes)
        torch.set_num_threads(self._threads)
        load_backend(backend)
        if self._rank:
            terms = (self._world, False, COLLECTIVE_TIMEOUT)
            self._store = dist.TCPStore(host, port, *terms) if port else dist.FileStore(host, self._world)
        store = self._store
        dist.init_process_group(backend, None, COLLECTIVE_TIMEOUT, self._world, self._rank, store)

    def build(self, worker: str, kwargs: dict[str, Any]) -> None:
        """Make the worker: ``module:Class``, with references in ``kwargs`` fetched."""
        module, _, name = worker.partition(":")
        # Ray resolves references that are arguments themselves, but not those inside a dictionary.
        fetched = {key: _fetch(value) for key, value in kwargs.items()}
        with importing():
            kind = getattr(importlib.import_module(module), name)
        gc.freeze()  # keeps about 500k objects out of every later collection
        self._worker = kind(**fetched)

    def run(self, call: Call[Any]) -> Any:
        """Run the call on the role that it is for; a Request among its positional arguments arrives as a Batch, a
        list of references as what they stand for."""
        protocol = getattr(sys.modules[call.method.__module__], call.role)
        # The base class decides, not isinstance: for a Protocol that compares names of methods, and actor and critic
        # share several.
        role = next(candidate for candidate in self._worker.roles if protocol in type(candidate).__mro__)
        try:
            return getattr(role, call.method.__name__)(*map(_assembled, call.args), **call.kwargs)
        except Exception as error:
            # The driver tells only the error that caused the others; this one stays in the rank's own log.
            log.exception("%s failed", call.name)
            explained_error = self._worker.explain(error) if hasattr(self._worker, "explain") else error
            if explained_error is not error:
                raise explained_error from None
            raise

    @ray.method(concurrency_group="control")
    def poll(self, call: Call[Any]) -> Any:
        """As ``run``, while ``run`` is busy."""
        return self.run(call)

    @ray.method(concurrency_group="saving")
    def beside(self, call: Call[Any]) -> Any:
        """As ``run``, while ``run`` makes the next steps."""
        return self.run(call)

    @ray.method(concurrency_group="parcels")
    def cut(self, parcels: Sequence[Sequence[StoredRows]]) -> tuple[Any, ...]:
        """`cut_parcels` from objects of this node, while ``run`` may wait for those of other nodes."""
        return cut_parcels(parcels, _objects([part for parcel in parcels for part in parcel]))

    def leave(self) -> None:
        """Leave the process group together."""
        dist.barrier()
        dist.destroy_process_group()

    @ray.method(concurrency_group="control")
    def measure(self) -> dict[str, float]:
        """Return the memory of this node's processes as metrics."""
        return node_memory()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """`stacks_here`, also while ``run`` is busy."""
        return stacks_here()


# No restarts and no retries: a repeated optimizer step would be applied twice.
# The control group has one thread for polls and stacks, so a poll must be short: the stacks of a hang wait behind it.
_GROUPS = {"control": 1, "parcels": 1, "saving": 1}
_OPTIONS: Any = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": _GROUPS}
HOST: Any = ray.remote(**_OPTIONS)(_Host)
_GONE = (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError)


def _listen(host: str) -> socket.socket:
    """A socket on this address of the node. By itself a store listens on all of them, to whoever comes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:  # an address that a router stands for
        return socket.create_server(("", 0), family=family)


def _fetch(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fetch(item) for key, item in value.items()}
    return _get(value) if isinstance(value, ray.ObjectRef) else value


def _assembled(arg: Any) -> Any:
    if isinstance(arg, list) and arg and isinstance(arg[0], ray.ObjectRef):
        return _get(arg)
    if not isinstance(arg, Request):
        return arg
    objects = _objects(arg.parts)
    return assemble(
        arg, [objects[part.ref] if part.piece is None else objects[part.ref][part.piece] for part in arg.parts]
    )


def _objects(parts: Sequence[StoredRows]) -> dict[Any, Any]:
    """The objects of ``parts``, by reference."""
    refs = list({part.ref: None for part in parts})
    return dict(zip(refs, _get(refs), strict=True))


def _get(refs: Any) -> Any:
    """What a reference, or a list of them, stands for. Raises WorkerLost where one does not come: its node is gone."""
    try:
        return ray.get(refs)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause or error) from error  # of `cut`, which is no sign of a lost worker
    except _GONE as error:
        # Of its own type, so that the death of the worker that held the object counts as the cause.
        raise WorkerLost(f"what another worker holds did not come ({type(error).__name__}). {AGAIN}") from error
