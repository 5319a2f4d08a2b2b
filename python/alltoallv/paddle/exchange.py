"""The all-to-all family; see `alltoallv.paddle` for what all functions have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import paddle
from paddle import Tensor

from alltoallv import _core
from alltoallv._calls import collectives, experts, signature
from alltoallv._calls.collectives import check_length, check_one_dtype
from alltoallv._calls.counts import Counts, Unit, packed
from alltoallv._calls.guard import guard
from alltoallv._calls.request import read_request
from alltoallv._calls.signature import described
from alltoallv._calls.transfer import Transfer, packing
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.paddle.autograd import AsyncExchange, Exchange, LearningExchange, run, submit
from alltoallv.paddle.group import Group, resolve
from alltoallv.paddle.tensors import (
    as_input,
    check_apart,
    check_output,
    check_tensor,
    core_name,
    from_block,
    region,
)
from alltoallv.paddle.work import Done, Task

_NAMES = ["out_tensor", "in_tensor", "out_split_sizes", "in_split_sizes"]


if TYPE_CHECKING:
    from typing_extensions import Unpack

    from alltoallv._calls.signature import ExchangeOptions


@overload
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    async_op: Literal[False] = False,
    **options: Unpack[ExchangeOptions[Tensor, Group]],
) -> Tensor: ...
@overload
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    async_op: Literal[True],
    **options: Unpack[ExchangeOptions[Tensor, Group]],
) -> tuple[Tensor | None, Task]: ...
@described(signature.all_to_all_v)
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit | None = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    comm = resolve(group)
    if comm is None:
        return (None, None) if async_op else None
    with guard(comm, "all_to_all_v"):
        limit = _core.read_timeout(timeout)
        check_tensor("input", input)
        core_name(input.dtype)
        wants_grad = paddle.is_grad_enabled() and not input.stop_gradient
        if out is not None and wants_grad:
            raise InvalidParamError("out is given for an input that wants a gradient, expected one or the other")
        x = input
        if out is not None and recv_counts is not None:
            x = as_input("input", input)
            check_output("out", out, x.dtype)
            check_apart(out, x)
        request = read_request(
            comm.size, input.shape, send_counts, recv_counts, sdispls, rdispls, unit, out, async_op and wants_grad
        )
        layout = request.layout
        index = packing(*layout[:2]) if wants_grad else None
        if index is not None:  # Paddle's own gather adds up the gradients of what is sent twice
            input = paddle.gather(input.reshape([-1]), paddle.to_tensor(index))
            layout = (layout[0], packed(layout[0]), *layout[2:])
    transfer = Transfer(comm, "all_to_all_v", layout, tuple(input.shape), request.shape, request.row, limit)
    if request.learns:
        learn = _submit_learning if async_op else LearningExchange.apply
        return learn(input, transfer, request.shape[1:])
    if out is not None:
        return submit(x, transfer, out) if async_op else run(x, transfer, out)
    if not async_op:
        return Exchange.apply(input, transfer)
    holder: list[Task] = []
    output = AsyncExchange.apply(input, transfer, holder)
    return output, holder[0]


def _submit_learning(input: Tensor, transfer: Transfer, tail: tuple[int, ...]) -> tuple[None, Task]:
    with guard(transfer.communicator, transfer.operator):
        x = as_input("input", input)
        plan = transfer.plan(core_name(x.dtype))
    learning = plan.submit_learning(x.data_ptr(), transfer.timeout)

    def finish() -> Tensor:
        block, counts = learning.take()
        return from_block(block, (sum(counts) // transfer.row, *tail), x.dtype)

    return None, Task(transfer.communicator, learning.work, (x,), finish)


def exchange_counts(send_counts: Counts, group: Group = None) -> Tensor:
    """What every rank will send to this one: entry j is rank j's ``send_counts`` for this rank. int64, ``[W]``."""
    comm = resolve(group)
    return None if comm is None else paddle.to_tensor(experts.tell_counts(comm, send_counts))


def alltoall_single(
    in_tensor: Tensor,
    out_tensor: Tensor,
    in_split_sizes: Counts | None = None,
    out_split_sizes: Counts | None = None,
    group: Group = None,
    sync_op: bool = True,
    *,
    timeout: float | None = None,
) -> Task | None:
    """Splits ``in_tensor`` along dimension 0, sends part j to rank j, concatenates what arrives into ``out_tensor``.

    Meaning of ``paddle.distributed.alltoall_single``, with the order of arguments of Paddle 2; Paddle 3 has the output
    first, so give the tensors by name. Split sizes count rows and default to equal parts, for which dimension 0 must
    divide. Not differentiable, as in Paddle; `all_to_all_v` is.

    Args:
        in_tensor: Shape ``[sum(in_split_sizes), ...]``, any dtype.
        out_tensor: Shape ``[sum(out_split_sizes), ...]``, of the same dtype; contiguous, apart from ``in_tensor``.
        in_split_sizes, out_split_sizes: One integer >= 0 per rank. Those of rank i for j and of rank j for i agree.
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Whether the call returns only when ``out_tensor`` is complete.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        As `all_to_all_v`.
    """
    comm = resolve(group)
    if comm is None:
        return None
    with guard(comm, "all_to_all_single"):
        x = as_input("in_tensor", in_tensor)
        core_name(x.dtype)
        check_output("out_tensor", out_tensor, x.dtype)
        request = _core.Request.all_to_all_single(
            comm.size, out_tensor.shape, x.shape, out_split_sizes, in_split_sizes, _NAMES
        )
        check_apart(out_tensor, x)
        shapes = tuple(x.shape), tuple(out_tensor.shape)
        transfer = Transfer(
            comm, "all_to_all_single", request.layout, *shapes, request.row, _core.read_timeout(timeout)
        )
    if not sync_op:
        return submit(x, transfer, out_tensor)[1]
    return Done(run(x, transfer, out_tensor))


def alltoall(
    in_tensor_list: Sequence[Tensor],
    out_tensor_list: list[Tensor],
    group: Group = None,
    sync_op: bool = True,
    *,
    timeout: float | None = None,
) -> Task | None:
    """Sends ``in_tensor_list[j]`` to rank j and receives ``out_tensor_list[j]`` from it.

    Meaning of ``paddle.distributed.alltoall``, with the order of arguments of Paddle 2 (see `alltoall_single`). Tensors
    of any shapes, all of one dtype, moved from and to where they lie. An empty ``out_tensor_list`` is filled with
    tensors of the shapes of ``in_tensor_list``. Returns as `alltoall_single`.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    comm = resolve(group)
    if comm is None:
        return None
    with guard(comm, "all_to_all"):
        limit = _core.read_timeout(timeout)
        ins, outs = _check_lists(comm, in_tensor_list, out_tensor_list)
        inputs, outputs = [region(x) for x in ins], [region(out) for out in outs]
        ready = collectives.all_to_all(comm, core_name(ins[0].dtype), outputs, inputs, limit, "out_tensor_list")
        for out in outs:
            out._bump_inplace_version()
        if len(out_tensor_list) == 0:
            out_tensor_list += outs
    if not sync_op:
        return Task(comm, ready.submit(), (ins, outs), lambda: outs)
    ready.run()
    return Done(outs)


def _check_lists(comm: Communicator, inputs: Any, outputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    for name, tensors in (("in_tensor_list", inputs), ("out_tensor_list", outputs)):
        if not isinstance(tensors, list | tuple):
            raise TypeError(f"{name} is a {type(tensors).__name__}, expected a list of tensors")
    if len(inputs) == 0:
        raise RuntimeError("The input tensor_list should not be empty.")
    check_length("in_tensor_list", inputs, comm.size)
    if len(outputs):
        check_length("out_tensor_list", outputs, comm.size)
    ins = [as_input(f"in_tensor_list[{j}]", x) for j, x in enumerate(inputs)]
    outs = list(outputs) if len(outputs) else [paddle.empty_like(x) for x in ins]
    for j, out in enumerate(outs):
        check_output(f"out_tensor_list[{j}]", out)
    check_one_dtype(core_name(x.dtype) for x in (*ins, *outs))
    return ins, outs
