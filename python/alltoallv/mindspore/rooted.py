"""Reduce, gather, scatter and messages of ``mindspore.mint.distributed``, with its signatures and return values.

On CPU, for contiguous outputs. They write into tensors of the caller and have no gradients. ``dst`` and ``src`` are
ranks of the job, for a `Communicator` ranks in it. Reduce, gather and scatter raise as
`alltoallv.mindspore.all_to_all_v`, messages as `alltoallv.numpy.send`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor

from alltoallv._calls import messages, rooted
from alltoallv._calls.collectives import Ready, check_length
from alltoallv._calls.guard import guard
from alltoallv._calls.messages import Message
from alltoallv.communicator import Communicator
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.exchange import check_async, enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import as_input, check_output, core_name, region, settle
from alltoallv.mindspore.work import CommHandle


def reduce(tensor: Tensor, dst: int, op: str = "sum", group: Group = None, async_op: bool = False) -> CommHandle | None:
    """Replaces the ``tensor`` of rank ``dst`` by the combination of all; those of the others stay.

    ``op`` and the result's bits as for `all_reduce`.
    """

    def prepare(comm: Communicator) -> tuple[Ready, list[Tensor]]:
        dtype = _output(tensor)
        root = groups.rank_in(group, dst)
        mine = region(tensor)
        return rooted.reduce(comm, dtype, op, mine if comm.rank == root else None, mine, root), [tensor]

    return _run("reduce", group, async_op, prepare)


def gather(
    tensor: Tensor, gather_list: Sequence[Tensor], dst: int = 0, group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Copies the ``tensor`` of rank j into ``gather_list[j]`` of rank ``dst``, which has that rank's size.

    Elsewhere ``gather_list`` is not looked at.
    """

    def prepare(comm: Communicator) -> tuple[Ready, list[Tensor]]:
        root = groups.rank_in(group, dst)
        x = as_input(tensor)
        outs = _tensors(comm, "gather_list", gather_list) if comm.rank == root else []
        for j, out in enumerate(outs):
            check_output(f"gather_list[{j}]", out, x.dtype)
        call = rooted.gather(comm, core_name(x.dtype), [region(out) for out in outs], region(x), root)
        return call, [*outs, x]

    return _run("gather", group, async_op, prepare)


def scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor], src: int = 0, group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Copies ``scatter_list[j]`` of rank ``src`` into the ``tensor`` of rank j, which has its size.

    Elsewhere ``scatter_list`` is not looked at.
    """

    def prepare(comm: Communicator) -> tuple[Ready, list[Tensor]]:
        root = groups.rank_in(group, src)
        dtype = _output(tensor)
        given = _tensors(comm, "scatter_list", scatter_list) if comm.rank == root else []
        parts = [as_input(x) for x in given]
        for j, x in enumerate(parts):
            check_output(f"scatter_list[{j}]", x, tensor.dtype)
        return rooted.scatter(comm, dtype, region(tensor), [region(x) for x in parts], root), [tensor, *parts]

    return _run("scatter", group, async_op, prepare)


def send(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> int:
    """Sends ``tensor`` to rank ``dst``; returns 0 when that has received it.

    Messages of one pair and one tag are received in the order of their sends, beside the collectives.
    """
    comm, x = enter(group), as_input(tensor)
    messages.send(comm, core_name(x.dtype), region(x), groups.rank_in(group, dst), tag, waits=True).run()
    return 0


def recv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> int:
    """Receives into ``tensor`` what rank ``src`` sends with this tag; returns 0."""
    comm, dtype = enter(group), _output(tensor)
    messages.recv(comm, dtype, region(tensor), groups.rank_in(group, src), tag, waits=True).run()
    return 0


def isend(tensor: Tensor, dst: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """`send` that returns at once; the tensor must not be changed until the handle's ``wait`` has returned."""
    comm, x = enter(group), as_input(tensor)
    return _post(
        comm, messages.send(comm, core_name(x.dtype), region(x), groups.rank_in(group, dst), tag, waits=False), x
    )


def irecv(tensor: Tensor, src: int = 0, group: Group = None, tag: int = 0) -> CommHandle:
    """`recv` that returns at once. Collectives may be called meanwhile."""
    comm, dtype = enter(group), _output(tensor)
    root = groups.rank_in(group, src)
    return _post(comm, messages.recv(comm, dtype, region(tensor), root, tag, waits=False), tensor)


def _output(tensor: Tensor) -> str:
    """Checks a tensor that is written; its dtype's name."""
    check_output("tensor", tensor)
    dtype = core_name(tensor.dtype)
    settle()
    return dtype


def _tensors(comm: Communicator, name: str, tensors: Any) -> list[Tensor]:
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"Expected list or tuple, but got {type(tensors)}.")
    check_length(name, tensors, comm.size)
    return list(tensors)


def _run(
    name: str, group: Group, async_op: bool, prepare: Callable[[Communicator], tuple[Ready, list[Tensor]]]
) -> CommHandle | None:
    """``prepare`` gives the call and the tensors it uses, the output first."""
    comm = enter(group)
    with guard(comm, name):
        check_async(async_op)
        call, used = prepare(comm)
    if async_op:
        return CommHandle(comm, call.submit(), (used,), lambda: used[0])
    call.run()
    return None


def _post(comm: Communicator, message: Message, tensor: Tensor) -> CommHandle:
    return CommHandle(comm, message.submit(), (tensor,), lambda: tensor)
