"""Prints and writes a benchmark's results: the table, the progress bar, JSON, the figure."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

from alltoallv import _core
from alltoallv_tools.bench.figure import panels
from alltoallv_tools.tables import Table

SCHEMA = 4
Row = dict[str, Any]


def kernel_times(us: list[float], moved: int) -> dict[str, float]:
    """Summarizes a kernel's calls: microseconds, and GB/s of the bytes that it reads and writes."""
    median = statistics.median(us)
    return {"median_us": median, "min_us": min(us), "max_us": max(us), "GB/s": moved / median / 1e3}


def machine() -> dict[str, Any]:
    """Describes the machine on which the benchmark runs."""
    model = platform.machine()
    caches: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
        for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
            level, kind = (entry / "level").read_text().strip(), (entry / "type").read_text().strip()
            if kind != "Instruction":
                caches[f"L{level}"] = (entry / "size").read_text().strip()
    except OSError:
        pass
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "model": model,
        "caches": caches,
        "cache_bytes": _core.cache_bytes(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def header(title: str, columns: list[str]) -> str:
    """Returns the table's head: the columns of nccl-tests, then each peer's time and its ratio to ours."""
    legend = "# time: µs of a call, median of blocks; algbw, busbw: GB/s; x: its time / ours, median of rounds"
    return f"# {title}\n{legend}\n{_table(columns).head()}"


def line(row: Row, columns: list[str]) -> str:
    """Formats one row of the table."""
    ours, times = row["times"]["ours"], []
    for column in columns:
        measured = column in row["times"]
        times += [row["times"][column]["median_us"], ratio(row, column)] if measured else [None, None]
    figures = (ours["median_us"], ours["min_us"], ours["max_us"], row["algbw"], row["busbw"], wrong(row), *times)
    return _table(columns).row(row["np"], row["nbytes"], row["count"], row["dtype"], *figures)


def _table(columns: list[str]) -> Table:
    own = ("np >3", "size(B) >10", "count >10", "type >9", "time >10.2f", "min >10.2f", "max >10.2f")
    peers = (part for column in columns for part in (f"{column} >10.2f", "x >7.2f"))
    return Table(*own, "algbw >7.2f", "busbw >7.2f", "#wrong >6", *peers)


def wrong(row: Row) -> int:
    """Counts the wrong elements of all competitors; a kernel's row holds that number itself."""
    return int(row["wrong"]) if "wrong" in row else sum(times["wrong"] for times in row["times"].values())


def ratio(row: Row, name: str) -> float:
    """Returns how many times ours a competitor takes."""
    return float(row["times"][name]["ratio"])


def as_json(run: dict[str, Any], rows: list[Row]) -> str:
    """Returns the results as JSON; docs/bench.md describes the schema."""
    return json.dumps({"schema": SCHEMA, "machine": machine(), **run, "rows": rows}, indent=1)


def as_csv(rows: list[Row]) -> str:
    """Returns one CSV line per competitor of each row; values that are lists or tables are left out."""
    lines = [
        {key: value for key, value in row.items() if not isinstance(value, dict | list)} | {"competitor": name} | times
        for row in rows
        for name, times in row["times"].items()
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue().rstrip("\n")


class Progress:
    """Draws a progress bar on a terminal; writes nothing to a file."""

    def __init__(self, total: int) -> None:
        self._total, self._done = max(total, 1), 0
        self._shown = sys.stderr.isatty()

    def step(self, what: str, done: bool = True) -> None:
        """Draws the bar; ``done`` says that one more step has ended."""
        self._done += done
        if self._shown:
            filled = 30 * self._done // self._total
            bar = f"[{'#' * filled}{'.' * (30 - filled)}] {self._done} of {self._total}: {what}"
            print(f"\r\033[K{bar[:110]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erases the bar, to make room for a line of text."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def columns(rows: list[Row]) -> list[str]:
    """Returns the names of the competitors that were measured besides ours."""
    return list(dict.fromkeys(name for row in rows for name in row["times"] if name != "ours"))


def plot(rows: list[Row], path: Path) -> None:
    """Draws time over size, one panel per world size. The suffix of the path decides the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    sizes = sorted({row["np"] for row in rows})
    with panels(path, len(sizes), (4.5 * len(sizes), 4)) as axes:
        for axis, size in zip(axes, sizes, strict=True):
            of_size = [row for row in rows if row["np"] == size and row["nbytes"] > 0]
            for name in ["ours", *columns(rows)]:
                style = {"ours": "ko-", "copy": "k:", "copy-nt": "k-."}.get(name, "o-")
                points = [(row["nbytes"], row["times"][name]["median_us"]) for row in of_size if name in row["times"]]
                if points:
                    axis.loglog(*zip(*points, strict=True), style, label=name, markersize=3, linewidth=1.2)
            axis.set_title(f"{size} rank{'s' if size > 1 else ''}")
            axis.set_xlabel("payload of a rank (bytes)")
        axes[0].set_ylabel("time of a call (µs)")
