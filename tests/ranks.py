"""Tests on several processes, without Ray."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

# Imported once, in a process from which those of the ranks are forked.
_PRELOADED = ["rltrain.workers.hybrid", "tests.tiny"]


def run_on_ranks(function: Callable[..., None], world: int, *args: Any) -> None:
    """``function(rank, world, *args)`` in ``world`` processes at once. Raises what the first that fails raises."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    mp.start_processes(function, (world, *args), nprocs=world, start_method="forkserver")
