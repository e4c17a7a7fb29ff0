"""Faster imports of torch, Ray and transformers, which take seconds, a fifth of it for garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

IMPORTING = "importing torch, Ray and transformers"
"""Log message before these imports."""


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection inside the context, because modules are never freed. Afterwards the new objects are
    moved to the oldest generation; otherwise they would be scanned three times before the next step.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if was:
            gc.enable()
