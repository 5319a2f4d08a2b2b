"""Rank 3 dies without a word; the others tell who it was, and after how long."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import PeerLostError

comm = Communicator.from_env(timeout=60)
x = np.ones(1_000_000, np.float32)
for _ in range(3):
    an.all_reduce(x, group=comm)
an.barrier(group=comm)
begin = time.monotonic()
if comm.rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        an.all_reduce(x, group=comm)
except PeerLostError as error:
    print(f"after {time.monotonic() - begin:.3f} s: {error}")
