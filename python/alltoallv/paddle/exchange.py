"""The all-to-all family, also of experts' rows; `alltoallv.paddle` describes what all functions share."""

from __future__ import annotations

from collections.abc import Sequence

from paddle import Tensor

from alltoallv._calls.counts import Counts
from alltoallv.paddle.front_end import front_end
from alltoallv.paddle.group import Group
from alltoallv.paddle.work import Done, Task, ending

all_to_all_v = front_end.all_to_all_v
exchange_counts = front_end.exchange_counts


@ending
def alltoall_single(
    out_tensor: Tensor,
    in_tensor: Tensor,
    in_split_sizes: Counts | None = None,
    out_split_sizes: Counts | None = None,
    group: Group = None,
    sync_op: bool = True,
    *,
    timeout: float | None = None,
) -> Task | None:
    """Splits ``in_tensor`` along dimension 0, sends part j to rank j, concatenates what arrives into ``out_tensor``.

    Signature and meaning are those of ``paddle.distributed.alltoall_single`` in Paddle 3: the output comes first, the
    input's split sizes before the output's. Split sizes count rows and default to equal parts, into which dimension 0
    must divide. It has no gradient, as in Paddle; `all_to_all_v` has one.

    Args:
        out_tensor: Shape ``[sum(out_split_sizes), ...]``, of the input's dtype; contiguous, apart from ``in_tensor``.
        in_tensor: Shape ``[sum(in_split_sizes), ...]``, any dtype; it is never written.
        in_split_sizes, out_split_sizes: One integer >= 0 per rank. What rank i sends to j, rank j must receive from i.
    """
    comm = front_end.enter(group)
    if comm is None:
        return None
    names = "out_tensor", "in_tensor", "out_split_sizes", "in_split_sizes"
    splits = out_split_sizes, in_split_sizes
    made = front_end.single(comm, out_tensor, in_tensor, splits, not sync_op, timeout, names)
    return Done(made) if sync_op else made[1]


@ending
def alltoall(
    out_tensor_list: list[Tensor],
    in_tensor_list: Sequence[Tensor],
    group: Group = None,
    sync_op: bool = True,
    *,
    timeout: float | None = None,
) -> Task | None:
    """Sends ``in_tensor_list[j]`` to rank j and receives ``out_tensor_list[j]`` from it.

    Signature and meaning are those of ``paddle.distributed.alltoall`` in Paddle 3: the outputs come first. Tensors may
    have any shapes but one dtype; the data move directly between them. An empty ``out_tensor_list`` is filled with
    tensors of the shapes of ``in_tensor_list``.
    """
    names = "out_tensor_list", "in_tensor_list", ""
    return front_end.call("all_to_all", group, not sync_op, out_tensor_list, in_tensor_list, names, timeout=timeout)


def global_scatter(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """Sends every row to the rank of its expert, like `alltoallv.numpy.global_scatter`, on tensors, with gradients.

    Counts that are tensors must be int64, else it raises InvalidTensorError with Paddle's text. ``use_calc_stream`` is
    ignored on CPU.
    """
    return front_end.global_scatter(x, local_count, global_count, group)


def global_gather(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """Reverses `global_scatter`: brings the rows back to the ranks that sent them, with gradients."""
    return front_end.global_gather(x, local_count, global_count, group)
