"""Collectives with a root: broadcast, reduce, gather, scatter."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from alltoallv._calls.counts import Counts
from alltoallv.communicator import Communicator
from alltoallv.numpy.arrays import Array, call
from alltoallv.numpy.reduce import Op
from alltoallv.numpy.work import Work, ending


@ending
def broadcast(array: Array, root: int = 0, *, group: Communicator | None = None, async_op: bool = False) -> Work | None:
    """Copies rank ``root``'s array into the arrays of all others, in place; shape and dtype are equal on all ranks."""
    made = call("broadcast", group, array, None, ("array", "", ""), async_op, None, root=root)
    return made[1] if async_op else None


@ending
def reduce(
    input: npt.ArrayLike,
    root: int = 0,
    op: Op = "sum",
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Reduces the ``input`` of all ranks element by element, in the order of ranks, to rank ``root`` alone.

    Args:
        input, op: As for `all_reduce`; the result has the same bits.
        root: The rank that gets the result, the same on all ranks.
        out: On the root, the array for the result; may be the input itself. Ignored elsewhere.

    Returns:
        On the root the result, of the input's shape and dtype; None elsewhere. ``(result, work)`` with
        ``async_op=True``.
    """
    return call("reduce", group, out, input, ("out", "input", ""), async_op, timeout, root=root, reduce_op=op)


@ending
def gather(
    input: npt.ArrayLike,
    root: int = 0,
    recv_counts: Counts | None = None,
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Gathers the ``input`` of every rank, in the order of ranks, on rank ``root`` alone.

    Args:
        input: The same dtype on all ranks; the same shape, too, unless there are ``recv_counts``.
        root: The rank that gets the result, the same on all ranks.
        recv_counts: On the root, the number of rows of every rank's input; all other dimensions are equal. Ignored
            elsewhere.
        out: On the root, the array for the result: contiguous, without overlap with the input. Ignored elsewhere.

    Returns:
        On the root an array of shape ``[W, *input.shape]``, with ``recv_counts`` of shape ``[sum(recv_counts),
        *input.shape[1:]]``; None elsewhere. ``(result, work)`` with ``async_op=True``.
    """
    terms: dict[str, Any] = {"root": root, "counts": recv_counts, "whole": True}
    return call("gather", group, out, input, ("out", "input", "recv_counts"), async_op, timeout, **terms)


@ending
def scatter(
    out: Array,
    input: npt.ArrayLike | None = None,
    root: int = 0,
    send_counts: Counts | None = None,
    *,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Splits the ``input`` of rank ``root`` and gives every rank its part in ``out``.

    Args:
        out: The array for this rank's part; contiguous.
        input: On the root, W parts of the shape of its ``out``, one after the other. Ignored elsewhere.
        root: The rank that provides the input, the same on all ranks.
        send_counts: On the root, the number of input rows for each rank, instead of equal parts.

    Returns:
        None, or the `Work` with ``async_op=True``.
    """
    terms: dict[str, Any] = {"root": root, "counts": send_counts, "whole": True}
    made = call("scatter", group, out, input, ("out", "input", "send_counts"), async_op, timeout, **terms)
    return made[1] if async_op else None
