"""Draws docs/speed.png from docs/measured.json; docs/traffic.png is a page of ``alltoallv trace`` in a browser."""

from __future__ import annotations

import json
from pathlib import Path

from alltoallv_tools.bench.figure import panels

DOCS = Path(__file__).resolve().parent
MPIS = ("mpich", "openmpi", "impi")


def main() -> None:
    """All-to-all with counts of float32, uneven, into memory of empty(): the best MPI's time over ours."""
    run = json.loads((DOCS / "measured.json").read_text())["runs"]["float32"]
    rows = [dict(zip(run["columns"], row, strict=True)) for row in run["rows"]]
    with panels(DOCS / "speed.png", 1, (6.4, 2.8)) as (axis,):
        for ranks, marker in ((2, "o"), (4, "s"), (8, "^")):
            points = [
                (row["nbytes"], min(row[name] for name in MPIS) / row["us"]) for row in rows if row["np"] == ranks
            ]
            axis.semilogx(*zip(*points, strict=True), marker + "-", base=2, label=f"{ranks} ranks", linewidth=1.6)
        axis.axhline(1, color="0.5", linewidth=1, linestyle="--")
        sizes = sorted({row["nbytes"] for row in rows})
        axis.set_xticks(sizes, [f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB" for size in sizes])
        axis.set_ylim(0)
        axis.set_ylabel("times as fast")
        axis.set_xlabel("bytes that a rank sends")
        axis.set_title("all_to_all_v against the best of MPICH, Open MPI and Intel MPI", fontsize=10)
        axis.legend()


if __name__ == "__main__":
    main()
