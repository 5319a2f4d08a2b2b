"""Prints and draws the demo's results: the traffic as a table and as a picture, and the times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv_tools.demo.digits import classes_of, experts_of
from alltoallv_tools.tables import table_lines

PICTURE_INCHES = (7.0, 6.0)
PICTURE_DPI = 150  # pixels per inch: the picture has 1050 x 900
_LABELLED, _ANNOTATED = 8, 16  # most ranks for which the axes have room for texts, and the cells for numbers

Matrix = npt.NDArray[np.int64]


def traffic_table(traffic: Matrix) -> str:
    """Formats the tokens from rank i to rank j, ``traffic[i, j]``, with the sums of rows and columns."""
    size = len(traffic)
    head = ["", *(f"to {j}" for j in range(size)), "sum"]
    rows = [[f"from {i}", *traffic[i], traffic[i].sum()] for i in range(size)]
    return "\n".join(table_lines(head, [*rows, ["sum", *traffic.sum(axis=0), traffic.sum()]]))


def bandwidth_table(seconds: dict[str, float], total_bytes: int, size: int) -> str:
    """Formats time and bandwidths of each exchange, as nccl-tests define them.

    Args:
        seconds: Time per exchange.
        total_bytes: Payload of all ranks together, including what stays on its rank.
        size: Number of ranks.
    """
    rows = []
    for name, time in seconds.items():
        algbw = total_bytes / size / time / 1e9
        rows.append([name, f"{time * 1e6:.1f} µs", f"{algbw:.2f} GB/s", f"{algbw * (size - 1) / size:.2f} GB/s"])
    return "\n".join(table_lines(["exchange", "time", "algbw", "busbw"], rows))


def draw_traffic(traffic: Matrix, path: Path) -> None:
    """Writes the traffic as a PNG of ``PICTURE_INCHES`` at ``PICTURE_DPI``; makes the folder if needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = len(traffic)
    figure = Figure(figsize=PICTURE_INCHES, dpi=PICTURE_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor("0.95")  # pairs without traffic are grey
    image = axes.imshow(np.ma.masked_equal(traffic, 0), cmap="Blues", vmin=0)
    figure.colorbar(image, ax=axes, label="tokens", shrink=0.85)
    empty = int((traffic == 0).sum())
    axes.set_title(
        f"Dispatch of {traffic.sum():,} handwritten digits to 8 experts on {_ranks(size)}\n"
        f"tokens per pair of ranks; {empty} of {size * size} pairs empty (grey)",
        fontsize=11,
        pad=12,
    )
    axes.set_xlabel("receiving rank" + (", its experts, what it gets" if size <= _LABELLED else ""), labelpad=8)
    axes.set_ylabel("sending rank" + (", its digits, what it sends" if size <= _LABELLED else ""), labelpad=8)
    small = 9 if size <= 5 else 7
    for axis, sums, what, numbers in (
        (axes.xaxis, traffic.sum(axis=0), "expert", experts_of),
        (axes.yaxis, traffic.sum(axis=1), "digit", classes_of),
    ):
        long = [f"rank {rank}\n{_span(what, numbers(rank, size))}\n{n} tokens" for rank, n in enumerate(sums)]
        shown = range(0, size, -(-size // 32))
        axis.set_ticks(shown, long if size <= _LABELLED else [str(rank) for rank in shown], fontsize=small)
    if size <= _ANNOTATED:
        for (i, j), count in np.ndenumerate(traffic):
            _annotate(axes, i, j, int(count), int(traffic.max()), small + 2)
    # White lines between the cells.
    axes.set_xticks(np.arange(size - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(size - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _annotate(axes: Any, i: int, j: int, count: int, largest: int, size: int) -> None:
    colour = "0.55" if count == 0 else "white" if count > 0.5 * largest else "0.15"
    axes.text(j, i, str(count), ha="center", va="center", color=colour, fontsize=size)


def _ranks(size: int) -> str:
    return f"{size} rank{'s' if size > 1 else ''}"


def _span(what: str, numbers: range) -> str:
    """Returns "digits 3–4", "digit 9", or "no digit"."""
    if not numbers:
        return f"no {what}"
    return f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]}–{numbers[-1]}"
