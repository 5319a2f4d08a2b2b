"""Collectives of torch.distributed that write into the caller's tensors, with torch's signatures.

All return None, or the `Work` with ``async_op=True``. They have no gradients, as in torch; `alltoallv.torch.functional`
has. Tensors that are not contiguous are copied; an output of that kind is complete when ``wait`` has returned.
In a graph they are an operator and copies; ``torch.compile`` leaves `barrier` out of its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.api import collectives, profile, rooted
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.collectives import Operation
from alltoallv.torch.api.group import AnyCommunicator, Group, device_of
from alltoallv.torch.api.tensors import check_tensor
from alltoallv.torch.api.work import Work
from alltoallv.torch.graph.collective import collective
from alltoallv.torch.graph.graphs import between_graphs, is_tracing

_SUM = dist.ReduceOp.SUM


def all_reduce(tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False) -> Work | None:
    """Replaces ``tensor``, of one shape and dtype on all ranks, by the combination of all ranks' tensors.

    Signature and meaning of ``torch.distributed.all_reduce``. In host memory all ranks get the same bits: the terms are
    combined in the order of ranks, 16-bit floats in float32, rounded once.

    Args:
        op: ``ReduceOp.SUM``, ``PRODUCT``, ``MIN``, ``MAX``, for floats ``AVG``, for integers and bool
            ``BAND``, ``BOR``, ``BXOR``; of complex tensors SUM and AVG.

    Raises:
        InvalidParamError: ``op`` has no meaning for the dtype. Otherwise as `all_to_all_v`.
    """
    if is_tracing():
        return collective("all_reduce", [tensor], [], op, 0, group, async_op)
    return _run("all_reduce", group, async_op, lambda c: collectives.all_reduce(c, tensor, _op(tensor, op)), [tensor])


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Any = _SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Combines ``input_list[j]`` of all ranks into rank j's ``output``.

    Signature and meaning of ``torch.distributed.reduce_scatter``: one tensor per rank, of any sizes, which are equal on
    all ranks; ``output`` has as many elements as this rank's entry. ``op`` and errors as for `all_reduce`.
    """
    if is_tracing():
        return collective("reduce_scatter", [output], input_list, op, 0, group, async_op)

    def prepare(comm: AnyCommunicator) -> Operation:
        return collectives.reduce_scatter(comm, output, input_list, _op(output, op))

    return _run("reduce_scatter", group, async_op, prepare, [output], input_list)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Combines the ``input`` of all ranks, of which rank j gets the j-th of W equal parts as ``output``.

    Signature and meaning of ``torch.distributed.reduce_scatter_tensor``: ``input`` has W times the elements of
    ``output``. ``op`` and errors as for `all_reduce`.
    """
    if is_tracing():
        return collective("reduce_scatter_tensor", [output], [input], op, 0, group, async_op)

    def prepare(comm: AnyCommunicator) -> Operation:
        return collectives.reduce_scatter_single(comm, output, input, _op(output, op))

    return _run("reduce_scatter", group, async_op, prepare, [output, input])


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Copies the ``tensor`` of rank j into ``tensor_list[j]`` of every rank.

    Signature and meaning of ``torch.distributed.all_gather``: one output per rank, with the elements of that rank's
    tensor; the ranks may differ in size. Raises as `all_to_all_v`.
    """
    if is_tracing():
        return collective("all_gather", tensor_list, [tensor], _SUM, 0, group, async_op)
    return _run(
        "all_gather", group, async_op, lambda c: collectives.all_gather(c, tensor_list, tensor), [tensor], tensor_list
    )


def broadcast(
    tensor: Tensor, src: int | None = None, group: Group = None, async_op: bool = False, group_src: int | None = None
) -> Work | None:
    """Copies the ``tensor`` of one rank into the tensors of all others, of one size and dtype.

    Signature and meaning of ``torch.distributed.broadcast``. Raises as `all_to_all_v`.

    Args:
        src: That rank: its number in the job for a ProcessGroup, in the communicator for a `Communicator`.
        group_src: That rank's number in the group, in place of ``src``.
    """
    if is_tracing():
        return collective("broadcast", [tensor], [], _SUM, rank_in(group, "src", src, group_src), group, async_op)
    return _run(
        "broadcast",
        group,
        async_op,
        lambda c: collectives.broadcast(c, tensor, rank_in(group, "src", src, group_src)),
        [tensor],
    )


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Replaces the ``tensor`` of one rank by the combination of all ranks' tensors; those of the others stay.

    Signature and meaning of ``torch.distributed.reduce``; the bits, ``op`` and errors are those of `all_reduce`.

    Args:
        dst: That rank: its number in the job for a ProcessGroup, in the communicator for a `Communicator`.
        group_dst: That rank's number in the group, in place of ``dst``.
    """
    if is_tracing():
        return collective("reduce", [tensor], [], op, rank_in(group, "dst", dst, group_dst), group, async_op)

    def prepare(comm: AnyCommunicator) -> Operation:
        return rooted.reduce(comm, tensor, rank_in(group, "dst", dst, group_dst), _op(tensor, op))

    return _run("reduce", group, async_op, prepare, [tensor])


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copies the ``tensor`` of rank j into ``gather_list[j]`` of one rank.

    Signature and meaning of ``torch.distributed.gather``, and the tensors of the ranks may differ in size. Raises as
    `all_to_all_v`.

    Args:
        gather_list: On that rank one output per rank, with the elements of that rank's tensor; None elsewhere.
        dst, group_dst: That rank, as for `reduce`; rank 0 of the job if neither is given.
    """
    if is_tracing():
        return collective(
            "gather", gather_list or [], [tensor], _SUM, _root(group, "dst", dst, group_dst), group, async_op
        )

    def prepare(comm: AnyCommunicator) -> Operation:
        return rooted.gather(comm, gather_list or (), tensor, _root(group, "dst", dst, group_dst))

    return _run("gather", group, async_op, prepare, [tensor], gather_list or ())


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copies ``scatter_list[j]`` of one rank into the ``tensor`` of rank j.

    Signature and meaning of ``torch.distributed.scatter``, and the ranks' tensors may differ in size. Raises as
    `all_to_all_v`.

    Args:
        scatter_list: On that rank one input per rank, with the elements of that rank's tensor; None elsewhere.
        src, group_src: That rank, as for `broadcast`; rank 0 of the job if neither is given.
    """
    if is_tracing():
        return collective(
            "scatter", [tensor], scatter_list or [], _SUM, _root(group, "src", src, group_src), group, async_op
        )

    def prepare(comm: AnyCommunicator) -> Operation:
        return rooted.scatter(comm, tensor, scatter_list or (), _root(group, "src", src, group_src))

    return _run("scatter", group, async_op, prepare, [tensor], scatter_list or ())


@between_graphs
def barrier(group: Group = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Work | None:
    """Returns when every rank has called it; late ranks are named, in a warning and in the timeout's error.

    Signature and meaning of ``torch.distributed.barrier``. The hosts wait for each other, not for what their devices
    are still computing; ``device_ids`` is accepted for torch's sake and changes nothing.
    """
    return _run("barrier", group, async_op, collectives.barrier, [])


def _run(
    name: str,
    group: Group,
    async_op: bool,
    prepare: Callable[[AnyCommunicator], Operation],
    tensors: Sequence[Tensor],
    more: Any = (),
) -> Work | None:
    """``tensors`` and the list ``more``: what the caller gave; the first of them tells the device."""
    first = next(iter(tensors), None)
    comm = groups.resolve(group, device_of(first))
    if comm is None:
        return None
    with guard(comm, name):
        if not isinstance(more, list | tuple):
            raise InvalidTensorError(f"the list of tensors is a {type(more).__name__}, expected {comm.size} tensors", 5)
        for tensor in (*tensors, *more):
            check_tensor("tensor", tensor)
        operation = prepare(comm)
    about = operation.itemsize, operation.sends, operation.recvs
    with profile.span(name, comm, *about, async_op=async_op, cuda=first is not None and first.is_cuda):
        if not async_op:
            operation.run(-1.0)
            operation.finish()
            return None
        pending = operation.submit(-1.0)

    def finish() -> Any:
        operation.finish()
        return operation.result

    return Work(comm, pending, (operation,), finish)


def _op(tensor: Tensor, op: Any) -> dist.ReduceOp:
    try:
        made = op if hasattr(op, "op") else dist.ReduceOp(op)  # isinstance says yes to both
    except TypeError:
        raise InvalidParamError(f"op is {op!r}, expected a torch.distributed.ReduceOp") from None
    if tensor.is_complex() and collectives.op_name(made) not in ("sum", "avg"):  # the engines see its parts
        raise InvalidParamError(f"op is {op!r}, expected SUM or AVG for dtype {tensor.dtype}")
    return made


def rank_in(group: Group, name: str, rank: int | None, group_rank: int | None) -> int:
    """The rank in the group that is meant by an argument called ``name`` or by ``group_{name}``."""
    if (rank is None) == (group_rank is None):
        raise InvalidParamError(f"{name} is {rank!r} and group_{name} {group_rank!r}, expected one of them")
    if group_rank is not None:
        return group_rank
    assert rank is not None
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        if rank not in ranks:
            raise InvalidParamError(f"{name} is {rank!r}, expected one of the group's ranks {ranks}")
        return ranks.index(rank)
    return rank


def _root(group: Group, name: str, rank: int | None, group_rank: int | None) -> int:
    """The same where the first rank is the default."""
    first = 0 if rank is None and group_rank is None else rank
    return rank_in(group, name, first, group_rank)
