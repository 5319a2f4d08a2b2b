"""Paddle's global_scatter and global_gather on MindSpore tensors; `alltoallv._calls.experts` has the counts."""

from __future__ import annotations

from mindspore import Tensor, ops

from alltoallv._calls import signature
from alltoallv._calls.counts import Counts
from alltoallv._calls.expert_rows import ExpertRows, Order
from alltoallv._calls.signature import described
from alltoallv.mindspore.front_end import front_end
from alltoallv.mindspore.group import Group


class _Rows(ExpertRows[Tensor]):
    def permuted(self, x: Tensor, order: Order) -> Tensor:
        return ops.gather(x, Tensor(order), 0)  # works on a device, too


_rows = _Rows(front_end)


@described(signature.global_scatter)
def global_scatter(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
    return _rows.global_scatter(x, local_count, global_count, group)


@described(signature.global_gather)
def global_gather(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
    return _rows.global_gather(x, local_count, global_count, group)
