"""What the traced ranks do."""

from __future__ import annotations

import time

import numpy as np

import alltoallv
from alltoallv.numpy import all_gather, all_reduce, all_to_all_v, barrier, recv, send

COUNTS = np.array([[1, 2, 0, 5], [0, 3, 1, 5], [2, 0, 0, 7], [4, 1, 1, 9]])
LATE = 2  # the rank that works longer than the others
STEPS = 5


def traffic(comm: alltoallv.Communicator, folder: str) -> None:
    """Two domains, a message, and a rank that is late; recorded inside the block alone."""
    barrier(group=comm)
    with alltoallv.trace(folder):
        pair = comm.split(comm.rank % 2)
        assert pair is not None
        for _ in range(STEPS):
            counts = COUNTS[comm.rank]
            all_to_all_v(np.ones(counts.sum(), np.float32), counts.tolist(), group=comm)
            if comm.rank == LATE:
                while not are_in(comm, "all_reduce"):
                    time.sleep(0.001)
                time.sleep(0.15)  # much longer than a busy machine makes others late
            all_reduce(np.ones(8, np.float64), group=comm)
            all_reduce(np.ones(2, np.int16), group=pair)
        all_gather(np.ones(3, np.int32), group=comm)
        if comm.rank == 0:
            send(np.ones(5, np.float32), 3, group=comm)
        if comm.rank == 3:
            recv(np.ones(5, np.float32), 0, group=comm)
        barrier(group=comm)
        pair.destroy()
    barrier(group=comm)


def are_in(comm: alltoallv.Communicator, operator: str) -> bool:
    """Whether all other ranks wait in a call of this operator."""
    last = [one["operators"][-1:] for one in comm.flight_record()["ranks"] if one["rank"] != comm.rank]
    return all(ops and (ops[0]["operator"], ops[0]["state"]) == (operator, "running") for ops in last)
