"""A linear layer split by its inputs over the ranks, whose result has the same bits for every number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alltoallv._calls.guard import guard
from alltoallv._calls.linear import leaf_products
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.graphs import is_tracing
from alltoallv.torch.eager.group import Group, device_of
from alltoallv.torch.graph import ops as ops

__all__ = ["row_parallel_linear"]


def row_parallel_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, leaves: int, group: Group = None
) -> Tensor | None:
    """Runs a linear layer split by its inputs over the ranks: sums ``input @ weight.T``, and adds ``bias``.

    Every rank divides its product into L / W products of as many input features each, and all L are added as
    `functional.all_reduce` adds ``leaves``. So every product has the same shape for every number W of ranks, and the
    sum has the same bits, as far as torch's product of one shape has: on CPU with as many threads in every rank
    (``torch.set_num_threads``), on devices of one kind.

    Args:
        input: ``[..., K]``, this rank's part of the features, in rank order; its leading dimensions are the same on all
            ranks.
        weight: ``[N, K]``, this rank's columns of the layer's weight, in the input's dtype.
        bias: ``[N]``, added once to the sum; every rank gives the same.
        leaves: L, a multiple of W, up to 4096, equal on all ranks; K is a multiple of L / W.
        group: A ProcessGroup, a `Communicator`, or None for the default group.

    Returns:
        ``[..., N]`` in the input's dtype; None on a rank outside the group. Differentiable in input, weight and bias:
        the gradient is summed over the ranks, in a tree over them.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm: Any = None
    if not is_tracing(input):
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return None
    with guard(comm, "all_reduce"):
        products = torch.stack(leaf_products(input, weight, bias, leaves, groups.world_size(group), ops.multiply))
    total: Tensor = ops.all_reduce_leaves(products, leaves, group)
    return total if bias is None else total + bias
