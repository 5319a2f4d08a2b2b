"""The operator itself; see `alltoallv.mindspore` for what all functions have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, overload

import numpy as np
from mindspore import Tensor, ops
from mindspore.graph import jit_trace

from alltoallv import _core
from alltoallv.communicator import Communicator
from alltoallv.counts import Counts, Unit, as_counts, packed, scaled
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.guard import guard
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.autograd import AsyncExchange, Exchange, Layout, LearningExchange, assign, tracks
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import (
    as_input,
    check_apart,
    check_output,
    check_tensor,
    core_name,
    from_block,
    row_size,
    settle,
)
from alltoallv.mindspore.work import CommHandle


@overload
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit = "element",
    out: Tensor | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit = "element",
    out: Tensor | None = None,
    group: Group = None,
    async_op: Literal[True],
) -> tuple[Tensor | None, CommHandle]: ...
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit = "element",
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sends a region of ``input`` to every rank and receives one from each.

    For every rank j, with this rank called r::

        out_r[rdispls_r[j] : rdispls_r[j] + recv_counts_r[j]] = input_j[sdispls_j[r] : sdispls_j[r] + send_counts_j[r]]

    Args:
        input: Any shape; taken flat, or by rows of dimension 0.
        send_counts, recv_counts: One integer >= 0 per rank, as a list or an integer tensor. ``send_counts`` of rank i
            for j and ``recv_counts`` of rank j for i must agree. ``recv_counts=None`` learns them from the peers; the
            output is then packed.
        sdispls, rdispls: Where the regions begin; packed in rank order if left out. Send regions may overlap and leave
            gaps; receive regions may leave gaps.
        unit: What counts and displacements count: ``"element"``, or ``"row"`` of dimension 0.
        out: Where to receive; contiguous, of the input's dtype, apart from it in memory. Elements that no region covers
            keep their value. Left out, the output is allocated in shared memory, just large enough, gaps zero.
        group: A group's name, a `Communicator`, or None for all ranks.
        async_op: Return ``(output, handle)`` at once. With learnt counts the output is not known yet:
            ``(None, handle)``, and ``handle.result()`` returns it.

    Returns:
        With ``unit="element"`` one dimension; with ``"row"`` the other dimensions of the input stay. ``out`` if given.
        Differentiable in PyNative, to any order: the gradient is the exchange with the roles exchanged.

    Raises:
        TypeError: ``input``, ``group`` or ``async_op`` is of another type.
        InvalidParamError, InvalidTensorError: this rank's or a peer's arguments.
        PeerMismatchError: two ranks disagree about operator, dtype or counts; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    comm = enter(group)
    with guard(comm, "all_to_all_v"):
        check_async(async_op)
        if unit not in ("element", "row"):
            raise InvalidParamError(f"unit is {unit!r}, expected 'element' or 'row'")
        check_tensor("input", input)
        core_name(input.dtype)
        row = row_size(input) if unit == "row" else 1
        tail = tuple(input.shape[1:]) if unit == "row" else ()
        wants_grad = tracks(input)
        sends = scaled(as_counts("send_counts", send_counts, comm.size), row)
        sdispl = packed(sends) if sdispls is None else scaled(as_counts("sdispls", sdispls, comm.size), row)
        if recv_counts is None:
            if rdispls is not None or out is not None:
                what = "rdispls" if rdispls is not None else "out"
                raise InvalidParamError(f"{what} is given without recv_counts, expected both or neither")
            if row == 0:
                raise InvalidParamError("input has rows without elements, expected recv_counts to be given for it")
            if async_op and wants_grad:
                raise InvalidParamError(
                    "async_op is True inside a gradient function and recv_counts are not given, expected recv_counts"
                )
            _core.check_send(input.size, sends, sdispl, comm.size)
            recvs, rdispl, shape = [], [], (0,)
        else:
            rows = as_counts("recv_counts", recv_counts, comm.size)
            recvs = scaled(rows, row)
            rdispl = packed(recvs) if rdispls is None else scaled(as_counts("rdispls", rdispls, comm.size), row)
            numel = -1
            if out is not None:
                check_output("out", out, input.dtype)
                if tail and tuple(out.shape[1:]) != tail:
                    raise InvalidTensorError(f"out has rows of shape {tuple(out.shape[1:])}, expected {tail}")
                settle()
                check_apart(out, input)
                numel = out.size
            needed = _core.check_exchange(input.size, numel, sends, sdispl, recvs, rdispl, comm.size)
            shape = (needed // row if row else sum(rows), *tail)
        if wants_grad and overlap(sends, sdispl):
            input, sdispl = pack(input, sends, sdispl), packed(sends)
    layout = Layout(comm, "all_to_all_v", sends, sdispl, recvs, rdispl, tuple(input.shape), shape, row)
    if recv_counts is None:
        return _submit_learning(input, layout, tail) if async_op else LearningExchange.apply(input, layout, tail)
    return exchange(input, layout, out, "out", async_op)


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


def exchange(input: Tensor, layout: Layout, out: Tensor | None, name: str, async_op: bool) -> Any:
    """Runs or submits a checked exchange, with gradients where they may be asked for."""
    if out is None:
        if async_op:
            holder: list[CommHandle] = []
            output = AsyncExchange.apply(input, layout, holder)
            return output, holder[0]
        return Exchange.apply(input, layout)
    if not tracks(input, out):
        if async_op:
            return layout.submit(input, out)
        return layout.run(input, out)
    # MindSpore follows the values into the output. A handle is then already done.
    values = Exchange.apply(input, replace(layout, shape_out=tuple(out.shape)))
    assign(name, out, values, _kept(layout, out))
    return (out, Done(out)) if async_op else out


def _kept(layout: Layout, out: Tensor) -> Any:
    if sum(layout.recvs) == out.size:
        return None
    kept = np.ones(out.size, np.bool_)
    for begin, count in zip(layout.rdispls, layout.recvs, strict=True):
        kept[begin : begin + count] = False
    return kept


class Done(CommHandle):
    """The handle of a call that was not asynchronous after all."""

    def __init__(self, output: Any) -> None:
        self._result = output

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """True."""
        return True


def _submit_learning(input: Tensor, layout: Layout, tail: tuple[int, ...]) -> tuple[None, CommHandle]:
    with guard(layout.communicator, layout.operator):
        x = as_input(input)
        plan = layout.plan(x.dtype)
    learning = plan.submit_learning(x.data_ptr())

    def finish() -> Tensor:
        block, counts = learning.take()
        return from_block(block, (sum(counts) // layout.row, *tail), x.dtype)

    return None, CommHandle(layout.communicator, learning.work, (x,), finish)


def overlap(counts: Sequence[int], displs: Sequence[int]) -> bool:
    """Whether two of these regions share an element."""
    regions = sorted((d, d + n) for n, d in zip(counts, displs, strict=True) if n > 0)
    return any(begin < end for (_, end), (begin, _) in pairwise(regions))


def pack(input: Tensor, counts: Sequence[int], displs: Sequence[int]) -> Tensor:
    """The regions one after the other, by MindSpore's own gather, whose gradient adds up what overlaps."""
    index = np.concatenate([np.arange(d, d + n) for n, d in zip(counts, displs, strict=True)])
    return ops.gather(input.reshape(-1), Tensor(index.astype(np.int64)), 0)


def exchange_counts(send_counts: Counts, group: Group = None) -> Tensor:
    """What every rank will send to this one: entry j is rank j's ``send_counts[rank]``. int64, shape ``[W]``."""
    comm = enter(group)
    with guard(comm, "exchange_counts"):
        x = np.array(as_counts("send_counts", send_counts, comm.size), np.int64)
        if (x < 0).any():
            raise InvalidParamError(f"send_counts is {x.tolist()}, expected entries >= 0")
        out = np.empty(comm.size, np.int64)
        ones, places = [1] * comm.size, list(range(comm.size))
        plan = _core.Plan(comm.core, "exchange_counts", "int64", ones, places, ones, places)
    plan.run(x.ctypes.data, out.ctypes.data)
    return Tensor.from_numpy(out)
