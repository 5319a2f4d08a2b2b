"""Collectives with a root: broadcast, reduce, gather, scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls import collectives, declared
from alltoallv._calls.counts import Counts, as_counts
from alltoallv._calls.guard import guard
from alltoallv._calls.regions import Region
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.errors import InvalidTensorError
from alltoallv.numpy.arrays import Array, as_input, check_output, output_for, reduced_dtype, region, resolve
from alltoallv.numpy.exchange import finish, front_end
from alltoallv.numpy.reduce import Op, check_same_or_apart
from alltoallv.numpy.work import Work, ending


@ending
def broadcast(array: Array, root: int = 0, *, group: Communicator | None = None, async_op: bool = False) -> Work | None:
    """Copies rank ``root``'s array into the arrays of all others, in place; shape and dtype are equal on all ranks."""
    comm = resolve(group)
    if not async_op and _core.broadcast(comm.core, array, root):
        return None
    return front_end.call(declared.broadcast, comm, async_op, array, root=("root", root), name="array")


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
    comm = resolve(group)
    with guard(comm, "reduce"):
        x, limit = as_input("input", input), _core.read_timeout(timeout)
        dtype = reduced_dtype(x, op)
        if comm.rank != root:
            out = None
        else:
            out = output_for(out, x.shape, x)
            check_same_or_apart(out, x)
        call = collectives.reduce(comm, dtype, op, None if out is None else region(out), region(x), x.shape, root)
    return finish(comm, call, out, x, async_op, limit)


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
    comm = resolve(group)
    with guard(comm, "gather"):
        x, limit = as_input("input", input), _core.read_timeout(timeout)
        outputs: Sequence[Region] = ()
        if comm.rank != root:
            out = None
        else:
            shape, sizes = _parts("recv_counts", recv_counts, x.shape, comm.size)
            out = output_for(out, shape, x)
            outputs = declared.cut(region(out), sizes, out.itemsize)
        call = collectives.gather(comm, core_name(x.dtype), outputs, region(x), root)
    return finish(comm, call, out, x, async_op, limit)


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
    comm = resolve(group)
    with guard(comm, "scatter"):
        limit = _core.read_timeout(timeout)
        check_output("out", out)
        x, inputs = None, list[Region]()
        if comm.rank == root:
            if input is None:
                raise InvalidTensorError("input is None on the root, expected the parts of all ranks", 5)
            x = as_input("input", input)
            check_output("out", out, x.dtype)
            given = x.shape if send_counts is not None else out.shape
            shape, sizes = _parts("send_counts", send_counts, given, comm.size)
            if x.size != math.prod(shape):
                raise InvalidTensorError(f"input has {x.size} elements, expected {math.prod(shape)}", 9)
            inputs = declared.cut(region(x), sizes, x.itemsize)
        call = collectives.scatter(comm, core_name(out.dtype), region(out), inputs, root)
    made = finish(comm, call, out, x, async_op, limit)
    return made[1] if isinstance(made, tuple) else None


def _parts(name: str, counts: Counts | None, shape: Sequence[int], size: int) -> tuple[tuple[int, ...], list[int]]:
    """Returns the shape of all parts together and the elements of each part; without counts each has ``shape``."""
    if counts is None:
        return (size, *shape), [math.prod(shape)] * size
    rows, row = as_counts(name, counts, size), _core.row_size(shape)
    return (sum(rows), *shape[1:]), [n * row for n in rows]
