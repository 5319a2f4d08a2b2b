"""Reductions, gathers, broadcast and barrier of ``mindspore.mint.distributed``, with its signatures and return values.

They write into tensors of the caller and return None, or a `CommHandle` with ``async_op=True``. On CPU. A gradient
passes through the outputs, which must then be tensors of their own, not parts of larger ones; with a gradient, tensors
have one size on all ranks, and ``op`` is ``"sum"``. All raise as `alltoallv.mindspore.all_to_all_v`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, ops

from alltoallv import _core
from alltoallv._calls import collectives
from alltoallv._calls.collectives import Ready
from alltoallv._calls.counts import Counts, packed, scaled, shares
from alltoallv._calls.guard import guard
from alltoallv._calls.regions import Region
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.autograd import AllReduce, Broadcast, Gather, ReduceScatter, assign, tracks
from alltoallv.mindspore.calls import Call, Place
from alltoallv.mindspore.exchange import check_async, enter
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import as_input, check_output, check_tensor, core_name, executor, in_queue, row_size
from alltoallv.mindspore.work import CommHandle, Done


def all_reduce(tensor: Tensor, op: str = "sum", group: Group = None, async_op: bool = False) -> CommHandle | None:
    """Replaces ``tensor``, of one shape and dtype on all ranks, by the combination of all, the same bits on all ranks.

    ``op`` is ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, or for floats ``"avg"``, with the rules of
    `alltoallv.numpy.all_reduce`; sum and avg have a gradient.
    """
    comm = enter(group)
    given = (comm.core, "all_reduce", tensor, tensor, op)
    if async_op is False and isinstance(tensor, Tensor) and _core.reduce(*given) is not None:
        return None
    with guard(comm, "all_reduce"):
        check_async(async_op)
        check_tensor("tensor", tensor)
        dtype = core_name(tensor.dtype)
        check_output("tensor", tensor)
        call = Call(lambda place: collectives.all_reduce(comm, dtype, op, place(tensor)))
        wants_grad = tracks(tensor)
        if wants_grad and op not in ("sum", "avg"):
            raise InvalidParamError(f"op is {op!r}, expected 'sum' or 'avg' for a tensor with a gradient")
    if wants_grad:
        return _assigned([("tensor", tensor, AllReduce.apply(tensor, comm, op))], async_op)
    return call.start(comm, [tensor], async_op)


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: str = "sum", group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Combines ``input_list[j]`` of all ranks into rank j's ``output``.

    One tensor per rank, of any sizes, which are equal on all ranks. ``op`` as for `all_reduce`.
    """
    return _reduce_scatter(output, input_list, op, group, async_op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: str = "sum", group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Combines the ``input`` of all ranks, of which rank j gets the j-th of W equal parts as ``output``.

    ``input`` has W times the elements of ``output``. ``op`` as for `all_reduce`.
    """
    return _reduce_scatter(output, input, op, group, async_op)


def reduce_scatter_tensor_uneven(
    output: Tensor,
    input: Tensor,
    input_split_sizes: Counts | None = None,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
) -> CommHandle | None:
    """Combines the ``input`` of all ranks, of which rank j gets ``input_split_sizes[j]`` rows of dimension 0.

    The split sizes are equal on all ranks, and default to equal parts. ``op`` as for `all_reduce`.
    """
    return _reduce_scatter(output, input, op, group, async_op, input_split_sizes, by_rows=True)


def _reduce_scatter(
    output: Tensor,
    given: Any,
    op: str,
    group: Group,
    async_op: bool,
    sizes: Counts | None = None,
    *,
    by_rows: bool = False,
) -> CommHandle | None:
    comm = enter(group)
    with guard(comm, "reduce_scatter"):
        check_async(async_op)
        check_tensor("output", output)
        dtype = core_name(output.dtype)
        check_output("output", output)
        parts = [as_input(x) for x in _tensors(comm, "input_list", given)]
        for x in parts:
            check_output("input", x, output.dtype)
        wants_grad = tracks(output, *parts)
        if wants_grad and (op != "sum" or len({x.size for x in parts}) > 1):
            raise InvalidParamError(f"op is {op!r}, expected 'sum' of equal parts for tensors with a gradient")
        counts = [x.size for x in parts] if len(parts) > 1 else [output.size] * comm.size
        if by_rows:
            counts = _split("input_split_sizes", parts[0], "input", sizes, comm.size)
        elif len(parts) > 1 and (wants_grad or in_queue()):
            parts = [ops.concat([x.reshape(-1) for x in parts])]
        whole = not by_rows and counts == [output.size] * comm.size

        def prepare(place: Place) -> Ready:
            apart = len(parts) > 1 or whole
            inputs = [place(x) for x in parts] if apart else _cut(place(parts[0]), counts, output.itemsize)
            return collectives.reduce_scatter(comm, dtype, op, place(output), inputs)

        call = Call(prepare)
    if wants_grad:
        values = ReduceScatter.apply(parts[0], comm, counts, tuple(output.shape))
        return _assigned([("output", output, values)], async_op)
    return call.start(comm, [output], async_op, parts)


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Copies the ``tensor`` of rank j into ``tensor_list[j]`` of every rank, which has that rank's size."""
    comm = enter(group)
    with guard(comm, "all_gather"):
        check_async(async_op)
        x = as_input(tensor)
        if isinstance(tensor_list, Tensor):
            raise TypeError(f"Expected list or tuple, but got {type(tensor_list)}.")
        outs = _tensors(comm, "tensor_list", tensor_list)
        for j, out in enumerate(outs):
            check_output(f"tensor_list[{j}]", out, x.dtype)
        name = core_name(x.dtype)
        call = Call(lambda place: collectives.all_gather(comm, name, [place(out) for out in outs], place(x)))
        wants_grad = tracks(x, *outs)
        if wants_grad and len({out.size for out in outs}) > 1:
            raise InvalidParamError("tensor_list has tensors of different sizes, expected one size for a gradient")
    if wants_grad:
        n = x.size
        flat = Gather.apply(x, comm, [n] * comm.size)
        values = [flat[j * n : (j + 1) * n] for j in range(comm.size)]
        named = [(f"tensor_list[{j}]", out, values[j].reshape(out.shape)) for j, out in enumerate(outs)]
        return _assigned(named, async_op)
    return call.start(comm, outs, async_op, [x])


def all_gather_into_tensor_uneven(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Counts | None = None,
    group: Group = None,
    async_op: bool = False,
) -> CommHandle | None:
    """Concatenates the ``input`` of all ranks along dimension 0 into ``output``.

    Rank j's has ``output_split_sizes[j]`` rows, equal on all ranks; left out, all have as many.
    """
    comm = enter(group)
    with guard(comm, "all_gather"):
        check_async(async_op)
        x = as_input(input)
        check_output("output", output, x.dtype)
        counts, name = _split("output_split_sizes", output, "output", output_split_sizes, comm.size), core_name(x.dtype)
        call = Call(lambda place: collectives.all_gather(comm, name, _cut(place(output), counts, x.itemsize), place(x)))
        wants_grad = tracks(x, output)
    if wants_grad:
        return _assigned([("output", output, Gather.apply(x, comm, counts))], async_op)
    return call.start(comm, [output], async_op, [x])


def _split(name: str, tensor: Tensor, of: str, sizes: Counts | None, size: int) -> list[int]:
    """The elements of every rank's rows in one tensor; empty sizes stand for equal ones, as in MindSpore."""
    given = None if sizes is None or len(sizes) == 0 else sizes
    return scaled(shares(name, given, of, tensor.shape[0], size), row_size(tensor))


def _cut(whole: Region, counts: Sequence[int], itemsize: int) -> list[Region]:
    """The regions of so many elements, one after the other."""
    return [(whole[0] + at * itemsize, n * itemsize) for at, n in zip(packed(counts), counts, strict=True)]


def broadcast(tensor: Tensor, src: int, group: Group = None, async_op: bool = False) -> CommHandle | None:
    """Copies the ``tensor`` of one rank into the tensors of all others, of one size and dtype.

    ``src`` is that rank's number in the job; for a `Communicator`, in it. The gradient is the sum of all ranks' and
    goes to ``src``.
    """
    comm = enter(group)
    with guard(comm, "broadcast"):
        check_async(async_op)
        check_tensor("tensor", tensor)
        dtype = core_name(tensor.dtype)
        check_output("tensor", tensor)
        root = groups.rank_in(group, src)
        call = Call(lambda place: collectives.broadcast(comm, dtype, place(tensor), root))
        wants_grad = tracks(tensor)
    if wants_grad:
        return _assigned([("tensor", tensor, Broadcast.apply(tensor, comm, root))], async_op)
    return call.start(comm, [tensor], async_op)


def barrier(group: Group = None, async_op: bool = False, device_ids: Any = None) -> CommHandle | None:
    """Returns when every rank has called it; late ranks are named, in a warning and in the timeout's error.

    ``device_ids`` is accepted for MindSpore's sake and changes nothing.
    """
    comm = enter(group)
    if in_queue():
        executor.sync()
        comm = on_host(comm)
    with guard(comm, "barrier"):
        check_async(async_op)
        ready = collectives.barrier(comm)
    if async_op:
        return CommHandle(comm, ready.submit(), (ready,), lambda: None)
    ready.run()
    return None


def _assigned(named: list[tuple[str, Tensor, Tensor]], async_op: bool) -> CommHandle | None:
    """MindSpore follows the values into the outputs. A handle is then already done."""
    for name, out, values in named:
        assign(name, out, values)
    return Done(named[0][1] if len(named) == 1 else [out for _, out, _ in named]) if async_op else None


def _tensors(comm: Communicator, name: str, tensors: Any) -> list[Tensor]:
    """Of a list with one per rank, or the one for all."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"Expected list or tuple, but got {type(tensors)}.")
    for tensor in tensors:
        check_tensor(name, tensor)
    collectives.check_length(name, tensors, comm.size)
    return list(tensors)
