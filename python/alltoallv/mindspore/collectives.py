"""The collectives of ``mindspore.mint.distributed``, with its signatures, return values and error types.

They write into tensors of the caller and return None, or a `CommHandle` with ``async_op=True``. A gradient passes
through the outputs, which must then be tensors of their own, not parts of larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mindspore import Tensor

from alltoallv import _core
from alltoallv._calls.collectives import check_length, check_one_dtype
from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import guard
from alltoallv._calls.regions import check_gather_apart
from alltoallv.communicator import Communicator
from alltoallv.mindspore.autograd import (
    Gather,
    ListExchange,
    TensorTransfer,
    assign,
    gather_transfer,
    lists_exchange,
    tracks,
)
from alltoallv.mindspore.calls import Call
from alltoallv.mindspore.exchange import check_async, enter, exchange
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import (
    as_input,
    check_output,
    check_tensor,
    core_name,
    in_queue,
    region,
    settle,
    settle_apart,
)
from alltoallv.mindspore.work import CommHandle, Done


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Counts | None = None,
    input_split_sizes: Counts | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> CommHandle | None:
    """Splits ``input`` along dimension 0, sends part j to rank j, and concatenates what arrives into ``output``.

    Split sizes count rows and default to equal parts, for which dimension 0 must divide.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    comm = enter(group)
    splits = (output_split_sizes, input_split_sizes)
    given = (comm.core, output, input, *splits, False, timeout)
    if async_op is False and isinstance(input, Tensor) and _core.all_to_all_single(*given) is not None:
        return None
    with guard(comm, "all_to_all_single"):
        check_async(async_op)
        limit = _core.read_timeout(timeout)
        _check_pair("all_to_all_single", output, input, "output", "input")
        request = _core.Request.all_to_all_single(comm.size, output.shape, input.shape, *splits)
        settle_apart(output, input)
        shapes = tuple(input.shape), tuple(output.shape)
        transfer = TensorTransfer(comm, "all_to_all_single", request.layout, *shapes, request.row, limit)
    return _handle(exchange(input, transfer, output, "output", async_op), async_op)


def _handle(result: Any, async_op: bool) -> CommHandle | None:
    return result[1] if async_op else None


def _check_pair(operator: str, output: Any, input: Any, output_name: str, input_name: str) -> None:
    for name, tensor in ((input_name, input), (output_name, output)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"For {operator}, the {name.split('_')[0]} tensor must be tensor, but got {type(tensor)}")
    core_name(input.dtype)
    check_output(output_name, output, input.dtype)


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> CommHandle | None:
    """Concatenates the ``input_tensor`` of all ranks, in rank order, along dimension 0 into ``output_tensor``.

    Inputs of one shape ``[x1, x2, ...]`` and dtype; the output has shape ``[W * x1, x2, ...]``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    comm = enter(group)
    given = (comm.core, output_tensor, input_tensor, False, timeout)
    if async_op is False and isinstance(input_tensor, Tensor) and _core.all_gather_into_tensor(*given) is not None:
        return None
    with guard(comm, "all_gather_into_tensor"):
        check_async(async_op)
        limit = _core.read_timeout(timeout)
        _check_pair("all_gather_into_tensor", output_tensor, input_tensor, "output_tensor", "input_tensor")
        shape, expected = tuple(input_tensor.shape), tuple(output_tensor.shape)
        _core.Request.all_gather(comm.size, shape, output_tensor.size, "output_tensor")
        if not in_queue():
            settle()
            check_gather_apart(region(output_tensor), region(input_tensor), comm.rank)
    if tracks(input_tensor, output_tensor):
        values = Gather.apply(input_tensor, comm, [input_tensor.size] * comm.size)
        assign("output_tensor", output_tensor, values)
        return Done(output_tensor) if async_op else None
    transfer = replace(gather_transfer(comm, shape, expected), timeout=limit)
    return _handle(exchange(input_tensor, transfer, output_tensor, "output_tensor", async_op), async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> CommHandle | None:
    """Sends ``input_tensor_list[j]`` to rank j and receives ``output_tensor_list[j]`` from it.

    Tensors of any shapes, all of one dtype; what arrives keeps the shape of the receiver's tensor. Moved from and to
    where they lie.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    comm = enter(group)
    with guard(comm, "all_to_all"):
        check_async(async_op)
        limit = _core.read_timeout(timeout)
        _check_lists(comm, output_tensor_list, input_tensor_list)
        ins, outs = [as_input(x) for x in input_tensor_list], list(output_tensor_list)
        call = Call(lists_exchange(comm, outs, ins, limit))
        wants_grad = tracks(*input_tensor_list, *outs)
    if wants_grad:
        values = ListExchange.apply(comm, [tuple(out.shape) for out in outs], *input_tensor_list)
        for j, (out, value) in enumerate(zip(outs, values, strict=True)):
            assign(f"output_tensor_list[{j}]", out, value)
        return Done(outs) if async_op else None
    return call.start(comm, outs, async_op, ins)


def _check_lists(comm: Communicator, outputs: Any, inputs: Any) -> None:
    for name, tensors in (("input_tensor_list", inputs), ("output_tensor_list", outputs)):
        if not isinstance(tensors, list | tuple):
            raise TypeError(f"Expected list or tuple, but got {type(tensors)}.")
        for tensor in tensors:
            check_tensor(name, tensor)
        check_length(name, tensors, comm.size)
    for j, out in enumerate(outputs):
        check_output(f"output_tensor_list[{j}]", out)
    check_one_dtype(core_name(x.dtype) for x in (*inputs, *outputs))
