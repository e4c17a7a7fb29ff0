"""A figure for the programs that draw one: matplotlib without a window, which not every environment has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rltrain.base.storage import replacing

NO_PICTURE = "there is no picture, as matplotlib is not installed: pip install 'rltrain[plot]'"
log = logging.getLogger(__name__)


def new_figure(width: float, height: float) -> Any | None:
    """A matplotlib Figure of so many inches; None, with a sentence in the log, where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        log.info(NO_PICTURE)
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, file: Path) -> None:
    """Write a figure as PNG, whole or not at all. Raises DiskError or StorageError."""
    with replacing(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
