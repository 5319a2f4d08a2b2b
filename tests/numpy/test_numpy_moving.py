"""Dtypes that only move, and scans, against NumPy: processes and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import on_both

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import reference

Launch = Callable[..., list[Any]]
few = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

DTYPES = [np.dtype(kind) for kind in (
    [("a", "i4"), ("b", ">f8"), ("c", "S3"), ("d", "u1", (2, 2))],
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    "M8[us]", "m8[D]", "S5", "U3", "V7", "V65535", np.longdouble, np.clongdouble, ">f4", ">i8", ml_dtypes.int4,
)]  # fmt: skip


def made(dtype: np.dtype[Any], seed: int, *shape: int) -> Any:
    """Any bits at all."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), dtype).reshape(shape)


def check_moves(comm: Communicator, dtype: np.dtype[Any], counts: Any) -> None:
    size, me, mine = comm.size, comm.rank, counts[comm.rank]
    rows = [made(dtype, r, sum(counts[r]), 2) for r in range(size)]
    arrived = reference.all_to_all_v([x.view(np.uint8) for x in rows], counts)[me]
    taken = [row[me] for row in counts]
    together = np.concatenate([x.view(np.uint8) for x in rows])

    def same(got: Any, wanted: Any) -> None:
        assert got.dtype == dtype
        assert got.tobytes() == wanted.tobytes()

    x = rows[me]
    same(av.all_to_all_v(x, mine, group=comm), arrived)
    out, work = av.all_to_all_v(x, mine, taken, group=comm, async_op=True)
    work.wait()
    same(out, arrived)
    out = np.empty((sum(taken), 2), dtype)
    av.all_to_all_single(out, x, taken, mine, group=comm)
    same(out, arrived)
    outs = [np.empty((n, 2), dtype) for n in taken]
    av.all_to_all(outs, np.split(x, np.cumsum(mine)[:-1]), group=comm)
    assert b"".join(out.tobytes() for out in outs) == arrived.tobytes()
    same(av.all_gather_v(x, group=comm), together)
    same(av.all_gather_v(x, [sum(row) for row in counts], group=comm), together)
    flat = av.Plan(np.multiply(mine, 2), np.multiply(taken, 2), dtype, group=comm)(x.reshape(-1))
    same(flat, arrived)

    one = made(dtype, 100 + me, 3)
    all_ones = np.stack([made(dtype, 100 + r, 3).view(np.uint8) for r in range(size)])
    same(av.all_gather(one, group=comm), all_ones)
    out = np.empty(3 * size, dtype)
    av.all_gather_into_tensor(out, one, group=comm)
    same(out, all_ones)
    root = size - 1
    gathered: Any = av.gather(one, root, group=comm)
    assert (gathered is None) == (me != root)
    if me == root:
        same(gathered, all_ones)
    out = np.empty(3, dtype)
    av.scatter(out, gathered, root, group=comm)
    same(out, one)
    av.broadcast(out, root, group=comm)
    same(out, all_ones[root])
    assert av.sendrecv(one, (me + 1) % size, out, (me - 1) % size, group=comm) == (me - 1) % size
    same(out, all_ones[me - 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_move(launch: Launch, dtype: np.dtype[Any]) -> None:
    launch(3, check_moves, dtype, [[1, 2, 0], [0, 0, 0], [3, 1, 2]])


@few
@given(st.sampled_from(DTYPES), st.integers(1, 3), st.data())
def test_any_counts(launch: Launch, dtype: np.dtype[Any], size: int, draw: st.DataObject) -> None:
    line = st.lists(st.integers(0, 40), min_size=size, max_size=size)
    launch(size, check_moves, dtype, draw.draw(st.lists(line, min_size=size, max_size=size)))


@pytest.mark.parametrize("other", [np.dtype("f8"), np.dtype([("a", "f4"), ("c", "i4")]), np.dtype("S9")], ids=str)
def test_ranks_find_that_dtypes_differ(launch: Launch, other: np.dtype[Any]) -> None:
    def program(comm: Communicator) -> str:
        x = np.zeros(4, [("a", "i4"), ("b", "i4")] if comm.rank == 0 else other)
        with pytest.raises(PeerMismatchError, match=r"dtype 8 bytes #[0-9a-f]{4}, rank 1 has dtype.*A2A-3009") as found:
            av.all_gather(x, group=comm)
        message = (lambda: av.send(x, 1, group=comm)) if comm.rank == 0 else (lambda: av.recv(x, 0, group=comm))
        with pytest.raises(PeerMismatchError, match=r"4 8 bytes #[0-9a-f]{4}.*A2A-3008"):
            message()
        return str(found.value)

    first, second = launch(2, program)
    assert first == second


@on_both(2)
def test_no_reductions_of_what_only_moves(comm: Communicator) -> None:
    for function in (av.all_reduce, av.reduce, av.reduce_scatter, av.scan):
        with pytest.raises(
            InvalidParamError, match=r"op 'sum' is not defined for dtype datetime64\[s\], expected.*A2A-1044"
        ):
            function(np.zeros(2, "M8[s]"), group=comm)  # type: ignore[operator]
    with pytest.raises(InvalidTensorError, match=r"dtype is object, expected one whose elements.*A2A-2074"):
        av.send(np.zeros(1, object), 0, group=comm)


@few
@given(st.integers(1, 4), st.integers(0, 9), st.booleans(), st.sampled_from(["f4", "f2", "i8", "c8", "?"]))
def test_scan_in_place(launch: Launch, size: int, n: int, exclusive: bool, kind: str) -> None:
    inputs = [(np.random.default_rng(r).standard_normal(n) * 9).astype(kind) for r in range(size)]

    def program(comm: Communicator) -> Any:
        x = inputs[comm.rank].copy()
        result = av.scan(x, exclusive=exclusive, out=x, group=comm)
        assert result is x or (exclusive and comm.rank == 0 and x.tobytes() == inputs[0].tobytes())
        return result

    for result, wanted in zip(launch(size, program), reference.scan(inputs, "sum", exclusive), strict=True):
        assert (result is None) == (wanted is None)
        assert wanted is None or result.tobytes() == wanted.tobytes()
