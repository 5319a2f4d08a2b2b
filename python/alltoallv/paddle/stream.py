"""The functions of ``paddle.distributed.stream``, with its names of arguments, order and defaults.

They are `alltoallv.paddle`'s own, but for ``use_calc_stream``: on CPU there is no stream, so it changes nothing, and
is refused together with ``sync_op=False``, as in Paddle. `alltoall_single` takes the output's split sizes first.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddle import Tensor
from paddle.distributed import ReduceOp

from alltoallv._calls.counts import Counts
from alltoallv.paddle import collectives, exchange, messages
from alltoallv.paddle.front_end import Group, Task

__all__ = [
    "all_gather",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def all_gather(
    tensor_or_tensor_list: Tensor | list[Tensor],
    tensor: Tensor,
    group: Group = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """See `alltoallv.paddle.all_gather`."""
    _check(sync_op, use_calc_stream)
    return collectives.all_gather(tensor_or_tensor_list, tensor, group, sync_op)


def all_reduce(
    tensor: Tensor, op: int = ReduceOp.SUM, group: Group = None, sync_op: bool = True, use_calc_stream: bool = False
) -> Task | None:
    """See `alltoallv.paddle.all_reduce`."""
    _check(sync_op, use_calc_stream)
    return collectives.all_reduce(tensor, op, group, sync_op)


def alltoall(
    out_tensor_or_tensor_list: Tensor | list[Tensor],
    in_tensor_or_tensor_list: Tensor | Sequence[Tensor],
    group: Group = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """See `alltoallv.paddle.alltoall`."""
    _check(sync_op, use_calc_stream)
    return exchange.alltoall(out_tensor_or_tensor_list, in_tensor_or_tensor_list, group, sync_op)


def alltoall_single(
    out_tensor: Tensor,
    in_tensor: Tensor,
    out_split_sizes: Counts | None = None,
    in_split_sizes: Counts | None = None,
    group: Group = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """See `alltoallv.paddle.alltoall_single`, which takes the split sizes in the other order."""
    _check(sync_op, use_calc_stream)
    return exchange.alltoall_single(out_tensor, in_tensor, in_split_sizes, out_split_sizes, group, sync_op)


def broadcast(
    tensor: Tensor, src: int, group: Group = None, sync_op: bool = True, use_calc_stream: bool = False
) -> Task | None:
    """See `alltoallv.paddle.broadcast`."""
    _check(sync_op, use_calc_stream)
    return collectives.broadcast(tensor, src, group, sync_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """See `alltoallv.paddle.gather`."""
    _check(sync_op, use_calc_stream)
    return collectives.gather(tensor, gather_list, dst, group, sync_op)


def recv(
    tensor: Tensor, src: int = 0, group: Group = None, sync_op: bool = True, use_calc_stream: bool = False
) -> Task | None:
    """See `alltoallv.paddle.recv`."""
    _check(sync_op, use_calc_stream)
    return messages.recv(tensor, src, group, sync_op)


def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: int = ReduceOp.SUM,
    group: Group = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """See `alltoallv.paddle.reduce`."""
    _check(sync_op, use_calc_stream)
    return collectives.reduce(tensor, dst, op, group, sync_op)


def reduce_scatter(
    tensor: Tensor,
    tensor_or_tensor_list: Tensor | Sequence[Tensor],
    op: int = ReduceOp.SUM,
    group: Group = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """See `alltoallv.paddle.reduce_scatter`."""
    _check(sync_op, use_calc_stream)
    return collectives.reduce_scatter(tensor, tensor_or_tensor_list, op, group, sync_op)


def scatter(
    tensor: Tensor,
    tensor_or_tensor_list: Tensor | Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """See `alltoallv.paddle.scatter`; here the parts may also be one tensor, divided along dimension 0."""
    _check(sync_op, use_calc_stream)
    return collectives.scatter(tensor, tensor_or_tensor_list, src, group, sync_op)


def send(
    tensor: Tensor, dst: int = 0, group: Group = None, sync_op: bool = True, use_calc_stream: bool = False
) -> Task | None:
    """See `alltoallv.paddle.send`."""
    _check(sync_op, use_calc_stream)
    return messages.send(tensor, dst, group, sync_op)


def _check(sync_op: bool, use_calc_stream: bool) -> None:
    if use_calc_stream and not sync_op:
        raise RuntimeError("use_calc_stream can only be true in sync op behavior.")
