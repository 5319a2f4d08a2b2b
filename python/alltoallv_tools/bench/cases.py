"""Defines a benchmark case: a collective with its size, pattern and data; every rank can predict the result."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv._calls.collectives import FLOATS, OTHERS
from alltoallv._calls.counts import packed

COLLECTIVES = ("alltoallv", "allgather", "allreduce", "quantized")
PATTERNS = ("uniform", "uneven", "skewed", "sparse", "moe")
OUTPUTS = ("allocated", "empty", "private")
APIS = ("numpy", "plan", "core", "torch", "torch-plan", "mindspore")  # our own interfaces
# Other forms in which a front end can be given its counts; the default is lists that stay the same at every step.
COUNTS = {"numpy": ("new", "tuple", "array"), "torch": ("new", "tensor")}
VARIANTS = ("plain", "rewritten", "consumed", "cycle")
WAYS = ("inline", "push", "pull", "cma", "staged")  # values of ALLTOALLV_PATH


def dtypes_of(collective: str) -> tuple[str, ...]:
    """Returns the dtypes of a collective that NumPy, which predicts the results, has as well."""
    if collective == "quantized":
        return ("float32",)
    dtypes = (FLOATS | OTHERS) - {"bfloat16"}
    return tuple(sorted(dtypes if collective == "allreduce" else dtypes | {"complex64", "complex128"}))


def outputs_of(api: str, collective: str) -> tuple[str, ...]:
    """Returns where an interface of ours can put a collective's result, the usual place first; empty if it lacks it."""
    if api in ("plan", "core", "torch-plan") and collective != "alltoallv":
        return ()
    if api == "core" or (api == "mindspore" and collective in ("allgather", "allreduce")):
        return ("empty", "private")  # the caller always passes the output
    if api == "torch" and collective in ("allreduce", "quantized"):
        return ("allocated",)  # so does `alltoallv.torch.functional.all_reduce`, with which quantized is compared
    return OUTPUTS


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bytes(text: str) -> list[int]:
    """Parses sizes: ``"1K,64K"`` is a list; ``"1K..64M"`` is a range in steps of a factor of 4.

    Raises:
        ValueError: the text has another form.
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
            raise ValueError(f"--bytes has {part!r}, expected a size such as 64K, or a range such as 1K..64M")
    return sizes


def _one(text: str) -> int:
    match = re.fullmatch(r"(\d{1,18})([kmg]?)(i?b)?", text.strip().lower(), re.ASCII)
    size = int(match[1]) * _UNITS[match[2]] if match else 2**63
    if size >= 2**63:
        raise ValueError(f"--bytes has {text!r}, expected a size such as 1024, 64K or 4M, below 2**63")
    return size


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        collective: one of `COLLECTIVES`, or ``overhead``: an exchange by every interface, or a call of ``backend``.
        nbytes: what a rank sends (alltoallv), contributes (allgather) or reduces (allreduce, quantized).
        dtype: as NumPy names it.
        pattern: how an exchange's payload divides over the peers; other collectives are uniform.
        output: where ours puts the result: allocated by the operator, `alltoallv.empty`, or ordinary memory.
        formats: for ``quantized``, the names of formats to measure in further columns, separated by commas.
        variant: what happens between calls: nothing, the send buffer is rewritten, the output is read, or both.
        ways: whether each fixed data path has a column beside the path that ours chooses.
    """

    collective: str
    nbytes: int
    dtype: str = "float32"
    pattern: str = "uneven"
    output: str = "allocated"
    variant: str = "plain"
    formats: str = ""
    ways: bool = False

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def count(self) -> int:
        """Number of elements in a rank's payload."""
        return self.nbytes // np.dtype(self.dtype).itemsize

    def counts(self, size: int) -> npt.NDArray[np.int64]:
        """Elements that rank i sends to rank j, shape ``[W, W]``; each row sums to `count`."""
        ranks = np.arange(size)
        if self.pattern == "uniform":
            weights = np.ones((size, size))
        elif self.pattern == "uneven":  # seven weights, all within a factor of 2
            weights = 1.0 + (ranks[:, None] * 3 + ranks * 5) % 7 / 7
        elif self.pattern == "skewed":  # the first rank gets most
            weights = np.broadcast_to(1.0 / (1 + ranks), (size, size))
        elif self.pattern == "sparse":  # every rank sends to one peer
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
        """Returns the send and receive counts of a rank."""
        counts = self.counts(size)
        return counts[rank].tolist(), counts[:, rank].tolist()

    def received(self, rank: int, size: int) -> int:
        """Returns the number of elements that a rank receives."""
        return sum(self.layout(rank, size)[1])

    def layouts(self, rank: int, size: int, steps: int = 64) -> list[tuple[list[int], list[int]]]:
        """Returns a different layout for each step: at step k every rank moves some elements from rank 1 to rank 0."""
        counts = self.counts(size)
        layouts = []
        for k in range(steps):
            step = counts.copy()
            if size > 1:
                moved = np.minimum(k, step[:, 1])
                step[:, 0] += moved
                step[:, 1] -= moved
            layouts.append((step[rank].tolist(), step[:, rank].tolist()))
        return layouts

    def input(self, rank: int) -> npt.NDArray[Any]:
        """Returns the payload of ``rank``: small integers, or normal deviates for quantized reductions."""
        if self.collective == "quantized":
            block = np.random.default_rng(rank).standard_normal(min(self.count, 1 << 20), np.float32)
            return np.asarray(np.resize(block, self.count).astype(self.dtype))
        return self._values(rank, 0, self.count)

    def expected(self, rank: int, size: int) -> npt.NDArray[Any]:
        """Returns the result that ``rank`` must get; a quantized reduction may differ from it by `tolerance`."""
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
        """Counts the elements of a result that differ from the expected ones."""
        flat = np.ravel(got)
        if flat.size != expected.size:
            return max(flat.size, expected.size)
        if self.collective != "quantized":
            return int((flat != expected).sum())
        return int((np.abs(flat - expected) > self.tolerance(size)).sum())

    def tolerance(self, size: int) -> float:
        """Returns an upper bound of the absolute error of int8 and bfloat16 reductions of the deviates of `input`.

        A deviate is below 6; half a step of 6 / 127 for each rank's codes, and half a step of the sum's codes. bfloat16
        keeps 8 bits, which is less in error.
        """
        if self.formats:  # rounding to a 4-bit float changes a value by up to a quarter
            return 6.0 / 4 * 2 * size
        return 6.0 / 127 / 2 * size + 6.0 * size / 127 / 2

    def _values(self, rank: int, begin: int, count: int) -> npt.NDArray[Any]:
        """Returns small integers that are exact in every dtype, differ between ranks, and repeat after 15 elements."""
        period = ((np.arange(begin, begin + 15) * 7 + rank * 13) % 15).astype(self.dtype)
        return np.resize(period, count)


def bus_factor(collective: str, size: int) -> float:
    """Returns bus bandwidth divided by algorithm bandwidth, as PERFORMANCE.md of nccl-tests defines it."""
    if collective in ("allreduce", "quantized"):
        return 2 * (size - 1) / size
    return (size - 1) / size


def moved_bytes(case: Case, size: int) -> int:
    """Returns the bytes that nccl-tests divide by the time to get the algorithm bandwidth."""
    return case.nbytes * size if case.collective == "allgather" else case.nbytes
