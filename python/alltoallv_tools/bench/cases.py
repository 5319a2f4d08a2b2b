"""What is measured: a collective of a given size and pattern, with data whose result every rank can predict."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv._calls.counts import packed
from alltoallv._calls.reductions import FLOATS, OTHERS

COLLECTIVES = ("alltoallv", "allgather", "allreduce", "quantized")
PATTERNS = ("uniform", "uneven", "skewed", "sparse", "moe")
OUTPUTS = ("allocated", "empty", "private")
APIS = ("numpy", "plan", "core", "torch", "torch-plan", "mindspore")  # of ours
# How a front end is given its counts, beside lists that are the same at each step.
COUNTS = {"numpy": ("new", "tuple", "array"), "torch": ("new", "tensor")}
VARIANTS = ("plain", "rewritten", "consumed", "cycle")


def dtypes_of(collective: str) -> tuple[str, ...]:
    """The dtypes of a collective that NumPy, with which results are predicted, has too."""
    if collective == "quantized":
        return ("float32",)
    known = (FLOATS | OTHERS) - {"bfloat16"}
    return tuple(sorted(known if collective == "allreduce" else known | {"complex64", "complex128"}))


def outputs_of(api: str, collective: str) -> tuple[str, ...]:
    """Where one of our interfaces can put a collective's result, the usual place first; nothing if it lacks it."""
    if api in ("plan", "core", "torch-plan") and collective != "alltoallv":
        return ()
    if api == "core" or (api == "mindspore" and collective in ("allgather", "allreduce")):
        return ("empty", "private")  # the caller always gives it
    if api == "torch" and collective in ("allreduce", "quantized"):
        return ("allocated",)  # so does `alltoallv.torch.functional.all_reduce`, which quantized is compared with
    return OUTPUTS


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
    """One measurement.

    Attributes:
        collective: one of `COLLECTIVES`, or ``overhead``: an exchange by every interface, or a call of ``backend``.
        nbytes: what a rank sends (alltoallv), contributes (allgather) or reduces (allreduce, quantized).
        dtype: as NumPy names it.
        pattern: how an exchange's payload divides over the peers; other collectives are uniform.
        output: where ours puts the result: allocated by the operator, `alltoallv.empty`, or ordinary memory.
        formats: of quantized, further columns: names of formats, with commas between.
        variant: what happens between calls: nothing, the send buffer is rewritten, the output is read, or both.
    """

    collective: str
    nbytes: int
    dtype: str = "float32"
    pattern: str = "uneven"
    output: str = "allocated"
    variant: str = "plain"
    formats: str = ""

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
        elif self.pattern == "uneven":  # seven weights, all within a factor of 2
            weights = 1.0 + (ranks[:, None] * 3 + ranks * 5) % 7 / 7
        elif self.pattern == "skewed":  # the first rank gets most
            weights = np.broadcast_to(1.0 / (1 + ranks), (size, size))
        elif self.pattern == "sparse":  # one peer each
            weights = ((ranks[:, None] + 1) % size == ranks).astype(float)
        else:  # moe: tokens drawn from expert popularities that differ by a factor of ten; some peers get none
            tokens = max(1, min(self.count, 4 * size))
            popularity = np.geomspace(10, 1, size)
            draws = np.random.default_rng(7).multinomial(tokens, popularity / popularity.sum(), size)
            weights = draws.astype(float)
        shares = np.floor(weights / weights.sum(1, keepdims=True) * self.count).astype(np.int64)
        heaviest = (ranks + 1) % size if self.pattern != "moe" else weights.argmax(1)
        shares[ranks, heaviest] += self.count - shares.sum(1)
        return np.asarray(shares)

    def layout(self, rank: int, size: int) -> tuple[list[int], list[int]]:
        """Send and receive counts of a rank."""
        counts = self.counts(size)
        return counts[rank].tolist(), counts[:, rank].tolist()

    def received(self, rank: int, size: int) -> int:
        """Elements that a rank receives."""
        return sum(self.layout(rank, size)[1])

    def layouts(self, rank: int, size: int, steps: int = 64) -> list[tuple[list[int], list[int]]]:
        """Layouts of steps that all differ: at step k every rank sends some elements to rank 0 that were rank 1's."""
        counts = self.counts(size)
        made = []
        for k in range(steps):
            step = counts.copy()
            if size > 1:
                moved = np.minimum(k, step[:, 1])
                step[:, 0] += moved
                step[:, 1] -= moved
            made.append((step[rank].tolist(), step[:, rank].tolist()))
        return made

    def input(self, rank: int) -> npt.NDArray[Any]:
        """Rank ``rank``'s payload: small integers, or for quantized reductions normal deviates."""
        if self.collective == "quantized":
            block = np.random.default_rng(rank).standard_normal(min(self.count, 1 << 20), np.float32)
            return np.asarray(np.resize(block, self.count).astype(self.dtype))
        return self._values(rank, 0, self.count)

    def expected(self, rank: int, size: int) -> npt.NDArray[Any]:
        """What rank ``rank`` must end up with; of a quantized reduction, up to `tolerance`."""
        if self.collective == "allgather":
            return np.concatenate([self.input(j) for j in range(size)])
        if self.collective in ("allreduce", "quantized", "functional all_reduce"):
            total = self.input(0).copy()
            for j in range(1, size):
                total += self.input(j)
            return total
        counts = self.counts(size)
        starts = [packed(counts[j].tolist())[rank] for j in range(size)]
        return np.concatenate([self._values(j, starts[j], counts[j, rank]) for j in range(size)])

    def wrong(self, got: npt.NDArray[Any], expected: npt.NDArray[Any], size: int) -> int:
        """How many elements of a result differ from what was expected."""
        flat = np.ravel(got)
        if flat.size != expected.size:
            return max(flat.size, expected.size)
        if self.collective != "quantized":
            return int((flat != expected).sum())
        return int((np.abs(flat - expected) > self.tolerance(size)).sum())

    def tolerance(self, size: int) -> float:
        """Absolute error that int8 and bfloat16 reductions of the deviates of `input` stay below.

        A deviate is below 6; half a step of 6 / 127 for each rank's codes, and half a step of the sum's codes. bfloat16
        keeps 8 bits, which is less in error.
        """
        if self.formats:  # a float of 4 bits is up to a quarter off
            return 6.0 / 4 * 2 * size
        return 6.0 / 127 / 2 * size + 6.0 * size / 127 / 2

    def _values(self, rank: int, begin: int, count: int) -> npt.NDArray[Any]:
        """Small integers, exact in every dtype, different between ranks, with a period of 15."""
        period = ((np.arange(begin, begin + 15) * 7 + rank * 13) % 15).astype(self.dtype)
        return np.resize(period, count)


def bus_factor(collective: str, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests define them (its PERFORMANCE.md)."""
    if collective in ("allreduce", "quantized"):
        return 2 * (size - 1) / size
    return (size - 1) / size


def moved_bytes(case: Case, size: int) -> int:
    """The size that nccl-tests divide by the time for the algorithm bandwidth."""
    return case.nbytes * size if case.collective == "allgather" else case.nbytes
