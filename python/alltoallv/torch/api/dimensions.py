"""Exchanges of one dimension for another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls.dimensions import Sizes, read_swap
from alltoallv._calls.guard import guard
from alltoallv._calls.regions import check_untracked
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.graphs import is_tracing
from alltoallv.torch.eager.group import Group, device_of
from alltoallv.torch.eager.tensors import check_output, check_tensor, needs_grad
from alltoallv.torch.eager.work import Done
from alltoallv.torch.graph import ops as ops

__all__ = ["all_to_all_nd", "heads_to_sequence", "sequence_to_heads"]


def all_to_all_nd(
    input: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: Group = None,
    *,
    scatter_sizes: Sizes = None,
    gather_sizes: Sizes = None,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges one dimension of a tensor for another: ranks that have parts of the one get parts of the other.

    For every rank r:

        out_r = concatenate(over j, along gather_dim, split(input_j, scatter_sizes, along scatter_dim)[r])

    What goes to a rank is copied from where it lies in the input to where it belongs in the output: nothing is permuted
    before or after. On NPUs and GPUs, whose libraries move parts in one piece, they are copied before
    and after.

    Args:
        input: At least 2 dimensions, any dense dtype; equal on all ranks but for dimension ``gather_dim``.
            Read in place where what goes to a rank lies in rows at one distance, else copied first.
        scatter_dim, gather_dim: Two dimensions, the same on all ranks; below 0 they count from the last.
        group: A ProcessGroup, a `Communicator`, or None for all ranks.
        scatter_sizes: The lengths along ``scatter_dim`` that every rank gets, one per rank, or their sum. Default, and
            for a sum: ceil(n / W) each, the last ones smaller or empty, as `reshard` and DTensor divide.
        gather_sizes: The lengths along ``gather_dim`` that the ranks have, one per rank, or their sum, divided in the
            same way. Default: all have as much as this one.
        out: Where to receive: contiguous, of the result's shape and the input's dtype, apart from it in memory. An
            input that is not contiguous is copied first then. Not for an input that wants a gradient.
        async_op: Return ``(output, handle)`` at once.

    Returns:
        ``out`` if given, else a new tensor: the shape of ``input`` with ``scatter_sizes[r]`` and ``sum(gather_sizes)``
        along the two dimensions. Differentiable, to any order, and an operator
        of its own in a graph of torch.compile. None on a rank outside the group.

    Raises:
        TypeError: ``input`` is no tensor.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, is wrong.
        PeerMismatchError: two ranks disagree about dimensions, sizes or dtype; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    if not is_dynamo_compiling() and (shared := groups.on_shm(group)) is not None:
        dims = scatter_dim, gather_dim, scatter_sizes, gather_sizes
        result = _core.all_to_all_nd(shared.core, input, out, *dims, async_op)
        if result is not None and result is not NotImplemented:
            return calls.started(shared, result, input) if async_op else result
    comm = None
    if is_tracing(input):
        if not (torch.compiler.is_compiling() or input.is_meta):
            groups.resolve(group, device_of(input))  # made before the graph runs, where possible
        rank, size = groups.rank_in(group), groups.world_size(group)
    else:
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return (None, None) if async_op else None
        rank, size = comm.rank, comm.size
    with guard(comm, "all_to_all_nd"):
        if not isinstance(input, Tensor):
            check_tensor("input", input)  # it raises the error
        swap = read_swap(input.shape, rank, size, scatter_dim, gather_dim, scatter_sizes, gather_sizes)
        if out is not None:
            check_untracked(needs_grad(input), out)
            check_output("out", out, input.dtype)
            _core.check_shape("out", out.shape, swap.shape_out)
    sizes = swap.scatter_sizes, swap.gather_sizes
    operands = input, swap.scatter, swap.gather, *sizes, rank, group if comm is None else comm
    if comm is None or not (async_op or out is not None):
        output = ops.all_to_all_nd(*operands)
        output = output if out is None else out.copy_(output)
        return (output, Done(output)) if async_op else output
    with guard(comm, "all_to_all_nd"):
        operation = calls.exchange_dimensions(comm, swap, input, out)
    if needs_grad(input):
        operation.result = ops.all_to_all_nd.ran(operation.result, *operands)
    if async_op:
        return operation.result, operation.submit()
    operation.run()
    return operation.result


def sequence_to_heads(
    input: Tensor,
    group: Group = None,
    *,
    sequence: Sizes = None,
    heads: Sizes = None,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges a part of the sequence with all heads for the whole sequence with a part of the heads.

    It is what attention needs whose tensors are divided along the sequence (Ulysses): `all_to_all_nd` with
    ``scatter_dim=heads_dim`` and ``gather_dim=sequence_dim``. `heads_to_sequence` brings the result back.

    Args:
        input: In the default order ``[batch, part of the sequence, heads, ...]``.
        group: A ProcessGroup, a `Communicator`, or None for all ranks.
        sequence: The lengths of the ranks' parts, one per rank, or their sum. Default: all are as long as this one.
        heads: How many heads every rank gets, one per rank, or their sum. Default: ceil(heads / W), the last ones fewer
            or none.
        sequence_dim, heads_dim: The two dimensions.
        out, async_op: See `all_to_all_nd`.

    Returns:
        ``[batch, sequence, part of the heads, ...]``, as `all_to_all_nd`.

    Raises:
        AllToAllVError: as `all_to_all_nd`.
    """
    sizes = {"scatter_sizes": heads, "gather_sizes": sequence}
    return all_to_all_nd(input, heads_dim, sequence_dim, group, out=out, async_op=async_op, **sizes)


def heads_to_sequence(
    input: Tensor,
    group: Group = None,
    *,
    sequence: Sizes = None,
    heads: Sizes = None,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges the whole sequence with a part of the heads for a part of the sequence with all heads.

    See `sequence_to_heads`, whose transpose it is.

    Args:
        input: In the default order ``[batch, sequence, part of the heads, ...]``.
        group: A ProcessGroup, a `Communicator`, or None for all ranks.
        sequence: The lengths of the ranks' parts, one per rank, or their sum. Default: ceil(n / W), the last ones
            shorter or empty.
        heads: How many heads the ranks have, one per rank, or their sum. Default: all have as many as this one.
        sequence_dim, heads_dim: The two dimensions.
        out, async_op: See `all_to_all_nd`.

    Returns:
        ``[batch, part of the sequence, heads, ...]``, as `all_to_all_nd`.

    Raises:
        AllToAllVError: as `all_to_all_nd`.
    """
    sizes = {"scatter_sizes": sequence, "gather_sizes": heads}
    return all_to_all_nd(input, sequence_dim, heads_dim, group, out=out, async_op=async_op, **sizes)
