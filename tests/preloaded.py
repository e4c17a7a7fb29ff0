"""Imported once, in a process from which those of the ranks are forked: see `tests.ranks`."""

import gc

import rltrain.workers.hybrid  # noqa: F401
import tests.tiny  # noqa: F401

# What a collection looks through is copied for the process that does: half a gigabyte for each rank.
gc.freeze()
