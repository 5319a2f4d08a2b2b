"""Every rank ends as soon as its own last operator has ended."""

from __future__ import annotations

import time

import numpy as np

import alltoallv.numpy as an
from alltoallv import Communicator

comm = Communicator.from_env(timeout=60)
counts = [2_000_000] * comm.size
inputs = [np.full(sum(counts), rank, np.float32) for rank in range(comm.size)]
for _ in range(3):
    y = an.all_to_all_v(inputs[comm.rank], counts, counts, group=comm)
if comm.rank == comm.size - 1:
    time.sleep(0.2)
    comm.destroy()
else:
    comm.destroy()
assert np.array_equal(y, np.repeat(np.arange(comm.size, dtype=np.float32), counts[0]))
