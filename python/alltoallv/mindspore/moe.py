"""Paddle's global_scatter and global_gather on MindSpore tensors; `alltoallv._calls.experts` has the counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops

from alltoallv._calls.counts import Counts
from alltoallv._calls.expert_rows import ExpertRows
from alltoallv.communicator import Communicator
from alltoallv.mindspore.exchange import all_to_all_v
from alltoallv.mindspore.front_end import enter
from alltoallv.mindspore.group import on_host
from alltoallv.mindspore.tensors import check_tensor


class _Rows(ExpertRows[Tensor]):
    def member(self, group: Any) -> Communicator:
        return enter(group)

    def host(self, comm: Communicator) -> Communicator:
        return on_host(comm)

    def check(self, x: Any, counts: dict[str, Counts]) -> Tensor:
        check_tensor("x", x)
        return x

    def exchange(self, x: Tensor, sends: Counts, recvs: Counts, comm: Communicator) -> Tensor:
        return all_to_all_v(x, sends, recvs, unit="row", group=comm)

    def permuted(self, x: Tensor, order: npt.NDArray[np.int64]) -> Tensor:
        return ops.gather(x, Tensor(order), 0)


_rows = _Rows()
global_scatter = _rows.global_scatter
global_gather = _rows.global_gather
