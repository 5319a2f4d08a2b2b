"""Messages between two ranks, with torch.distributed's signatures: on one host, for tensors in host memory.

They are independent of collectives: a pending `irecv` keeps no collective from running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from alltoallv._calls import messages
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import Done, Operation, Work, check_place
from alltoallv.torch.eager.group import AnyCommunicator, Group, device_of
from alltoallv.torch.eager.observers import between_graphs, has_no_data
from alltoallv.torch.eager.tensors import Copies, as_input, check_tensor, core_name, output_of, region
from alltoallv.torch.graph import calling
from alltoallv.torch.graph.calling import is_watched, rank_in

__all__ = ["irecv", "isend", "recv", "send"]

T = TypeVar("T")


class MessageWork(Work):
    """The handle of a message under way."""

    _group: Group = None

    def _source_rank(self) -> int:
        """Returns the sender's rank of a received message: in the job, or in the `Communicator` that was given."""
        source: int = self._core.source  # type: ignore[attr-defined]
        return _outside(self._group, source)

    source_rank = _source_rank


class _NoMessage(Done, MessageWork):
    """The handle of a message of a tensor without data."""


@between_graphs
def send(
    tensor: Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Sends ``tensor`` to one rank; returns when that has received it.

    Signature and meaning of ``torch.distributed.send``. Messages of one pair and one tag are received in the order of
    their sends.

    Args:
        dst: The receiving rank: its number in the job for a ProcessGroup, in the communicator for a `Communicator`.
        group_dst: The receiving rank's number in the group, in place of ``dst``.

    Raises:
        InvalidParamError, InvalidTensorError: the arguments are wrong, on this rank alone.
        PeerMismatchError: the receiver expects another size or dtype; both ranks raise it, nothing has been written,
            and the communicator stays usable.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    comm = _member(tensor, group)
    if comm is not None and not has_no_data(tensor):
        operation = prepare_send(comm, tensor, rank_in(group, "dst", dst, group_dst), tag, waits=True)
        _seen(operation, operation.run)


@between_graphs
def recv(
    tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receives into ``tensor`` what one rank sends with this tag, or, without ``src``, the rank that sends first.

    Signature and meaning of ``torch.distributed.recv``; the rank is named as for `send`.

    Returns:
        The sender's rank; -1 on a rank outside the group.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    comm = _member(tensor, group)
    if comm is None:
        return -1
    peer = _source(group, src, group_src)
    if has_no_data(tensor):
        return -1 if peer is None else _outside(group, peer)
    operation = prepare_recv(comm, tensor, peer, tag, waits=True)
    return _outside(group, _seen(operation, operation.run).source)


@between_graphs
def isend(
    tensor: Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> MessageWork | None:
    """Does `send`, but returns at once; the tensor must not be changed until the work is done.

    Returns:
        The work, whose ``wait()`` raises the errors of `send`; None, with a warning, on a rank outside the group.
    """
    comm = _member(tensor, group)
    if comm is None:
        return None
    peer = rank_in(group, "dst", dst, group_dst)
    return _start(comm, group, tensor, lambda: prepare_send(comm, tensor, peer, tag, waits=False))


@between_graphs
def irecv(
    tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> MessageWork | None:
    """Does `recv`, but returns at once. Receives of one tag meet messages in the order of their calls.

    Returns:
        The work, whose ``wait()`` raises the errors of `recv`; None, with a warning, on a rank outside the group.
    """
    comm = _member(tensor, group)
    if comm is None:
        return None
    peer = _source(group, src, group_src)
    return _start(comm, group, tensor, lambda: prepare_recv(comm, tensor, peer, tag, waits=False))


def prepare_send(comm: AnyCommunicator, tensor: Tensor, dst: int, tag: int, *, waits: bool) -> Operation:
    """Returns a message to rank ``dst`` of the communicator."""
    x = as_input("tensor", tensor)
    call = messages.post("send", _of_messages(comm, x), core_name(x.dtype), region(x), dst, tag, waits=waits)
    return Operation(comm, "send", call, x, [x.numel()], [], [tensor], x)


def prepare_recv(comm: AnyCommunicator, tensor: Tensor, src: int | None, tag: int, *, waits: bool) -> Operation:
    """Returns the receiving side of a message from rank ``src`` of the communicator, or from any rank."""
    copies: Copies = []
    out = output_of(tensor, copies)
    call = messages.post("recv", _of_messages(comm, out), core_name(out.dtype), region(out), src, tag, waits=waits)
    return Operation(comm, "recv", call, out, [], [out.numel()], [tensor], out, copies)


def _of_messages(comm: AnyCommunicator, tensor: Tensor) -> Communicator:
    if not isinstance(comm, Communicator):
        raise BackendUnavailableError(
            f"domain '{comm.domain}' is of backend {comm.backend!r}, which has no messages here: "
            "use torch.distributed's send and recv with its group",
            id=5052,
        )
    check_place(comm, tensor)
    return comm


def _member(tensor: Tensor, group: Group) -> AnyCommunicator | None:
    if not (isinstance(tensor, Tensor) and has_no_data(tensor)):
        check_tensor("tensor", tensor)
    return groups.resolve(group, device_of(tensor))


def _source(group: Group, src: int | None, group_src: int | None) -> int | None:
    return None if src is None and group_src is None else rank_in(group, "src", src, group_src)


def _start(comm: AnyCommunicator, group: Group, tensor: Tensor, prepare: Callable[[], Operation]) -> MessageWork | None:
    if has_no_data(tensor):
        return _NoMessage([tensor])
    operation = prepare()
    work = MessageWork(comm, _seen(operation, operation.start), (operation,), operation.finish)
    work._group = group
    return work


def _seen(operation: Operation, run: Callable[[], T]) -> T:
    """Calls a method of the message, in an operator while a mode is active."""
    if not is_watched():
        return run()
    x, writes = [operation.like], operation.name == "recv"
    return calling.watch_call(operation.name, operation.communicator, x if writes else [], [] if writes else x, run)


def _outside(group: Group, rank: int) -> int:
    if isinstance(group, dist.ProcessGroup) and rank >= 0:
        return int(dist.get_global_rank(group, rank))
    return rank
