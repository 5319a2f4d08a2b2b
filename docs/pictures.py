"""Draws docs/speed.png and docs/performance.png from docs/measured.json.

python docs/pictures.py             both of them
python docs/pictures.py traffic     docs/traffic.png: the page of the demo's trace in Chromium
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from performance_page import COPIES, KIB, LARGE, MIB, WAYS, Figures, Way, best, human, load, rows

DOCS = Path(__file__).resolve().parent
MARKERS = {2: "o", 4: "s", 8: "^"}


def draw(axis: Any, way: Way, figures: Figures) -> None:
    """Microseconds of a call over the payload: ours, the best peer, a copy; red, where a peer is quicker."""
    found = rows(figures, way.run)
    for ranks in sorted({row["np"] for row in found}):
        mine = [row for row in found if row["np"] == ranks]
        sizes = [row["nbytes"] for row in mine]
        (line,) = axis.loglog(sizes, [row["us"] for row in mine], MARKERS[ranks] + "-", label=f"{ranks} ranks", lw=1.4)
        peers = [row["us"] * best(row, way.peers)[0] for row in mine]
        axis.loglog(sizes, peers, "--", color=line.get_color(), lw=1.1)
        large = [row for row in mine if way.limited and row["nbytes"] >= LARGE]
        copies = [row["us"] * best(row, COPIES)[0] for row in large]
        axis.loglog([row["nbytes"] for row in large], copies, ":", color=line.get_color(), lw=1.1)
        lost = [(row["nbytes"], row["us"]) for row in mine if best(row, way.peers)[0] < 1]
        if lost:
            axis.loglog(*zip(*lost, strict=True), "o", color="red", markersize=9, fillstyle="none")
    ticks = [size for size in (KIB, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB) if size >= found[0]["nbytes"]]
    axis.set_xticks(ticks, [human(size).replace(" ", "\n") for size in ticks])
    axis.yaxis.set_major_formatter(lambda us, _: f"{us:,g}")
    axis.minorticks_off()
    axis.grid(True, alpha=0.3)


def panels(path: Path, ways: list[Way], columns: int, figures: Figures) -> None:
    """One panel for each way, with one scale."""
    lines = -(-len(ways) // columns)
    figure = Figure(figsize=(10.4, 2.6 * lines + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for axis in axes[len(ways) :]:
        axis.set_visible(False)
    for axis, way in zip(axes, ways, strict=False):
        draw(axis, way, figures)
        axis.set_title(way.title.replace("`", ""), fontsize=9)
        axis.legend(fontsize=7, title=f"- - best of {', '.join(way.peers)}", title_fontsize=7, loc="upper left")
    for axis in axes[::columns]:
        axis.set_ylabel("µs of a call")
    machine = figures["machine"]
    more = sorted({row["np"] for way in ways for row in rows(figures, way.run) if row["np"] > machine["cpus"]})
    shared = f"{' and '.join(map(str, more))} ranks share them; " if more else ""
    figure.suptitle(
        f"{machine['model']}, {machine['cpus']} processors; {shared}x: bytes of a rank; "
        "dotted: a copy; red: a peer is quicker",
        fontsize=9,
    )
    figure.savefig(path, dpi=80)


def main() -> None:
    figures = load(DOCS / "measured.json")
    shown = [way for way in WAYS if len({row["nbytes"] for row in rows(figures, way.run)}) > 1]
    if shown:
        panels(DOCS / "performance.png", shown, 2, figures)
    if usual := [way for way in shown if way.run in ("plan", "function", "private")]:
        panels(DOCS / "speed.png", usual, 3, figures)


def traffic() -> None:
    """Runs the demo and takes a picture of the page that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        demo = [sys.executable, "-m", "alltoallv", "demo", "--output-dir", folder]
        subprocess.run(demo, check=True, stdout=subprocess.DEVNULL)
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        browser += ["--window-size=1100,740", "--virtual-time-budget=3000", f"--screenshot={DOCS / 'traffic.png'}"]
        subprocess.run([*browser, Path(folder, "trace.html").as_uri()], check=True)


if __name__ == "__main__":
    traffic() if sys.argv[1:] == ["traffic"] else main()
