"""Paddle's global_scatter and global_gather on MindSpore tensors; `alltoallv._calls.experts` has the counts."""

from __future__ import annotations

from mindspore import Tensor, ops

from alltoallv._calls.expert_rows import ExpertRows, Order
from alltoallv.mindspore.front_end import front_end


class _Rows(ExpertRows[Tensor]):
    def permuted(self, x: Tensor, order: Order) -> Tensor:
        return ops.gather(x, Tensor(order), 0)  # works on a device, too


_rows = _Rows(front_end)
global_scatter, global_gather = _rows.global_scatter, _rows.global_gather
