"""Declares a collective as a row, from which everything follows that torch has of it.

From a row follow what a graph has in its place (`torch.graph.traced`), and the method of the backend
(`torch.process_group.backend`). The function that users call stands beside it, in `torch.api`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv.errors import InvalidParamError
from alltoallv.launch import variables
from alltoallv.torch.eager.calls import Operation
from alltoallv.torch.eager.group import AnyCommunicator

Tensors = Sequence[Tensor]


class Parameters(NamedTuple):
    """The arguments of a collective other than its tensors."""

    op: Any = dist.ReduceOp.SUM
    root: int = 0
    counts: Any = (None, None)  # a `Counts` each: split sizes of the output and the input; or an exchange's layout
    unit: Any = "row"  # the unit of the counts that the ranks compare; None: whichever fits
    order: str | None = None  # of a reduction: "rank", or None for the group's


NO_PARAMETERS = Parameters()
Prepare = Callable[[AnyCommunicator, Tensors, Tensors, Parameters], Operation]
# Of the core, outputs, inputs, parameters, timeout and async_op.
AtOnce = Callable[[_core.Communicator, Sequence[Any], Tensors, Parameters, float | None, bool], Any]


class Method(NamedTuple):
    """Describes how the process groups of torch.distributed name a collective and what they call it with.

    Attributes:
        names: The method's names: first the name in torch's engines, then names in newer versions of torch.
        options: The class of its last argument, from which the call's timeout comes.
        parameters: Makes the `Parameters`, of the options and the arguments that follow the tensors.
        arguments: How many arguments follow the tensors.
        flat: Whether tensors are given as such, and not in a list with one entry for each device of the rank.
        coalesced: The names of the method that makes several such calls.
    """

    names: tuple[str, ...]
    options: type
    parameters: Callable[..., Parameters] = lambda options: NO_PARAMETERS
    arguments: int = 0
    flat: bool = False
    coalesced: tuple[str, ...] = ()


COLLECTIVES: dict[str, Collective] = {}  # by name


@dataclass(slots=True, eq=False)
class Collective:
    """Declares a collective: it decorates the function that prepares it, and has its name, without an underscore.

    Attributes:
        prepare: Given communicator, outputs, inputs and terms, checks them and returns what is ready to start.
        outputs, inputs: The public function's arguments; lists if their names say so.
        operator: The name that the ranks compare and errors give; by default the function's name.
        updates: Whether the previous values of the outputs are read, or partly kept.
        strict: Whether the function demands outputs that are contiguous.
        at_once: Makes the call in the core if the core alone can check the tensors, and returns the output, or with
            async_op the pair of it and the pending call; else None.
        method: The form that process groups have, if torch.distributed has the collective.
    """

    prepare: Prepare
    outputs: str = ""
    inputs: str = ""
    operator: str = ""
    updates: bool = False
    strict: bool = False
    at_once: AtOnce | None = None
    method: Method | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.prepare.__name__.removeprefix("_")
        self.operator = self.operator or self.name
        COLLECTIVES[self.name] = self

    def result(self, outs: Tensors) -> Any:
        """Returns the result of a handle: the list of outputs, or the one output of a strict function."""
        return outs[0] if self.strict and not self.outputs.endswith("_list") else list(outs)


# The operations of reductions, in torch's words and in the core's.


REDUCTIONS = frozenset(("all_reduce", "reduce", "reduce_scatter"))  # operators
_NAMES = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
REDUCE_OPS = {getattr(dist.ReduceOp, name.upper()): "prod" if name == "product" else name for name in _NAMES}


def order_for(parameters: Parameters) -> str | None:
    """Returns the call's order of additions; raises InvalidParamError if it is none."""
    return variables.order("order", parameters.order)


def op_for(tensor: Tensor, op: Any) -> str:
    """Returns the core's name of a ``ReduceOp`` that fits the tensor; torch's own if the core has none.

    Raises:
        InvalidParamError: it is no ReduceOp, or does not fit complex tensors, whose parts the engines reduce.
    """
    try:
        kind = op.op if hasattr(op, "op") else dist.ReduceOp(op).op  # isinstance says yes to both
    except TypeError:
        raise InvalidParamError(f"op is {op!r}, expected a torch.distributed.ReduceOp", id=1434) from None
    name = str(REDUCE_OPS.get(kind, kind.name))
    if tensor.is_complex() and name not in ("sum", "avg"):
        raise InvalidParamError(f"op is {op!r}, expected SUM or AVG for dtype {tensor.dtype}", id=1435)
    return name
