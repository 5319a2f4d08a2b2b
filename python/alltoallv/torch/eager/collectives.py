"""The collectives of torch.distributed: each is declared once, here or in `reductions`; see `declaration`.

A declaration checks the arguments and returns an `Operation`, ready to start. Tensors that are not contiguous travel as
copies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from alltoallv import _core
from alltoallv._calls.collectives import CheckedCall, barrier_plan, broadcast_layout, check_length, check_own
from alltoallv._calls.regions import check_apart, check_gather_apart, check_lists_apart, check_outputs_apart
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager import reductions as reductions  # declares the others
from alltoallv.torch.eager.calls import Operation
from alltoallv.torch.eager.declaration import COLLECTIVES as COLLECTIVES
from alltoallv.torch.eager.declaration import Collective, Functional, Method, Parameters, Tensors, rows_of
from alltoallv.torch.eager.group import AnyCommunicator
from alltoallv.torch.eager.tensors import MOVABLE as MOVABLE
from alltoallv.torch.eager.tensors import (
    Copies,
    apart,
    as_input,
    check_dtype,
    check_one_dtype,
    core_name,
    in_place,
    output_of,
    region,
)


def _by_root(options: Any) -> Parameters:
    return Parameters(root=options.rootRank)


_EVEN = Parameters(unit="element")


def _split(options: Any, outputs: Any, inputs: Any) -> Parameters:
    """Returns the split sizes; if there are none, equal parts."""
    if len(outputs) or len(inputs):  # by length, for Megatron gives tensors
        return Parameters(counts=(outputs, inputs), unit="element")
    return _EVEN


def _gathered(
    operator: str,
    core: _core.Communicator,
    outs: Tensors,
    ins: Tensors,
    parameters: Parameters,
    limit: float | None,
    async_op: bool,
) -> Any:
    """Gathers into a list of outputs, which torch has in a list of the rank's devices."""
    call = _core.call_plain(core, operator, outs, ins[0], parameters.root, None, async_op, limit)
    return ([call[0]], *call[1:]) if async_op and call is not None else call


def _is_flat(parameters: Parameters, out: Tensor, x: Tensor) -> bool:
    """Returns whether equal parts are of elements, as for torch's engines, since the tensors' rows may differ."""
    return parameters is _EVEN and out.shape != x.shape and out.numel() == x.numel()


def _split_at_once(
    core: _core.Communicator,
    outs: Tensors,
    ins: Tensors,
    parameters: Parameters,
    limit: float | None,
    async_op: bool,
) -> Any:
    if parameters is _EVEN and _is_flat(parameters, outs[0], ins[0]):
        return None
    outputs, inputs = parameters.counts
    return _core.all_to_all_single(core, outs[0], ins[0], outputs, inputs, async_op, limit, False)


@partial(
    Collective,
    outputs="tensor_list",
    inputs="tensor",
    at_once=partial(_gathered, "all_gather"),
    method=Method(("allgather",), AllgatherOptions),
)
def all_gather(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_length("tensor_list", outs, comm.size)
    check_one_dtype(*ins, *outs)
    copies: Copies = []
    x, spaces = as_input("tensor", ins[0]), [output_of(out, copies) for out in outs]
    own = spaces[comm.rank]
    if region(x) != region(own) or not isinstance(comm, Communicator):
        x = apart([x], spaces)[0]
    check_outputs_apart([region(out) for out in spaces], "tensor_list")
    if x.numel() != own.numel():
        raise InvalidTensorError(
            f"tensor has {x.numel()} elements, expected {own.numel()} as entry {comm.rank} of tensor_list", 9, id=2111
        )
    operation = calls.exchange_lists(comm, "all_gather", spaces, [x] * comm.size)
    return operation.giving([list(outs)], copies)


@partial(
    Collective,
    outputs="output_tensor",
    inputs="input_tensor",
    strict=True,
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.all_gather_into_tensor(
        core, outs[0], ins[0], async_op, limit, True
    ),
    functional=Functional(
        "all_gather",
        lambda shape, size: (size * rows_of(shape), *shape[1:]),
        gradient="reduce_scatter",
    ),
    method=Method(
        ("_allgather_base", "all_gather_single"),
        AllgatherOptions,
        flat=True,
        coalesced=("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
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
    return calls.exchange(comm, "all_gather_into_tensor", out, x, request.layout).giving(outs, copies)


@partial(
    Collective,
    outputs="output_tensor_list",
    inputs="input_tensor_list",
    strict=True,
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.call_plain(
        core, "all_to_all", outs, ins, None, None, async_op, limit
    ),
    method=Method(("alltoall",), AllToAllOptions, flat=True),
)
def all_to_all(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_length("input_tensor_list", ins, comm.size)
    check_length("output_tensor_list", outs, comm.size)
    check_one_dtype(*ins, *outs)
    copies: Copies = []
    spaces = [output_of(out, copies) for out in outs]
    xs = [as_input("input_tensor_list", x) for x in ins]
    check_lists_apart([region(out) for out in spaces], [region(x) for x in xs])
    return calls.exchange_lists(comm, "all_to_all", spaces, xs).giving(outs, copies)


@partial(
    Collective,
    outputs="output",
    inputs="input",
    strict=True,
    at_once=_split_at_once,
    method=Method(("alltoall_base", "all_to_all_single"), AllToAllOptions, _split, arguments=2, flat=True),
)
def all_to_all_single(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_one_dtype(*outs, *ins)
    copies: Copies = []
    out, x = output_of(outs[0], copies), as_input("input", ins[0])
    shapes = [(each.numel(),) if _is_flat(parameters, out, x) else each.shape for each in (out, x)]
    request = _core.Request.all_to_all_single(comm.size, *shapes, *parameters.counts)
    check_apart(region(out), region(x))
    row = request.row if parameters.unit == "row" else 1
    return calls.exchange(comm, "all_to_all_single", out, x, request.layout, row).giving(outs, copies)


@partial(Collective, outputs="out", inputs="input", updates=True)
def all_to_all_v(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    out, x = outs[0], as_input("input", ins[0])
    check_dtype("out", out, x.dtype)
    sends, recvs, sdispls, rdispls = parameters.counts
    request = _core.Request.all_to_all_v(comm.size, x.shape, sends, recvs, sdispls, rdispls, parameters.unit, out.shape)
    return calls.exchange(comm, "all_to_all_v", out, x, request.layout, max(request.row, 1))


@partial(
    Collective,
    outputs="tensor",
    updates=True,
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.call_plain(
        core, "broadcast", outs[0], None, parameters.root, None, async_op, limit
    ),
    method=Method(("broadcast",), BroadcastOptions, _by_root),
)
def broadcast(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    root, copies = parameters.root, Copies()
    _core.checked_rank("src", root, comm.size)
    x = in_place(outs[0], copies)
    if comm.rank == root:
        copies.clear()
    layout = broadcast_layout(comm.rank, comm.size, x.numel(), root)
    source = target = x
    if not isinstance(comm, Communicator):  # HCCL refuses one buffer for both, also where it has nothing to do
        nothing = x.new_empty(1)
        source, target = (x, nothing) if comm.rank == root else (nothing, x)
    return calls.exchange(comm, "broadcast", target, source, layout, root=root).giving(outs, copies)


@partial(
    Collective,
    outputs="gather_list",
    inputs="tensor",
    updates=True,
    at_once=partial(_gathered, "gather"),
    method=Method(("gather",), GatherOptions, _by_root),
)
def gather(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    """Copies all ranks' tensors to the root; on other ranks outputs are not used."""
    _core.checked_rank("dst", parameters.root, comm.size)
    here = comm.rank == parameters.root
    tensors = list(outs) if here else []
    check_one_dtype(*ins, *tensors)
    copies: Copies = []
    x, spaces = as_input("tensor", ins[0]), [output_of(out, copies) for out in tensors]
    if here:
        places, own = list(map(region, spaces)), region(x)
        check_own("gather_list", core_name(x.dtype), places, own, comm)
        check_outputs_apart(places, "gather_list")
        x = apart([x], [out for out, region_of_out in zip(spaces, places, strict=True) if region_of_out != own])[0]
    nothing = x.new_empty(0)
    sends = [x if j == parameters.root else nothing for j in range(comm.size)]
    operation = calls.exchange_lists(comm, "gather", spaces or [nothing] * comm.size, sends, parameters.root)
    return operation.giving([tensors], copies)


@partial(
    Collective,
    outputs="tensor",
    inputs="scatter_list",
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.call_plain(
        core, "scatter", outs[0], ins, parameters.root, None, async_op, limit
    ),
    method=Method(("scatter",), ScatterOptions, _by_root),
)
def scatter(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    """Copies the root's tensors to the ranks; on other ranks inputs are not used."""
    _core.checked_rank("src", parameters.root, comm.size)
    here = comm.rank == parameters.root
    tensors = list(ins) if here else []
    check_one_dtype(*outs, *tensors)
    copies: Copies = []
    out, xs = output_of(outs[0], copies), [as_input("scatter_list", x) for x in tensors]
    if here:
        check_own("scatter_list", core_name(out.dtype), list(map(region, xs)), region(out), comm)
        xs = [x if region(x) == region(out) else apart([x], [out])[0] for x in xs]
    nothing = out.new_empty(0)
    recvs = [out if j == parameters.root else nothing for j in range(comm.size)]
    operation = calls.exchange_lists(comm, "scatter", recvs, xs or [nothing] * comm.size, parameters.root)
    return operation.giving(outs, copies)


@partial(
    Collective,
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.call_plain(
        core, "barrier", None, None, None, None, async_op, limit
    ),
)
def barrier(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    none, call = [0] * comm.size, CheckedCall(barrier_plan(groups.on_host(comm)), (0, 0))
    return Operation(comm, "barrier", call, torch.empty(0, dtype=torch.uint8), none, none, [])
