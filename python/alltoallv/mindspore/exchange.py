"""The operator itself; see `alltoallv.mindspore` for what all functions have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from mindspore import Tensor, ops
from mindspore.graph import jit_trace

from alltoallv import _core
from alltoallv._calls import experts, signature
from alltoallv._calls.counts import Counts, Unit, packed
from alltoallv._calls.guard import guard
from alltoallv._calls.request import read_request
from alltoallv._calls.signature import described
from alltoallv._calls.transfer import packing
from alltoallv.communicator import Communicator
from alltoallv.mindspore import group as groups
from alltoallv.mindspore import tensors
from alltoallv.mindspore.autograd import (
    AsyncExchange,
    Exchange,
    LearningExchange,
    TensorTransfer,
    assign,
    run_learning,
    tracks,
)
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import (
    as_input,
    check_output,
    check_tensor,
    core_name,
    from_block,
    settle_apart,
)
from alltoallv.mindspore.work import CommHandle, Done

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
) -> tuple[Tensor | None, CommHandle]: ...
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
    comm = enter(group)
    counts = (send_counts, recv_counts, sdispls, rdispls, unit)
    if async_op is False and isinstance(input, Tensor):
        made = _core.all_to_all_v(comm.core, input, out, *counts, False, timeout)
        if made is not None:
            return made
    with guard(comm, "all_to_all_v"):
        check_async(async_op)
        limit = _core.read_timeout(timeout)
        check_tensor("input", input)
        core_name(input.dtype)
        wants_grad = tracks(input)
        if out is not None and recv_counts is not None:
            check_output("out", out, input.dtype)
            settle_apart(out, input)
        request = read_request(comm.size, input.shape, *counts, out, async_op and wants_grad)
        layout = request.layout
        index = packing(*layout[:2]) if wants_grad else None
        if index is not None:  # MindSpore's own gather adds up the gradients of what is sent twice
            input = ops.gather(input.reshape(-1), Tensor(index), 0)
            layout = (layout[0], packed(layout[0]), *layout[2:])
    transfer = TensorTransfer(comm, "all_to_all_v", layout, tuple(input.shape), request.shape, request.row, limit)
    if request.learns:
        tail = request.shape[1:]
        if async_op:
            return _submit_learning(input, transfer, tail)
        return LearningExchange.apply(input, transfer, tail) if wants_grad else run_learning(input, transfer, tail)[0]
    return exchange(input, transfer, out, "out", async_op)


def enter(group: Group) -> Communicator:
    """The communicator of a call; refuses where MindSpore would record the call's values instead of the call."""
    if getattr(jit_trace, "_using_trace", False):
        raise RuntimeError(
            "alltoallv.mindspore cannot be traced: use capture_mode='bytecode', "
            "or 'ast' with alltoallv.mindspore.AllToAllV"
        )
    return groups.resolve(group)


def check_async(async_op: Any) -> None:
    """Refuses what is no bool, with MindSpore's words."""
    if not isinstance(async_op, bool):
        raise TypeError(f"The argument 'async_op' must be a bool, but got {type(async_op)}.")


def exchange(input: Tensor, transfer: TensorTransfer, out: Tensor | None, name: str, async_op: bool) -> Any:
    """Runs or submits a checked exchange, with gradients where they may be asked for."""
    if out is None:
        if not tracks(input):
            return transfer.submit(input) if async_op else transfer.run(input)
        if async_op:
            holder: list[CommHandle] = []
            output = AsyncExchange.apply(input, transfer, holder)
            return output, holder[0]
        return Exchange.apply(input, transfer)
    if not tracks(input, out):
        if async_op:
            return transfer.submit(input, out)
        return transfer.run(input, out)
    # MindSpore follows the values into the output. A handle is then already done.
    values = Exchange.apply(input, replace(transfer, shape_out=tuple(out.shape)))
    assign(name, out, values, _kept(transfer, out))
    return (out, Done(out)) if async_op else out


def _kept(transfer: TensorTransfer, out: Tensor) -> Any:
    _, _, recvs, rdispls = transfer.layout
    if sum(recvs) == out.size:
        return None
    kept = np.ones(out.size, np.bool_)
    for begin, count in zip(rdispls, recvs, strict=True):
        kept[begin : begin + count] = False
    return kept


def _submit_learning(input: Tensor, transfer: TensorTransfer, tail: tuple[int, ...]) -> tuple[None, CommHandle]:
    if tensors.in_queue():
        return None, Done(LearningExchange.apply(input, transfer, tail))
    with guard(transfer.communicator, transfer.operator):
        x = as_input(input)
        plan = transfer.plan(core_name(x.dtype))
    learning = plan.submit_learning(x.data_ptr(), transfer.timeout)

    def finish() -> Tensor:
        block, counts = learning.take()
        return from_block(block, (sum(counts) // transfer.row, *tail), x.dtype)

    return None, CommHandle(transfer.communicator, learning.work, (x,), finish)


def exchange_counts(send_counts: Counts, group: Group = None) -> Tensor:
    """What every rank will send to this one: entry j is rank j's ``send_counts[rank]``. int64, shape ``[W]``."""
    return Tensor.from_numpy(experts.tell_counts(on_host(enter(group)), send_counts))
