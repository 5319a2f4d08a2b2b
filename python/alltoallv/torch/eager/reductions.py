"""The reductions of torch.distributed: see `alltoallv.torch.eager.collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions

from alltoallv import _core
from alltoallv._calls.collectives import CheckedCall, check_length, shape_of_list
from alltoallv._calls.counts import even_parts, even_split
from alltoallv._calls.reductions import ReductionPlan, check_reduction
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.launch import variables
from alltoallv.torch.eager import calls
from alltoallv.torch.eager.calls import Operation, check_place
from alltoallv.torch.eager.declaration import Collective, Functional, Method, Parameters, Tensors, rows_of
from alltoallv.torch.eager.group import AnyCommunicator
from alltoallv.torch.eager.tensors import (
    Copies,
    apart,
    as_input,
    check_one_dtype,
    core_name,
    in_place,
    joined,
    output_of,
)

REDUCTIONS = frozenset(("all_reduce", "reduce", "reduce_scatter"))  # operators
_NAMES = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
REDUCE_OPS = {getattr(dist.ReduceOp, name.upper()): "prod" if name == "product" else name for name in _NAMES}


def _by_op(options: Any) -> Parameters:
    return Parameters(options.reduceOp)


def _at_once(
    operator: str,
    core: _core.Communicator,
    outs: Tensors,
    ins: Tensors,
    parameters: Parameters,
    limit: float | None,
    async_op: bool,
) -> Any:
    if parameters.order not in (None, "rank"):
        return None
    op = None
    for kind, name in REDUCE_OPS.items():  # to look it up takes eight times as long as to compare it with SUM
        if parameters.op is kind or parameters.op == kind:
            op = name
            break
    limit = -1.0 if limit is None else limit
    if operator == "reduce":
        return _core.call_plain(core, operator, outs[0], None, parameters.root, op, async_op, limit)
    if operator == "reduce_scatter" and len(ins) > 1:
        return _core.call_plain(core, operator, outs[0], ins, None, op, async_op, limit)
    return _core.reduce(core, operator, (ins or outs)[0], outs[0], op, limit, async_op)


@partial(
    Collective,
    outputs="tensor",
    updates=True,
    at_once=partial(_at_once, "all_reduce"),
    functional=Functional(
        "all_reduce",
        lambda shape: shape,
        gradient="all_reduce",
        parameters="",
    ),
    method=Method(("allreduce",), AllreduceOptions, _by_op, coalesced=("allreduce_coalesced",)),
)
def all_reduce(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    copies: Copies = []
    out = in_place(outs[0], copies)
    x, op, order = ins[0] if ins else out, op_for(out, parameters.op), order_for(parameters)
    operation = calls.reduce(comm, "all_reduce", out, x, op, even_parts(x.numel(), comm.size), outs[0].shape, order)
    return operation.giving(outs, copies)


@partial(
    Collective,
    outputs="tensor",
    updates=True,
    at_once=partial(_at_once, "reduce"),
    method=Method(("reduce",), ReduceOptions, lambda options: Parameters(options.reduceOp, options.rootRank)),
)
def reduce(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    _core.checked_rank("dst", parameters.root, comm.size)
    copies: Copies = []
    x, here = in_place(outs[0], copies), comm.rank == parameters.root
    if not here:
        copies.clear()
    op, order = op_for(x, parameters.op), order_for(parameters)
    if isinstance(comm, Communicator):
        check_place(comm, x)
        dtype, counts = core_name(x.dtype), even_parts(x.numel(), comm.size)
        check_reduction(op, dtype)
        plan = ReductionPlan(comm.core, "reduce", dtype, op, counts, x.shape, parameters.root)
        call = CheckedCall(plan, (x.data_ptr(), x.data_ptr() if here else 0))
        return Operation(comm, "reduce", call, x, [x.numel()], [x.numel()] if here else [], list(outs), x, copies)
    out = x if here else x.clone()  # an engine combines on every rank
    operation = calls.reduce(comm, "all_reduce", out, out, op, even_parts(out.numel(), comm.size), out.shape, order)
    return operation.giving(outs, copies)


@partial(
    Collective,
    outputs="output",
    inputs="input_list",
    at_once=partial(_at_once, "reduce_scatter"),
    method=Method(("reduce_scatter",), ReduceScatterOptions, _by_op),
)
def reduce_scatter(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_length("input_list", ins, comm.size)
    check_one_dtype(*outs, *ins)
    parts = [as_input("input_list", x) for x in ins]
    counts = [x.numel() for x in parts]
    if outs[0].numel() != counts[comm.rank]:
        raise InvalidTensorError(
            f"output has {outs[0].numel()} elements, expected {counts[comm.rank]} as entry {comm.rank} of input_list",
            9,
            id=2112,
        )
    return _reduce_scatter(comm, outs, joined(parts), counts, parameters, shape_of_list(parts))


@partial(
    Collective,
    outputs="output",
    inputs="input",
    operator="reduce_scatter",
    at_once=partial(_at_once, "reduce_scatter"),
    functional=Functional(
        "reduce_scatter",
        lambda shape, size: (even_split("input", rows_of(shape), size)[0], *shape[1:]),
        gradient="all_gather",
    ),
    method=Method(
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ReduceScatterOptions,
        _by_op,
        flat=True,
        coalesced=("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ),
)
def reduce_scatter_tensor(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    output, input = outs[0], ins[0]
    check_one_dtype(output, input)
    if input.numel() != comm.size * output.numel():
        raise InvalidTensorError(
            f"input has shape {tuple(input.shape)}, "
            f"expected {comm.size} times the elements of an output of shape {tuple(output.shape)}",
            9,
            id=2113,
        )
    return _reduce_scatter(comm, outs, as_input("input", input), [output.numel()] * comm.size, parameters, input.shape)


def _reduce_scatter(
    comm: AnyCommunicator,
    outs: Tensors,
    x: Tensor,
    counts: list[int],
    parameters: Parameters,
    shape: Sequence[int] | None,
) -> Operation:
    copies: Copies = []
    out = output_of(outs[0], copies)
    x = apart([x], [out])[0]
    op, order = op_for(x, parameters.op), order_for(parameters)
    return calls.reduce(comm, "reduce_scatter", out, x, op, counts, shape, order).giving(outs, copies)


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
