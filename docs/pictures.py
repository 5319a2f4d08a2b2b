"""Draws docs/speed.png and docs/performance.png from docs/measured.json.

docs/traffic.png is a page of ``alltoallv trace`` in a browser.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from performance_page import COPIES, KIB, LARGE, MIB, WAYS, Figures, Way, best, human, load, rows

DOCS = Path(__file__).resolve().parent
MARKERS = {2: "o", 4: "s", 8: "^"}


def draw(axis: Any, way: Way, figures: Figures) -> None:
    """Times as fast as the best peer over the payload; dotted, what a copy's pace would be."""
    found = rows(figures, way.run)
    for ranks in sorted({row["np"] for row in found}):
        mine = [row for row in found if row["np"] == ranks]
        points = [(row["nbytes"], best(row, way.peers)[0]) for row in mine]
        (line,) = axis.loglog(*zip(*points, strict=True), MARKERS[ranks] + "-", label=f"{ranks} ranks", linewidth=1.4)
        copied = [
            (row["nbytes"], best(row, way.peers)[0] / best(row, COPIES)[0])
            for row in mine
            if way.limited and row["nbytes"] >= LARGE
        ]
        if copied:
            axis.loglog(*zip(*copied, strict=True), ":", color=line.get_color(), linewidth=1.2)
    axis.axhline(1, color="0.5", linewidth=1, linestyle="--")
    ticks = [size for size in (KIB, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB) if size >= found[0]["nbytes"]]
    axis.set_xticks(ticks, [human(size) for size in ticks])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    steps = [step for step in (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500) if low <= step <= high]
    axis.set_yticks(steps, [f"{step:g}" for step in steps])
    axis.grid(True, alpha=0.3)


def panels(path: Path, ways: list[Way], columns: int, figures: Figures, title: str = "") -> None:
    """One panel for each way."""
    lines = -(-len(ways) // columns)
    figure = Figure(figsize=(6.4 if columns == 1 else 3.6 * columns, 2.8 * lines))
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis in axes[len(ways) :]:
        axis.set_visible(False)
    for axis, way in zip(axes, ways, strict=False):
        draw(axis, way, figures)
        axis.set_title(title or way.title.replace("`", ""), fontsize=9)
        axis.set_ylabel(f"times the best of\n{', '.join(way.peers)}", fontsize=7)
        axis.set_xlabel("bytes of a rank", fontsize=8)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    figures = load(DOCS / "measured.json")
    shown = [way for way in WAYS if len({row["nbytes"] for row in rows(figures, way.run)}) > 1]
    if shown:
        panels(DOCS / "performance.png", shown, 2, figures)
    if plan := [way for way in shown if way.run == "plan"]:
        title = "all_to_all_v against the best of MPICH, Open MPI and Intel MPI"
        panels(DOCS / "speed.png", plan, 1, figures, title)


if __name__ == "__main__":
    main()
