"""Data movement: the all-to-all family, gathers, broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls import collectives, experts, signature
from alltoallv._calls.collectives import check_length, check_one_dtype
from alltoallv._calls.counts import Counts, Unit
from alltoallv._calls.guard import guard
from alltoallv._calls.signature import described
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.numpy.arrays import (
    Array,
    address,
    as_input,
    check_apart,
    check_output,
    new_output,
    region,
    resolve,
)
from alltoallv.numpy.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from alltoallv._calls.signature import ExchangeOptions


@dataclass(slots=True)
class Call:
    """An exchange whose arguments have passed this rank's checks."""

    communicator: Communicator
    plan: _core.Plan
    input: Array
    output: Array
    result: Any
    timeout: float

    def run(self) -> Any:
        self.plan.run(address(self.input), address(self.output), self.timeout)
        return self.result

    def submit(self) -> Work:
        core = self.plan.submit(address(self.input), address(self.output), self.timeout)
        return Work(self.communicator, core, (self.input, self.output, self.result), lambda: self.result)


@overload
def all_to_all_v(
    input: npt.ArrayLike,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    async_op: Literal[False] = False,
    **options: Unpack[ExchangeOptions[Array, Communicator | None]],
) -> Array: ...
@overload
def all_to_all_v(
    input: npt.ArrayLike,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    async_op: Literal[True],
    **options: Unpack[ExchangeOptions[Array, Communicator | None]],
) -> tuple[Array | None, Work]: ...
@described(signature.all_to_all_v)
def all_to_all_v(
    input: npt.ArrayLike,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit | None = None,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    comm = resolve(group)
    made = _core.all_to_all_v(
        comm.core, input, out, send_counts, recv_counts, sdispls, rdispls, unit, async_op, timeout
    )
    if made is None:
        counts = (send_counts, recv_counts, sdispls, rdispls, unit)
        return adapted("all_to_all_v", comm, input, out, counts, async_op, timeout)
    return with_work(comm, made, input) if async_op else made


def adapted(
    operator: str,
    comm: Communicator,
    input: npt.ArrayLike,
    out: Array | None,
    counts: tuple[Any, Any, Any, Any, Any],
    async_op: bool,
    timeout: float | None,
) -> Any:
    """A call whose arrays have to be looked at, or whose rows have no elements."""
    with guard(comm, operator):
        limit = _core.read_timeout(timeout)
        x = as_input("input", input)
        if out is not None:
            check_output("out", out, x.dtype)
            check_apart(out, x)
        request = _core.Request.all_to_all_v(comm.size, x.shape, *counts, out=None if out is None else out.shape)
        plan = request.plan(comm.core, operator, core_name(x.dtype))
        if out is None and not request.learns:
            out = new_output(request.shape, x.dtype, request.has_gaps)
    if out is None:
        if async_op:
            return with_work(comm, (None, plan.submit_learning(address(x), limit)), x)
        block, told = plan.run_learning(address(x), limit)
        return memory.from_block(block, request.shape_for(told), x.dtype)
    call = Call(comm, plan, x, out, out, limit)
    return (out, call.submit()) if async_op else call.run()


def with_work(comm: Communicator, made: tuple[Any, Any], input: Any) -> tuple[Array | None, Work]:
    """What an asynchronous call of the core has returned, with the handle of this front end."""
    output, pending = made
    if output is not None:
        return output, Work(comm, pending, (input, output), lambda: output)

    def finish() -> Array:
        block, _ = pending.take()
        return memory.from_block(block, pending.shape(), input.dtype)

    return None, Work(comm, pending.work, (input,), finish)


def exchange_counts(send_counts: Counts, group: Communicator | None = None) -> npt.NDArray[np.int64]:
    """What every rank will send to this one: entry j is rank j's ``send_counts`` entry for this rank. Shape ``[W]``."""
    comm = resolve(group)
    return experts.tell_counts(comm, send_counts)


def all_to_all_single(
    output: Array,
    input: npt.ArrayLike,
    output_split_sizes: Counts | None = None,
    input_split_sizes: Counts | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Splits ``input`` along dimension 0, sends part j to rank j, and concatenates what arrives into ``output``.

    Signature and meaning of ``torch.distributed.all_to_all_single``. Split sizes count rows and default to equal parts,
    for which dimension 0 must divide. Returns None, or the `Work` with ``async_op=True``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    comm = resolve(group)
    splits = (output_split_sizes, input_split_sizes)
    made = _core.all_to_all_single(comm.core, output, input, *splits, async_op, timeout)
    if made is not None:
        return with_work(comm, made, input)[1] if async_op else None
    with guard(comm, "all_to_all_single"):
        limit = _core.read_timeout(timeout)
        x = as_input("input", input)
        check_output("output", output, x.dtype)
        request = _core.Request.all_to_all_single(comm.size, output.shape, x.shape, *splits)
        check_apart(output, x)
        plan = request.plan(comm.core, "all_to_all_single", core_name(x.dtype))
        call = Call(comm, plan, x, output, output, limit)
    return finish(call, async_op)


def finish(call: Call, async_op: bool) -> Work | None:
    if async_op:
        return call.submit()
    call.run()
    return None


def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[npt.ArrayLike],
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Sends ``input_tensor_list[j]`` to rank j and receives ``output_tensor_list[j]`` from it.

    Signature and meaning of ``torch.distributed.all_to_all``: arrays of any sizes, all of one dtype, moved from and
    to where they lie. Returns None, or the `Work` with ``async_op=True``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    comm = resolve(group)
    with guard(comm, "all_to_all"):
        check_length("input_tensor_list", input_tensor_list, comm.size)
        check_length("output_tensor_list", output_tensor_list, comm.size)
        xs = [as_input(f"input_tensor_list[{j}]", x) for j, x in enumerate(input_tensor_list)]
        outs = [check_output(f"output_tensor_list[{j}]", out) for j, out in enumerate(output_tensor_list)]
        check_one_dtype(str(array.dtype) for array in (*xs, *outs))
        regions = [region(out) for out in outs], [region(x) for x in xs]
        call = collectives.all_to_all(comm, core_name(xs[0].dtype), *regions, _core.read_timeout(timeout))
    if async_op:
        return Work(comm, call.submit(), (xs, outs), lambda: outs)
    call.run()
    return None
