"""Reduce, gather, scatter and messages as calls of a communicator; see `alltoallv.torch.api.collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from alltoallv._calls import messages, rooted
from alltoallv._calls.collectives import Ready, check_length, check_rank
from alltoallv._calls.counts import even_parts
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError
from alltoallv.torch.api.calls import check_place
from alltoallv.torch.api.collectives import (
    Operation,
    apart,
    check_dtypes,
    exchange_lists,
    in_place,
    op_name,
    output_of,
    reduction,
)
from alltoallv.torch.api.group import AnyCommunicator
from alltoallv.torch.api.tensors import as_input, core_name, region

Copies = list[tuple[Tensor, Tensor]]


def reduce(comm: AnyCommunicator, tensor: Tensor, root: int, op: Any) -> Operation:
    """In place on the root; the others' tensors stay as they are."""
    check_rank("root", root, comm.size)
    copies: Copies = []
    x, here = in_place(tensor, copies), comm.rank == root
    if not here:
        copies.clear()
    if isinstance(comm, Communicator):
        check_place(comm, x)
        call = rooted.reduce(comm, core_name(x.dtype), op_name(op), region(x) if here else None, region(x), root)
        return _ready("reduce", call, [x.numel()], [x.numel()] if here else [], [tensor], [x], copies)
    out = x if here else x.clone()  # an engine combines everywhere
    parts = even_parts(out.numel(), comm.size)
    return reduction(comm, "all_reduce", op, out, out, parts, [out.numel()], [tensor], [out], copies)


def gather(comm: AnyCommunicator, outputs: Sequence[Tensor], input: Tensor, root: int) -> Operation:
    """On the root ``outputs`` has one tensor per rank, of that rank's size; elsewhere they are not looked at."""
    check_rank("root", root, comm.size)
    here = comm.rank == root
    given = list(outputs) if here else []
    check_dtypes([input, *given])
    copies: Copies = []
    x, outs = as_input("tensor", input), [output_of(out, copies) for out in given]
    check_place(comm, x, *outs)
    if here:
        check_length("gather_list", outs, comm.size)
        x = apart([x], [out for out in outs if region(out) != region(x)])[0]
    if isinstance(comm, Communicator):
        call = rooted.gather(comm, core_name(x.dtype), [region(out) for out in outs], region(x), root)
        recvs = [out.numel() for out in outs]
        return _ready("gather", call, [x.numel()], recvs, [given], [x, *outs], copies)
    nothing = x.new_empty(0)
    sends = [x if j == root else nothing for j in range(comm.size)]
    return exchange_lists(comm, "gather", sends, outs or [nothing] * comm.size, [given], copies)


def scatter(comm: AnyCommunicator, output: Tensor, inputs: Sequence[Tensor], root: int) -> Operation:
    """On the root ``inputs`` has one tensor per rank, of that rank's size; elsewhere they are not looked at."""
    check_rank("root", root, comm.size)
    here = comm.rank == root
    given = list(inputs) if here else []
    check_dtypes([output, *given])
    copies: Copies = []
    out, xs = output_of(output, copies), [as_input("scatter_list", x) for x in given]
    check_place(comm, out, *xs)
    if here:
        check_length("scatter_list", xs, comm.size)
        xs = [x if region(x) == region(out) else apart([x], [out])[0] for x in xs]
    if isinstance(comm, Communicator):
        call = rooted.scatter(comm, core_name(out.dtype), region(out), [region(x) for x in xs], root)
        return _ready("scatter", call, [x.numel() for x in xs], [out.numel()], [output], [out, *xs], copies)
    nothing = out.new_empty(0)
    recvs = [out if j == root else nothing for j in range(comm.size)]
    return exchange_lists(comm, "scatter", xs or [nothing] * comm.size, recvs, [output], copies)


def send(comm: AnyCommunicator, tensor: Tensor, dst: int, tag: int, *, waits: bool) -> Operation:
    """A message to rank ``dst``."""
    x = as_input("tensor", tensor)
    call = messages.send(_of_messages(comm, x), core_name(x.dtype), region(x), dst, tag, waits=waits)
    return Operation("send", call.run, call.submit, x.itemsize, [x.numel()], [], [tensor], [x])


def recv(comm: AnyCommunicator, tensor: Tensor, src: int | None, tag: int, *, waits: bool) -> Operation:
    """A message from rank ``src``, or from any."""
    copies: Copies = []
    out = output_of(tensor, copies)
    call = messages.recv(_of_messages(comm, out), core_name(out.dtype), region(out), src, tag, waits=waits)
    return Operation("recv", call.run, call.submit, out.itemsize, [], [out.numel()], [tensor], [out], copies)


def _of_messages(comm: AnyCommunicator, tensor: Tensor) -> Communicator:
    if not isinstance(comm, Communicator):
        raise BackendUnavailableError(
            f"domain '{comm.domain}' is of backend {comm.backend!r}, which has no messages here: "
            "use torch.distributed's send and recv with its group"
        )
    check_place(comm, tensor)
    return comm


def _ready(
    name: str,
    call: Ready,
    sends: Sequence[int],
    recvs: Sequence[int],
    result: Any,
    keep: list[Tensor],
    copies: Copies,
) -> Operation:
    return Operation(name, call.run, call.submit, keep[0].itemsize, sends, recvs, result, keep, copies)
