"""Mixture of experts on MindSpore tensors: sends tokens to the ranks of their experts and brings the results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from alltoallv import _core
from alltoallv._calls.adapters import as_bytes
from alltoallv._calls.dispatching import Array, Dispatched, Dispatching, DispatchState, collect, sum_dtype
from alltoallv._calls.experts import RoutingOptions
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name as name_of
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore.front_end import enter
from alltoallv.mindspore.tensors import as_input, check_tensor, numpy_dtype, region, settle, tracks

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
