"""Declares operators of torch.library with what a graph and autograd need to know, and calls them with little overhead.

Torch's way to them, in Python for the most part, takes ten times as long as a small exchange. Where nobody watches the
calls, an operator runs at once, and autograd learns of it by the same functions.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled, forward_ad

from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.tensors import PLAIN, has_tangent, needs_grad

# Makes Inductor keep the order of the operators. Effect tokens keep the order of effectful operators up to Inductor,
# whose scheduler (as of torch 2.13) files the dependencies between them under the names of buffers but looks for
# operations' names, and so moves an operator before another where the data allow it. Ranks that compile different code
# would then issue different collectives.


_taught: set[Any] = set()


def keep_order(operator: Any) -> None:
    """Gives Inductor a lowering of an operator (an OpOverload) that keeps its place among the effectful ones."""
    if operator in _taught:
        return
    _taught.add(operator)
    with contextlib.suppress(ImportError):  # another Inductor: the ranks' comparison still finds what differs
        from torch._inductor.lowering import lowerings

        lowerings[operator] = _lowering(operator)


def _lowering(operator: Any) -> Any:
    def lower(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        graph = V.graph
        first = len(graph.operations)
        result = ir.FallbackKernel.create(operator, *args, **kwargs)
        previous = graph.effectful_ops.get(torch.library.EffectType.ORDERED)
        if previous is not None:
            for operation in graph.operations[first:]:
                if isinstance(operation, ir.FallbackKernel):
                    graph.additional_star_deps[operation.get_operation_name()].add(previous.get_name())
        return torch.utils._pytree.tree_map(
            lambda node: node.wrap_for_lowering() if isinstance(node, ir.IRNode) else node, result
        )

    return lower


class Like(NamedTuple):
    """The shape and dtype of a tensor argument, which is all that a gradient knows of it."""

    shape: torch.Size
    dtype: torch.dtype


# For operators whose results' sizes depend on values: whether they do with these arguments.
sizes_depend_on_values: dict[str, Callable[[Any], bool]] = {}


class Operator:
    """Makes the operator ``alltoallv::<name of the function>``.

    The first argument is a tensor, the last a group: in a graph the name of one (see `groups.name_of`), which is what
    the function's annotations declare, in any other call also the group itself.

    Args:
        run: The function. It returns a tensor, or a list whose first tensors may need gradients.
        fake: Takes the arguments, and returns empty tensors like those that ``run`` makes: what a graph sees.
        gradient: ``gradient(call, grad, *saved)`` returns the gradient of the first argument, or of those that may need
            one. ``call`` has all arguments by name, tensors as `Like`; ``grad`` is the output's gradient, for a list
            its first tensors, None where the argument in that place needs none.
        saves: What the gradient receives: names of arguments, places in the list that ``run`` returns.
        schema: The operator's schema, in torch's words; left out, it follows from the function's annotations.
        followed: How many of the first arguments may need gradients.
        sized_by_values: Whether the sizes of the results depend on values, given the operator's arguments.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        *,
        fake: Callable[..., Any],
        gradient: Callable[..., Any],
        saves: tuple[str | int, ...] = (),
        schema: str | None = None,
        followed: int = 1,
        sized_by_values: Callable[[Any], bool] | None = None,
    ) -> None:
        if sized_by_values is not None:
            sizes_depend_on_values[f"alltoallv::{run.__name__}"] = sized_by_values
        self.run, self.gradient, self.followed = run, gradient, followed
        self.custom = torch.library.custom_op(f"alltoallv::{run.__name__}", run, mutates_args=(), schema=schema)
        self.packet = getattr(torch.ops.alltoallv, run.__name__)
        effectful(self.custom, fake)
        names = [argument.name for argument in self.custom._opoverload._schema.arguments]
        self._called: Any = collections.namedtuple("Called", names)  # type: ignore[misc]
        self._inputs = [names.index(name) for name in saves if isinstance(name, str)]
        self._outputs = [index for index in saves if isinstance(index, int)]
        self.custom.register_autograd(self.backward, setup_context=self.setup)

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps what `backward` needs."""
        ctx.wants = [x is not None and x.requires_grad for x in inputs[: self.followed]]
        if not isinstance(output, Tensor):
            unwanted = [x for x, wants in zip(output, ctx.wants, strict=False) if not wants]
            ctx.mark_non_differentiable(*unwanted, *output[self.followed :])
        ctx.save_for_backward(*map(inputs.__getitem__, self._inputs), *map(output.__getitem__, self._outputs))
        ctx.call = self._called(*[Like(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in inputs])

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Returns the gradients of all arguments."""
        grad = grads[0]
        if len(grads) > 1 or isinstance(grad, list):
            several = grad if isinstance(grad, list) else grads
            grad = [each if wants else None for each, wants in zip(several, ctx.wants, strict=False)]
        gradients = self.gradient(ctx.call, grad, *ctx.saved_tensors)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return (*gradients, *[None] * (len(ctx.call) - len(gradients)))

    def __call__(self, *args: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if not compiling and (has_tangent(args[0]) or torch._C._is_tracing()):
            return self.run(*args)  # it refuses the call, and all ranks are informed
        if compiling or has_dispatch_mode(args[0]):
            return self.packet(*args[:-1], groups.name_of(args[-1]))
        if needs_grad(*args[: self.followed]):
            return self._direct(self.run, args)
        return self.run(*args)

    def ran(self, result: Any, *args: Any) -> Any:
        """Returns a call's result, with its gradient, where `run` has already returned ``result``."""
        return self._direct(lambda *args: result, args) if needs_grad(*args[: self.followed]) else result

    def _direct(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = _Direct.apply(self, run, *args)
        return list(result) if type(result) is tuple else result


class _Direct(torch.autograd.Function):
    """Runs an operator without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, run: Callable[..., Any], *args: Any) -> Any:
        output = run(*args)
        operator.setup(ctx, args, output)
        ctx.operator_called = operator
        return tuple(output) if isinstance(output, list) else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.operator_called.backward(ctx, *grads)


def effectful(custom: Any, fake: Callable[..., Any]) -> None:
    """Declares a collective's fake for graphs. When a graph first contains the operator, Inductor is prepared for it.

    Every rank must issue the same collectives in the same order: a compiler may neither drop nor reorder them.
    """
    torch.library._register_effectful_op(custom._qualname, torch.library.EffectType.ORDERED)

    def taught(*args: Any) -> Any:
        keep_order(custom._opoverload)
        return fake(*args)

    custom.register_fake(taught)


def known_size(size: int) -> int:
    """Returns a size, for a fake; a size below 0 is known only when the graph runs."""
    return torch.library.get_ctx().new_dynamic_size() if isinstance(size, int) and size < 0 else size


def has_dispatch_mode(tensor: Tensor) -> bool:
    """Returns whether a mode, a transform, a profiler or the tensor's class must see the operator itself."""
    return (
        type(tensor) not in PLAIN
        or tensor.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _profiler_enabled()
    )
