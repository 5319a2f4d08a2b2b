"""Quantized collectives on Paddle tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import guard
from alltoallv._calls.transfer import Transfer
from alltoallv.communicator import Communicator
from alltoallv.paddle.adapter import ADAPTER
from alltoallv.paddle.autograd import AllReduce, Exchange, Gather
from alltoallv.paddle.group import Group, resolve
from alltoallv.paddle.tensors import check_tensor
from alltoallv.quantization import requests, texts
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.host import ReductionCall, RowsCall
from alltoallv.quantization.requests import Reduction
from alltoallv.quantization.spec import Gather as GatherMode
from alltoallv.quantization.spec import Options, Overflow, SumOp

_WORDS = {
    "tensor": "tensor",
    "work": "Task",
    "group": "A Paddle group, a `Communicator`, or None for all ranks; None is returned on a rank outside the group",
    "gradient": " Differentiable, straight through the rounding:\n        the gradient is that of the same collective "
    "without quantization. Not with ``out``, ``async_op`` or feedback.",
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
    comm = resolve(group)
    if comm is None:
        return (None, None) if async_op else None
    with guard(comm, "quantized_all_reduce"):
        wants_grad = _wants_grad(input, out, async_op, error_feedback)
        made = requests.all_reduce(ADAPTER, comm, input, options, out, error_feedback)
        call = _prepared(comm, made, out, timeout)
    if wants_grad:
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
    comm = resolve(group)
    if comm is None:
        return (None, None) if async_op else None
    with guard(comm, "quantized_reduce_scatter"):
        wants_grad = _wants_grad(input, out, async_op, error_feedback)
        made = requests.reduce_scatter(ADAPTER, comm, input, recv_counts, options, out, error_feedback)
        call = _prepared(comm, made, out, timeout)
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
    comm = resolve(group)
    if comm is None:
        return (None, None) if async_op else None
    with guard(comm, "quantized_all_to_all"):
        wants_grad = _wants_grad(input, None, async_op, None)
        call = RowsCall(ADAPTER, comm, input, send_counts, recv_counts, options, timeout)
    if wants_grad:
        return _Rows.apply(input, call)
    return call.submit() if async_op else call.run()


def _wants_grad(input: Any, out: Tensor | None, async_op: bool, error_feedback: ErrorFeedback | None) -> bool:
    check_tensor("input", input)
    if input.stop_gradient or not paddle.is_grad_enabled():
        return False
    requests.exclude("input wants a gradient", out, async_op, error_feedback)
    return True


def _prepared(
    comm: Communicator, made: Reduction[Tensor], out: Tensor | None, timeout: float | None
) -> ReductionCall[Tensor]:
    call = ReductionCall(ADAPTER, comm, made, timeout)
    if out is not None:
        out._bump_inplace_version()  # a backward that needs the old values shall say so
    return call


class _Reduce(PyLayer):
    """Straight through: the gradient is that of a sum."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: ReductionCall[Tensor]) -> Tensor:
        ctx.comm, ctx.request, ctx.dtype, ctx.shape = call.comm, call.made.request, input.dtype, input.shape
        return call.run()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad, request = grad.astype(ctx.dtype), ctx.request
        if request.operator == "quantized_all_reduce":
            return AllReduce.apply(grad, ctx.comm, request.quantization.op)
        back = Gather.apply(grad, ctx.comm, request.counts, ctx.shape)
        return back / ctx.comm.size if request.quantization.op == "avg" else back


class _Rows(PyLayer):
    """Straight through: the rows' gradients go back where the rows came from."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: RowsCall[Tensor]) -> Tensor:
        ctx.dtype = input.dtype
        out, recvs = call.run_counted()
        ctx.transfer = call.transfer(Transfer, recvs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Exchange.apply(grad.astype(ctx.dtype), ctx.transfer.transposed())
