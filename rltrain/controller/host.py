"""The process of one rank, as Ray sees it.

Workers know nothing of Ray: here a call finds its role, a `Request` becomes the batch that it stands for, and the
process joins the others. A control thread answers while a call runs, for texts that are ready early and for stacks of a
hang.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
from typing import Any

import ray
import torch
import torch.distributed as dist

from rltrain.controller.calls import Call
from rltrain.controller.samples import Request, assemble
from rltrain.device import COLLECTIVE_TIMEOUT, load_backend
from rltrain.env import adopt, see_own_device, use_interface
from rltrain.logs import open_worker_log

log = logging.getLogger(__name__)


class _Host:
    def __init__(self, rank: int, world: int, threads: int, logs: str | None, environment: dict[str, str]) -> None:
        # An engine ends this process by SIGQUIT when one of its own has died. A run that a script has put into the
        # background (`&`) inherits that this signal is ignored, and would wait for ever.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        adopt(environment)
        see_own_device(ray.get_runtime_context().get_accelerator_ids())
        self._rank, self._world, self._threads = rank, world, threads
        if logs:
            open_worker_log(logs, rank)
        self._worker: Any = None

    def open_store(self) -> tuple[str, int]:
        """Rank 0: listen on a port the system picks, so that no other process can take it in between."""
        host = ray.util.get_node_ip_address()
        # The others learn the port only from this call's result, so waiting for them here would never end.
        self._store = dist.TCPStore(host, 0, self._world, True, COLLECTIVE_TIMEOUT, wait_for_workers=False)
        return host, self._store.port

    def who(self) -> dict[str, Any]:
        """Process id and node."""
        return {"pid": os.getpid(), "node": socket.gethostname()}

    def join(self, host: str, port: int, backend: str, num_nodes: int) -> None:
        """Enter the process group."""
        if num_nodes > 1:
            use_interface(ray.util.get_node_ip_address())
        torch.set_num_threads(self._threads)
        load_backend(backend)
        store = self._store if self._rank == 0 else dist.TCPStore(host, port, self._world, False, COLLECTIVE_TIMEOUT)
        dist.init_process_group(backend, None, COLLECTIVE_TIMEOUT, self._world, self._rank, store)

    def build(self, worker: str, kwargs: dict[str, Any]) -> None:
        """Make the worker: ``module:Class``, with references in ``kwargs`` fetched."""
        module, _, name = worker.partition(":")
        # Ray resolves references that are arguments themselves, but not those inside a dictionary.
        fetched = {key: _fetch(value) for key, value in kwargs.items()}
        # Imported modules are never freed; gc.freeze() keeps about 500k objects out of every later collection.
        gc.disable()
        kind = getattr(importlib.import_module(module), name)
        gc.freeze()
        gc.enable()
        self._worker = kind(**fetched)

    def run(self, call: Call[Any]) -> Any:
        """Run the call on the role that it is for; a Request among its arguments arrives as a Batch."""
        protocol = getattr(sys.modules[call.method.__module__], call.role)
        # The base class decides, not isinstance: for a Protocol that compares names of methods, and actor and critic
        # share several.
        role = next(each for each in self._worker.roles if protocol in type(each).__mro__)
        try:
            return getattr(role, call.method.__name__)(
                *map(_assembled, call.args), **{key: _assembled(value) for key, value in call.kwargs.items()}
            )
        except Exception as error:
            # The driver tells only the error that caused the others; this one stays in the rank's own log.
            log.exception("%s failed", call.name)
            told = self._worker.explain(error) if hasattr(self._worker, "explain") else error
            if told is not error:
                raise told from None
            raise

    @ray.method(concurrency_group="control")
    def poll(self, call: Call[Any]) -> Any:
        """As ``run``, while ``run`` is busy."""
        return self.run(call)

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
# The control group has one thread for polls and stacks, so a poll must be short: the stacks of a hang wait behind it.
_OPTIONS: Any = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"control": 1}}
HOST: Any = ray.remote(**_OPTIONS)(_Host)


def _fetch(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fetch(each) for key, each in value.items()}
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


def _assembled(arg: Any) -> Any:
    if not isinstance(arg, Request):
        return arg
    return assemble(arg, ray.get([part.ref for part in arg.parts]))
