"""Reductions, in the fixed rank order 0, 1, ..., W-1: every rank gets the same bits. And collectives with a root."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls.collectives import check_no_order, check_order, leaf_products
from alltoallv._calls.counts import Counts, even_parts, packed
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.numpy.arrays import ADAPTER, Array, Work, address, as_input, check_output, later, region, resolve

__all__ = ["all_reduce", "broadcast", "gather", "reduce", "reduce_scatter", "row_parallel_linear", "scan", "scatter"]


Op = Literal["sum", "avg", "min", "max", "prod", "band", "bor", "bxor"]


def all_reduce(
    input: npt.ArrayLike,
    op: Op = "sum",
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    order: str | None = None,
    leaves: int | None = None,
) -> Any:
    """Reduces the ``input`` of all ranks element by element.

    Args:
        input: One shape and dtype on all ranks: integers, bool, float16, bfloat16, float32, float64 or
            complex.
        op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"``; for floats also ``"avg"``; for integers and bool also the
            bitwise ``"band"``, ``"bor"``, ``"bxor"``; for complex numbers only ``"sum"`` and ``"avg"``. Integers wrap;
            float16 and bfloat16 accumulate in float32 and are rounded once; min and max propagate NaN; for bool, sum
            and max are logical or, prod and min logical and.
        out: The array for the result; may be the input itself. By default it is allocated in shared memory.
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        timeout: Seconds to wait for the peers; default: the communicator's.
        order: ``"rank"`` or None: the order of additions, which in host memory is always that of the ranks.
        leaves: A multiple L of the number W of ranks, equal on all of them, up to 4096. The input is ``[L / W, ...]``,
            this rank's share of L arrays, and the result, ``[...]``, combines all L in a tree over L alone: neighbours
            in pairs, then the results in pairs, and so on. So it has the same bits for every W. ``"avg"`` divides by L.

    Returns:
        The result, of the input's shape (with ``leaves`` without dimension 0) and dtype, or ``(result, work)`` with
        ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm, names = resolve(group), ("out", "input", "")
    if order is not None:
        check_order(comm, "all_reduce", order)
    if leaves is not None:
        check_no_order(comm, order, leaves)
    elif not async_op and timeout is None:  # the shortest way: small reductions are many
        result: Array | None = _core.reduce(comm.core, "all_reduce", input, out, op)
        if result is not None:
            return result
    reduced = _core.call(
        ADAPTER, comm.core, "all_reduce", out, input, None, op, None, None, names, async_op, timeout, leaves
    )
    return later(comm, reduced) if async_op else reduced


def reduce_scatter(
    input: npt.ArrayLike,
    recv_counts: Counts | None = None,
    op: Op = "sum",
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    order: str | None = None,
) -> Any:
    """Reduces the ``input`` of all ranks and gives rank j its part of the rows of dimension 0.

    Args:
        input, op: As for `all_reduce`.
        recv_counts: Rows that each rank gets, equal on all ranks; their sum is dimension 0. Default: equal parts.
        out: Shape ``[recv_counts[rank], *input.shape[1:]]``. By default it is allocated in shared memory.
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        timeout: Seconds to wait for the peers; default: the communicator's.
        order: ``"rank"`` or None: the order of additions, which in host memory is always that of the ranks.

    Returns:
        This rank's part, or ``(part, work)`` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm, names = resolve(group), ("out", "input", "recv_counts")
    if order is not None:
        check_order(comm, "reduce_scatter", order)
    result = _core.call(
        ADAPTER, comm.core, "reduce_scatter", out, input, None, op, recv_counts, True, names, async_op, timeout
    )
    return later(comm, result) if async_op else result


def scan(
    input: npt.ArrayLike,
    op: Op = "sum",
    *,
    exclusive: bool = False,
    out: Array | None = None,
    group: Communicator | None = None,
    timeout: float | None = None,
) -> Array | None:
    """Reduces the ``input`` of ranks 0 to this one, in this order: the last rank gets the result of `all_reduce`.

    Every rank reduces a share of the elements for all of them, so that a rank moves only twice its input.

    Args:
        input, op: As for `all_reduce`.
        exclusive: Leaves this rank's own input out. Rank 0 then has no result.
        out: The array for the result: contiguous, of the input's size and dtype; may be the input itself. By default it
            is allocated in shared memory.
        group: A `Communicator`, or None for the default one.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        The result, of the input's shape and dtype. None on rank 0 of an exclusive scan, which does not change ``out``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm = resolve(group)
    with guard(comm, "scan"):
        x, limit = as_input("input", input), _core.read_timeout(timeout)
        dtype = core_name(x.dtype)
        _core.check_reduction(op, dtype, x.dtype)
        if out is None:
            out = memory.empty(x.shape, x.dtype)
        check_output("out", out, x.dtype, x.size)
        _core.check_same_or_apart(region(out), region(x))
        parts = even_parts(x.size, comm.size)
        own_count = parts[comm.rank]
        shares_of_all, partial_results = [memory.empty((comm.size, own_count), x.dtype) for _ in range(2)]
        there, here = (parts, packed(parts)), ([own_count] * comm.size, packed([own_count] * comm.size))
        scatter_plan = _core.Plan(comm.core, "scan", dtype, *there, *here)
        return_plan = _core.Plan(comm.core, "scan", dtype, *here, *there)
        into = out if comm.rank or not exclusive else np.empty_like(x)
    comm.core.reduce("scan", dtype, op, 0, 0, parts, limit, exclusive=bool(exclusive), shape=x.shape, moves=False)
    scatter_plan.run(address(x), address(shares_of_all), limit)
    at = [address(shares_of_all) + j * own_count * x.itemsize for j in range(comm.size)]
    for j in range(comm.size - exclusive):
        _core.kernel_reduce(
            dtype, op, address(partial_results) + (j + exclusive) * own_count * x.itemsize, at[: j + 1], own_count
        )
    return_plan.run(address(partial_results), address(into), limit)
    return out if into is out else None


def row_parallel_linear(
    input: npt.ArrayLike,
    weight: npt.ArrayLike,
    bias: npt.ArrayLike | None = None,
    *,
    leaves: int,
    group: Communicator | None = None,
) -> Any:
    """Runs a linear layer split by its inputs over the ranks: sums ``input @ weight.T``, and adds ``bias``.

    Every rank divides its product into L / W products of as many input features each, and all L are added as
    `all_reduce` adds ``leaves``. So every product has the same shape for every number W of ranks, and the sum has the
    same bits, as far as NumPy's product of one shape has: with as many threads of its library in every rank.

    Args:
        input: ``[..., K]``, this rank's part of the features, in rank order; its leading dimensions are the same on all
            ranks.
        weight: ``[N, K]``, this rank's columns of the layer's weight, in the input's dtype.
        bias: ``[N]``, added once to the sum; every rank gives the same.
        leaves: L, a multiple of W, up to 4096, equal on all ranks; K is a multiple of L / W.
        group: A `Communicator`, or None for the default one.

    Returns:
        ``[..., N]`` in the input's dtype.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm = resolve(group)
    with guard(comm, "all_reduce"):
        b = None if bias is None else np.asarray(bias)
        x: Array = as_input("input", input)
        w: Array = as_input("weight", weight)
        products: list[Array] = leaf_products(x, w, b, leaves, comm.size, multiply)
    total: Array = all_reduce(np.stack(products), leaves=leaves, group=comm)
    return total if b is None else total + b


def multiply(x: Array, weight: Array) -> Array:
    product: Array = np.ascontiguousarray(x) @ np.ascontiguousarray(weight).T
    return product


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
        On the root an array of shape ``[W, *input.shape]``, with ``recv_counts`` of shape
        ``[sum(recv_counts), *input.shape[1:]]``; None elsewhere. ``(result, work)`` with ``async_op=True``.

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
