"""Makes Inductor keep the order of the operators.

Effect tokens keep the order of effectful operators up to Inductor, whose scheduler (as of torch 2.13) files the
dependencies between them under the names of buffers but looks for operations' names, and so moves an operator before
another where the data allow it. Ranks that compile different code would then issue different collectives.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_taught: set[Any] = set()


def register(operator: Any) -> None:
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
