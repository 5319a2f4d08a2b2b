"""Collectives that return new tensors: differentiable, and visible to torch.compile with ``fullgraph=True``.

Inputs have one dtype on all ranks, and one shape where nothing else is said. A wrong argument of any rank, ranks that
disagree, and one that is lost or late are an `AllToAllVError` on every rank.
"""

from __future__ import annotations

from torch import Tensor

from alltoallv._calls.collectives import check_no_order
from alltoallv._calls.counts import Counts, even_split
from alltoallv._calls.guard import guard
from alltoallv.torch.api.exchange import all_to_all_v
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.group import Group, device_of
from alltoallv.torch.eager.observers import is_tracing
from alltoallv.torch.eager.tensors import row_size
from alltoallv.torch.graph import ops as ops


def all_to_all_single(
    input: Tensor,
    output_split_sizes: Counts | None = None,
    input_split_sizes: Counts | None = None,
    group: Group = None,
) -> Tensor:
    """Does what `alltoallv.torch.all_to_all_single` does, and returns ``[sum(output_split_sizes), ...]``.

    Split sizes count rows of dimension 0; both left out mean equal parts.

    Raises:
        ValueError: dimension 0 does not divide by the number of ranks, and equal parts are wanted.
    """
    comm = None
    if not is_tracing(input):
        group = comm = groups.resolve(group, device_of(input))
        if comm is None:
            return None  # type: ignore[return-value]
    with guard(comm, "all_to_all_v"):
        row_size(input)  # raises for a tensor without rows
        rows, size = input.shape[0], groups.world_size(group)
        if input_split_sizes is None:
            input_split_sizes = even_split("input", rows, size)
        if output_split_sizes is None:
            output_split_sizes = [rows // size] * size
    return all_to_all_v(input, input_split_sizes, output_split_sizes, unit="row", group=group)


def all_gather(input: Tensor, group: Group = None, *, order: str | None = None) -> Tensor:
    """Returns all ranks' inputs, ``[n, ...]``, concatenated: ``[W * n, ...]``. The gradient is a reduce-scatter.

    ``order``: that of the gradient's sums, as in `reduce_scatter`.
    """
    return ops.all_gather(input, groups.world_size(group), order or "", group)


def reduce_scatter(input: Tensor, group: Group = None, *, order: str | None = None) -> Tensor:
    """Sums all ranks' inputs, ``[W * n, ...]``; each keeps its part, ``[n, ...]``. The gradient is an all-gather.

    ``order="rank"`` adds in the order of ranks on devices too, as in `alltoallv.torch.all_reduce`.

    Raises:
        ValueError: dimension 0 does not divide by the number of ranks.
    """
    return ops.reduce_scatter(input, groups.world_size(group), order or "", group)


def all_reduce(input: Tensor, group: Group = None, *, order: str | None = None, leaves: int | None = None) -> Tensor:
    """Returns the sum of all ranks' inputs, in their shape. The gradient is also such a sum, in the same ``order``.

    ``order="rank"`` adds in the order of ranks on devices too, as in `alltoallv.torch.all_reduce`.

    ``leaves``: a multiple L of the number W of ranks, equal on all of them, up to 4096. The input is ``[L / W, ...]``,
    this rank's share of L tensors, and the result, ``[...]``, is the sum of all L in a tree over L alone: neighbours
    in pairs, then the results in pairs, and so on; 16-bit floats in float32, rounded once. So it has the same bits for
    every W, on every device. The gradient of each leaf is the sum of the ranks' gradients, in such a tree over the
    ranks.

    Raises:
        InvalidParamError, InvalidTensorError: ``leaves`` is no multiple of W, or not that of the input's dimension 0.
    """
    if leaves is not None:
        if order is not None:
            check_no_order(None if is_tracing(input) else groups.resolve(group, device_of(input)), order, leaves)
        result: Tensor = ops.all_reduce_leaves(input, leaves, group)
        return result
    return ops.all_reduce(input, order or "", group)
