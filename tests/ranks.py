"""Tests on several processes, without Ray."""

import faulthandler
import multiprocessing
import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# The variable that what is started for a test is found by; and that of whom a forked process is in the place of.
MARK, STAND_IN = "RLTRAIN_TEST", "RLTRAIN_STAND_IN"


_PRELOADING = threading.Lock()  # the environment of the process changes meanwhile


def preload() -> dict[str, str]:
    """Start the fork server of multiprocessing unless it runs. Returns the environment, for threads that share it."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.preloaded"])
    rooms = {MARK: "-" * 4096, STAND_IN: "-" * 16}  # for the folder of a test, and a pid
    with _PRELOADING:
        os.environ |= rooms
        forkserver.ensure_running()
        for name in rooms:
            del os.environ[name]
        return dict(os.environ)


def run_on_ranks(function: Callable[..., None], world: int, *args: Any) -> None:
    """Run ``function(rank, world, *args)`` in ``world`` processes of one group. Raises the error of the first one that
    fails."""
    preload()
    with tempfile.TemporaryDirectory() as folder:
        own = (function, world, f"{folder}/store", *args)
        mp.start_processes(_in_group, own, nprocs=world, start_method="forkserver")


def _in_group(rank: int, function: Callable[..., None], world: int, store: str, *args: Any) -> None:
    faulthandler.enable()  # a rank that crashes shows where
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        function(rank, world, *args)
    except Exception:
        traceback.print_exc()  # of every rank: the one that is told may have failed because of another one
        raise
    # A rank that is done may still be asked by another one.
    dist.barrier()
    dist.destroy_process_group()
