"""Reduce, gather, scatter and messages of ``mindspore.mint.distributed``, with its signatures and return values.

On CPU, for contiguous outputs. They write into tensors of the caller and have no gradients. ``dst`` and ``src`` are
ranks of the job, for a `Communicator` ranks in it. Reduce, gather and scatter raise as
`alltoallv.mindspore.all_to_all_v`, messages as `alltoallv.numpy.send`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor

from alltoallv._calls import rooted
from alltoallv._calls.collectives import Ready
from alltoallv._calls.guard import guard
from alltoallv._calls.messages import Message
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.adapter import ADAPTER, Tensors
from alltoallv.mindspore.calls import Call, Place
from alltoallv.mindspore.exchange import check_async, enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import settle
from alltoallv.mindspore.work import CommHandle


def reduce(tensor: Tensor, dst: int, op: str = "sum", group: Group = None, async_op: bool = False) -> CommHandle | None:
    """Replaces the ``tensor`` of rank ``dst`` by the combination of all; those of the others stay.

    ``op`` and the result's bits as for `all_reduce`.
    """
    return _run("reduce", group, async_op, dst, _reduce_on_host, tensor, op)


def _reduce_on_host(adapter: Tensors, *arguments: Any) -> tuple[Ready, list[Tensor]]:
    settle()  # the transport over HCCL has no reduction to one rank
    return rooted.reduce_tensor(adapter, *arguments)


def gather(
    tensor: Tensor, gather_list: Sequence[Tensor], dst: int = 0, group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Copies the ``tensor`` of rank j into ``gather_list[j]`` of rank ``dst``, which has that rank's size.

    Elsewhere ``gather_list`` is not looked at.
    """
    return _run("gather", group, async_op, dst, rooted.gather_tensors, tensor, gather_list)


def scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor], src: int = 0, group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Copies ``scatter_list[j]`` of rank ``src`` into the ``tensor`` of rank j, which has its size.

    Elsewhere ``scatter_list`` is not looked at.
    """
    return _run("scatter", group, async_op, src, rooted.scatter_tensors, tensor, scatter_list)


def send(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> int:
    """Sends ``tensor`` to rank ``dst``; returns 0 when that has received it.

    Messages of one pair and one tag are received in the order of their sends, beside the collectives.
    """
    _message("send", tensor, dst, group, tag).run()
    return 0


def recv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> int:
    """Receives into ``tensor`` what rank ``src`` sends with this tag; returns 0."""
    _message("recv", tensor, src, group, tag).run()
    return 0


def isend(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """`send` that returns at once; the tensor must not be changed until the handle's ``wait`` has returned."""
    return _post("send", tensor, dst, group, tag)


def irecv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """`recv` that returns at once. Collectives may be called meanwhile."""
    return _post("recv", tensor, src, group, tag)


def _run(
    name: str,
    group: Group,
    async_op: bool,
    root: int,
    prepare: Callable[..., tuple[Ready, list[Tensor]]],
    *arguments: Any,
) -> CommHandle | None:
    """``prepare`` gives the call and the tensors it uses, the output first."""
    comm = enter(group)
    used: list[Tensor] = []

    def ready(place: Place) -> Ready:
        made, used[:] = prepare(Tensors(place), comm, *arguments, groups.rank_in(group, root))
        return made

    with guard(comm, name):
        check_async(async_op)
        call = Call(ready)
    return call.start(comm, used, async_op, result=used[0])


def _message(operator: str, tensor: Tensor, peer: int, group: Group, tag: int) -> Message:
    comm = enter(group)
    return rooted.message(ADAPTER, comm, operator, tensor, groups.rank_in(group, peer), tag, waits=True)[0]


def _post(operator: str, tensor: Tensor, peer: int, group: Group, tag: int) -> CommHandle:
    comm = enter(group)
    message, used = rooted.message(ADAPTER, comm, operator, tensor, groups.rank_in(group, peer), tag, waits=False)
    return CommHandle(comm, message.submit(), (used,), lambda: tensor)
