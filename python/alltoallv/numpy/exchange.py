"""Data movement: the all-to-all family, gathers, broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls import experts
from alltoallv._calls.collectives import barrier_plan, broadcast_layout
from alltoallv._calls.counts import Counts, Unit, as_counts, check_gathered, gather_layout, split_layout, split_sizes
from alltoallv._calls.guard import guard
from alltoallv._calls.regions import check_gather_apart, check_lists_apart, lowest
from alltoallv._calls.repeats import arrays_of
from alltoallv._calls.request import Request, Sends, seconds
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.numpy.arrays import (
    Array,
    address,
    as_input,
    check_apart,
    check_output,
    region,
    resolve,
    row_size,
)
from alltoallv.numpy.work import Work


@dataclass(slots=True)
class Call:
    """An exchange whose arguments have passed this rank's checks."""

    communicator: Communicator
    plan: _core.Plan
    input: Array
    output: Array
    result: Any
    timeout: float
    input_address: int | None = None
    output_address: int | None = None

    def addresses(self) -> tuple[int, int]:
        return (
            address(self.input) if self.input_address is None else self.input_address,
            address(self.output) if self.output_address is None else self.output_address,
        )

    def run(self) -> Any:
        self.plan.run(*self.addresses(), self.timeout)
        return self.result

    def submit(self) -> Work:
        core = self.plan.submit(*self.addresses(), self.timeout)
        return Work(self.communicator, core, (self.input, self.output, self.result), lambda: self.result)


@overload
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
    async_op: Literal[False] = False,
    timeout: float | None = None,
) -> Array: ...
@overload
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
    async_op: Literal[True],
    timeout: float | None = None,
) -> tuple[Array | None, Work]: ...
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
) -> Array | tuple[Array | None, Work]:
    """Sends a region of ``input`` to every rank and receives one from each.

    For every rank j, with this rank called r::

        out_r[rdispls_r[j] : rdispls_r[j] + recv_counts_r[j]] = input_j[sdispls_j[r] : sdispls_j[r] + send_counts_j[r]]

    Args:
        input: Any shape, any dtype of fixed size; taken flat, or by rows of dimension 0. Copied first if it is not
            contiguous.
        send_counts, recv_counts: One integer >= 0 per rank. ``send_counts`` of rank i for j and ``recv_counts`` of rank
            j for i must agree. ``recv_counts=None`` learns them from the peers; the output is then packed.
        sdispls, rdispls: Where the regions begin; packed in rank order if left out. Send regions may overlap and leave
            gaps; receive regions may leave gaps.
        unit: What counts and displacements count: ``"element"``, or ``"row"`` of dimension 0; None: rows of an input of
            2 dimensions or more, elements of others.
        out: Where to receive; contiguous, of the input's dtype, apart from it in memory. Elements that no region covers
            keep their value. Left out, the output is allocated in shared memory, just large enough, gaps zero.
        async_op: Return ``(output, work)`` at once. With learnt counts the output is not known yet: ``(None, work)``,
            and ``work.result()`` returns it.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        Counted in elements one dimension; in rows the other dimensions of the input stay. ``out`` if given.

    Raises:
        InvalidParamError, InvalidTensorError: this rank's or a peer's arguments.
        PeerMismatchError: two ranks disagree about operator, dtype or counts; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    comm = resolve(group)
    what = None
    if type(send_counts) is list and type(recv_counts) is list and sdispls is rdispls is timeout is None:
        what = None if async_op else ("all_to_all_v", send_counts, recv_counts, unit)
    result: Array | None = comm.repeats.run(what, input, out) if what else None
    if result is not None:
        return result
    with guard(comm, "all_to_all_v"):
        limit = seconds(timeout)
        x = as_input("input", input)
        dtype = core_name(x.dtype)
        sends = Sends.read(x.shape, send_counts, sdispls, unit, comm.size)
        if recv_counts is None:
            sends.check_without_receives(rdispls, out)
        learns = recv_counts is None and sends.row > 0
        if learns:
            _core.check_send(x.size, sends.counts, sends.displs, comm.size)
            plan = _core.Plan(comm.core, "all_to_all_v", dtype, sends.counts, sends.displs, [], [], 0, sends.row)
    # Rows without elements leave no trace in an exchange of elements, so their number travels by itself: always, as a
    # rank cannot know whether its peers learn.
    told = None if sends.row else exchange_counts(send_counts, group=comm)
    if learns:
        return _run_learning(comm, plan, x, sends, async_op, limit)
    with guard(comm, "all_to_all_v"):
        if told is not None:
            recv_counts = _agreed_rows(comm, recv_counts, told.tolist())
        call = _exchange_call(comm, x, sends.with_receives(recv_counts, rdispls), out, limit)
        if what and told is None:
            arrays = arrays_of(x, x.size, call.output, call.output.shape)
            comm.repeats.keep(what, input, out, call.plan.on_arrays(arrays))
    if async_op:
        return call.result, call.submit()
    output: Array = call.run()
    return output


def _agreed_rows(comm: Communicator, recv_counts: Counts | None, told: list[int]) -> list[int]:
    """``told``, what the peers say they send, if this rank expects the same or has no expectation."""
    expected = told if recv_counts is None else as_counts("recv_counts", recv_counts, comm.size)
    for j, (sent, count) in enumerate(zip(told, expected, strict=True)):
        if sent != count:
            raise PeerMismatchError(f"rank {j} sends {sent} rows to rank {comm.rank}, which expects {count}")
    return told


def _exchange_call(comm: Communicator, x: Array, request: Request, out: Array | None, timeout: float) -> Call:
    if out is not None:
        check_output("out", out, x.dtype)
        request.check_out(out.shape)
        check_apart(out, x)
    shape = request.check(x.size, -1 if out is None else out.size)
    if out is None:
        out = memory.empty(shape, x.dtype)
        if request.has_gaps(shape):
            out.view(np.uint8)[...] = 0
    plan = _core.Plan(comm.core, "all_to_all_v", core_name(x.dtype), *request.layout, 0, max(request.row, 1))
    return Call(comm, plan, x, out, out, timeout)


def _run_learning(
    comm: Communicator, plan: _core.Plan, x: Array, sends: Sends, async_op: bool, timeout: float
) -> Array | tuple[None, Work]:
    def finish(block: _core.Block, counts: Sequence[int]) -> Array:
        return memory.from_block(block, (sum(counts) // sends.row, *sends.tail), x.dtype)

    if not async_op:
        return finish(*plan.run_learning(address(x), timeout))
    learning = plan.submit_learning(address(x), timeout)
    return None, Work(comm, learning.work, (x,), lambda: finish(*learning.take()))


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
    for which dimension 0 must divide. Returns None, or the `Work` with ``async_op=True``. Raises as `all_to_all_v`.
    """
    comm = resolve(group)
    with guard(comm, "all_to_all_single"):
        x = as_input("input", input)
        check_output("output", output, x.dtype)
        row = row_size(x)
        if output.ndim == 0 or row_size(output) != row:
            raise InvalidTensorError(
                f"output has rows of shape {output.shape[1:]}, expected {x.shape[1:]} as the input"
            )
        sends = split_sizes("input_split_sizes", input_split_sizes, "input", x.shape[0], comm.size)
        recvs = split_sizes("output_split_sizes", output_split_sizes, "output", output.shape[0], comm.size)
        check_apart(output, x)
        layout = split_layout(sends, recvs, row)
        _core.check_exchange(x.size, output.size, *layout, comm.size)
        plan = _core.Plan(comm.core, "all_to_all_single", core_name(x.dtype), *layout, 0, max(row, 1))
        call = Call(comm, plan, x, output, output, seconds(timeout))
    return _finish(call, async_op)


def _finish(call: Call, async_op: bool) -> Work | None:
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
    to where they lie. Returns None, or the `Work` with ``async_op=True``. Raises as `all_to_all_v`.
    """
    comm = resolve(group)
    with guard(comm, "all_to_all"):
        for name, arrays in (
            ("input_tensor_list", input_tensor_list),
            ("output_tensor_list", output_tensor_list),
        ):
            if not hasattr(arrays, "__len__"):
                raise InvalidParamError(f"{name} is {arrays!r}, expected {comm.size} tensors, one per rank")
            if len(arrays) != comm.size:
                raise InvalidParamError(f"{name} has {len(arrays)} tensors, expected {comm.size}, one per rank")
        xs = [as_input(f"input_tensor_list[{j}]", x) for j, x in enumerate(input_tensor_list)]
        outs = [check_output(f"output_tensor_list[{j}]", out) for j, out in enumerate(output_tensor_list)]
        dtypes = {str(array.dtype) for array in (*xs, *outs)}
        if len(dtypes) > 1:
            raise InvalidTensorError(f"Invalid usage of tensors with different dtypes: {', '.join(sorted(dtypes))}", 13)
        inputs, outputs = [region(x) for x in xs], [region(out) for out in outs]
        check_lists_apart(outputs, inputs)
        source, sdispls = lowest(inputs)
        target, rdispls = lowest(outputs)
        plan = _core.Plan(
            comm.core,
            "all_to_all",
            core_name(xs[0].dtype),
            [x.size for x in xs],
            sdispls,
            [out.size for out in outs],
            rdispls,
            byte_displs=True,
        )
        call = Call(comm, plan, xs[0], outs[0], (xs, outs), seconds(timeout), source, target)
    return _finish(call, async_op)


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
    ``async_op=True``. Raises as `all_to_all_v`.
    """
    comm = resolve(group)
    with guard(comm, "all_gather_into_tensor"):
        x = as_input("input_tensor", input_tensor)
        check_output("output_tensor", output_tensor, x.dtype)
        check_gathered("output_tensor", output_tensor.size, x.shape, comm.size)
        call = _gather_call("all_gather_into_tensor", comm, x, output_tensor, seconds(timeout))
    return _finish(call, async_op)


def all_gather(
    input: npt.ArrayLike,
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
) -> Array | tuple[Array, Work]:
    """The ``input`` of every rank, stacked: shape ``[W, *input.shape]``. Inputs have one shape and dtype.

    Returns the output, or ``(output, work)`` with ``async_op=True``. Raises as `all_to_all_v`.
    """
    comm = resolve(group)
    with guard(comm, "all_gather"):
        x = as_input("input", input)
        core_name(x.dtype)
        if out is None:
            out = memory.empty((comm.size, *x.shape), x.dtype)
        check_output("out", out, x.dtype, comm.size * x.size)
        call = _gather_call("all_gather", comm, x, out)
    if async_op:
        return out, call.submit()
    call.run()
    return out


def _gather_call(operator: str, comm: Communicator, x: Array, out: Array, timeout: float = -1.0) -> Call:
    check_gather_apart(region(out), region(x), comm.rank)
    plan = _core.Plan(comm.core, operator, core_name(x.dtype), *gather_layout(comm.size, x.size))
    return Call(comm, plan, x, out, out, timeout)


def broadcast(array: Array, root: int = 0, *, group: Communicator | None = None, async_op: bool = False) -> Work | None:
    """Copies the array of rank ``root`` into the arrays of all other ranks, in place. One shape and dtype everywhere.

    Returns None, or the `Work` with ``async_op=True``. Raises as `all_to_all_v`.
    """
    comm = resolve(group)
    with guard(comm, "broadcast"):
        check_output("array", array)
        layout = broadcast_layout(comm.rank, comm.size, array.size, root)
        plan = _core.Plan(comm.core, "broadcast", core_name(array.dtype), *layout, root)
        call = Call(comm, plan, array, array, array, -1.0)
    return _finish(call, async_op)


def barrier(*, group: Communicator | None = None, async_op: bool = False, timeout: float | None = None) -> Work | None:
    """Returns when every rank has called it. Late ranks are named, in a warning and in the timeout's error."""
    comm = resolve(group)
    with guard(comm, "barrier"):
        nothing = np.empty(0, np.uint8)
        call = Call(comm, barrier_plan(comm), nothing, nothing, None, seconds(timeout))
    return _finish(call, async_op)
