"""The operations of reductions, in torch's words and in the core's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from alltoallv.errors import InvalidParamError
from alltoallv.launch import variables
from alltoallv.torch.eager.declaration import Parameters

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
