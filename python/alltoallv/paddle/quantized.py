"""Quantized collectives on Paddle tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from alltoallv._calls.linear import all_reduction, gathering
from alltoallv.communicator import Communicator
from alltoallv.paddle.adapter import ADAPTER
from alltoallv.paddle.autograd import apply
from alltoallv.paddle.graphs import function
from alltoallv.paddle.group import resolve
from alltoallv.paddle.tensors import check_tensor
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.functions import Call, Quantized
from alltoallv.quantization.host import ReductionCall, RowsCall
from alltoallv.quantization.requests import exclude


class _Quantized(Quantized[Tensor]):
    adapter = ADAPTER

    def communicator(self, group: Any) -> Communicator | None:
        return resolve(group)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return paddle.matmul(x, weight, transpose_y=True)

    def join(self, parts: list[Tensor]) -> Tensor:
        return paddle.concat(parts)

    def wants_grad(self, input: Tensor, **given: Any) -> bool:
        check_tensor("input", input)
        if given.get("out") is not None:
            check_tensor("out", given["out"])
            given["out"]._bump_inplace_version()  # a backward that needs the old values shall say so
        if input.stop_gradient or not paddle.is_grad_enabled():
            return False
        exclude("input wants a gradient", **given)
        return True

    def differentiable(self, input: Tensor, call: Call[Tensor]) -> Tensor:
        return (_Reduce if isinstance(call, ReductionCall) else _Rows).apply(input, call)


class _Reduce(PyLayer):
    """Straight through: the gradient is that of a sum."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: ReductionCall[Tensor]) -> Tensor:
        output = call.run()
        ctx.comm, ctx.request, ctx.dtype, ctx.shape = call.comm, call.made.request, input.dtype, input.shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad, request = grad.astype(ctx.dtype), ctx.request
        if request.operator == "quantized_all_reduce":
            return apply(grad, all_reduction(ADAPTER, ctx.comm, grad.shape, request.quantization.op))
        back = apply(grad, gathering(ADAPTER, ctx.comm, grad.shape, ctx.shape, request.counts))
        return back / ctx.comm.size if request.quantization.op == "avg" else back


class _Rows(PyLayer):
    """Straight through: the rows' gradients go back where the rows came from."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: RowsCall[Tensor]) -> Tensor:
        ctx.dtype = input.dtype
        out, recvs = call.run_counted()
        ctx.transfer, ctx.returning = call.transfer(recvs), call.returning(recvs, input.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if ctx.returning is not None:
            return _Rows.apply(grad, ctx.returning(grad))
        return apply(grad.astype(ctx.dtype), ctx.transfer.transposed())


_functions = _Quantized()
quantized_all_reduce = function(_functions.quantized_all_reduce)
quantized_reduce_scatter = function(_functions.quantized_reduce_scatter)
quantized_all_to_all = function(_functions.quantized_all_to_all)
quantized_linear_all_reduce = function(_functions.quantized_linear_all_reduce)
