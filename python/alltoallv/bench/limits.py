"""What ours is compared with in its own ranks: the limits that the memory sets, and the full exchange."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from alltoallv import _core
from alltoallv.bench.cases import Case
from alltoallv.bench.contenders import Contender, Prepared


class Copy:
    """Each rank copies its own bytes once, with nobody to wait for: what the memory allows."""

    def prepare(self, case: Case) -> Prepared:
        x = np.ones(case.count, case.dtype)
        out = np.ones_like(x)
        return Prepared(lambda: np.copyto(out, x), lambda _: out, x, exact=False)


class StreamingCopy:
    """The same with non-temporal stores."""

    def prepare(self, case: Case) -> Prepared:
        x = np.ones(case.count, case.dtype)
        out = np.ones_like(x)
        copy, target, source, nbytes = _core.kernel_copy_streaming, out.ctypes.data, x.ctypes.data, x.nbytes
        return Prepared(lambda: copy(target, source, nbytes), lambda _: out, x, exact=False)


class Full:
    """Beside a sparse exchange: the same bytes to every peer."""

    def __init__(self, ours: Contender, size: int) -> None:
        self._ours, self._size = ours, size

    def prepare(self, case: Case) -> Prepared:
        full = replace(case, nbytes=case.nbytes * self._size, pattern="uniform")
        prepared = self._ours.prepare(full)
        prepared.exact = False  # of another case
        return prepared
