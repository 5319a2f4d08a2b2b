"""Gradients of exchanges in host memory, where nobody but autograd sees a call: the core's call, and its transpose."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv.communicator import Communicator
from alltoallv.torch.graph import ops


class _Exchange(torch.autograd.Function):
    """Gives the output of an exchange that has run its gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, result: tuple[Tensor, _core.LinearCall]) -> Tensor:
        ctx.shape, ctx.comm, ctx.linear = input.shape, comm, result[1]
        return result[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        linear, comm = ctx.linear, ctx.comm
        back = None
        if not torch.is_grad_enabled():
            back = linear.apply(comm.core, grad, True)
        if back is None or back is NotImplemented:  # with a gradient of its own, or of regions that overlap
            layout = torch.frombuffer(linear.layout, dtype=torch.int64).view(4, -1)
            arguments = math.prod(ctx.shape), linear.row, "all_to_all_v", comm
            back = ops.all_to_all_v_transpose(grad, layout, *arguments).view(ctx.shape)
        return back, None, None


class _QuantizedSum(torch.autograd.Function):
    """Gives a quantized sum the gradient of the sum, straight through the rounding."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, output: tuple[Tensor], op: str) -> Tensor:
        ctx.dtype, ctx.comm, ctx.op = input.dtype, comm, op
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        back = ops.all_reduce(grad.to(ctx.dtype), "", ctx.comm)
        return back / ctx.comm.size if ctx.op == "avg" else back, None, None, None


def quantized_sum(comm: Communicator, input: Tensor, options: tuple[Any, ...]) -> Tensor | None:
    """Runs a quantized all-reduce of a tensor that wants a gradient; for None see `exchange`.

    ``options``: the core's arguments from the format to the overflow.
    """
    if torch._C._are_functorch_transforms_active():
        return None
    format, group_size, gather, op, overflow = options
    result = _core.quantized_all_reduce(comm.core, input, None, format, group_size, gather, op, overflow, tracked=True)
    output: Tensor | None = None if result is None else _QuantizedSum.apply(input, comm, (result,), op)
    return output


def exchange(input: Tensor, comm: Communicator, counts: tuple[Any, ...]) -> Tensor | None:
    """Runs an all_to_all_v of a tensor that wants a gradient; None, with nothing done, if others must look at it."""
    if torch._C._are_functorch_transforms_active():
        return None
    result = _core.linear_all_to_all_v(comm.core, input, *counts)
    output: Tensor | None = None if result is None else _Exchange.apply(input, comm, result)
    return output
