"""Exchanges of one dimension for another."""

from __future__ import annotations

from typing import Any

from alltoallv._calls.dimensions import Sizes
from alltoallv.communicator import Communicator
from alltoallv.numpy.arrays import Array
from alltoallv.numpy.exchange import front_end

__all__ = ["all_to_all_nd", "heads_to_sequence", "sequence_to_heads"]


def all_to_all_nd(
    input: Array,
    scatter_dim: int,
    gather_dim: int,
    group: Communicator | None = None,
    *,
    scatter_sizes: Sizes = None,
    gather_sizes: Sizes = None,
    out: Array | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges one dimension of a tensor for another: ranks that have parts of the one get parts of the other.

    For every rank r:

        out_r = concatenate(over j, along gather_dim, split(input_j, scatter_sizes, along scatter_dim)[r])

    What goes to a rank is copied from where it lies in the input to where it belongs in the output: nothing is permuted
    before or after.

    Args:
        input: At least 2 dimensions, any dense dtype; equal on all ranks but for dimension ``gather_dim``.
            Read in place where what goes to a rank lies in rows at one distance, else copied first.
        scatter_dim, gather_dim: Two dimensions, the same on all ranks; below 0 they count from the last.
        group: A `Communicator`, or None for the default one.
        scatter_sizes: The lengths along ``scatter_dim`` that every rank gets, one per rank, or their sum. Default, and
            for a sum: ceil(n / W) each, the last ones smaller or empty, as `reshard` and DTensor divide.
        gather_sizes: The lengths along ``gather_dim`` that the ranks have, one per rank, or their sum, divided in the
            same way. Default: all have as much as this one.
        out: Where to receive: contiguous, of the result's shape and the input's dtype, apart from it in memory. An
            input that is not contiguous is copied first then.
        async_op: Return ``(output, handle)`` at once.

    Returns:
        ``out`` if given, else a new array: the shape of ``input`` with ``scatter_sizes[r]`` and ``sum(gather_sizes)``
        along the two dimensions.

    Raises:
        TypeError: ``input`` is no tensor.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, is wrong.
        PeerMismatchError: two ranks disagree about dimensions, sizes or dtype; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    return front_end.all_to_all_nd(input, scatter_dim, gather_dim, group, scatter_sizes, gather_sizes, out, async_op)


def sequence_to_heads(
    input: Array,
    group: Communicator | None = None,
    *,
    sequence: Sizes = None,
    heads: Sizes = None,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    out: Array | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges a part of the sequence with all heads for the whole sequence with a part of the heads.

    It is what attention needs whose tensors are divided along the sequence (Ulysses): `all_to_all_nd` with
    ``scatter_dim=heads_dim`` and ``gather_dim=sequence_dim``. `heads_to_sequence` brings the result back.

    Args:
        input: In the default order ``[batch, part of the sequence, heads, ...]``.
        group: A `Communicator`, or None for the default one.
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
    input: Array,
    group: Communicator | None = None,
    *,
    sequence: Sizes = None,
    heads: Sizes = None,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    out: Array | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges the whole sequence with a part of the heads for a part of the sequence with all heads.

    See `sequence_to_heads`, whose transpose it is.

    Args:
        input: In the default order ``[batch, sequence, part of the heads, ...]``.
        group: A `Communicator`, or None for the default one.
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
