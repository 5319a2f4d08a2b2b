"""What ours is compared with in its own ranks: the limits that the memory sets, and the full exchange."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from alltoallv import _core
from alltoallv.bench.cases import Case
from alltoallv.bench.contenders import Array, Contender, Prepared


def in_turns(copy: Callable[[], object]) -> Callable[[], object]:
    """Where ranks outnumber processors: no rank copies again before those that it shares a processor with have.

    Without it a rank would copy the same few MiB over and over in its time slice, and find them in the cache, which
    no exchange does.
    """

    def call() -> None:
        copy()
        os.sched_yield()

    return call


class Copy:
    """Each rank copies its own bytes once, with nobody to wait for: what the memory allows."""

    def __init__(self, *, crowded: bool) -> None:
        self._crowded = crowded

    def prepare(self, case: Case) -> Prepared:
        x = np.ones(case.count, case.dtype)
        out = np.ones_like(x)
        copy = self.copier(out, x)
        return Prepared(in_turns(copy) if self._crowded else copy, lambda _: out, x, exact=False)

    def copier(self, out: Array, x: Array) -> Callable[[], object]:
        return partial(np.copyto, out, x)


class StreamingCopy(Copy):
    """The same with non-temporal stores."""

    def copier(self, out: Array, x: Array) -> Callable[[], object]:
        return partial(_core.kernel_copy_streaming, out.ctypes.data, x.ctypes.data, x.nbytes)


class Full:
    """Beside a sparse exchange: the same bytes to every peer."""

    def __init__(self, ours: Contender, size: int) -> None:
        self._ours, self._size = ours, size

    def prepare(self, case: Case) -> Prepared:
        full = replace(case, nbytes=case.nbytes * self._size, pattern="uniform")
        prepared = self._ours.prepare(full)
        prepared.exact = False  # of another case
        return prepared
