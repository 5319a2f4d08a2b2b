"""Operators of torch.library, and the short way to them.

Torch's way to them, in Python for the most part, takes ten times as long as a small exchange. Where nobody watches the
calls, an operator runs at once, and autograd learns of it by the same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled, forward_ad

from alltoallv.torch.api import group as groups
from alltoallv.torch.api.tensors import PLAIN, has_tangent, needs_grad
from alltoallv.torch.graph import inductor


class Operator:
    """``alltoallv::<name of the function>``.

    The first argument is a tensor, the last a group: in a graph the name of one (see `groups.name_of`), which is what
    the function's annotations tell torch, in any other call also the group itself.
    """

    def __init__(self, run: Callable[..., Any], schema: str | None = None, followed: int = 1) -> None:
        """``schema``: the operator's, in torch's words; left out, it follows from the function's annotations.

        ``followed``: how many of the first arguments may need gradients.
        """
        self.run, self.followed = run, followed
        self.custom = torch.library.custom_op(f"alltoallv::{run.__name__}", run, mutates_args=(), schema=schema)
        self.packet = getattr(torch.ops.alltoallv, run.__name__)
        # Every rank must issue the same collectives in the same order: a compiler may neither drop nor reorder them.
        torch.library._register_effectful_op(self.custom._qualname, torch.library.EffectType.ORDERED)

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Registers what a graph sees. Its first call, when one first has the operator, tells Inductor of it."""

        @functools.wraps(function)
        def fake(*args: Any) -> Any:
            inductor.teach(self.custom._opoverload)
            return function(*args)

        self.custom.register_fake(fake)
        return function

    def differentiate(self, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
        """``setup(ctx, inputs, output)`` keeps what ``backward(ctx, grad)`` needs."""
        self.setup, self.backward = setup, backward
        self.custom.register_autograd(backward, setup_context=setup)

    def __call__(self, *args: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if not compiling and (has_tangent(args[0]) or torch._C._is_tracing()):
            return self.run(*args)  # which refuses it, so that all ranks hear of it
        if compiling or has_dispatch_mode(args[0]):
            return self.packet(*args[:-1], groups.name_of(args[-1]))
        if needs_grad(*args[: self.followed]):
            return self._direct(self.run, args)
        return self.run(*args)

    def ran(self, result: Any, *args: Any) -> Any:
        """What a call with these arguments returns, when what `run` would return is there already."""
        return self._direct(lambda *args: result, args) if needs_grad(*args[: self.followed]) else result

    def _direct(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = _Direct.apply(self, run, *args)
        return list(result) if type(result) is tuple else result


class _Direct(torch.autograd.Function):
    """An operator without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, run: Callable[..., Any], *args: Any) -> Any:
        output = run(*args)
        operator.setup(ctx, args, output)
        ctx.operator_called = operator
        return tuple(output) if isinstance(output, list) else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.operator_called.backward(ctx, grads[0] if len(grads) == 1 else grads)


def has_dispatch_mode(tensor: Tensor) -> bool:
    """Whether somebody is to see the operator itself: a mode, a transform, a profiler, the tensor's class."""
    return (
        type(tensor) not in PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _profiler_enabled()
    )
