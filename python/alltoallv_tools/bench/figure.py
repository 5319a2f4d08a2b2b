"""Draws figures: a row of panels, without a display."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def panels(path: Path, number: int, inches: tuple[float, float]) -> Iterator[list[Any]]:
    """Yields axes side by side with one scale, and writes them to ``path`` (PNG or SVG) when the block ends.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches)
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, number, sharey=True, squeeze=False)[0])
    yield axes
    for axis in axes:
        axis.grid(True, which="both", alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "alltoallv"}):  # the same data give the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
