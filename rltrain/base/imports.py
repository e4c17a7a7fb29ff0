"""Importing torch, Ray and transformers: seconds, of which looking for garbage takes a fifth."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

IMPORTING = "importing torch, Ray and transformers"
"""The line of a log before them."""


@contextmanager
def importing() -> Iterator[None]:
    """Inside, nobody looks for garbage: modules are never freed. Afterwards what was made inside counts as old: as new
    it would be looked through three times before the next step."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if was:
            gc.enable()
