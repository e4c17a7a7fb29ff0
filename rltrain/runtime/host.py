"""Process of one rank, as a Ray actor.

Workers do not use Ray: here a call is dispatched to its role, a `Request` is assembled into a batch, and the process
joins the process group. A control thread responds during a call: it returns texts that are ready early, and stacks in a
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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from rltrain.common.device import COLLECTIVE_TIMEOUT, load_backend
from rltrain.common.env import SESSION, adopt, see_own_device, use_interface
from rltrain.common.errors import AGAIN, WorkerLost
from rltrain.common.imports import importing
from rltrain.common.logs import open_worker_log
from rltrain.runtime.actors import CONTROL, ActorProcess
from rltrain.runtime.calls import Call
from rltrain.runtime.cross_node import pack_for_node
from rltrain.runtime.exchange import sign_objects
from rltrain.runtime.processes import node_memory
from rltrain.runtime.samples import FETCH_SECONDS, Request, StoredRows, assemble

log = logging.getLogger(__name__)


class _Host(ActorProcess):
    def __init__(self, rank: int, world: int, threads: int, logs: str | None, environment: dict[str, str]) -> None:
        # An engine ends this process by SIGQUIT when one of its processes has died. A run started in the background
        # (`&`) by a script inherits an ignored SIGQUIT and would wait forever.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        # Ray's handler allocates memory, so without free memory it recurses forever and hides the cause.
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        node: Any = ray._private.worker._global_node
        adopt(environment | {SESSION: node.session_name})
        see_own_device(ray.get_runtime_context().get_accelerator_ids())
        self._rank, self._world, self._threads = rank, world, threads
        if logs:
            open_worker_log(logs, rank)
        self._worker: Any = None

    def open_store(self, num_nodes: int) -> tuple[str, int]:
        """Open the store for the rendezvous of the ranks (rank 0). Returns host and port, or file and 0.

        On one node it is a file in a folder of this user, because a port would be open to every user. With several
        nodes it listens on a port chosen by the system, so that no other process can take it first.
        """
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
        # The other ranks get the port from this call's result, so waiting for them here would deadlock.
        terms = (self._world, True, COLLECTIVE_TIMEOUT, False)
        store = self._store = dist.TCPStore(host, port, *terms, master_listen_fd=file)
        return host, store.port

    def ask(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a function in this process, before the worker is built."""
        return function(argument)

    def join(self, host: str, port: int, backend: str, num_nodes: int, key: bytes) -> None:
        """Join the process group. host: with port 0, the file of the store. key: the run's key for `sign_objects`."""
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
        """Build the worker ``module:Class``; references in ``kwargs`` are fetched first."""
        module, _, name = worker.partition(":")
        # Ray resolves references that are arguments, but not inside a dictionary.
        fetched = {key: _fetch(value) for key, value in kwargs.items()}
        with importing():
            kind = getattr(importlib.import_module(module), name)
        gc.freeze()  # excludes about 500k objects from later garbage collections
        self._worker = kind(**fetched)

    def run(self, call: Call[Any]) -> Any:
        """Run the call on its role. A Request becomes a Batch, and a list of references a list of objects."""
        protocol = getattr(sys.modules[call.method.__module__], call.role)
        # Match by base class. isinstance with a Protocol only compares method names, and actor and critic share
        # several.
        role = next(candidate for candidate in self._worker.roles if protocol in type(candidate).__mro__)
        try:
            started = time.perf_counter()
            args = [_assembled(arg) for arg in call.args]
            FETCH_SECONDS[call.name] += time.perf_counter() - started
            return getattr(role, call.method.__name__)(*args, **call.kwargs)
        except Exception as error:
            # The driver reports only the root cause; this error stays in the rank's log.
            log.exception("%s failed", call.name)
            explained_error = self._worker.explain(error) if hasattr(self._worker, "explain") else error
            if explained_error is not error:
                raise explained_error from None
            raise

    @ray.method(concurrency_group=CONTROL)
    def poll(self, call: Call[Any]) -> Any:
        """Run a call concurrently with ``run``."""
        return self.run(call)

    @ray.method(concurrency_group="saving")
    def run_concurrently(self, call: Call[Any]) -> Any:
        """Run a call concurrently with ``run``."""
        return self.run(call)

    @ray.method(concurrency_group="bundles")
    def pack(self, bundles: Sequence[Sequence[StoredRows]]) -> tuple[Any, ...]:
        """Run `pack_for_node` on objects of this node, while ``run`` may wait for bundles of other nodes."""
        return pack_for_node(bundles, _objects([part for bundle in bundles for part in bundle]))

    def leave(self) -> None:
        """Leave the process group together with the other ranks."""
        dist.barrier()
        dist.destroy_process_group()

    @ray.method(concurrency_group=CONTROL)
    def measure(self) -> dict[str, float]:
        """Return the memory of this node's processes as metrics."""
        return node_memory()


# No restarts and no retries: a repeated optimizer step would be applied twice.
# The control group has one thread for polls and stacks, so a poll must be short: stacks of a hang wait for it.
_GROUPS = {CONTROL: 1, "bundles": 1, "saving": 1}
_OPTIONS: Any = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": _GROUPS}
HOST: Any = ray.remote(**_OPTIONS)(_Host)
_GONE = (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError)


def _listen(host: str) -> socket.socket:
    """Return a socket on this address of the node. By default a store listens on all addresses, for any client."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:  # the address belongs to a router, not to this node
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
    """Return the objects of ``parts``, by reference."""
    refs = list({part.ref: None for part in parts})
    return dict(zip(refs, _get(refs), strict=True))


def _get(refs: Any) -> Any:
    """Get the objects of one or several references. Raises WorkerLost if one is lost with its node."""
    try:
        return ray.get(refs)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause or error) from error  # an error of `pack`, not a lost worker
    except _GONE as error:
        # A separate type, so that the death of the worker with the object counts as the cause.
        raise WorkerLost(f"the data of another worker did not arrive ({type(error).__name__}). {AGAIN}") from error
