"""The all-to-all family and gathers to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import Counts
from alltoallv._calls.expert_rows import ExpertRows
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.numpy.arrays import ADAPTER, Array, as_input, call, resolve
from alltoallv.numpy.work import Work, ending


class _Exchanges(ExpertRows[Array, Communicator | None, Work]):
    adapter, starts = ADAPTER, True

    enter = staticmethod(resolve)

    def check(self, name: str, x: Any) -> Array:
        array = as_input(name, x)
        core_name(array.dtype)
        return array

    def started(self, comm: Communicator, made: tuple[Array | None, Any, Any], input: Any) -> tuple[Array | None, Work]:
        output, pending, used = made
        if output is not None:
            return output, Work(comm, pending, (used, output), lambda: output)
        return None, Work(comm, pending.work, (used,), partial(pending.output, used))

    def numbers(self, values: npt.NDArray[np.int64]) -> Array:
        return values


front_end = _Exchanges()
all_to_all_v = front_end.all_to_all_v
exchange_counts = front_end.exchange_counts
all_to_all_single = front_end.all_to_all_single
all_gather_into_tensor = front_end.all_gather_into_tensor
global_scatter, global_gather = front_end.global_scatter, front_end.global_gather


@ending
def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[npt.ArrayLike],
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Sends ``input_tensor_list[j]`` to rank j and receives ``output_tensor_list[j]`` from it.

    Signature and meaning are those of ``torch.distributed.all_to_all``. Arrays may have any sizes but one dtype; the
    data move directly between the given arrays.
    """
    names = "output_tensor_list", "input_tensor_list", ""
    made = call("all_to_all", group, output_tensor_list, input_tensor_list, names, async_op, timeout)
    return made[1] if async_op else None


@ending
def all_gather(
    input: npt.ArrayLike,
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Gathers the ``input`` of every rank, stacked: shape ``[W, *input.shape]``. Inputs have one shape and dtype.

    Args:
        input: Any shape and any dtype of fixed size.
        out: The array for the result: contiguous, of the input's dtype, W times its elements, apart from it except for
            this rank's part. By default it is allocated in shared memory.

    Returns:
        The output, or ``(output, work)`` with ``async_op=True``.
    """
    comm = resolve(group)
    made = _core.all_gather(comm.core, out, input, async_op, timeout)
    if made is not None:
        return front_end.started(comm, made, input) if async_op else made
    return front_end.gather("all_gather", comm, out, input, async_op, timeout, ("out", "input"))


@ending
def all_gather_v(
    input: npt.ArrayLike,
    recv_counts: Counts | None = None,
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Concatenates the ``input`` of all ranks, each with any number of rows, in the order of ranks.

    Args:
        input: Any dtype of fixed size, at least 1 dimension; all dimensions but the first are equal on all ranks.
        recv_counts: The number of rows of every rank's input; None asks the peers.
        out: The array for the result: contiguous, of the input's dtype, apart from the input, with at least as many
            rows as the result. Needs ``recv_counts``. By default it is allocated in shared memory.

    Returns:
        An array of shape ``[sum of all rows, *input.shape[1:]]``; ``(output, work)`` with ``async_op=True``. Without
        ``recv_counts`` that output is None, and the array is the work's result.
    """
    comm = resolve(group)
    with guard(comm, "all_gather"):
        x = as_input("input", input)
        _core.row_size(x.shape)  # refuses an input without rows
        counts = ([len(x)] * comm.size, recv_counts, [0] * comm.size, None, "row")
    return front_end.move("all_gather", comm, x, out, counts, async_op, timeout)


@ending
def barrier(*, group: Communicator | None = None, async_op: bool = False, timeout: float | None = None) -> Work | None:
    """Returns when every rank has called it. A warning and the timeout's error name late ranks."""
    made = call("barrier", group, None, None, ("", "", ""), async_op, timeout)
    return made[1] if async_op else None
