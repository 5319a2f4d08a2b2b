"""The operator itself, and its use for experts; see `alltoallv.mindspore` for what all functions have in common."""

from __future__ import annotations

from mindspore import Tensor, ops

from alltoallv._calls.expert_rows import ExpertRows, Order
from alltoallv.mindspore.front_end import front_end
from alltoallv.mindspore.tensors import in_queue


class _Rows(ExpertRows[Tensor]):
    def permuted(self, x: Tensor, order: Order) -> Tensor:
        # MindSpore's own works on a device, but on CPU not for all dtypes.
        return ops.gather(x, Tensor(order), 0) if in_queue() else super().permuted(x, order)


all_to_all_v = front_end.all_to_all_v
exchange_counts = front_end.exchange_counts
all_to_all_single = front_end.all_to_all_single
all_gather_into_tensor = front_end.all_gather_into_tensor
_rows = _Rows(front_end)
global_scatter, global_gather = _rows.global_scatter, _rows.global_gather
