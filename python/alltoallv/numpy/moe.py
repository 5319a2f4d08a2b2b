"""Exchange of tokens between mixture-of-experts ranks; the counts are those of `alltoallv._calls.experts`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv._calls.counts import Counts
from alltoallv._calls.expert_rows import ExpertRows
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.numpy.arrays import Array, as_input, resolve
from alltoallv.numpy.exchange import all_to_all_v


class _Rows(ExpertRows[Array]):
    def member(self, group: Any) -> Communicator:
        return resolve(group)

    def check(self, x: Any, counts: dict[str, Counts]) -> Array:
        rows: Array = as_input("x", x)
        core_name(rows.dtype)
        return rows

    def exchange(self, x: Array, sends: Counts, recvs: Counts, comm: Communicator) -> Array:
        return all_to_all_v(x, sends, recvs, unit="row", group=comm)

    def permuted(self, x: Array, order: npt.NDArray[np.int64]) -> Array:
        return np.asarray(x[order])


_rows = _Rows()
global_scatter = _rows.global_scatter
global_gather = _rows.global_gather
