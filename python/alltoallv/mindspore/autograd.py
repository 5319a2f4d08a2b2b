"""Gradients of linear collectives in MindSpore's autograd: the gradient of a collective is its transpose.

Everything here runs on the thread that calls it: forward when Python calls the function, backward inside the gradient
function, in the reverse order. Derivatives of every order exist.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from alltoallv._calls.guard import guard
from alltoallv._calls.linear import Map, all_reduction
from alltoallv._calls.regions import as_bytes
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.mindspore.adapter import LATE
from alltoallv.mindspore.calls import Call
from alltoallv.mindspore.tensors import empty, in_queue, region, settle, wants_gradient


class _Applied(_Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, call: Map[Tensor]) -> Tensor:
        ctx.call = call
        return call.run(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.call.back(grad, apply), None


def apply(input: Tensor, call: Map[Tensor]) -> Tensor:
    """Runs the call and records its gradient."""
    return _Applied.apply(input, call)


def refuse_gradient(operator: str, *tensors: Any) -> None:
    """Raises InvalidParamError where a call without a gradient gets a tensor that wants one: it would be zero."""
    if wants_gradient(*tensors):
        raise InvalidParamError(
            f"{operator} has no gradient and got a tensor that wants one, expected ops.stop_gradient(tensor)", id=1316
        )


def summed(input: Tensor, comm: Communicator, op: str = "sum") -> Tensor:
    """Returns the sum or average of all ranks' inputs in a new tensor."""
    return apply(input, all_reduction(LATE, comm, input.shape, op))


class Broadcast(_Function):
    """Returns the values of rank ``root`` in a new tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, root: int) -> Tensor:
        ctx.comm, ctx.root = comm, root
        with guard(comm, "broadcast"):
            out = input.copy()
            call = Call(comm, "broadcast", out, root=root)
        call.start()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        total = summed(grad, ctx.comm)
        if ctx.comm.rank != ctx.root:
            # The zeros are computed from the sum, because its own gradient is also collective.
            total = ops.where(Tensor(False), total, ops.zeros_like(total))
        return total, None, None


class ListExchange(_Function):
    """Sends ``inputs[j]`` to rank j and returns what arrives in new tensors of the given shapes."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, shapes: list[tuple[int, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.shapes = comm, [tuple(x.shape) for x in inputs]
        with guard(comm, "all_to_all"):
            fresh = ops.zeros if in_queue() else empty
            outputs = [fresh(shape, inputs[0].dtype) for shape in shapes]
            call = Call(comm, "all_to_all", outputs, inputs, names=("outputs", "inputs", ""))
        call.start()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ListExchange.apply(ctx.comm, ctx.shapes, *grads)


class _Assign(_Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, values: Tensor, kept: Any) -> Tensor:
        ctx.shape, ctx.kept = values.shape, kept
        ctx.mark_dirty(output)
        if in_queue():
            fresh = values.reshape(output.shape)
            output.copy_(fresh if kept is None else ops.where(Tensor(kept.reshape(output.shape)), output, fresh))
            return output
        values = values.contiguous()
        settle()
        target, source = as_bytes(region(output)), as_bytes(region(values))
        if kept is None:
            target[...] = source
        else:
            np.copyto(target.reshape(-1, output.itemsize), source.reshape(-1, output.itemsize), where=~kept[:, None])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        own = None
        if ctx.kept is not None:
            own = grad * Tensor(ctx.kept.reshape(grad.shape)).astype(grad.dtype)
        return own, grad.reshape(ctx.shape), None


def assign(name: str, output: Tensor, values: Tensor, kept: Any = None) -> None:
    """Copies values into a caller's tensor; gradients of the tensor then flow to ``values``.

    ``kept`` is true where the tensor keeps its own value, or None if it keeps no value.
    """
    if output.untyped_storage().nbytes() != output.nbytes:
        raise InvalidTensorError(
            f"{name} is a part of a larger tensor, to which MindSpore passes no gradient on: "
            "expected a tensor of its own, or the output of all_to_all_v",
            id=2078,
        )
    _Assign.apply(output, values, kept)
