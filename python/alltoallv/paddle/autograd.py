"""Linear collectives as Paddle's autograd sees them: each is followed by its transpose, to any order."""

from __future__ import annotations

from typing import Any

from paddle import Tensor
from paddle.autograd import PyLayer

from alltoallv._calls.linear import Map


class _Applied(PyLayer):
    """Its context keeps nothing before the call has gone well: Paddle never frees that of a forward that has raised."""

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
    """Runs the call, with gradients."""
    return _Applied.apply(input, call)
