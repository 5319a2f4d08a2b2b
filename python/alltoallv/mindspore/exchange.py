"""The operator itself, and its use for experts, also as a dispatcher of tokens; `alltoallv.mindspore` describes what
all functions share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from alltoallv import _core
from alltoallv._calls.adapters import as_bytes
from alltoallv._calls.counts import Counts, Unit
from alltoallv._calls.dispatching import Array, Dispatched, Dispatching, DispatchState, collect, sum_dtype
from alltoallv._calls.experts import RoutingOptions
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name as name_of
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import device_op
from alltoallv.mindspore.front_end import enter, front_end
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import (
    CommHandle,
    Received,
    as_input,
    check_tensor,
    numpy_dtype,
    region,
    settle,
    tracks,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "all_gather_into_tensor",
    "all_to_all_single",
    "all_to_all_v",
    "exchange_counts",
    "global_gather",
    "global_scatter",
]


@overload
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
    async_op: Literal[False] = False,
    timeout: float | None = None,
) -> Tensor: ...
@overload
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
    async_op: Literal[True],
    timeout: float | None = None,
) -> tuple[Tensor | None, CommHandle]: ...
@overload
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    unit: Unit | None = None,
    group: Group = None,
    capacity: int,
) -> Received: ...
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
    capacity: int | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Sends a region of ``input`` to every rank and receives one from each.

    For every rank j, with this rank called r:

        out_r[rdispls_r[j] : rdispls_r[j] + recv_counts_r[j]] = input_j[sdispls_j[r] : sdispls_j[r] + send_counts_j[r]]

    Args:
        input: A tensor (in NumPy an array) of any shape and any dense dtype; taken flat, or by rows of dimension 0.
            Copied first if it is not contiguous.
        send_counts, recv_counts: One integer >= 0 per rank: a list, tuple, array or integer tensor. ``send_counts`` of
            rank i for j and ``recv_counts`` of rank j for i must agree. ``recv_counts=None`` learns them from the
            peers; the output is then packed.
        sdispls, rdispls: Where the regions begin; packed in rank order if left out. Packed, ``send_counts`` cover the
            whole input; with ``sdispls`` send regions may overlap and leave gaps. Receive regions may leave gaps.
        unit: What counts and displacements count: ``"element"``, or ``"row"`` of dimension 0; None: rows of an input of
            2 dimensions or more, elements of others.
        out: Where to receive; contiguous, of the input's dtype, apart from it in memory. Elements that no region covers
            keep their value. Left out, the output is allocated in shared memory, just large enough, gaps zero. In torch
            and Paddle it cannot be given for an input that wants a gradient.
        capacity: In torch and MindSpore, for tensors on an NPU, without the arguments ``rdispls``, ``out``,
            ``async_op``, ``timeout``: how many units this rank can receive. Counts then stay on the device, as int64
            tensors there, and the host does not wait for them: they may change in a captured graph. ``recv_counts`` are
            only compared with what comes. The result is a `alltoallv.torch.Received` (in MindSpore its own), whose
            ``check()`` raises what is raised at once elsewhere, also on every rank. Only where the kernels in Ascend C
            serve (docs/ascend.md), else BackendUnavailableError on every rank; with ``sdispls`` not differentiable.
        group: A group of the framework (in torch a ProcessGroup, in MindSpore a name), a `Communicator`, or None for
            all ranks.
        async_op: Return ``(output, handle)`` at once. With learnt counts the output is not known yet:
            ``(None, handle)``, and ``handle.result()`` returns it.
        timeout: Seconds to wait for the peers of tensors in host memory; default: the communicator's. In MindSpore and
            Paddle it also holds for the gradient's exchange; in torch it cannot be given for an input that wants one.

    Returns:
        ``out`` if given, else a new tensor: of one dimension if counts are elements; if they are rows, with the other
        dimensions of the input. In torch, Paddle, and MindSpore's PyNative mode it is differentiable, to any order: the
        gradient is the exchange with sends and receives swapped.

    Raises:
        TypeError: ``input`` is no tensor.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, is wrong.
        PeerMismatchError: two ranks disagree about operator, dtype or counts; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    if capacity is not None:
        others = {"rdispls": rdispls, "out": out, "async_op": async_op, "timeout": timeout}
        return device_op.all_to_all_counted(
            input, (send_counts, sdispls, recv_counts), unit, capacity, enter(group), others
        )
    return front_end.all_to_all_v(
        input, send_counts, recv_counts, sdispls, rdispls, unit, out, group, async_op, timeout
    )


def exchange_counts(
    send_counts: Counts,
    group: Group = None,
) -> Tensor:
    """Returns what every rank will send to this one: entry j is rank j's ``send_counts`` entry for this rank.

    Args:
        send_counts: One integer >= 0 per rank.
        group: See `all_to_all_v`.

    Returns:
        int64, shape ``[W]``, on the CPU; None on a rank outside the group.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    return front_end.exchange_counts(send_counts, group)


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

    Signature and meaning are as in ``torch.distributed.all_to_all_single``.

    Args:
        output: Shape ``[sum(output_split_sizes), ...]``; contiguous, of the input's dtype, apart from it in memory.
        input: Shape ``[sum(input_split_sizes), ...]``, any dtype.
        output_split_sizes, input_split_sizes: Rows from and for every rank; by default equal parts, for which
            dimension 0 must divide.
        group, async_op, timeout: See `all_to_all_v`.

    Returns:
        None, or the handle with ``async_op=True``. No gradient passes through it in torch, as in torch.distributed;
        `alltoallv.torch.functional` has one with gradients, and so has MindSpore's PyNative mode here.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    return front_end.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op, timeout)


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> CommHandle | None:
    """Concatenates the ``input_tensor`` of all ranks, in rank order, into ``output_tensor``.

    Signature and meaning are as in ``torch.distributed.all_gather_into_tensor``.

    Args:
        output_tensor: Contiguous, of W times the elements, in shape ``[W * x1, x2, ...]``, ``[W, x1, x2, ...]`` or any
            other.
        input_tensor: Shape ``[x1, x2, ...]``, one on all ranks, of one dtype; may be this rank's part of the output.
        group, async_op, timeout: See `all_to_all_v`.

    Returns:
        None, or the handle with ``async_op=True``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    return front_end.all_gather_into_tensor(output_tensor, input_tensor, group, async_op, timeout)


def global_scatter(
    x: Tensor,
    local_count: Counts,
    global_count: Counts,
    group: Group = None,
) -> Tensor:
    """Sends every row to the rank of its expert. Differentiable where `all_to_all_v` is.

    Args:
        x: Rows sorted by rank, then by expert: ``local_count[e + j * E]`` rows for expert e of rank j.
            Shape ``[n, ...]``.
        local_count, global_count: ``W * E`` integers >= 0, flat or of shape ``[W, E]``; entry ``e + j * E`` stands for
            expert e and rank j: rows that go from here to expert e of rank j, and rows that come from rank j for
            expert e of this rank.
        group: See `all_to_all_v`.

    Returns:
        Shape ``[sum(global_count), ...]``, rows sorted by this rank's expert, then by the rank they come from.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, also about the rows of one expert, or one
            is lost or late.
    """
    return front_end.global_scatter(x, local_count, global_count, group)


def global_gather(
    x: Tensor,
    local_count: Counts,
    global_count: Counts,
    group: Group = None,
) -> Tensor:
    """Brings the rows of `global_scatter` back to the ranks that sent them: its inverse, as differentiable.

    Args:
        x: Rows sorted by this rank's expert, then by rank. Shape ``[sum(global_count), ...]``.
        local_count, global_count, group: See `global_scatter`.

    Returns:
        Shape ``[sum(local_count), ...]``, rows sorted by the rank they come from, then by that rank's expert.

    Raises:
        AllToAllVError: as `global_scatter`.
    """
    return front_end.global_gather(x, local_count, global_count, group)


class MoEDispatcher(Dispatching[Tensor]):
    """Sends tokens to their experts on the ranks of a group, and brings the results back; on CPU, in PyNative.

    A token travels once to every rank that has one of its experts, with its gate weights and expert numbers, in one
    exchange, which also states how many rows arrive; results come back in pieces of about 16 MiB. Dispatch and combine
    are each other's gradient. Every method is collective: all ranks call it, also those without tokens or rows, and all
    of them call their gradient function. Results do not depend, to the bit, on which rank holds a token or an expert,
    if an expert treats every row by itself and no capacity is set.

    Args:
        num_experts: Number of experts on all ranks together.
        group: See `alltoallv.mindspore`.
        options: ``capacity``, ``drop``, ``alignment``, ``payload``, ``combine_payload``, ``codes``, ``placement``,
            ``active_ranks``; equal on all ranks. See `RoutingOptions`.
    """

    def __init__(self, num_experts: int, group: Any = None, **options: Unpack[RoutingOptions]) -> None:
        super().__init__(num_experts, group, **options)
        if self.routing.code_dtype not in (None, "int8"):
            shown = f"codes is True with payload {self.routing.payload!r}"
            raise InvalidParamError(f"{shown}, expected 'int8': MindSpore has no tensors of float8 on CPU", id=1329)

    def member(self) -> Communicator:
        return enter(self.group)

    def array(self, name: str, x: Any) -> Array:
        check_tensor(name, x)
        return _array(x)

    def arrived(
        self, tokens: Any, gate_weights: Any, rows: Array, weights: Array | None, state: DispatchState[Any]
    ) -> Dispatched[Tensor]:
        """Returns the arrived rows as tensors, with their gradient."""
        pair = row_tensor, of_rows = _tensor(rows), _or_nothing(weights)
        if tracks(tokens, gate_weights) and state.scales is None:  # codes have no gradient
            row_tensor, of_rows = _Moved.apply(tokens, gate_weights, state, False, lambda: pair)
        state.weights = None if gate_weights is None else of_rows
        state.scales = None if state.scales is None else _tensor(state.scales)
        return row_tensor, state.counts, state

    def weighted(self, expert_outputs: Tensor, state: DispatchState[Tensor]) -> tuple[Tensor, None]:
        """Multiplies the rows by their weights in MindSpore, so that both have gradients."""
        rows, weights = expert_outputs, state.weights
        check_tensor("expert_outputs", rows)
        _core.moe_check_outputs(rows.shape, len(state.route[1]))
        if weights is None:
            return rows, None
        wide = getattr(mindspore, name_of(sum_dtype(numpy_dtype(rows.dtype), numpy_dtype(weights.dtype))))
        each = weights.astype(wide).reshape(-1, *[1] * (rows.ndim - 1))
        return (rows.astype(wide) * each).astype(rows.dtype), None

    def combined(self, rows: Tensor, state: DispatchState[Tensor], tokens: Array) -> Tensor:
        """Returns the combined tokens as a tensor, with their gradient."""
        result = _tensor(tokens)
        return _Moved.apply(rows, None, state, True, lambda: (result, _or_nothing(None)))[0] if tracks(rows) else result

    def parts(self, tokens: Tensor, ends: Sequence[int]) -> list[Tensor]:
        return [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return ops.concat([part for part in parts if part.shape[0]] or [parts[0]])


class _Moved(_Function):
    """Sends tokens and weights to their experts, or back, where the rows of one token are added; each is the other's
    gradient. ``made``, if it is given, returns what has been moved already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor | None,
        state: DispatchState[Tensor],
        back: bool,
        results: Callable[[], Any] | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.state, ctx.back, ctx.shape = state, back, None if weights is None else weights.shape
        if results is not None:
            return results()
        arrays = _array(rows), None if weights is None else _array(weights)
        comm, route = state.communicator, state.route
        if back:
            moved, of_rows = collect(None, comm, *arrays, route, *state.ids.shape)()
        else:
            moved, of_rows = _core.moe_spread(None, comm.core, *arrays, route)
        return _tensor(moved), _or_nothing(of_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, weight_grad: Tensor) -> tuple[Any, ...]:
        weighted = ctx.shape is not None
        rows, weights = _Moved.apply(grad, weight_grad if weighted else None, ctx.state, not ctx.back, None)
        return rows, weights.reshape(ctx.shape) if weighted else None, None, None, None


def _array(tensor: Tensor) -> Array:
    """Returns the values, in the tensor's memory if possible."""
    settle()
    x = as_input(tensor)
    values: Array = as_bytes(region(x)).view(numpy_dtype(x.dtype)).reshape(x.shape)
    return values.copy()  # MindSpore may reuse the memory of a tensor that has no more references


def _tensor(array: Array) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array))


def _or_nothing(array: Array | None) -> Tensor:
    return _tensor(np.zeros(0, np.float32) if array is None else array)
