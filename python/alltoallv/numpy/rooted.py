"""Collectives with a root: broadcast, reduce, gather, scatter."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.collectives import check_order
from alltoallv._calls.counts import Counts
from alltoallv.communicator import Communicator
from alltoallv.numpy.arrays import ADAPTER, Array, later, resolve
from alltoallv.numpy.reductions import Op
from alltoallv.numpy.work import Work

__all__ = ["broadcast", "gather", "reduce", "scatter"]


def broadcast(array: Array, root: int = 0, *, group: Communicator | None = None, async_op: bool = False) -> Work | None:
    """Copies rank ``root``'s array into the arrays of all others, in place; shape and dtype are equal on all ranks.

    Args:
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.

    Returns:
        None, or the `Work` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm, names = resolve(group), ("array", "", "")
    call = _core.call(ADAPTER, comm.core, "broadcast", array, None, root, None, None, None, names, async_op)
    return later(comm, call)[1] if async_op else None


def reduce(
    input: npt.ArrayLike,
    root: int = 0,
    op: Op = "sum",
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    order: str | None = None,
) -> Any:
    """Reduces the ``input`` of all ranks element by element, in the order of ranks, to rank ``root`` alone.

    Args:
        input, op: As for `all_reduce`; the result has the same bits.
        root: The rank that gets the result, the same on all ranks.
        out: On the root, the array for the result; may be the input itself. Ignored elsewhere.
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        timeout: Seconds to wait for the peers; default: the communicator's.
        order: ``"rank"`` or None: the order of additions, which in host memory is always that of the ranks.

    Returns:
        On the root the result, of the input's shape and dtype; None elsewhere. ``(result, work)`` with
        ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm, names = resolve(group), ("out", "input", "")
    if order is not None:
        check_order(comm, "reduce", order)
    result = _core.call(ADAPTER, comm.core, "reduce", out, input, root, op, None, None, names, async_op, timeout)
    return later(comm, result) if async_op else result


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
        input: The same dtype on all ranks; also the same shape, unless there are ``recv_counts``.
        root: The rank that gets the result, the same on all ranks.
        recv_counts: On the root, the number of rows of every rank's input; all other dimensions are equal. Ignored
            elsewhere.
        out: On the root, the array for the result: contiguous, without overlap with the input. Ignored elsewhere.
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        On the root an array of shape ``[W, *input.shape]``, with ``recv_counts`` of shape ``[sum(recv_counts),
        *input.shape[1:]]``; None elsewhere. ``(result, work)`` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm, names = resolve(group), ("out", "input", "recv_counts")
    result = _core.call(
        ADAPTER, comm.core, "gather", out, input, root, None, recv_counts, True, names, async_op, timeout
    )
    return later(comm, result) if async_op else result


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
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        None, or the `Work` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm, names = resolve(group), ("out", "input", "send_counts")
    call = _core.call(
        ADAPTER, comm.core, "scatter", out, input, root, None, send_counts, True, names, async_op, timeout
    )
    return later(comm, call)[1] if async_op else None
