"""Paddle's global_scatter and global_gather; the counts are those of `alltoallv._calls.experts`."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from alltoallv._calls.counts import Counts
from alltoallv._calls.expert_rows import ExpertRows
from alltoallv.errors import InvalidTensorError
from alltoallv.paddle.front_end import front_end
from alltoallv.paddle.group import Group


class _Rows(ExpertRows[Tensor]):
    def check(self, x: Any, counts: dict[str, Counts]) -> Tensor:
        for name, given in counts.items():
            if isinstance(given, Tensor) and given.dtype != paddle.int64:
                raise InvalidTensorError(f"Please use int64 type in {name}, which has dtype {given.dtype}.", 13)
        return super().check(x, counts)


_rows = _Rows(front_end)


def global_scatter(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """Sends every row to the rank of its expert, like `alltoallv.numpy.global_scatter`, on tensors, with gradients.

    Counts that are tensors must be int64, else it raises InvalidTensorError with Paddle's text. ``use_calc_stream`` is
    ignored on CPU.
    """
    return _rows.global_scatter(x, local_count, global_count, group)


def global_gather(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """Reverses `global_scatter`: brings the rows back to the ranks that sent them, with gradients."""
    return _rows.global_gather(x, local_count, global_count, group)
