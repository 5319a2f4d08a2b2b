"""Reductions, gathers, scatter, broadcast and barrier with the signatures of ``paddle.distributed``.

They write into the caller's tensors, have no gradients, as in Paddle, and return a task, also with ``sync_op=True``; a
rank outside the group gets None and a warning. ``tensor`` and the tensors in lists are contiguous. ``dst`` and ``src``
are ranks of the job; with a `Communicator` they are ranks in it. All raise the errors of
`alltoallv.paddle.all_to_all_v`.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.distributed import ReduceOp

from alltoallv._calls.collectives import check_order
from alltoallv.paddle.front_end import Group, Task, apply, front_end, resolve

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_leaves",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "row_parallel_linear",
    "scatter",
]


def all_reduce(
    tensor: Tensor, op: int = ReduceOp.SUM, group: Group = None, sync_op: bool = True, *, order: str | None = None
) -> Task | None:
    """Replaces ``tensor``, which has one shape and dtype on all ranks, by the reduction of all ranks' tensors.

    All ranks get the same bits: values are combined in rank order, 16-bit floats in float32, and rounded once.

    Args:
        tensor: Any shape; an integer, bool, float (not of 8 bits) or, for SUM and AVG, complex dtype.
        op: ``ReduceOp.SUM``, ``PROD``, ``MIN``, ``MAX``, and for floats ``AVG``.
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Return when the outputs are complete; if false, at once, and they are after the task's ``wait()``.
        order: ``"rank"`` or None: the order of additions, which in host memory is always that of the ranks.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    if order is not None and (comm := resolve(group)) is not None:
        check_order(comm, "all_reduce", order)
    return front_end.call("all_reduce", group, not sync_op, tensor, reduce_op=op)


def all_reduce_leaves(tensor: Tensor, leaves: int, group: Group = None) -> Tensor | None:
    """Returns the sum of L tensors, of which every one of W ranks has its share ``tensor``, ``[L / W, ...]``.

    All are added in a tree over L alone: neighbours in pairs, then the results in pairs, and so on; 16-bit floats in
    float32, rounded once. So the sum has the same bits for every W. Its gradient is for each leaf the sum of the
    ranks' gradients, in such a tree over the ranks.

    Args:
        tensor: Of one shape and dtype on all ranks: an integer, bool, float or complex dtype.
        leaves: L, a multiple of W, up to 4096, equal on all ranks.
        group: A Paddle group, a `Communicator`, or None for all ranks.

    Returns:
        Shape ``[...]``, a new tensor; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    total: Tensor | None = front_end.all_reduce_leaves(tensor, leaves, group, apply)
    return total


def row_parallel_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, leaves: int, group: Group = None
) -> Tensor | None:
    """Runs a linear layer split by its inputs over the ranks: sums ``input @ weight.T``, and adds ``bias``.

    Every rank divides its product into L / W products of as many input features each, and all L are added as by
    `all_reduce_leaves`. So every product has the same shape for every number W of ranks, and the sum has the same bits,
    as far as the framework's product of one shape has: on CPU with as many threads in every rank.

    Args:
        input: ``[..., K]``, this rank's part of the features, in rank order; its leading dimensions are the same on all
            ranks.
        weight: ``[N, K]``, this rank's columns of the layer's weight, in the input's dtype.
        bias: ``[N]``, added once to the sum; every rank gives the same.
        leaves: L, a multiple of W, up to 4096, equal on all ranks; K is a multiple of L / W.
        group: A Paddle group, a `Communicator`, or None for all ranks.

    Returns:
        ``[..., N]`` in the input's dtype; None, with a warning, on a rank outside the group. Differentiable in input,
        weight and bias.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    tensors = input, weight, bias
    total: Tensor | None = front_end.row_parallel_linear(tensors, leaves, group, apply, multiply, paddle.stack)
    return total


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    return paddle.matmul(x.contiguous(), weight.contiguous(), transpose_y=True)


def reduce(
    tensor: Tensor,
    dst: int,
    op: int = ReduceOp.SUM,
    group: Group = None,
    sync_op: bool = True,
    *,
    order: str | None = None,
) -> Task | None:
    """Replaces the ``tensor`` of rank ``dst`` by the reduction of all tensors; the other ranks' tensors do not change.

    ``op`` and the result's bits are as in `all_reduce`.

    Args:
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Return when the outputs are complete; if false, at once, and they are after the task's ``wait()``.
        order: ``"rank"`` or None: the order of additions, which in host memory is always that of the ranks.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    if order is not None and (comm := resolve(group)) is not None:
        check_order(comm, "reduce", order)
    return front_end.call("reduce", group, not sync_op, tensor, reduce_op=op, root=("dst", dst))


def reduce_scatter(
    tensor: Tensor,
    tensor_list: Sequence[Tensor] | Tensor,
    op: int = ReduceOp.SUM,
    group: Group = None,
    sync_op: bool = True,
    *,
    order: str | None = None,
) -> Task | None:
    """Reduces ``tensor_list[j]`` of all ranks into rank j's ``tensor``.

    ``tensor_list`` has one tensor per rank, of any sizes, but the same on all ranks, or is one tensor of W equal parts.
    ``op`` as in `all_reduce`.

    Args:
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Return when the outputs are complete; if false, at once, and they are after the task's ``wait()``.
        order: ``"rank"`` or None: the order of additions, which in host memory is always that of the ranks.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    if order is not None and (comm := resolve(group)) is not None:
        check_order(comm, "reduce_scatter", order)
    names = "tensor", "tensor_list", ""
    return front_end.call("reduce_scatter", group, not sync_op, tensor, tensor_list, names, reduce_op=op)


def all_gather(
    tensor_list: list[Tensor] | Tensor,
    tensor: Tensor,
    group: Group = None,
    sync_op: bool = True,
    *,
    timeout: float | None = None,
) -> Task | None:
    """Copies the ``tensor`` of rank j into ``tensor_list[j]`` of every rank.

    Args:
        tensor_list: One tensor per rank, of that rank's size. An empty list is filled with tensors of the shape of
            ``tensor``. One tensor, W times as large as ``tensor``, takes all of them one after the other.
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Return when the outputs are complete; if false, at once, and they are after the task's ``wait()``.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    names = "tensor_list", "tensor", ""
    return front_end.call("all_gather", group, not sync_op, tensor_list, tensor, names, timeout=timeout)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    sync_op: bool = True,
) -> Task | None:
    """Copies the ``tensor`` of rank j into ``gather_list[j]`` of rank ``dst``; both have the same size.

    An empty list is filled with tensors of the shape of ``tensor``. Other ranks ignore ``gather_list``.

    Args:
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Return when the outputs are complete; if false, at once, and they are after the task's ``wait()``.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    names = "gather_list", "tensor", ""
    return front_end.call("gather", group, not sync_op, gather_list, tensor, names, root=("dst", dst))


def scatter(
    tensor: Tensor,
    tensor_list: Sequence[Tensor] | Tensor | None = None,
    src: int = 0,
    group: Group = None,
    sync_op: bool = True,
) -> Task | None:
    """Copies ``tensor_list[j]`` of rank ``src`` into the ``tensor`` of rank j; both have the same size.

    Other ranks ignore ``tensor_list``. One tensor in its place is divided into W equal parts along dimension 0.

    Args:
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Return when the outputs are complete; if false, at once, and they are after the task's ``wait()``.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    names = "tensor", "tensor_list", ""
    return front_end.call("scatter", group, not sync_op, tensor, tensor_list, names, root=("src", src))


def broadcast(tensor: Tensor, src: int, group: Group = None, sync_op: bool = True) -> Task | None:
    """Copies the ``tensor`` of one rank into the tensors of all others, which have the same size and dtype.

    ``src`` is that rank's number in the job; with a `Communicator`, its rank there.

    Args:
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Return when the outputs are complete; if false, at once, and they are after the task's ``wait()``.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return front_end.call("broadcast", group, not sync_op, tensor, root=("src", src))


def barrier(group: Group = None) -> None:
    """Returns when every rank has called it; a warning and the timeout's error name late ranks."""
    front_end.call("barrier", group, False)
