"""The collectives of torch.distributed that write into the caller's tensors, with torch's signatures.

All return None, or the `Work` with ``async_op=True``. They have no gradients, as in torch; `alltoallv.torch.functional`
has. What they do is declared in `alltoallv.torch.eager.collectives`. Tensors that are not contiguous are copied; an
output of that kind is complete when ``wait`` has returned. In a graph they are an operator and copies;
``torch.compile`` leaves `barrier` out of its graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls.collectives import check_length
from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.eager import calls, collectives, reductions
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.declaration import NO_PARAMETERS, Collective, Parameters
from alltoallv.torch.eager.graphs import between_graphs, check_untimed, is_tracing
from alltoallv.torch.eager.group import Group, device_of
from alltoallv.torch.eager.tensors import check_contiguous, check_tensor
from alltoallv.torch.eager.work import Work
from alltoallv.torch.graph import watched
from alltoallv.torch.graph.traced import collective
from alltoallv.torch.graph.watched import is_watched

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
]

_SUM = dist.ReduceOp.SUM


def all_reduce(
    tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False, *, order: str | None = None
) -> Work | None:
    """Replaces ``tensor`` by the combination of all ranks' tensors, element by element.

    Signature and meaning of ``torch.distributed.all_reduce``. In host memory all ranks get the same bits: the terms are
    combined in the order of ranks, 16-bit floats in float32, rounded once.

    Args:
        tensor: Any shape, the same on all ranks, as the dtype is: an integer, bool, float (not of 8 bits) or complex.
        op: ``ReduceOp.SUM``, ``PRODUCT``, ``MIN``, ``MAX``, for floats also ``AVG``, for integers and bool also
            ``BAND``, ``BOR``, ``BXOR``; for complex tensors SUM and AVG alone.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on devices too, with the bits of host memory, where that is the
            order anyway. Default: the group's, which is ``ALLTOALLV_ORDER`` or the engine's own.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return _call(reductions.all_reduce, [tensor], [], group, async_op, Parameters(op, order=order))


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    order: str | None = None,
) -> Work | None:
    """Combines ``input_list[j]`` of all ranks into rank j's ``output``.

    Signature and meaning of ``torch.distributed.reduce_scatter``: one tensor per rank, of any sizes, which are equal on
    all ranks; ``output`` has as many elements as this rank's entry. ``op`` as for `all_reduce`.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on devices too, with the bits of host memory, where that is the
            order anyway. Default: the group's, which is ``ALLTOALLV_ORDER`` or the engine's own.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return _call(reductions.reduce_scatter, [output], input_list, group, async_op, Parameters(op, order=order))


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    order: str | None = None,
) -> Work | None:
    """Combines the ``input`` of all ranks, of which rank j gets the j-th of W equal parts as ``output``.

    Signature and meaning of ``torch.distributed.reduce_scatter_tensor``: ``input`` has W times the elements of
    ``output``. ``op`` as for `all_reduce`.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on devices too, with the bits of host memory, where that is the
            order anyway. Default: the group's, which is ``ALLTOALLV_ORDER`` or the engine's own.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return _call(reductions.reduce_scatter_tensor, [output], [input], group, async_op, Parameters(op, order=order))


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
    return _call(collectives.all_gather, tensor_list, [tensor], group, async_op)


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
    return _call(collectives.all_gather_into_tensor, *tensors, group, async_op, timeout=timeout)


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
    return _call(collectives.all_to_all, *lists, group, async_op, timeout=timeout)


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
    return _call(collectives.all_to_all_single, [output], [input], group, async_op, parameters, timeout)


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
    return _call(collectives.broadcast, [tensor], [], group, async_op, root=("src", src, group_src))


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    order: str | None = None,
) -> Work | None:
    """Replaces the ``tensor`` of one rank by the combination of all ranks' tensors; the others' tensors stay.

    Signature and meaning of ``torch.distributed.reduce``; the bits and ``op`` are as for `all_reduce`.

    Args:
        dst: The receiving rank: its number in the job for a ProcessGroup, in the communicator for a `Communicator`.
        group_dst: The receiving rank's number in the group, in place of ``dst``.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on devices too, with the bits of host memory, where that is the
            order anyway. Default: the group's, which is ``ALLTOALLV_ORDER`` or the engine's own.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return _call(
        reductions.reduce, [tensor], [], group, async_op, Parameters(op, order=order), root=("dst", dst, group_dst)
    )


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
    return _call(collectives.gather, outs, [tensor], group, async_op, root=("dst", dst, group_dst))


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
    return _call(collectives.scatter, [tensor], ins, group, async_op, root=("src", src, group_src))


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
    return _call(collectives.barrier, [], [], group, async_op, timeout=limit)


def _call(
    row: Collective,
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    group: Group,
    async_op: bool,
    parameters: Parameters = NO_PARAMETERS,
    timeout: float | None = None,
    *,
    root: tuple[str, int | None, int | None] | None = None,
) -> Work | None:
    """Calls a collective; `rank_in` turns ``root`` into a rank of the group."""
    if not row.strict and timeout is None and not is_dynamo_compiling():  # strict functions ask the core themselves
        shared, resolved = groups.on_shm(group), parameters
        if shared is not None and root is not None:
            resolved = parameters._replace(root=_plain_root(shared, group, *root))
        if shared is not None and row.at_once is not None:
            started = row.at_once(shared.core, outs, ins, resolved, None, async_op)
            if started is not None:
                used = outs, started
                return Work(shared, started[1], used, lambda: row.result(outs)) if async_op else None
    first = next((x for tensors in (ins, outs) if isinstance(tensors, list | tuple) for x in tensors), None)
    if is_tracing(first):
        check_untimed(timeout)
        if root is not None:
            parameters = parameters._replace(root=rank_in(group, *root))
        return collective(row, outs, ins, parameters, group, async_op)
    comm = groups.resolve(group, device_of(first))
    if comm is None:
        return None
    with guard(comm, row.operator, TypeError):  # torch.distributed's wrappers check types on a rank alone
        limit = calls.limit(comm, timeout)
        for name, tensors in ((row.inputs, ins), (row.outputs, outs)):
            if not isinstance(tensors, list | tuple):
                check_length(name, tensors, comm.size)
                raise InvalidTensorError(
                    f"{name} is a {type(tensors).__name__}, expected a list of tensors", 5, id=2104
                )
            for label, tensor in _labelled(name, tensors):
                check_tensor(label, tensor)
        if row.strict:
            for label, out in _labelled(row.outputs, outs):
                check_contiguous(label, out)
        if root is not None:
            parameters = parameters._replace(root=rank_in(group, *root))
        operation = None if (seen := is_watched()) else row.prepare(comm, outs, ins, parameters)
    if seen:
        return watched.collective(comm, row, outs, ins, parameters, limit, async_op)
    assert operation is not None
    if async_op:
        if row.strict:
            operation.result = row.result(outs)
        return operation.submit(limit)
    operation.run(limit)
    return None


def _labelled(name: str, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Returns the tensors of an argument, each with its name for errors."""
    return [(f"{name}[{j}]" if name.endswith("_list") else name, x) for j, x in enumerate(tensors)]


def _plain_root(comm: Communicator, group: Group, name: str, rank: int | None, group_rank: int | None) -> int:
    """Returns `rank_in`; -1, no rank, where that raises."""
    with contextlib.suppress(InvalidParamError):
        return rank_in(group, name, rank, group_rank)
    return -1


def rank_in(group: Group, name: str, rank: int | None, group_rank: int | None) -> int:
    """Returns the rank in the group that the argument called ``name``, or ``group_{name}``, means."""
    if (rank is None) == (group_rank is None):
        raise InvalidParamError(f"{name} is {rank!r} and group_{name} {group_rank!r}, expected one of them", id=1420)
    if group_rank is not None:
        if not is_tracing():  # in a graph the operator raises, on all ranks
            _core.checked_rank(f"group_{name}", group_rank, groups.world_size(group))
        return group_rank
    assert rank is not None
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        if rank not in ranks:
            raise InvalidParamError(f"{name} is {rank!r}, expected one of the group's ranks {ranks}", id=1169)
        return ranks.index(rank)
    return rank
