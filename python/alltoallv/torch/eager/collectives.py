"""The collectives of torch.distributed: each is declared here once, see `alltoallv.torch.eager.declaration`.

A declaration checks the arguments and returns an `Operation`, ready to start. Tensors that are not contiguous travel as
copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv._calls import rooted
from alltoallv._calls.collectives import Ready, barrier_plan, broadcast_layout, check_length, check_rank
from alltoallv._calls.counts import even_parts, scaled
from alltoallv._calls.regions import check_apart, check_gather_apart, check_lists_apart, check_outputs_apart
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import Operation, check_place
from alltoallv.torch.eager.declaration import COLLECTIVES as COLLECTIVES
from alltoallv.torch.eager.declaration import AtOnce, Collective, Functional, Parameters, Tensors
from alltoallv.torch.eager.group import AnyCommunicator
from alltoallv.torch.eager.tensors import (
    Copies,
    apart,
    as_input,
    check_dtype,
    check_one_dtype,
    core_name,
    in_place,
    joined,
    output_of,
    region,
)

_NAMES = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
REDUCE_OPS = {getattr(dist.ReduceOp, name.upper()): "prod" if name == "product" else name for name in _NAMES}
MOVABLE = {dtype for name in _core.dtypes if isinstance(dtype := getattr(torch, name, None), torch.dtype)}


def _reduce_at_once(operator: str) -> AtOnce:
    def call(
        core: _core.Communicator,
        outs: Tensors,
        ins: Tensors,
        parameters: Parameters,
        limit: float | None,
        async_op: bool,
    ) -> Any:
        op = None
        for kind, name in REDUCE_OPS.items():  # to look it up takes eight times as long as to compare it with SUM
            if parameters.op is kind or parameters.op == kind:
                op = name
                break
        return _core.reduce(core, operator, (ins or outs)[0], outs[0], op, -1.0 if limit is None else limit, async_op)

    return call


@partial(
    Collective,
    outputs="tensor",
    updates=True,
    at_once=_reduce_at_once("all_reduce"),
    functional=Functional(
        "all_reduce",
        lambda core, x: _core.reduce(core, "all_reduce", x, None, "sum"),
        lambda shape: shape,
        gradient="all_reduce",
        given="",
    ),
)
def all_reduce(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    copies: Copies = []
    out = in_place(outs[0], copies)
    x, op = ins[0] if ins else out, op_for(out, parameters.op)
    if x.is_complex() and not isinstance(comm, Communicator):
        x, out = torch.view_as_real(x), torch.view_as_real(out)
    made = calls.reduce(comm, "all_reduce", out, x, op, even_parts(x.numel(), comm.size))
    return _completed(made, outs, copies)


@partial(Collective, outputs="tensor", updates=True)
def reduce(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_rank("root", parameters.root, comm.size)
    copies: Copies = []
    x, here = in_place(outs[0], copies), comm.rank == parameters.root
    if not here:
        copies.clear()
    op = op_for(x, parameters.op)
    if isinstance(comm, Communicator):
        check_place(comm, x)
        call = rooted.reduce(comm, core_name(x.dtype), op, region(x) if here else None, region(x), parameters.root)
        return Operation(comm, "reduce", call, x, [x.numel()], [x.numel()] if here else [], list(outs), x, copies)
    out = x if here else x.clone()  # an engine combines on every rank
    made = calls.reduce(comm, "all_reduce", out, out, op, even_parts(out.numel(), comm.size))
    return _completed(made, outs, copies)


@partial(Collective, outputs="output", inputs="input_list")
def reduce_scatter(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_length("input_list", ins, comm.size)
    check_one_dtype(*outs, *ins)
    parts = [as_input("input_list", x) for x in ins]
    counts = [x.numel() for x in parts]
    if outs[0].numel() != counts[comm.rank]:
        raise InvalidTensorError(
            f"output has {outs[0].numel()} elements, expected {counts[comm.rank]} as entry {comm.rank} of input_list", 9
        )
    return _reduce_scatter(comm, outs, joined(parts), counts, parameters)


@partial(
    Collective,
    outputs="output",
    inputs="input",
    operator="reduce_scatter",
    at_once=_reduce_at_once("reduce_scatter"),
    functional=Functional(
        "reduce_scatter",
        lambda core, x: _core.reduce(core, "reduce_scatter", x, None, "sum"),
        lambda shape, size: (shape[0] // size, *shape[1:]),
        gradient="all_gather",
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
        )
    return _reduce_scatter(comm, outs, as_input("input", input), [output.numel()] * comm.size, parameters)


def _reduce_scatter(
    comm: AnyCommunicator, outs: Tensors, x: Tensor, counts: list[int], parameters: Parameters
) -> Operation:
    copies: Copies = []
    out = output_of(outs[0], copies)
    x = apart([x], [out])[0]
    op = op_for(x, parameters.op)
    if x.is_complex() and not isinstance(comm, Communicator):
        x, out, counts = torch.view_as_real(x), torch.view_as_real(out), scaled(counts, 2)
    return _completed(calls.reduce(comm, "reduce_scatter", out, x, op, counts), outs, copies)


@partial(Collective, outputs="tensor_list", inputs="tensor")
def all_gather(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_length("tensor_list", outs, comm.size)
    check_one_dtype(*ins, *outs)
    copies: Copies = []
    x, spaces = as_input("tensor", ins[0]), [output_of(out, copies) for out in outs]
    mine = spaces[comm.rank]
    if region(x) != region(mine) or not isinstance(comm, Communicator):
        x = apart([x], spaces)[0]
    check_outputs_apart([region(out) for out in spaces], "tensor_list")
    if x.numel() != mine.numel():
        raise InvalidTensorError(
            f"tensor has {x.numel()} elements, expected {mine.numel()} as entry {comm.rank} of tensor_list", 9
        )
    made = calls.exchange_lists(comm, "all_gather", spaces, [x] * comm.size)
    return _completed(made, [list(outs)], copies)


@partial(
    Collective,
    outputs="output_tensor",
    inputs="input_tensor",
    strict=True,
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.all_gather_into_tensor(
        core, outs[0], ins[0], async_op, limit
    ),
    functional=Functional(
        "all_gather",
        lambda core, x: _core.all_gather_into_tensor(core, None, x, False, None),
        lambda shape, size: (size * shape[0], *shape[1:]),
        gradient="reduce_scatter",
    ),
)
def all_gather_into_tensor(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    output, input = outs[0], ins[0]
    check_dtype("output_tensor", output, input.dtype)
    request = _core.Request.all_gather(comm.size, input.shape, output.numel(), "output_tensor")
    copies: Copies = []
    x, out = as_input("input_tensor", input), output_of(output, copies)
    check_gather_apart(region(out), region(x), comm.rank)
    if not isinstance(comm, Communicator):
        x = apart([x], [out])[0]
    return _completed(calls.exchange(comm, "all_gather_into_tensor", out, x, request.layout), outs, copies)


@partial(Collective, outputs="output_tensor_list", inputs="input_tensor_list", strict=True)
def all_to_all(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_length("input_tensor_list", ins, comm.size)
    check_length("output_tensor_list", outs, comm.size)
    check_one_dtype(*ins, *outs)
    copies: Copies = []
    spaces = [output_of(out, copies) for out in outs]
    xs = [as_input("input_tensor_list", x) for x in ins]
    check_lists_apart([region(out) for out in spaces], [region(x) for x in xs])
    return _completed(calls.exchange_lists(comm, "all_to_all", spaces, xs), outs, copies)


@partial(
    Collective,
    outputs="output",
    inputs="input",
    strict=True,
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.all_to_all_single(
        core, outs[0], ins[0], parameters.counts[0], parameters.counts[1], async_op, limit, False
    ),
)
def all_to_all_single(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_one_dtype(*outs, *ins)
    copies: Copies = []
    out, x = output_of(outs[0], copies), as_input("input", ins[0])
    request = _core.Request.all_to_all_single(comm.size, out.shape, x.shape, *parameters.counts)
    check_apart(region(out), region(x))
    row = request.row if parameters.unit == "row" else 1
    return _completed(calls.exchange(comm, "all_to_all_single", out, x, request.layout, row), outs, copies)


@partial(Collective, outputs="out", inputs="input", updates=True)
def all_to_all_v(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    out, x = outs[0], as_input("input", ins[0])
    check_dtype("out", out, x.dtype)
    sends, recvs, sdispls, rdispls = parameters.counts
    request = _core.Request.all_to_all_v(comm.size, x.shape, sends, recvs, sdispls, rdispls, parameters.unit, out.shape)
    return calls.exchange(comm, "all_to_all_v", out, x, request.layout, max(request.row, 1))


@partial(Collective, outputs="tensor", updates=True)
def broadcast(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    root, copies = parameters.root, Copies()
    x = in_place(outs[0], copies)
    if comm.rank == root:
        copies.clear()
    layout = broadcast_layout(comm.rank, comm.size, x.numel(), root)
    source = target = x
    if not isinstance(comm, Communicator):  # HCCL refuses one buffer for both, also where it has nothing to do
        nothing = x.new_empty(1)
        source, target = (x, nothing) if comm.rank == root else (nothing, x)
    return _completed(calls.exchange(comm, "broadcast", target, source, layout, root=root), outs, copies)


@partial(Collective, outputs="gather_list", inputs="tensor", updates=True)
def gather(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    """Copies all ranks' tensors to the root; on other ranks outputs are not used."""
    check_rank("root", parameters.root, comm.size)
    here = comm.rank == parameters.root
    given = list(outs) if here else []
    check_one_dtype(*ins, *given)
    copies: Copies = []
    x, spaces = as_input("tensor", ins[0]), [output_of(out, copies) for out in given]
    check_place(comm, x, *spaces)
    if here:
        check_length("gather_list", spaces, comm.size)
        x = apart([x], [out for out in spaces if region(out) != region(x)])[0]
    if isinstance(comm, Communicator):
        call = rooted.gather(comm, core_name(x.dtype), [region(out) for out in spaces], region(x), parameters.root)
        recvs = [out.numel() for out in spaces]
        return Operation(comm, "gather", call, x, [x.numel()], recvs, [given], (x, spaces), copies)
    nothing = x.new_empty(0)
    sends = [x if j == parameters.root else nothing for j in range(comm.size)]
    made = calls.exchange_lists(comm, "gather", spaces or [nothing] * comm.size, sends)
    return _completed(made, [given], copies)


@partial(Collective, outputs="tensor", inputs="scatter_list")
def scatter(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    """Copies the root's tensors to the ranks; on other ranks inputs are not used."""
    check_rank("root", parameters.root, comm.size)
    here = comm.rank == parameters.root
    given = list(ins) if here else []
    check_one_dtype(*outs, *given)
    copies: Copies = []
    out, xs = output_of(outs[0], copies), [as_input("scatter_list", x) for x in given]
    check_place(comm, out, *xs)
    if here:
        check_length("scatter_list", xs, comm.size)
        xs = [x if region(x) == region(out) else apart([x], [out])[0] for x in xs]
    if isinstance(comm, Communicator):
        call = rooted.scatter(comm, core_name(out.dtype), region(out), [region(x) for x in xs], parameters.root)
        sends = [x.numel() for x in xs]
        return Operation(comm, "scatter", call, out, sends, [out.numel()], list(outs), (out, xs), copies)
    nothing = out.new_empty(0)
    recvs = [out if j == parameters.root else nothing for j in range(comm.size)]
    return _completed(calls.exchange_lists(comm, "scatter", recvs, xs or [nothing] * comm.size), outs, copies)


@Collective
def barrier(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    none, call = [0] * comm.size, Ready(barrier_plan(groups.on_host(comm)), (0, 0))
    return Operation(comm, "barrier", call, torch.empty(0, dtype=torch.uint8), none, none, [])


def _completed(made: Operation, result: Sequence[Any], copies: Copies) -> Operation:
    """Adds the caller's result: a list, as in torch."""
    made.result, made.copies = list(result), copies
    return made


def op_for(tensor: Tensor, op: Any) -> str:
    """Returns the core's name of a ``ReduceOp`` that fits the tensor; torch's own if the core has none.

    Raises:
        InvalidParamError: it is no ReduceOp, or does not fit complex tensors, whose parts the engines reduce.
    """
    try:
        kind = op.op if hasattr(op, "op") else dist.ReduceOp(op).op  # isinstance says yes to both
    except TypeError:
        raise InvalidParamError(f"op is {op!r}, expected a torch.distributed.ReduceOp") from None
    name = str(REDUCE_OPS.get(kind, kind.name))
    if tensor.is_complex() and name not in ("sum", "avg"):
        raise InvalidParamError(f"op is {op!r}, expected SUM or AVG for dtype {tensor.dtype}")
    return name
