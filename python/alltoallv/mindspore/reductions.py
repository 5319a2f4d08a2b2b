"""Reductions, gathers, broadcast and barrier of ``mindspore.mint.distributed``, with its signatures and return values.

They write into tensors of the caller and return None, or a `CommHandle` with ``async_op=True``. On CPU. A gradient
passes through the outputs, which must then be tensors of their own, not parts of larger ones; with a gradient, tensors
have one size on all ranks, and ``op`` is ``"sum"``. All raise as `alltoallv.mindspore.all_to_all_v`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, ops

from alltoallv._calls import collectives
from alltoallv._calls.collectives import Ready
from alltoallv._calls.counts import Counts, shares
from alltoallv._calls.guard import guard
from alltoallv._calls.regions import Region
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.autograd import AllReduce, Broadcast, Gather, ReduceScatter, assign, tracks
from alltoallv.mindspore.exchange import check_async, enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import as_input, check_output, check_tensor, core_name, region, row_size, settle
from alltoallv.mindspore.work import CommHandle, Done


def all_reduce(tensor: Tensor, op: str = "sum", group: Group = None, async_op: bool = False) -> CommHandle | None:
    """Replaces ``tensor``, of one shape and dtype on all ranks, by the combination of all, the same bits on all ranks.

    ``op`` is ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, or for floats ``"avg"``, with the rules of
    `alltoallv.numpy.all_reduce`; sum and avg have a gradient.
    """
    comm = enter(group)
    with guard(comm, "all_reduce"):
        check_async(async_op)
        check_tensor("tensor", tensor)
        dtype = core_name(tensor.dtype)
        check_output("tensor", tensor)
        settle()
        ready = collectives.all_reduce(comm, dtype, op, region(tensor))
        wants_grad = tracks(tensor)
        if wants_grad and op not in ("sum", "avg"):
            raise InvalidParamError(f"op is {op!r}, expected 'sum' or 'avg' for a tensor with a gradient")
    if wants_grad:
        return _assigned([("tensor", tensor, AllReduce.apply(tensor, comm, op))], async_op)
    return _start(comm, ready, [tensor], async_op)


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
        regions = [region(x) for x in parts]
        if by_rows:
            regions = _split("input_split_sizes", parts[0], "input", sizes, comm.size)
        ready = collectives.reduce_scatter(comm, dtype, op, region(output), regions)
        wants_grad = tracks(output, *parts)
        if wants_grad and (op != "sum" or len({x.size for x in parts}) > 1):
            raise InvalidParamError(f"op is {op!r}, expected 'sum' of equal parts for tensors with a gradient")
    if wants_grad:
        joined = ops.concat([x.reshape(-1) for x in parts]) if len(parts) > 1 else parts[0]
        counts = [nbytes // output.itemsize for _, nbytes in regions] if by_rows else [output.size] * comm.size
        values = ReduceScatter.apply(joined, comm, counts, tuple(output.shape))
        return _assigned([("output", output, values)], async_op)
    return _start(comm, ready, [output], async_op, parts)


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
        ready = collectives.all_gather(comm, core_name(x.dtype), [region(out) for out in outs], region(x))
        wants_grad = tracks(x, *outs)
        if wants_grad and len({out.size for out in outs}) > 1:
            raise InvalidParamError("tensor_list has tensors of different sizes, expected one size for a gradient")
    if wants_grad:
        n = x.size
        flat = Gather.apply(x, comm, [n] * comm.size)
        values = [flat[j * n : (j + 1) * n] for j in range(comm.size)]
        named = [(f"tensor_list[{j}]", out, values[j].reshape(out.shape)) for j, out in enumerate(outs)]
        return _assigned(named, async_op)
    return _start(comm, ready, outs, async_op, x)


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
        regions = _split("output_split_sizes", output, "output", output_split_sizes, comm.size)
        ready = collectives.all_gather(comm, core_name(x.dtype), regions, region(x))
        wants_grad = tracks(x, output)
    if wants_grad:
        counts = [nbytes // x.itemsize for _, nbytes in regions]
        return _assigned([("output", output, Gather.apply(x, comm, counts))], async_op)
    return _start(comm, ready, [output], async_op, x)


def _split(name: str, tensor: Tensor, of: str, sizes: Counts | None, size: int) -> list[Region]:
    """Where the rows of every rank lie in one tensor; empty sizes stand for equal ones, as in MindSpore."""
    given = None if sizes is None or len(sizes) == 0 else sizes
    at, row, regions = region(tensor)[0], row_size(tensor) * tensor.itemsize, []
    for rows in shares(name, given, of, tensor.shape[0], size):
        regions.append((at, rows * row))
        at += rows * row
    return regions


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
        settle()
        ready = collectives.broadcast(comm, dtype, region(tensor), root)
        wants_grad = tracks(tensor)
    if wants_grad:
        return _assigned([("tensor", tensor, Broadcast.apply(tensor, comm, root))], async_op)
    return _start(comm, ready, [tensor], async_op)


def barrier(group: Group = None, async_op: bool = False, device_ids: Any = None) -> CommHandle | None:
    """Returns when every rank has called it; late ranks are named, in a warning and in the timeout's error.

    ``device_ids`` is accepted for MindSpore's sake and changes nothing.
    """
    comm = enter(group)
    with guard(comm, "barrier"):
        check_async(async_op)
        ready = collectives.barrier(comm)
    return _start(comm, ready, [], async_op)


def _start(
    comm: Communicator, ready: Ready, outs: list[Tensor], async_op: bool, kept: object = None
) -> CommHandle | None:
    if async_op:
        result = outs[0] if len(outs) == 1 else outs
        return CommHandle(comm, ready.submit(), (ready, outs, kept), lambda: result)
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
