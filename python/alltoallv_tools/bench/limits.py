"""Competitors that run in our own ranks: copies that show what the memory allows, and the full exchange."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

import alltoallv.numpy as an
from alltoallv import _core
from alltoallv.communicator import Communicator
from alltoallv_tools.bench.cases import Case
from alltoallv_tools.bench.competitors import Array, Competitor, Prepared

ROUNDS_FROM = 1 << 20
"""Bytes of a copy from which on ranks wait for one another; the waits would outlast smaller ones."""


class Rounds:
    """Makes ranks wait for each other after every copy, as exchanges do, where ranks outnumber processors.

    Without it a rank would copy the same few MiB over and over in its time slice and find them in the cache, which no
    exchange does.
    """

    _LINE = 64  # bytes of a cache line

    def __init__(self, comm: Communicator) -> None:
        own = os.memfd_create("bench-rounds") if comm.rank == 0 else -1
        places = np.empty(2 * comm.size, np.int64)
        an.all_gather(np.array([os.getpid(), own]), out=places, group=comm)
        pid, first = places[:2]
        length = self._LINE * comm.size
        with open(f"/proc/{pid}/fd/{first}", "r+b") as file:
            file.truncate(length)
            counters = np.frombuffer(mmap.mmap(file.fileno(), length), np.int64)
        an.barrier(group=comm)  # all ranks have opened it
        if own >= 0:
            os.close(own)
        self._copies = counters[:: self._LINE // counters.itemsize]  # one counter per rank
        self._rank = comm.rank

    def end(self) -> None:
        """Waits until all ranks have made as many copies as this one."""
        copies = self._copies
        done = copies[self._rank] + 1
        copies[self._rank] = done
        while copies.min() < done:
            os.sched_yield()


class Copy:
    """Copies each rank's own bytes once without waiting for any peer: what the memory allows."""

    def __init__(self, rounds: Rounds | None) -> None:
        self._rounds = rounds

    def prepare(self, case: Case) -> Prepared:
        x = np.ones(case.count, case.dtype)
        out = np.ones_like(x)
        return Prepared(self._turns(self.copier(out, x), x.nbytes), lambda _: out, x, exact=False)

    def _turns(self, copy: Callable[[], object], nbytes: int) -> Callable[[], object]:
        if self._rounds is None:
            return copy
        end = self._rounds.end if nbytes >= ROUNDS_FROM else os.sched_yield

        def call() -> None:
            copy()
            end()

        return call

    def copier(self, out: Array, x: Array) -> Callable[[], object]:
        return partial(np.copyto, out, x)


class StreamingCopy(Copy):
    """Copies as `Copy` does, with non-temporal stores."""

    def copier(self, out: Array, x: Array) -> Callable[[], object]:
        return partial(_core.kernel_copy_streaming, out.ctypes.data, x.ctypes.data, x.nbytes)


class Full:
    """Sends the same bytes to every peer, for comparison with a sparse exchange."""

    def __init__(self, ours: Competitor, size: int) -> None:
        self._ours, self._size = ours, size

    def prepare(self, case: Case) -> Prepared:
        full = replace(case, nbytes=case.nbytes * self._size, pattern="uniform")
        prepared = self._ours.prepare(full)
        prepared.exact = False  # the prediction belongs to another case
        return prepared
