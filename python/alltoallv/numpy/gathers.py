"""Gathers to all ranks, broadcast and barrier."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls.collectives import barrier_plan, broadcast_layout
from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import guard
from alltoallv._calls.regions import check_gather_apart
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.numpy.arrays import Array, as_input, check_output, region, resolve, row_size
from alltoallv.numpy.exchange import Call, adapted, finish, with_work
from alltoallv.numpy.work import Work


def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: npt.ArrayLike,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Concatenates the ``input_tensor`` of all ranks, in rank order, into ``output_tensor``.

    Signature and meaning of ``torch.distributed.all_gather_into_tensor``: inputs of one shape ``[x1, x2, ...]`` and
    dtype; the output has as many elements, in shape ``[W * x1, x2, ...]``, ``[W, x1, x2, ...]`` or any other, and the
    input may be this rank's part of it. Returns None, or the `Work` with
    ``async_op=True``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    made = _gather("all_gather_into_tensor", resolve(group), output_tensor, input_tensor, async_op, timeout)
    return made[1] if async_op else None


def all_gather(
    input: npt.ArrayLike,
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """The ``input`` of every rank, stacked: shape ``[W, *input.shape]``. Inputs have one shape and dtype.

    Returns the output, or ``(output, work)`` with ``async_op=True``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    return _gather("all_gather", resolve(group), out, input, async_op, timeout)


def all_gather_v(
    input: npt.ArrayLike,
    recv_counts: Counts | None = None,
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """The ``input`` of every rank, of any number of rows, one after the other in the order of ranks.

    Args:
        input: Any dtype of fixed size, at least 1 dimension; the dimensions behind the first are equal on all ranks.
        recv_counts: The rows of dimension 0 of every rank's input; None learns them from the peers.
        out: Where the result goes: contiguous, of the input's dtype, apart from the input, as many rows as the result
            or more. Only with ``recv_counts``. Left out, it is allocated in shared memory.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        An array of shape ``[sum of all rows, *input.shape[1:]]``; ``(output, work)`` with ``async_op=True``, of which
        the output is None where the counts are learnt: it is the work's result.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    comm = resolve(group)
    with guard(comm, "all_gather"):
        x = as_input("input", input)
        row_size(x)
        counts = ([len(x)] * comm.size, recv_counts, [0] * comm.size, None, "row")
    return adapted("all_gather", comm, x, out, counts, async_op, timeout)


def _gather(
    operator: str,
    comm: Communicator,
    out: Array | None,
    input: npt.ArrayLike,
    async_op: bool,
    timeout: float | None,
) -> Any:
    read = _core.all_gather if operator == "all_gather" else _core.all_gather_into_tensor
    stacks = operator == "all_gather"
    made = None if out is None and not stacks else read(comm.core, out, input, async_op, timeout)
    if made is not None:
        return with_work(comm, made, input) if async_op else made
    name = "out" if stacks else "output_tensor"
    with guard(comm, operator):
        limit = _core.read_timeout(timeout)
        x = as_input("input" if stacks else "input_tensor", input)
        dtype = core_name(x.dtype)
        if out is None and stacks:
            out = memory.empty((comm.size, *x.shape), x.dtype)
        target = check_output(name, out, x.dtype)
        request = _core.Request.all_gather(comm.size, x.shape, target.size, name)
        check_gather_apart(region(target), region(x), comm.rank)
        call = Call(comm, request.plan(comm.core, operator, dtype), x, target, target, limit)
    return (target, call.submit()) if async_op else call.run()


def broadcast(array: Array, root: int = 0, *, group: Communicator | None = None, async_op: bool = False) -> Work | None:
    """Copies the array of rank ``root`` into the arrays of all other ranks, in place. One shape and dtype everywhere.

    Returns None, or the `Work` with ``async_op=True``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    comm = resolve(group)
    with guard(comm, "broadcast"):
        check_output("array", array)
        layout = broadcast_layout(comm.rank, comm.size, array.size, root)
        plan = _core.Plan(comm.core, "broadcast", core_name(array.dtype), *layout, root)
        call = Call(comm, plan, array, array, array, -1.0)
    return finish(call, async_op)


def barrier(*, group: Communicator | None = None, async_op: bool = False, timeout: float | None = None) -> Work | None:
    """Returns when every rank has called it. Late ranks are named, in a warning and in the timeout's error."""
    comm = resolve(group)
    with guard(comm, "barrier"):
        nothing = np.empty(0, np.uint8)
        call = Call(comm, barrier_plan(comm), nothing, nothing, None, _core.read_timeout(timeout))
    return finish(call, async_op)
