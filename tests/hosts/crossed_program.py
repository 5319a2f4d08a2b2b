"""Ranks on different hosts call two groups in opposite order; tells the error, and after how long it came."""

from __future__ import annotations

import time

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import DeadlockError

first, second = (Communicator.from_env(domain, timeout=30) for domain in ("first", "second"))
for comm in (first, second):
    an.barrier(group=comm)
time.sleep(0.6 * (first.rank == 0))  # the others wait for long, and nobody is told anything
for comm in (first, second):
    an.barrier(group=comm)
begin = time.monotonic()
try:
    an.barrier(group=(first, second)[first.rank % 2])
    an.barrier(group=(second, first)[first.rank % 2])
except DeadlockError as error:
    print(f"after {time.monotonic() - begin:.3f} s: {error}", flush=True)
