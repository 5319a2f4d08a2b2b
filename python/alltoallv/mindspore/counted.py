"""All-to-all-v by counts that lie on an NPU: one kernel in Ascend C, in MindSpore's queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from alltoallv import _core
from alltoallv._calls.adapters import check_on_npu, check_untracked
from alltoallv._calls.guard import COUNT_NAMES, STATUS_SHAPE, guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import device_op
from alltoallv.mindspore.tensors import Place, Received, as_input, core_name, target, wants_gradient
from alltoallv.quantization.requests import exclude as check_excluded


def device() -> str:
    """Returns the kind of device where tensors lie."""
    return "npu" if target() == "Ascend" else "cpu"


def as_counts(counts: Sequence[Any], size: int) -> list[Tensor | None]:
    """Returns counts of `COUNT_NAMES` as int64; the host does not read a tensor's values."""
    tensors: list[Tensor | None] = []
    for name, values in zip(COUNT_NAMES, counts, strict=True):
        if values is None:
            tensors.append(None)
            continue
        each = values if isinstance(values, Tensor) else Tensor(np.asarray(values, np.int64))
        if each.dtype not in (mindspore.int64, mindspore.int32) or each.shape != (size,):
            raise InvalidParamError(
                f"{name} is {each.dtype} {each.shape}, expected int64 ({size},), one entry per rank", id=1324
            )
        tensors.append(each.astype(mindspore.int64).contiguous())
    return tensors


def exchange(comm: Communicator, x: Tensor, counts: Sequence[Tensor | None], capacity: int, row: int) -> list[Tensor]:
    """Queues the exchange of rows of ``row`` elements; returns what arrives, flat, its counts and the status."""
    sends, sdispls, recvs = counts
    out, status = ops.zeros((capacity * row,), x.dtype), ops.zeros(STATUS_SHAPE, mindspore.int32)
    received = ops.zeros((comm.size,), mindspore.int64) if recvs is None else recvs
    dtype, rows = core_name(x.dtype), x.size // max(row, 1)
    present = [each for each in counts if each is not None]

    def launch(locate: Place, stream: int) -> None:
        places = [0 if each is None else locate(each)[0] for each in (x, sends, sdispls, out, received, status)]
        read, written = (places[0], rows, places[1], places[2]), (places[3], capacity, recvs is not None)
        _core.exchange_counted_on_device(comm.core, dtype, row, *read, *written, places[4], places[5], stream)

    outputs = [out, status] if recvs is not None else [out, received, status]
    device_op.enqueue(launch, outputs, [x, *present])
    return [out, received, status]


class _Exchange(_Function):
    """`exchange`; rows go back by the counts that have come."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, comm: Communicator, counts: Sequence[Tensor | None], capacity: int, row: int
    ) -> tuple[Tensor, ...]:
        results = tuple(exchange(comm, as_input(input), counts, capacity, row))
        ctx.comm, ctx.received, ctx.shape, ctx.row = comm, results[1], input.shape, row
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_others: Any) -> tuple[Any, ...]:
        rows = math.prod(ctx.shape) // max(ctx.row, 1)
        back = _Exchange.apply(grad, ctx.comm, (ctx.received, None, None), rows, ctx.row)[0]
        return back.reshape(ctx.shape), None, None, None, None


def all_to_all_v(
    input: Tensor, counts: Sequence[Any], unit: Any, capacity: Any, comm: Communicator, others: dict[str, Any]
) -> Received:
    """Receives up to ``capacity`` units, by counts on the device; ``others`` are arguments that exclude it."""
    with guard(comm, "all_to_all_v"):
        x = as_input(input)
        check_excluded("capacity is given", **others)
        check_on_npu("input", device())
        _core.checked_least("capacity", capacity, 0)
        check_untracked(wants_gradient(input), counts[1], argument="sdispls")
        by_row, placed = _core.reads_rows(unit, input.ndim), as_counts(counts, comm.size)
    row = math.prod(input.shape[1:]) if by_row else 1
    tracked = wants_gradient(input)
    results = (
        _Exchange.apply(input, comm, placed, capacity, row) if tracked else exchange(comm, x, placed, capacity, row)
    )
    return Received(results[0].reshape((capacity, *input.shape[1:]) if by_row else (capacity,)), *results[1:])
