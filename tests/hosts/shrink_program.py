"""Ranks named in the arguments die; the others shrink their communicator, go on, and tell how long that took."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import PeerLostError

lost = set(map(int, sys.argv[1:]))
comm = Communicator.from_env(timeout=30)
x = np.ones(1_000_000, np.float32)
under_way = an.isend(x, (comm.rank + 1) % comm.size, group=comm)  # large, and half way when the others die
an.all_reduce(x, group=comm)
if comm.rank in lost:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        an.all_reduce(x, group=comm)
except PeerLostError:
    pass
begin = time.monotonic()
left = comm.shrink()
seconds = time.monotonic() - begin
comm.destroy()
survivors = [rank for rank in range(comm.size) if rank not in lost]
assert left.size == len(survivors)
assert left.rank == survivors.index(comm.rank)
for n in (3, 300_000):
    assert an.all_reduce(np.full(n, comm.rank), group=left)[-1] == sum(survivors)
    assert an.all_gather(np.full(n, comm.rank), group=left)[:, 0].tolist() == survivors
half = left.split(left.rank % 2)
assert half is not None
assert an.all_reduce(np.ones(2), group=half)[0] == half.size
print(f"{left.backend} after {seconds:.3f} s", flush=True)
