"""Quantized collectives on MindSpore tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from alltoallv import _core, quantized
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.feedback import Feedback
from alltoallv.guard import guard
from alltoallv.mindspore.autograd import tracks
from alltoallv.mindspore.exchange import check_async, enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import as_input, check_apart, check_output, core_name, empty, region, settle
from alltoallv.mindspore.work import CommHandle
from alltoallv.quantization import Gather, Overflow, SumOp

OPERATOR = "quantized_all_reduce"


class ErrorFeedback(Feedback[Any]):
    __doc__ = f"{Feedback.__doc__}\n    The arrays are NumPy's."

    def _zeros(self, count: int, like: Any) -> Any:
        return np.zeros(count, np.float32)

    def _copy(self, value: Any) -> Any:
        return np.array(value, np.float32).reshape(-1)

    def _count(self, array: Any) -> int:
        return int(array.size)


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
        if wants_grad and not simple and getattr(input, "_requires_grad", False):
            raise InvalidParamError("input requires grad, which out, async_op and error_feedback exclude")
        if out is None:
            out = empty(tuple(x.shape), dtype)
        check_output("out", out, dtype)
        if tuple(out.shape) != tuple(x.shape):
            raise InvalidTensorError(f"out has shape {tuple(out.shape)}, expected {tuple(x.shape)}")
        if region(out) != region(x):
            check_apart(out, x)
        errors: tuple[Any, Any] = (None, None)
        if error_feedback is not None:
            if not isinstance(error_feedback, ErrorFeedback):
                raise InvalidParamError(
                    f"error_feedback is a {type(error_feedback).__name__}, expected alltoallv.mindspore.ErrorFeedback"
                )
            errors = error_feedback.arrays(request, comm.size, comm.rank, x)
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
    def forward(
        ctx: Any, input: Tensor, comm: Communicator, plan: _core.QuantPlan, out: Tensor, average: bool
    ) -> Tensor:
        ctx.comm, ctx.average, ctx.dtype = comm, average, input.dtype
        plan.run(region(as_input(input))[0], region(out)[0])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        comm = ctx.comm
        with guard(comm, "all_reduce"):
            x = as_input(grad.astype(ctx.dtype))
            out = empty(tuple(x.shape), x.dtype)
            count = int(x.size)
            counts = [count // comm.size + (j < count % comm.size) for j in range(comm.size)]
        op = "avg" if ctx.average else "sum"
        comm.core.reduce("all_reduce", core_name(x.dtype), op, region(x)[0], region(out)[0], counts)
        return out, None, None, None, None


def _scale(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None if value is None else quantized.as_scale(name, value)
    if value.dtype not in (mindspore.float32, mindspore.float16, mindspore.bfloat16):
        raise InvalidTensorError(f"{name} has dtype {value.dtype}, expected float32, float16, bfloat16", 13)
    return quantized.as_scale(name, value.astype(mindspore.float32).asnumpy())
