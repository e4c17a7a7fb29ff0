"""Imports for the process from which those of ranks and forked runs are created: see `tests.ranks.preload`."""

import gc
import multiprocessing

import pandas  # noqa: F401

import rltrain.workers.hybrid  # noqa: F401
import tests.tiny  # noqa: F401

MAIN = multiprocessing.current_process()  # until one is forked
# What a collection looks through is copied for the process that does: half a gigabyte for each rank.
gc.freeze()
