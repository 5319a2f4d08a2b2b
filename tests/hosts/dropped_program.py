"""Rank 0 drops its communicator while MPI carries a call of it that will never end."""

from __future__ import annotations

import os
import time

import numpy as np
from mpi4py import MPI

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError
from alltoallv.launch import mpi

comm = Communicator.from_mpi(MPI.COMM_WORLD, timeout=30)
rank, counts = comm.rank, [250_000] * comm.size
if rank == 0:
    mpi.Engine.progress = lambda self: bool(time.sleep(0.005))
    mpi.Engine.missing = lambda self: [1]
    sent = np.ones(sum(counts))  # MPI may still read this, and write to the output: they stay
    out, work = an.all_to_all_v(sent, counts, counts, group=comm, async_op=True)
    time.sleep(0.3)
    del work, comm
else:
    sent, out = np.ones(sum(counts)), np.empty(sum(counts))
    try:
        an.all_to_all_v(sent, counts, counts, out=out, group=comm)
    except AllToAllVError as error:
        print(error)
    del comm
print(f"rank {rank} goes on", flush=True)
MPI.COMM_WORLD.Barrier()
time.sleep(1)  # MPICH aborts a rank that still reads from one that has ended
os._exit(0)  # messages are left that will never end
