"""256 processes on one host: every collective, and errors that name ranks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, PeerLostError, PeerMismatchError
from alltoallv.numpy import all_gather, all_reduce, all_to_all_v, barrier

SIZE = 256


def run(body: Callable[[Communicator], Any], job: str, *, ends: int = -1) -> None:
    """Forks the ranks, which share what this process has imported, and expects all but ``ends`` to end well."""
    children = {}
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_RANK": str(rank)}
                os.environ |= {"LOCAL_WORLD_SIZE": str(SIZE), "ALLTOALLV_JOB_ID": job}
                body(Communicator.from_env(timeout=200))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children[child] = rank
    codes = {children[child]: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    assert {rank: code for rank, code in codes.items() if code != (7 if rank == ends else 0)} == {}


def calls(comm: Communicator) -> None:
    """Sparse counts, counts that are learnt, gathers, sums, and what ranks disagree about."""
    rank, world = comm.rank, range(SIZE)
    for turn in range(3):
        sends = [(rank + to + turn) % 3 if to % 7 else 0 for to in world]
        counts = [(by + rank + turn) % 3 if rank % 7 else 0 for by in world]
        x = np.full(sum(sends), rank, np.int32)
        expected = np.repeat(np.arange(SIZE, dtype=np.int32), counts)
        np.testing.assert_array_equal(all_to_all_v(x, sends, counts, group=comm), expected)
        np.testing.assert_array_equal(all_to_all_v(x, sends, group=comm), expected)
        np.testing.assert_array_equal(all_gather(np.array([rank]), group=comm).ravel(), np.arange(SIZE))
        np.testing.assert_array_equal(all_reduce(np.arange(3) + rank, group=comm), np.arange(3) * SIZE + sum(world))
        barrier(group=comm)
    with pytest.raises(PeerMismatchError, match="rank 200 sends 1 elements to rank 131, which expects 2"):
        all_to_all_v(np.ones(SIZE), [1] * SIZE, [1 + (rank == 131 and by == 200) for by in world], group=comm)
    with pytest.raises(PeerMismatchError, match="rank 0 has dtype float64, rank 250 has dtype float32"):
        all_reduce(np.ones(2, np.float32 if rank == 250 else np.float64), group=comm)
    with pytest.raises(PeerMismatchError, match=r"rank 0 has shape \(2, 3\), rank 99 has shape \(3, 2\)"):
        all_reduce(np.ones((3, 2) if rank == 99 else (2, 3)), group=comm)
    with pytest.raises(InvalidParamError):
        all_to_all_v(np.ones(SIZE), [1] * SIZE, [-1 if rank == 177 else 1] * SIZE, group=comm)
    barrier(group=comm)


def loses_one(comm: Communicator) -> None:
    barrier(group=comm)
    if comm.rank == 201:
        os._exit(7)
    with pytest.raises(PeerLostError, match="rank 201 was lost"):
        barrier(group=comm)


@pytest.mark.slow
def test_calls_of_256_processes() -> None:
    run(calls, f"many-{os.getpid()}")


@pytest.mark.slow
def test_loss_among_256_processes() -> None:
    run(loses_one, f"loss-{os.getpid()}", ends=201)
