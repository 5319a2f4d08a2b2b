"""Calls in chunks, of which several are under way at once: after the error of one rank the next call works on all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import AllToAllVError, InvalidTensorError, PeerMismatchError

IDS = np.array([[0], [1], [2], [3], [0], [3]])


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("what", ["first", "last", "output", "shared", "ids", "chunks"])
@on_ranks(3)
def test_layer(comm: Communicator, what: str, chunks: int) -> None:
    dispatcher, calls = av.MoEDispatcher(4, comm), 0
    odd = comm.rank == 1

    def experts(rows: Any, counts: Any) -> Any:
        nonlocal calls
        calls += 1
        if odd and calls == {"first": 1, "last": chunks}.get(what):
            raise RuntimeError("this expert fails")
        return np.append(rows, [[0]], 0) if odd and what == "output" and calls == 1 else rows

    def shared(rows: Any) -> Any:
        if odd and what == "shared":
            raise RuntimeError("this expert fails")
        return rows

    tokens, ids = np.arange(6.0, dtype=np.float32)[:, None] + 100 * comm.rank, IDS.copy()
    if odd and what == "ids":
        ids[-1] = 4
    count = chunks + (odd and what == "chunks")
    mine = {"ids": ValueError, "output": InvalidTensorError, "chunks": PeerMismatchError}.get(what, RuntimeError)
    with pytest.raises(mine if odd else AllToAllVError) as caught:
        dispatcher(tokens, ids, None, experts, shared=shared, chunks=count)
    assert what == "chunks" or odd or "failed on rank 1: " in str(caught.value)
    y = dispatcher(tokens + 7, IDS, None, lambda rows, counts: rows, chunks=chunks)
    assert np.array_equal(y, tokens + 7)
    av.barrier(group=comm)


@pytest.mark.parametrize("what", ["dtype", "shape", "chunks", "rows"])
@on_ranks(2)
def test_linear(comm: Communicator, what: str) -> None:
    odd, how = comm.rank == 1, {"group": comm, "chunks": 4}
    x, w = np.repeat(np.arange(512, dtype=np.float32)[:, None], 16, 1), np.ones((128, 16), np.float32)
    other: dict[str, Any] = {
        "dtype": (x.astype(np.float64), w.astype(np.float64), how),
        "shape": (x[:, 1:], w, how),
        "chunks": (x, w, how | {"chunks": 2}),
        "rows": (x[:256], w, how | {"chunks": 2}),
    }
    given, weight, about = other[what] if odd else (x, w, how)
    match = (
        "rank 0 begins a call in 4 chunks, rank 1 begins a call in 2" if what in ("chunks", "rows") else "input|weight"
    )
    with pytest.raises(AllToAllVError, match=match):
        av.quantized_linear_all_reduce(given, weight, **about)
    y = av.quantized_linear_all_reduce(x, w, **how)
    assert np.allclose(y[:, 0], comm.size * x.sum(1), rtol=0.02, atol=1)
    av.barrier(group=comm)
