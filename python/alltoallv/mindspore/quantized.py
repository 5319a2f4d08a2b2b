"""Quantized collectives on MindSpore tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.mindspore.autograd import AllReduce, tracks
from alltoallv.mindspore.exchange import check_async, enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import as_input, check_apart, check_output, core_name, empty, region, settle
from alltoallv.mindspore.work import CommHandle
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.feedback import Feedback, HostFeedback
from alltoallv.quantization.spec import Gather, Overflow, SumOp

OPERATOR = "quantized_all_reduce"


class ErrorFeedback(HostFeedback):
    __doc__ = f"{Feedback.__doc__}\n    The arrays are NumPy's."
    _title = "alltoallv.mindspore.ErrorFeedback"


def quantized_all_reduce(
    input: Tensor,
    *,
    scale: Tensor | float | None = None,
    offset: float | None = None,
    bits: int = 8,
    group_size: int = 128,
    gather: Gather = "full",
    op: SumOp = "sum",
    out_dtype: Any = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    comm_quant_scale_1: Tensor | float | None = None,
    comm_quant_scale_2: Tensor | float | None = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """The sum of the ``input`` of all ranks, whose terms travel as codes; the same bits on every rank.

    Arguments and errors are those of `alltoallv.numpy.quantized_all_reduce`, with tensors; ``error_feedback`` is an
    `alltoallv.mindspore.ErrorFeedback`.

    Returns:
        The result in the input's shape, or ``(result, handle)`` with ``async_op=True``. In PyNative it has a gradient
        where neither ``out``, ``async_op`` nor ``error_feedback`` is given: straight through the rounding, the sum (or
        average) of all ranks' gradients, not quantized.
    """
    comm = enter(group)
    with guard(comm, OPERATOR):
        check_async(async_op)
        x = as_input(input)
        request = quantized.all_reduce_request(
            tuple(x.shape),
            core_name(x.dtype),
            scale=_scale("scale", scale),
            offset=offset,
            comm_quant_scale_1=_scale("comm_quant_scale_1", comm_quant_scale_1),
            comm_quant_scale_2=_scale("comm_quant_scale_2", comm_quant_scale_2),
            bits=bits,
            group_size=group_size,
            gather=gather,
            op=op,
            out_dtype=None if out_dtype is None else core_name(out_dtype),
            overflow=overflow,
            has_feedback=error_feedback is not None,
        )
        dtype = getattr(mindspore, request.out_dtype)
        simple = out is None and not async_op and error_feedback is None
        wants_grad = tracks(input) and request.dtype != "int8"
        if wants_grad and getattr(input, "_requires_grad", False):
            quantized.exclude("input requires grad", out, async_op, error_feedback)
        if out is None:
            out = empty(tuple(x.shape), dtype)
        check_output("out", out, dtype)
        if tuple(out.shape) != tuple(x.shape):
            raise InvalidTensorError(f"out has shape {tuple(out.shape)}, expected {tuple(x.shape)}")
        if region(out) != region(x):
            check_apart(out, x)
        errors: tuple[Any, Any] = ErrorFeedback.arrays_of(error_feedback, request, comm.size, comm.rank, x)
        plan = quantized.plan(comm, request)
        addresses = [None if array is None else array.ctypes.data for array in errors]
        settle()
    if async_op:
        work = plan.submit(region(x)[0], region(out)[0], addresses[0], addresses[1])
        return out, CommHandle(comm, work, (x, out, errors), lambda: out)
    if wants_grad and simple:
        return _Reduce.apply(input, comm, plan, out, op == "avg")
    plan.run(region(x)[0], region(out)[0], addresses[0], addresses[1])
    return out


class _Reduce(_Function):
    """Straight through: the gradient is that of a sum."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, plan: Any, out: Tensor, average: bool) -> Tensor:
        ctx.comm, ctx.average, ctx.dtype = comm, average, input.dtype
        x = as_input(input)  # may be a copy, which must live until the end
        plan.run(region(x)[0], region(out)[0])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        op = "avg" if ctx.average else "sum"
        return AllReduce.apply(grad.astype(ctx.dtype), ctx.comm, op), None, None, None, None


def _scale(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return quantized.as_scale(name, value)
    return quantized.as_scale(name, value.astype(mindspore.float32).asnumpy(), core_name(value.dtype))
