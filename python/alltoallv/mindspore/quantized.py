"""Quantized collectives on MindSpore tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from alltoallv._calls.linear import gathering
from alltoallv.communicator import Communicator
from alltoallv.mindspore.adapter import ADAPTER, LATE
from alltoallv.mindspore.autograd import apply, summed, tracks
from alltoallv.mindspore.front_end import check_async, enter
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.functions import Call, Quantized
from alltoallv.quantization.host import ReductionCall, RowsCall
from alltoallv.quantization.requests import exclude, present


class _Quantized(Quantized[Tensor]):
    adapter = ADAPTER

    def communicator(self, group: Any) -> Communicator:
        return enter(group)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.matmul(x, weight.T)

    def join(self, parts: list[Tensor]) -> Tensor:
        return ops.cat(parts)

    def wants_grad(self, input: Tensor, **given: Any) -> bool:
        """Inside of a gradient function a call that cannot have a gradient goes on without, unless its input asks."""
        check_async(given["async_op"])
        if tracks(input) and getattr(input, "_requires_grad", False):
            exclude("input requires grad", **given)
        return tracks(input) and not present(given)

    def differentiable(self, input: Tensor, call: Call[Tensor]) -> Tensor:
        return (_Reduce if isinstance(call, ReductionCall) else _Rows).apply(input, call)


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
            return summed(grad, ctx.comm, request.quantization.op), None
        back = apply(grad, gathering(LATE, ctx.comm, grad.shape, ctx.shape, request.counts))
        return back / ctx.comm.size if request.quantization.op == "avg" else back, None


class _Rows(_Function):
    """Straight through: the rows' gradients go back where the rows came from."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: RowsCall[Tensor]) -> Tensor:
        ctx.dtype = input.dtype
        out, recvs = call.run_counted()
        ctx.transfer, ctx.returning = call.transfer(recvs), call.returning(recvs, input.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.returning is not None:
            return _Rows.apply(grad, ctx.returning(grad)), None
        return apply(grad.astype(ctx.dtype), ctx.transfer.transposed()), None


_functions = _Quantized()
quantized_all_reduce = _functions.quantized_all_reduce
quantized_reduce_scatter = _functions.quantized_reduce_scatter
quantized_all_to_all = _functions.quantized_all_to_all
quantized_linear_all_reduce = _functions.quantized_linear_all_reduce
