"""Ranks leave at once; the others tell who it was, and after how long.

lost_program.py HOW RANK ...    HOW: "kill", without a word, or "exit"
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError

comms = [Communicator.from_env(domain, timeout=60) for domain in ("first", "second")]
x = np.ones(1_000_000, np.float32)
for comm in comms * 2:
    an.all_reduce(x, group=comm)
    an.barrier(group=comm)
time.sleep(0.3)  # until all have finished the barrier: the leader of a host passes its end on
begin = time.monotonic()
if comms[0].rank in map(int, sys.argv[2:]):
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit()
for comm in comms:
    try:
        while True:
            an.all_reduce(x, group=comm)
    except AllToAllVError as error:
        print(f"{type(error).__name__} after {time.monotonic() - begin:.3f} s: {error}", flush=True)
