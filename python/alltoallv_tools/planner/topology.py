"""Describes machines for the model: nested groups of ranks, each with a class of links."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from alltoallv.errors import InvalidParamError


@dataclass(frozen=True)
class Level:
    """The links between ranks that share this group and no smaller one, or the memory that they share.

    Attributes:
        name: the group's name, such as ``server``.
        ranks: the number of ranks in one group; 0 for the outermost, which holds all.
        alpha_us: microseconds from the start of a message until its first byte arrives.
        port_gbps: GB/s (10^9 bytes per second) that a rank can send, and at the same time receive, over all its links.
        pair_gbps: GB/s that one pair of ranks can use; below ``port_gbps`` if every peer has its own link.
        curve: makes the class shared memory: points (ranks of a group, bytes that they send together, GB/s of a rank
            with its own processor), which show the effect of caches. The points replace the two rates.
        cached: bytes that ranks send together when their inputs and outputs outgrow the caches, so that they are
            written past them: there the curve breaks off and starts again. 0: unknown.
        waits: points (ranks of a group, microseconds) where ranks take turns on processors. They replace ``alpha_us``.
        workers: processors that the ranks of a group share; 0 means that each has its own.
    """

    name: str
    ranks: int
    alpha_us: float
    port_gbps: float
    pair_gbps: float = 0.0
    curve: tuple[tuple[float, float, float], ...] = ()
    cached: float = 0.0
    waits: tuple[tuple[float, float], ...] = ()
    workers: int = 0

    def alpha(self, size: int) -> float:
        """Returns the latency in microseconds when ``size`` ranks take part."""
        return interpolate(self.waits, self._group(size), extend=True) if self.waits else self.alpha_us

    def pair(self, nbytes: float, size: int) -> float:
        """Returns the GB/s of one pair when each of ``size`` ranks sends ``nbytes`` in all."""
        rate = self.port(nbytes, size)
        return min(rate, self.pair_gbps) if self.pair_gbps else rate

    def port(self, nbytes: float, size: int) -> float:
        """Returns the GB/s of a rank to all its peers when each of ``size`` ranks sends ``nbytes`` in all."""
        return self.share(size) * (self._memory(nbytes, self._group(size)) if self.curve else self.port_gbps)

    def _memory(self, nbytes: float, ranks: int) -> float:
        """Returns the GB/s on the curve, interpolated first by bytes and then by the number of ranks."""
        together = nbytes * ranks
        side = [point for point in self.curve if (point[1] < self.cached) == (together < self.cached)]
        curves: dict[float, list[tuple[float, float]]] = {}
        for at, held, rate in side or self.curve:
            curves.setdefault(at, []).append((held, rate))
        return interpolate([(at, interpolate(curve, together)) for at, curve in curves.items()], ranks)

    def share(self, size: int) -> float:
        """Returns the part of a processor that a rank has."""
        return min(1.0, self.workers / self._group(size)) if self.workers else 1.0

    def _group(self, size: int) -> int:
        """Returns how many of ``size`` ranks one group holds."""
        return min(size, self.ranks or size)


def interpolate(curve: Sequence[tuple[float, float]], at: float, *, extend: bool = False) -> float:
    """Interpolates in logarithms of both; constant beyond the ends, or continued above the last point if ``extend``."""
    points = sorted(curve)
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if at <= x1 or (extend and x1 == points[-1][0]):
            part = math.log(at / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + part * math.log(y1 / y0))
    return points[-1][1]


@dataclass(frozen=True)
class Topology:
    """A machine: its groups of ranks, its links, and fixed times.

    Attributes:
        name: the name in the table.
        levels: the groups, from the innermost outwards.
        message_us: microseconds of a rank's processor or engine for each peer that gets a message.
        start_us: microseconds of every collective without its messages: launch, agreement.
        memory_gbps: GB/s at which a rank's kernels read and write its memory.
        kernel_us: microseconds of a kernel besides the time for its bytes.
        source: where the numbers come from.
    """

    name: str
    levels: tuple[Level, ...]
    message_us: float = 0.0
    start_us: float = 0.0
    memory_gbps: float = 1000.0
    kernel_us: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        sizes = [level.ranks for level in self.levels]
        are_integers = all(isinstance(size, int) for size in sizes)
        if not sizes or not are_integers or sizes[-1] != 0 or any(size <= 0 for size in sizes[:-1]):
            where = f"the levels of topology {self.name!r}"
            raise InvalidParamError(
                f"{where} have ranks {sizes}, expected integers above 0, and 0 for the last", id=1470
            )
        for inner, outer in pairwise(sizes[:-1]):
            if outer % inner:
                raise InvalidParamError(f"a group of {outer} ranks does not divide into groups of {inner}", id=1471)
        _check(f"topology {self.name!r}", self, ("message_us", "start_us", "kernel_us"), ("memory_gbps",))
        for level in self.levels:
            where = f"level {level.name!r}"
            rate = () if level.curve else ("port_gbps",)
            _check(where, level, ("alpha_us", "cached", "pair_gbps", "workers"), rate)
            for name, points, length in (("curve", level.curve, 3), ("waits", level.waits, 2)):
                for point in points:
                    if len(point) != length or not all(map(_is_above_0, point)):
                        raise InvalidParamError(
                            f"{name} of {where} has {point}, expected {length} numbers above 0", id=1472
                        )
                if len({point[:-1] for point in points}) < len(points):
                    raise InvalidParamError(
                        f"{name} of {where} has two values at one point, expected one: {points}", id=1473
                    )

    def used(self, size: int) -> list[tuple[Level, int]]:
        """Returns the levels that ``size`` ranks fill, innermost first, and how many peers a rank has over each."""
        result, inside = [], 1
        for level in self.levels:
            group = min(level.ranks, size) if level.ranks else size
            if group > inside:
                result.append((level, group - inside))
                inside = group
        return result

    @classmethod
    def read(cls, source: str | Path) -> Topology:
        """Reads a preset by name, or a JSON file of what `as_json` returns.

        Raises:
            InvalidParamError: ``source`` is neither a preset nor such a file.
        """
        if str(source) in PRESETS:
            return PRESETS[str(source)]
        try:
            fields: dict[str, Any] = json.loads(Path(source).read_text())
            levels = tuple(
                Level(**{**level, **{name: tuple(map(tuple, level.get(name, ()))) for name in ("curve", "waits")}})
                for level in fields.pop("levels")
            )
            return cls(levels=levels, **fields)
        except OSError as error:
            names = ", ".join(PRESETS)
            raise InvalidParamError(
                f"topology is {str(source)!r}, expected one of {names}, or a file: {error}", id=1474
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidParamError(
                f"topology {str(source)!r} is not as docs/plan.md describes: {error}", id=1475
            ) from error

    def as_json(self) -> str:
        """Returns the text of a file for `read`."""
        return json.dumps(asdict(self), indent=1)


def _check(where: str, owner: Level | Topology, least_0: Sequence[str], above_0: Sequence[str]) -> None:
    """Raises InvalidParamError for a number that is not finite, or too small."""
    for name in (*least_0, *above_0):
        value = getattr(owner, name)
        if not (_is_above_0(value) or (value == 0 and name in least_0)):
            expected = "of at least 0" if name in least_0 else "above 0"
            raise InvalidParamError(f"{name} of {where} is {value!r}, expected a number {expected}", id=1476)


def _is_above_0(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


# Rates are per direction: published peaks times 0.8, which large transfers reach. Latencies are of one message on
# an idle link. docs/plan.md cites every number.
_REACHED = 0.8

_A2 = Topology(
    "atlas-a2",
    (Level("server", 8, 5.0, 196 * _REACHED, 28 * _REACHED), Level("network", 0, 10.0, 25 * _REACHED)),
    message_us=0.5,
    start_us=20.0,
    memory_gbps=1600 * _REACHED,
    kernel_us=5.0,
    source="8 NPUs in a full mesh of HCCS links of 56 GB/s both ways; one 200 Gbit/s RoCE port per NPU",
)
_A3 = replace(
    _A2,
    name="atlas-a3",
    levels=(Level("superpod", 768, 3.0, 196 * _REACHED), Level("network", 0, 10.0, 25 * _REACHED)),
    source="CloudMatrix384: 392 GB/s per chip of two NPUs one way over UB, 400 Gbit/s RoCE per chip",
)
_H100 = Topology(
    "h100",
    (Level("node", 8, 3.0, 450 * _REACHED), Level("network", 0, 6.0, 50 * _REACHED)),
    message_us=0.3,
    start_us=15.0,
    memory_gbps=3350 * _REACHED,
    kernel_us=3.0,
    source="NVLink 4, 900 GB/s both ways per GPU over NVSwitch; one 400 Gbit/s NDR port per GPU",
)
_H200 = replace(
    _H100,
    name="h200",
    memory_gbps=4800 * _REACHED,
    source="links as h100; memory of 4.8 TB/s against 3.35",
)
PRESETS = {topology.name: topology for topology in (_A2, _A3, _H100, _H200)}
