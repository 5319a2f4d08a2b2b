"""Parameters of a topology from measurements: the rows of ``bench --json``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alltoallv.errors import InvalidParamError
from alltoallv.planner.model import all_to_all_v
from alltoallv.planner.topology import Level, Topology

Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """A row that was not used for the fit, and what the fit says about it; microseconds."""

    size: int
    nbytes: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1


def shared_memory(rows: Sequence[Row], cpus: int, name: str = "fitted") -> Topology:
    """The topology of one host.

    The start is the time of the smallest payload at the smallest number of ranks; what more ranks add is per message;
    the rate at every size comes from the rest of the time.

    Raises:
        InvalidParamError: too few rows.
    """
    rows = [row for row in rows if row["collective"] == "alltoallv" and row["np"] > 1 and "ours" in row["times"]]
    sizes = sorted({row["np"] for row in rows})
    if len(rows) < 2 or len({row["nbytes"] for row in rows}) < 2:
        raise InvalidParamError(f"there are {len(rows)} rows of alltoallv, expected two sizes at least")
    times = {(row["np"], row["nbytes"]): float(row["times"]["ours"]["median_us"]) for row in rows}
    smallest = min(nbytes for _, nbytes in times)
    floor = {size: times[size, smallest] for size in sizes if (size, smallest) in times}
    first = min(floor)
    message = 0.0
    if len(floor) > 1:
        peers = np.array([size - 1 for size in floor], float)
        message = max(0.0, float(np.polyfit(peers, np.array(list(floor.values())), 1)[0]))
    start = max(0.05, floor[first] - message * (first - 1))
    points: dict[float, list[float]] = {}
    for (size, nbytes), time in times.items():
        rest = time - start - message * (size - 1)
        if nbytes > smallest and rest > 0.1 * time:
            share = min(1.0, cpus / size)
            points.setdefault(nbytes, []).append(_moved(nbytes, size) / rest / 1e3 / share)
    if not points:
        raise InvalidParamError("no payload takes longer than the start of a call, expected larger ones too")
    curve = tuple((nbytes, math.exp(float(np.mean(np.log(rates))))) for nbytes, rates in sorted(points.items()))
    level = Level("host", 0, 0.0, curve[-1][1], curve=curve, workers=cpus)
    return Topology(name, (level,), message_us=message, start_us=start, source="fitted to bench")


def _moved(nbytes: float, size: int) -> float:
    """Bytes that a rank sends to others."""
    return nbytes * (size - 1) / size


def check(topology: Topology, rows: Sequence[Row]) -> list[Check]:
    """What a topology says about rows."""
    return [
        Check(
            row["np"],
            row["nbytes"],
            float(row["times"]["ours"]["median_us"]),
            all_to_all_v(topology, row["np"], row["nbytes"], row["pattern"]),
        )
        for row in rows
        if row["collective"] == "alltoallv" and "ours" in row["times"] and row["np"] > 1
    ]


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Every second payload size for the fit, smallest and largest among them; the others to check it."""
    sizes = sorted({row["nbytes"] for row in rows})
    kept = {*sizes[::2], sizes[-1]}
    return [row for row in rows if row["nbytes"] in kept], [row for row in rows if row["nbytes"] not in kept]
