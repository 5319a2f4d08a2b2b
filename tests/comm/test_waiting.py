"""Waits end because whoever completes them wakes the sleeper, not because the sleeper looks now and then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from trouble import attempt, join

import alltoallv
from alltoallv import Communicator
from alltoallv.numpy import all_reduce, all_to_all_v, barrier, isend, recv


def exchange(comm: Communicator, rows: int) -> None:
    x = np.full((rows * comm.size, 64), comm.rank, np.float32)
    y = all_to_all_v(x, [rows] * comm.size, group=comm)
    assert (y.reshape(comm.size, -1) == np.arange(comm.size)[:, None]).all()


def message(comm: Communicator, elements: int) -> None:
    """Each rank reads memory of its neighbour that it has not seen before."""
    x = alltoallv.empty(elements, np.float64)
    x[:] = comm.rank
    work = isend(x, (comm.rank + 1) % comm.size, group=comm)
    out = np.empty(elements)
    recv(out, (comm.rank - 1) % comm.size, group=comm)
    work.wait()
    assert (out == (comm.rank - 1) % comm.size).all()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_memory_of_peers_comes_by_itself(ranks: Any, size: int) -> None:
    """What a first exchange, one after the pool has grown, and one with learnt counts write into."""

    def work(comm: Communicator) -> int:
        for rows in (90, 20_000 // size):
            exchange(comm, rows)
        return comm.stats()["segment_requests"]

    assert ranks(size, fresh=True)(work) == [0] * size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_wait_ends_by_looking(ranks: Any, size: int) -> None:
    """Calls that need memory of peers for the first time, after their pools have grown too; messages; a loss."""

    def work(comm: Communicator) -> int:
        exchange(comm, 90)
        message(comm, 1 << 20)
        exchange(comm, 2_000)
        all_reduce(np.ones(100_000), group=comm)
        barrier(group=comm)
        with join(comm.rank, comm.size, "aborted", comm.domain) as other:
            barrier(group=other)
            if comm.rank == 0:
                other.abort("on purpose")
            else:
                assert attempt(recv, np.empty(1), 0, group=other).name == "PeerLostError"
        barrier(group=comm)
        return comm.stats()["unrung_waits"]

    # One may count whose bell rings a moment later; without bells it is one per peer and call.
    assert sum(ranks(size, fresh=True)(work)) <= 1
