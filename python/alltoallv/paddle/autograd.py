"""Gradients of linear collectives in Paddle's autograd, to any order: a collective's gradient is its transpose."""

from __future__ import annotations

from typing import Any

from paddle import Tensor
from paddle.autograd import PyLayer

from alltoallv._calls.linear import Map


class _Applied(PyLayer):
    """Fills its context only after the call has succeeded: Paddle never frees that of a forward that has raised."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: Map[Tensor]) -> Tensor:
        output = call.run(input)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gradient: Tensor = ctx.call.back(grad, apply)
        return gradient


def apply(input: Tensor, call: Map[Tensor]) -> Tensor:
    """Runs the call and records its gradient."""
    return _Applied.apply(input, call)
