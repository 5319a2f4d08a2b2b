"""The collectives of torch.distributed that move data, with torch's signatures; `reductions` has the others.

They write into the caller's tensors and return None, or the `Work` with ``async_op=True``. They have no gradients, as
in torch; `alltoallv.torch.functional` has. Before each stands its declaration (`eager.calls`), which checks the
arguments and returns an `Operation`, ready to start. Tensors that are not contiguous are copied; an output of that
kind is complete when ``wait`` has returned. In a graph they are an operator and copies; ``torch.compile`` leaves
`barrier` out of its graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls.collectives import CheckedCall, barrier_plan, broadcast_layout
from alltoallv._calls.counts import Counts
from alltoallv.communicator import Communicator
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import Collective, Method, Operation, Parameters, Tensors, Work
from alltoallv.torch.eager.group import AnyCommunicator, Group
from alltoallv.torch.eager.observers import between_graphs
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
from alltoallv.torch.graph.calling import call_collective

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "scatter",
]


def _by_root(options: Any) -> Parameters:
    return Parameters(root=options.rootRank)


_EVEN = Parameters(unit="element")
_SUM = dist.ReduceOp.SUM  # named where a graph makes `Parameters`: torch 2.10 cannot take the default


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
def _all_gather(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    _core.check_list("tensor_list", outs, comm.size)
    check_one_dtype(*ins, *outs)
    copies: Copies = []
    x, spaces = as_input("tensor", ins[0]), [output_of(out, copies) for out in outs]
    own = spaces[comm.rank]
    if region(x) != region(own) or not isinstance(comm, Communicator):
        x = apart([x], spaces)[0]
    _core.check_lists_apart([region(out) for out in spaces], [], "tensor_list")
    _core.check_part("tensor", x.numel(), "tensor_list", own.numel(), comm.rank)
    operation = calls.exchange_lists(comm, "all_gather", spaces, [x] * comm.size)
    return operation.giving([list(outs)], copies)


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Copies the ``tensor`` of rank j into ``tensor_list[j]`` of every rank.

    Signature and meaning of ``torch.distributed.all_gather``: one output per rank, with the elements of that rank's
    tensor; the ranks may differ in size.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return call_collective(_all_gather, tensor_list, [tensor], group, async_op)


@partial(
    Collective,
    outputs="output_tensor",
    inputs="input_tensor",
    strict=True,
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.all_gather_into_tensor(
        core, outs[0], ins[0], async_op, limit, True
    ),
    method=Method(
        ("_allgather_base", "all_gather_single"),
        AllgatherOptions,
        flat=True,
        coalesced=("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ),
)
def _all_gather_into_tensor(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    output, input = outs[0], ins[0]
    check_dtype("output_tensor", output, input.dtype)
    request = _core.Request.all_gather(comm.size, input.shape, output.numel(), "output_tensor")
    copies: Copies = []
    x, out = as_input("input_tensor", input), output_of(output, copies)
    _core.check_gather_apart(region(out), region(x), comm.rank)
    if not isinstance(comm, Communicator):
        x = apart([x], [out])[0]
    return calls.exchange(comm, "all_gather_into_tensor", out, x, request.layout).giving(outs, copies)


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Concatenates the ``input_tensor`` of all ranks, in rank order, into ``output_tensor``.

    Signature and meaning are as in ``torch.distributed.all_gather_into_tensor``.

    Args:
        output_tensor: Contiguous, of W times the elements, in shape ``[W * x1, x2, ...]``, ``[W, x1, x2, ...]`` or any
            other.
        input_tensor: Shape ``[x1, x2, ...]``, one on all ranks, of one dtype; may be this rank's part of the output.
        group, async_op, timeout: See `all_to_all_v`.

    Returns:
        None, or the handle with ``async_op=True``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    if output_tensor is not None and not is_dynamo_compiling() and (shared := groups.on_shm(group)) is not None:
        started = _core.all_gather_into_tensor(shared.core, output_tensor, input_tensor, async_op, timeout)
        if started is not None:
            return calls.started(shared, started, input_tensor)[1] if async_op else None
    tensors = [output_tensor], [input_tensor]
    return call_collective(_all_gather_into_tensor, *tensors, group, async_op, timeout=timeout)


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
def _all_to_all(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    _core.check_list("input_tensor_list", ins, comm.size)
    _core.check_list("output_tensor_list", outs, comm.size)
    check_one_dtype(*ins, *outs)
    copies: Copies = []
    spaces = [output_of(out, copies) for out in outs]
    xs = [as_input("input_tensor_list", x) for x in ins]
    _core.check_lists_apart([region(out) for out in spaces], [region(x) for x in xs])
    return calls.exchange_lists(comm, "all_to_all", spaces, xs).giving(outs, copies)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Sends ``input_tensor_list[j]`` to rank j and receives ``output_tensor_list[j]`` from it.

    Signature and meaning of ``torch.distributed.all_to_all``: tensors of any sizes, all of one dtype, moved from and to
    where they lie.

    Args:
        timeout: Seconds to wait for the peers of tensors in host memory; default: the communicator's.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    lists = output_tensor_list, input_tensor_list
    if timeout is None and not is_dynamo_compiling() and (shared := groups.on_shm(group)) is not None:
        started = _core.call_plain(shared.core, "all_to_all", *lists, None, None, async_op)
        if started is not None:
            return calls.started(shared, started, input_tensor_list)[1] if async_op else None
    return call_collective(_all_to_all, *lists, group, async_op, timeout=timeout)


@partial(
    Collective,
    outputs="output",
    inputs="input",
    strict=True,
    at_once=_split_at_once,
    method=Method(("alltoall_base", "all_to_all_single"), AllToAllOptions, _split, arguments=2, flat=True),
)
def _all_to_all_single(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    check_one_dtype(*outs, *ins)
    copies: Copies = []
    out, x = output_of(outs[0], copies), as_input("input", ins[0])
    shapes = [(each.numel(),) if _is_flat(parameters, out, x) else each.shape for each in (out, x)]
    request = _core.Request.all_to_all_single(comm.size, *shapes, *parameters.counts)
    _core.check_apart(region(out), region(x))
    row = request.row if parameters.unit == "row" else 1
    operation = calls.exchange(comm, "all_to_all_single", out, x, request.layout, row, request=request)
    return operation.giving(outs, copies)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Counts | None = None,
    input_split_sizes: Counts | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Splits ``input`` along dimension 0, sends part j to rank j, and concatenates what arrives into ``output``.

    Signature and meaning are as in ``torch.distributed.all_to_all_single``.

    Args:
        output: Shape ``[sum(output_split_sizes), ...]``; contiguous, of the input's dtype, apart from it in memory.
        input: Shape ``[sum(input_split_sizes), ...]``, any dtype.
        output_split_sizes, input_split_sizes: Rows from and for every rank; by default equal parts, for which
            dimension 0 must divide.
        group, async_op, timeout: See `all_to_all_v`.

    Returns:
        None, or the handle with ``async_op=True``. No gradient passes through it in torch, as in torch.distributed;
        `alltoallv.torch.functional` has one with gradients, and so has MindSpore's PyNative mode here.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    splits = (output_split_sizes, input_split_sizes)
    if not is_dynamo_compiling() and (shared := groups.on_shm(group)) is not None:
        started = _core.all_to_all_single(shared.core, output, input, *splits, async_op, timeout)
        if started is not None:
            return calls.started(shared, started, input)[1] if async_op else None
    parameters = Parameters(_SUM, counts=splits)
    return call_collective(_all_to_all_single, [output], [input], group, async_op, parameters, timeout)


@partial(
    Collective,
    outputs="tensor",
    updates=True,
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.call_plain(
        core, "broadcast", outs[0], None, parameters.root, None, async_op, limit
    ),
    method=Method(("broadcast",), BroadcastOptions, _by_root),
)
def _broadcast(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
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


def broadcast(
    tensor: Tensor, src: int | None = None, group: Group = None, async_op: bool = False, group_src: int | None = None
) -> Work | None:
    """Copies the ``tensor`` of one rank into the tensors of all others, of one size and dtype.

    Signature and meaning of ``torch.distributed.broadcast``.

    Args:
        src: The sending rank: its number in the job for a ProcessGroup, in the communicator for a `Communicator`.
        group_src: The sending rank's number in the group, in place of ``src``.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return call_collective(_broadcast, [tensor], [], group, async_op, root=("src", src, group_src))


@partial(
    Collective,
    outputs="gather_list",
    inputs="tensor",
    updates=True,
    at_once=partial(_gathered, "gather"),
    method=Method(("gather",), GatherOptions, _by_root),
)
def _gather(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    """Copies all ranks' tensors to the root; on other ranks outputs are not used."""
    _core.checked_rank("dst", parameters.root, comm.size)
    here = comm.rank == parameters.root
    tensors = list(outs) if here else []
    check_one_dtype(*ins, *tensors)
    copies: Copies = []
    x, spaces = as_input("tensor", ins[0]), [output_of(out, copies) for out in tensors]
    if here:
        places, own = list(map(region, spaces)), region(x)
        _core.check_list("gather_list", places, comm.size)
        _core.check_own("gather_list", places, own, core_name(x.dtype), comm.rank)
        _core.check_lists_apart(places, [], "gather_list")
        x = apart([x], [out for j, out in enumerate(spaces) if j != comm.rank or places[j] != own])[0]
    nothing = x.new_empty(0)
    sends = [x if j == parameters.root else nothing for j in range(comm.size)]
    operation = calls.exchange_lists(comm, "gather", spaces or [nothing] * comm.size, sends, parameters.root)
    return operation.giving([tensors], copies)


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copies the ``tensor`` of rank j into ``gather_list[j]`` of one rank.

    Signature and meaning of ``torch.distributed.gather``, and the tensors of the ranks may differ in size.

    Args:
        gather_list: On that rank one output per rank, with the elements of that rank's tensor; None elsewhere.
        dst, group_dst: The receiving rank, as for `reduce`; rank 0 of the job if neither is given.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    outs, dst = () if gather_list is None else gather_list, 0 if dst is group_dst is None else dst
    return call_collective(_gather, outs, [tensor], group, async_op, root=("dst", dst, group_dst))


@partial(
    Collective,
    outputs="tensor",
    inputs="scatter_list",
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.call_plain(
        core, "scatter", outs[0], ins, parameters.root, None, async_op, limit
    ),
    method=Method(("scatter",), ScatterOptions, _by_root),
)
def _scatter(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    """Copies the root's tensors to the ranks; on other ranks inputs are not used."""
    _core.checked_rank("src", parameters.root, comm.size)
    here = comm.rank == parameters.root
    tensors = list(ins) if here else []
    check_one_dtype(*outs, *tensors)
    copies: Copies = []
    out, xs = output_of(outs[0], copies), [as_input("scatter_list", x) for x in tensors]
    if here:
        _core.check_list("scatter_list", xs, comm.size)
        _core.check_own("scatter_list", list(map(region, xs)), region(out), core_name(out.dtype), comm.rank)
        stays = region(xs[comm.rank]) == region(out)  # the output has what it gets
        xs = [x if stays and region(x) == region(out) else apart([x], [out])[0] for x in xs]
    nothing = out.new_empty(0)
    recvs = [out if j == parameters.root else nothing for j in range(comm.size)]
    operation = calls.exchange_lists(comm, "scatter", recvs, xs or [nothing] * comm.size, parameters.root)
    return operation.giving(outs, copies)


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copies ``scatter_list[j]`` of one rank into the ``tensor`` of rank j.

    Signature and meaning of ``torch.distributed.scatter``, and the ranks' tensors may differ in size.

    Args:
        scatter_list: On that rank one input per rank, with the elements of that rank's tensor; None elsewhere.
        src, group_src: The sending rank, as for `broadcast`; rank 0 of the job if neither is given.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    ins, src = () if scatter_list is None else scatter_list, 0 if src is group_src is None else src
    return call_collective(_scatter, [tensor], ins, group, async_op, root=("src", src, group_src))


@partial(
    Collective,
    at_once=lambda core, outs, ins, parameters, limit, async_op: _core.call_plain(
        core, "barrier", None, None, None, None, async_op, limit
    ),
)
def _barrier(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    none, call = [0] * comm.size, CheckedCall(barrier_plan(groups.on_host(comm)), (0, 0))
    return Operation(comm, "barrier", call, torch.empty(0, dtype=torch.uint8), none, none, [])


@between_graphs
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Returns when every rank has called it; late ranks are named, in a warning and in the timeout's error.

    Signature and meaning of ``torch.distributed.barrier``. The hosts wait for each other, not for what their devices
    are still computing; ``device_ids`` is accepted for torch's sake and changes nothing. ``timeout``, in seconds if
    it is a number, replaces the communicator's.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return call_collective(_barrier, [], [], group, async_op, timeout=limit)
