"""A rank is killed while large messages move between the ranks of a host."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import PeerLostError

lost = int(sys.argv[1])
comm = Communicator.from_env(timeout=60)
data = np.ones(4_000_000)
an.barrier(group=comm)
end = time.monotonic() + 30
try:
    for number in range(1_000_000):
        if comm.rank == lost and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank < 2:
            work = an.isend(data, 1 - comm.rank, group=comm)
            an.recv(out := np.zeros_like(data), 1 - comm.rank, group=comm)
            work.wait()
            assert np.array_equal(out, data)
        else:
            time.sleep(0.02)
            if lost != 2:
                an.barrier(group=comm)
        assert time.monotonic() < end, "nobody was lost"
except PeerLostError as error:
    print(error)
