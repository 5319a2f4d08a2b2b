"""What is measured: an exchange of a given size and pattern, with data whose result every rank can predict."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv.counts import packed

COLLECTIVES = ("alltoallv", "allgather", "allreduce")
PATTERNS = ("uniform", "uneven", "skewed", "sparse")

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bytes(text: str) -> list[int]:
    """``"1K,64K"`` is a list, ``"1K..64M"`` every fourth power between.

    Raises:
        ValueError: text of another form.
    """
    sizes: list[int] = []
    for part in text.split(","):
        ends = [_one(end) for end in part.split("..")]
        if len(ends) == 1:
            sizes += ends
        elif len(ends) == 2 and 0 < ends[0] <= ends[1]:
            size = ends[0]
            while size <= ends[1]:
                sizes.append(size)
                size *= 4
            if sizes[-1] != ends[1]:
                sizes.append(ends[1])
        else:
            raise ValueError(f"{part!r} is no size such as 64K, and no range such as 1K..64M")
    return sizes


def _one(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size such as 1024, 64K or 4M")
    return int(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Case:
    """One measurement. ``nbytes`` is what a rank sends (alltoallv), contributes (allgather) or reduces (allreduce)."""

    collective: str
    nbytes: int
    dtype: str
    pattern: str
    output: str  # allocated, empty or private

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def count(self) -> int:
        """Elements of a rank's payload."""
        return self.nbytes // np.dtype(self.dtype).itemsize

    def counts(self, size: int) -> npt.NDArray[np.int64]:
        """Elements that rank i sends to rank j, ``[W, W]``; each row sums to `count`."""
        ranks = np.arange(size)
        if self.pattern == "uniform":
            weights = np.ones((size, size))
        elif self.pattern == "uneven":  # every pair differs, all within a factor of 2
            weights = 1.0 + (ranks[:, None] * 3 + ranks * 5) % 7 / 7
        elif self.pattern == "skewed":  # the first rank gets most
            weights = np.broadcast_to(1.0 / (1 + ranks), (size, size))
        else:  # sparse: one peer each
            weights = ((ranks[:, None] + 1) % size == ranks).astype(float)
        shares = np.floor(weights / weights.sum(1, keepdims=True) * self.count).astype(np.int64)
        shares[ranks, (ranks + 1) % size] += self.count - shares.sum(1)
        return np.asarray(shares)

    def input(self, rank: int) -> npt.NDArray[Any]:
        """Rank ``rank``'s payload."""
        return _values(rank, np.arange(self.count, dtype=np.int64)).astype(self.dtype)

    def expected(self, rank: int, size: int) -> npt.NDArray[Any]:
        """What rank ``rank`` must end up with."""
        if self.collective == "allgather":
            return np.concatenate([self.input(j) for j in range(size)])
        if self.collective == "allreduce":
            return np.asarray(np.sum([self.input(j) for j in range(size)], axis=0, dtype=self.dtype))
        counts = self.counts(size)
        parts = []
        for j in range(size):
            begin = packed(counts[j].tolist())[rank]
            parts.append(_values(j, np.arange(begin, begin + counts[j, rank])).astype(self.dtype))
        return np.concatenate(parts)


def _values(rank: int, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Small integers, exact in every dtype, different between ranks."""
    return (index * 7 + rank * 13) % 15


def bus_factor(collective: str, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests define them (its PERFORMANCE.md)."""
    if collective == "allreduce":
        return 2 * (size - 1) / size
    return (size - 1) / size


def moved_bytes(case: Case, size: int) -> int:
    """The size that nccl-tests divide by the time for the algorithm bandwidth."""
    return case.nbytes * size if case.collective == "allgather" else case.nbytes
