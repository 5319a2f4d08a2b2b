"""Paddle's global_scatter and global_gather; the counts are those of `alltoallv._calls.experts`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from alltoallv._calls.counts import Counts
from alltoallv._calls.expert_rows import ExpertRows
from alltoallv._calls.linear import Map
from alltoallv._calls.regions import as_bytes
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.paddle.adapter import ADAPTER
from alltoallv.paddle.autograd import apply
from alltoallv.paddle.exchange import all_to_all_v
from alltoallv.paddle.group import Group, resolve
from alltoallv.paddle.tensors import check_tensor, core_name, region


class _Permutation(Map[Tensor]):
    """Row n of the output is row ``order[n]`` of the input. Paddle's own gather has no float16 on CPU."""

    def __init__(self, order: npt.NDArray[np.int64]) -> None:
        self._order = order

    def run(self, input: Tensor) -> Tensor:
        x = ADAPTER.contiguous(input)
        out = ADAPTER.new(x.shape, x)
        source, target = (as_bytes(region(tensor)).reshape(len(self._order), -1) for tensor in (x, out))
        np.take(source, self._order, axis=0, out=target)
        return out

    def transposed(self) -> _Permutation:
        return _Permutation(np.argsort(self._order))


class _Rows(ExpertRows[Tensor]):
    def member(self, group: Any) -> Communicator | None:
        return resolve(group)

    def check(self, x: Any, counts: dict[str, Counts]) -> Tensor:
        check_tensor("x", x)
        core_name(x.dtype)
        for name, given in counts.items():
            if isinstance(given, Tensor) and given.dtype != paddle.int64:
                raise InvalidTensorError(f"Please use int64 type in {name}, which has dtype {given.dtype}.", 13)
        return x

    def exchange(self, x: Tensor, sends: Counts, recvs: Counts, comm: Communicator) -> Tensor:
        return all_to_all_v(x, sends, recvs, unit="row", group=comm)

    def permuted(self, x: Tensor, order: npt.NDArray[np.int64]) -> Tensor:
        return apply(x, _Permutation(order))


_rows = _Rows()


def global_scatter(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """Sends every row to the card of its expert; `alltoallv.numpy.global_scatter` of tensors, differentiable.

    Counts that are tensors are int64, else InvalidTensorError, with Paddle's words. ``use_calc_stream`` has no meaning
    on CPU.
    """
    return _rows.global_scatter(x, local_count, global_count, group)


def global_gather(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """The inverse of `global_scatter`: brings the rows back to the cards that sent them. Differentiable."""
    return _rows.global_gather(x, local_count, global_count, group)
