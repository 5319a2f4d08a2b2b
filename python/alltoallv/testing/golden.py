"""Makes golden data: random exchanges with their expected results, bit for bit, and files to keep them in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv.extras import extra
from alltoallv.testing import reference

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

#: Names of every dtype that the operators move, of which bfloat16 and the dtypes of 8 bits need ml_dtypes.
DTYPES = tuple(_core.dtypes)


def dtype_of(name: str | npt.DTypeLike) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name, which may be one of ml_dtypes'."""
    if isinstance(name, str) and name.startswith(("bfloat", "float8_", "float6_", "float4_")):
        name = getattr(extra("ml_dtypes", "testing"), name)
    return np.dtype(name)


@dataclass(frozen=True, eq=False)
class Case:
    """Holds one all_to_all_v of W ranks.

    Attributes:
        inputs: W flat arrays.
        send_counts: W x W, row r belongs to rank r; so are the next three.
        sdispls: displacements of the send regions.
        recv_counts: recv_counts[r][j] == send_counts[j][r].
        rdispls: displacements of the receive regions, which never overlap.
        outputs: W flat arrays, prefilled; elements that no region covers must stay.
        expected: the outputs afterwards.
    """

    inputs: tuple[Array, ...]
    send_counts: Counts
    sdispls: Counts
    recv_counts: Counts
    rdispls: Counts
    outputs: tuple[Array, ...]
    expected: tuple[Array, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks, W."""
        return len(self.inputs)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of all arrays."""
        return self.inputs[0].dtype

    @property
    def output_sizes(self) -> list[int]:
        """The number of elements of every rank's output."""
        return [array.size for array in self.outputs]

    def __repr__(self) -> str:
        """Returns counts and displacements, but no data: what a reader of a failing example needs."""
        rows = (f"{name}={getattr(self, name).tolist()}" for name in _MATRICES)
        return f"Case(dtype={self.dtype.name}, {', '.join(rows)}, output_sizes={self.output_sizes})"


_MATRICES = ("send_counts", "sdispls", "recv_counts", "rdispls")
_ARRAYS = ("inputs", "outputs", "expected")


def fill(rng: np.random.Generator, shape: int | Sequence[int], dtype: str | npt.DTypeLike) -> Array:
    """Returns random bit patterns (NaNs with payload, infinities, denormals, ...) that are valid for ``dtype``."""
    kind = dtype_of(dtype)
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    count = int(np.prod(dims, dtype=np.int64))
    if kind == np.bool_:
        return rng.integers(0, 2, count, np.uint8).view(np.bool_).reshape(dims)
    return rng.integers(0, 256, count * kind.itemsize, np.uint8).view(kind).reshape(dims)


def random_case(
    rng: np.random.Generator,
    world_size: int,
    dtype: str | npt.DTypeLike,
    *,
    zeros: float = 0.3,
    gaps: bool = True,
    permuted: bool = True,
    overlapping_sends: bool = False,
    max_count: int = 20,
) -> Case:
    """Returns a random exchange.

    Args:
        rng: source of all randomness.
        world_size: W, at least 1.
        dtype: the data's dtype, or its name.
        zeros: share of the counts that are zero.
        gaps: leave up to 5 elements between regions, and at both ends.
        permuted: regions lie in random order instead of rank order.
        overlapping_sends: send regions lie anywhere in the input, also over each other.
        max_count: largest count.
    """
    shape = (world_size, world_size)
    counts = np.where(rng.random(shape) < zeros, 0, rng.integers(0, max_count + 1, shape))

    def layout(row: Counts) -> tuple[Counts, int]:
        order = rng.permutation(world_size) if permuted else np.arange(world_size)
        return _layout(row, order, rng.integers(0, 6, world_size + 1) if gaps else np.zeros(world_size + 1, int))

    sends, receives = [layout(row) for row in counts], [layout(row) for row in counts.T]
    anywhere = (lambda end: int(rng.integers(0, end + 1))) if overlapping_sends else None
    return _case(rng, dtype, counts, sends, receives, anywhere)


def cases(*, max_world_size: int = 8, dtypes: Sequence[str] = DTYPES) -> SearchStrategy[Case]:
    """Returns a hypothesis strategy for every kind of exchange.

    It shrinks towards few ranks, zero counts and packed regions.
    """
    from hypothesis import strategies as st

    @st.composite
    def build(draw: st.DrawFn) -> Case:
        size = draw(st.integers(1, max_world_size))
        numbers = st.lists(st.one_of(st.just(0), st.integers(0, 20)), min_size=size, max_size=size)
        counts = np.array([draw(numbers) for _ in range(size)], np.int64)
        gaps = st.lists(st.integers(0, 3), min_size=size + 1, max_size=size + 1)
        order = st.one_of(st.just(list(range(size))), st.permutations(range(size)))
        sends = [_layout(row, draw(order), draw(gaps)) for row in counts]
        receives = [_layout(row, draw(order), draw(gaps)) for row in counts.T]
        anywhere = (lambda end: draw(st.integers(0, end))) if draw(st.booleans()) else None
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        return _case(rng, draw(st.sampled_from(dtypes)), counts, sends, receives, anywhere)

    return build()


def assert_bits_equal(actual: Array, expected: Array, what: str = "") -> None:
    """Asserts equal dtype, shape and bits; NaN payloads and the sign of zero also count.

    Raises:
        AssertionError: they differ; it names the first index that differs, and both values with their bits.
    """
    head = f"{what}: " if what else ""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{head}dtype is {actual.dtype}, expected {expected.dtype}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{head}shape is {actual.shape}, expected {expected.shape}")
    if (bits := actual.tobytes()) == (wanted := expected.tobytes()):
        return
    ours, theirs = (np.frombuffer(b, np.uint8).reshape(-1, actual.dtype.itemsize) for b in (bits, wanted))
    wrong = np.flatnonzero((ours != theirs).any(axis=1))
    first = int(wrong[0])
    index = tuple(map(int, np.unravel_index(first, actual.shape)))
    shown = index[0] if len(index) == 1 else index
    raise AssertionError(
        f"{head}{wrong.size} of {actual.size} elements differ, first at index {shown}: "
        f"{_show(actual.reshape(-1)[first], ours[first])}, expected "
        f"{_show(expected.reshape(-1)[first], theirs[first])}"
    )


def save(path: str | os.PathLike[str], case: Case) -> None:
    """Writes a case to an .npz file, in the byte order of the machine; ml_dtypes' dtypes survive."""
    data: dict[str, Array] = {name: getattr(case, name) for name in _MATRICES}
    for name in _ARRAYS:
        for r, array in enumerate(getattr(case, name)):
            data[f"{name}_{r}"] = np.frombuffer(array.tobytes(), np.uint8)
    meta = {"dtype": case.dtype.name, "world_size": case.world_size}
    with open(path, "wb") as file:
        np.savez(file, meta=np.array(json.dumps(meta)), **data)  # type: ignore[arg-type]


def load(path: str | os.PathLike[str]) -> Case:
    """Reads a case that :func:`save` has written."""
    with np.load(path, allow_pickle=False) as data:
        meta = json.loads(str(data["meta"]))
        dtype = dtype_of(meta["dtype"])
        matrices = {name: data[name] for name in _MATRICES}
        arrays = {name: tuple(data[f"{name}_{r}"].view(dtype) for r in range(meta["world_size"])) for name in _ARRAYS}
    return Case(**matrices, **arrays)  # type: ignore[arg-type]


def _layout(counts: Counts, order: Sequence[int] | Counts, gaps: Sequence[int] | Counts) -> tuple[Counts, int]:
    """Returns displacements of regions in the given order with gaps before, between and after, and the length."""
    displs = np.zeros(len(counts), np.int64)
    position = 0
    for rank, gap in zip(order, gaps[:-1], strict=True):
        position += int(gap)
        displs[rank] = position
        position += int(counts[rank])
    return displs, position + int(gaps[-1])


def _case(
    rng: np.random.Generator,
    dtype: str | npt.DTypeLike,
    send_counts: Counts,
    sends: list[tuple[Counts, int]],
    receives: list[tuple[Counts, int]],
    anywhere: Callable[[int], int] | None,
) -> Case:
    """Returns a case of regions as `_layout` has placed them; ``anywhere`` draws other places of the send regions."""
    sdispls, rdispls = (np.array([displs for displs, _ in rows]) for rows in (sends, receives))
    if anywhere:
        for r, (_, total) in enumerate(sends):
            sdispls[r] = [anywhere(total - int(count)) for count in send_counts[r]]
    inputs, outputs = (tuple(fill(rng, size, dtype) for _, size in rows) for rows in (sends, receives))
    recv_counts = np.ascontiguousarray(send_counts.T)
    expected = tuple(reference.all_to_all_v(inputs, send_counts, sdispls, recv_counts, rdispls, outputs))
    return Case(inputs, send_counts, sdispls, recv_counts, rdispls, outputs, expected)


def _show(value: Any, data: npt.NDArray[np.uint8]) -> str:
    return f"{value} (0x{data.tobytes()[::-1].hex()})"
