"""Imported once, in a process from which those of ranks and forked runs are made: see `tests.ranks.preload`."""

import gc

import rltrain.report
import rltrain.trainer.build
import rltrain.workers.hybrid  # noqa: F401
import tests.tiny  # noqa: F401

# What a collection looks through is copied for the process that does: half a gigabyte for each rank.
gc.freeze()
