"""Quantized collectives on MindSpore tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor
from mindspore.common._grad_function import _Function

from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import guard
from alltoallv.mindspore.adapter import ADAPTER
from alltoallv.mindspore.autograd import AllReduce, Exchange, Gather, TensorTransfer, tracks
from alltoallv.mindspore.exchange import check_async, enter
from alltoallv.mindspore.group import Group
from alltoallv.quantization import requests, texts
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.host import ReductionCall, RowsCall
from alltoallv.quantization.spec import Gather as GatherMode
from alltoallv.quantization.spec import Options, Overflow, SumOp

_WORDS = {
    "tensor": "tensor",
    "work": "CommHandle",
    "group": "None for all ranks, a name made by `new_group` or by MindSpore, or a `Communicator`",
    "gradient": " In PyNative it has a gradient, straight through\n        the rounding: that of the same collective "
    "without quantization. Not with ``async_op`` or what is written.",
}


@texts.of(texts.ALL_REDUCE, **_WORDS)
def quantized_all_reduce(
    input: Tensor,
    *,
    scale: Tensor | float | None = None,
    offset: float | None = None,
    bits: int = 8,
    group_size: int = 128,
    gather: GatherMode = "full",
    op: SumOp = "sum",
    out_dtype: Any = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    comm_quant_scale_1: Tensor | float | None = None,
    comm_quant_scale_2: Tensor | float | None = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    options = Options(
        scale, comm_quant_scale_1, comm_quant_scale_2, offset, bits, group_size, gather, op, overflow, out_dtype
    )
    comm = enter(group)
    with guard(comm, "quantized_all_reduce"):
        wants_grad = _wants_grad(input, out, async_op, error_feedback)
        made = requests.all_reduce(ADAPTER, comm, input, options, out, error_feedback)
        call = ReductionCall(ADAPTER, comm, made, timeout)
    if wants_grad and made.request.dtype != "int8":
        return _Reduce.apply(input, call)
    return call.submit() if async_op else call.run()


@texts.of(texts.REDUCE_SCATTER, **_WORDS)
def quantized_reduce_scatter(
    input: Tensor,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    group_size: int = 128,
    op: SumOp = "sum",
    out_dtype: Any = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    options = Options(bits=bits, group_size=group_size, op=op, overflow=overflow, out_dtype=out_dtype)
    comm = enter(group)
    with guard(comm, "quantized_reduce_scatter"):
        wants_grad = _wants_grad(input, out, async_op, error_feedback)
        made = requests.reduce_scatter(ADAPTER, comm, input, recv_counts, options, out, error_feedback)
        call = ReductionCall(ADAPTER, comm, made, timeout)
    if wants_grad:
        return _Reduce.apply(input, call)
    return call.submit() if async_op else call.run()


@texts.of(texts.ALL_TO_ALL, **_WORDS)
def quantized_all_to_all(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    group_size: int | None = None,
    out_dtype: Any = None,
    overflow: Overflow = "saturate",
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    options = Options(bits=bits, group_size=group_size, overflow=overflow, out_dtype=out_dtype)
    comm = enter(group)
    with guard(comm, "quantized_all_to_all"):
        wants_grad = _wants_grad(input, None, async_op, None)
        call = RowsCall(ADAPTER, comm, input, send_counts, recv_counts, options, timeout)
    if wants_grad:
        return _Rows.apply(input, call)
    return call.submit() if async_op else call.run()


def _wants_grad(input: Any, out: Tensor | None, async_op: bool, error_feedback: ErrorFeedback | None) -> bool:
    """Inside of a gradient function a call that cannot have a gradient goes on without, unless its input asks."""
    check_async(async_op)
    if not tracks(input):
        return False
    if getattr(input, "_requires_grad", False):
        requests.exclude("input requires grad", out, async_op, error_feedback)
    return out is None and not async_op and error_feedback is None


class _Reduce(_Function):
    """Straight through: the gradient is that of a sum."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: ReductionCall[Tensor]) -> Tensor:
        ctx.comm, ctx.request, ctx.dtype, ctx.shape = call.comm, call.made.request, input.dtype, tuple(input.shape)
        return call.run()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad, request = grad.astype(ctx.dtype), ctx.request
        if request.operator == "quantized_all_reduce":
            return AllReduce.apply(grad, ctx.comm, request.quantization.op), None
        back = Gather.apply(grad, ctx.comm, request.counts).reshape(ctx.shape)
        return back / ctx.comm.size if request.quantization.op == "avg" else back, None


class _Rows(_Function):
    """Straight through: the rows' gradients go back where the rows came from."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: RowsCall[Tensor]) -> Tensor:
        ctx.dtype = input.dtype
        out, recvs = call.run_counted()
        ctx.transfer = call.transfer(TensorTransfer, recvs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Exchange.apply(grad.astype(ctx.dtype), ctx.transfer.transposed()), None
