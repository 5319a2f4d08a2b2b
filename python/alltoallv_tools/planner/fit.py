"""Fits a topology to measurements, the rows of ``bench --json``, and checks how well it predicts other rows.

Only the fastest block of a row counts: a topology describes an idle machine, and a busy one only adds time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alltoallv.errors import InvalidParamError
from alltoallv_tools.planner.model import all_to_all_v
from alltoallv_tools.planner.topology import Level, Topology

Row = dict[str, Any]
TOLERANCE = 0.25  # largest accepted error of a prediction, relative to the measured time


@dataclass(frozen=True)
class Check:
    """A measured row and a topology's prediction for it; microseconds."""

    size: int
    nbytes: int
    pattern: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The prediction's relative error, with its sign."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Fit:
    """A fitted topology, and checks by rows that were not used to fit it."""

    topology: Topology
    checks: list[Check]

    @property
    def within(self) -> int:
        """Counts the checks whose error is at most `TOLERANCE`."""
        return sum(abs(each.error) <= TOLERANCE for each in self.checks)

    def table(self) -> Iterator[str]:
        """Yields the checks as lines of a Markdown table."""
        yield "| ranks | bytes | pattern | measured µs | predicted µs | error |"
        yield "|---:|---:|---|---:|---:|---:|"
        for each in self.checks:
            times = f"{each.measured:.1f} | {each.predicted:.1f} | {each.error:+.0%}"
            yield f"| {each.size} | {each.nbytes} | {each.pattern} | {times} |"
        yield ""
        share = f"{self.within} of {len(self.checks)} sizes that were not used for the fit"
        yield f"{share} are predicted within {TOLERANCE:.0%}."


def fit(document: Any) -> Fit:
    """Fits a host to every second size of what ``bench alltoallv --json`` wrote, and checks it with the others.

    Raises:
        InvalidParamError: the document is of another kind or has too few rows.
    """
    try:
        cpus = int(document["machine"]["cpus"])
        cached = int(document["machine"].get("cache_bytes", 0)) / 2  # half for the inputs, half for the outputs
        rows = [row for row in exchanges(document["rows"]) if _time(row) > 0 and row["nbytes"] > 0]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidParamError(
            "this is not what `bench alltoallv --json` writes, see docs/bench.md", id=1464
        ) from None
    used, held = split(rows)
    topology = shared_memory(used, cpus, cached)
    return Fit(topology, check(topology, held))


def exchanges(rows: Sequence[Row]) -> list[Row]:
    """Returns the complete rows of alltoallv for 2 ranks or more; of a size measured several times, the fastest."""
    fastest: dict[tuple[int, int, str], Row] = {}
    for row in rows:
        if row.get("collective") != "alltoallv" or row["np"] < 2 or "ours" not in row["times"]:
            continue
        key = row["np"], row["nbytes"], row["pattern"]
        if key not in fastest or _time(row) < _time(fastest[key]):
            fastest[key] = row
    return list(fastest.values())


def shared_memory(rows: Sequence[Row], cpus: int, cached: float = 0.0, name: str = "fitted") -> Topology:
    """Fits one host whose ranks share ``cpus`` processors, with caches for ``cached`` bytes of payload.

    The shortest time at each number of ranks is the time that ranks wait for each other. The rest of longer times is
    memory traffic, by the number of bytes that those ranks send together.

    Raises:
        InvalidParamError: there are too few rows.
    """
    rows = exchanges(rows)
    if len({row["nbytes"] for row in rows}) < 2:
        raise InvalidParamError(f"there are {len(rows)} rows of alltoallv, expected two sizes at least", id=1465)
    waits: dict[int, float] = {}
    for row in rows:
        waits[row["np"]] = min(waits.get(row["np"], math.inf), _time(row))
    host = Level("host", 0, min(waits.values()), 0.0, waits=tuple(sorted(waits.items())), workers=cpus)
    points: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        size, nbytes = row["np"], row["nbytes"]
        # More bytes cannot take less time: a longer time than theirs comes from a disturbance.
        time = min(_time(other) for other in rows if other["np"] == size and other["nbytes"] >= nbytes)
        rest = time - waits[size]
        if rest > 0.5 * time:  # a smaller rest is lost in the spread of the waits
            points.setdefault((size, size * nbytes), []).append(nbytes / rest / 1e3 / host.share(size))
    if not points:
        raise InvalidParamError("no payload takes twice as long as the smallest, expected larger ones as well", id=1466)
    curve = tuple((*at, math.exp(math.fsum(map(math.log, rates)) / len(rates))) for at, rates in sorted(points.items()))
    rate = max(curve, key=lambda point: point[1])[2]  # beyond the reach of the caches
    host = replace(host, port_gbps=rate, curve=curve, cached=cached)
    return Topology(name, (host,), memory_gbps=2 * rate, source="times that bench measured")  # a copy reads and writes


def _time(row: Row) -> float:
    return float(row["times"]["ours"]["min_us"])


def check(topology: Topology, rows: Sequence[Row]) -> list[Check]:
    """Compares a topology's predictions with measured rows."""
    return [
        Check(
            row["np"],
            row["nbytes"],
            row["pattern"],
            _time(row),
            all_to_all_v(topology, row["np"], row["nbytes"], row["pattern"]),
        )
        for row in exchanges(rows)
    ]


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Splits rows by payload size: every second size, with the smallest and the largest, for the fit, the rest for
    checks.
    """
    sizes = sorted({row["nbytes"] for row in rows})
    kept = {*sizes[::2], *sizes[-1:]}
    return [row for row in rows if row["nbytes"] in kept], [row for row in rows if row["nbytes"] not in kept]
