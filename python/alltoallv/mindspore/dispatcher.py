"""Mixture of experts on MindSpore tensors: tokens to the ranks of their experts, and the results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from alltoallv._calls import dispatch, routing
from alltoallv._calls import experts as counted
from alltoallv._calls.dispatch import Array, Route
from alltoallv._calls.dispatching import OPERATOR, Dispatching, DispatchState, Pending
from alltoallv._calls.guard import guard
from alltoallv._calls.regions import as_bytes
from alltoallv._calls.routing import Routing
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name as name_of
from alltoallv.errors import InvalidTensorError
from alltoallv.mindspore.autograd import tracks
from alltoallv.mindspore.exchange import enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import as_input, check_tensor, numpy_dtype, region


class MoEDispatcher(Dispatching[Tensor]):
    """Takes tokens to their experts, which live on the ranks of a group, and the results back; on CPU, in PyNative.

    Token rows, gate weights and expert numbers travel in one exchange; how many rows arrive is learnt in it. The way
    back is the same exchange with the roles exchanged, and each is the other's gradient. Every method is collective:
    all ranks call it, also those without tokens or rows, and all of them their gradient function. Results do not depend
    on how tokens and experts lie on the ranks, bit for bit, as long as an expert treats every row by itself and no
    capacity is set.

    Args:
        num_experts: Experts on all ranks together.
        group: See `alltoallv.mindspore`.
        options: ``capacity``, ``drop``, ``alignment``, ``payload``, ``combine_payload``, ``codes``, ``placement``;
            equal on all ranks. See `alltoallv._calls.routing.Routing`.
    """

    def __init__(self, num_experts: int, group: Group = None, **options: Any) -> None:
        self.routing, self.group = Routing(num_experts, **options), group

    def member(self) -> Communicator:
        """The dispatcher's communicator."""
        return enter(self.group)

    def dispatch(
        self,
        tokens: Tensor,
        expert_ids: Tensor | DispatchState[Tensor],
        gate_weights: Tensor | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Sends every token to each of its k experts.

        Args:
            tokens: Shape ``[n, ...]``, n >= 0. dtype and row shape agree on all ranks.
            expert_ids: Integers from 0 to ``num_experts - 1``, shape ``[n, k]``, or ``[n]`` for k = 1. Or the state of
                an earlier dispatch, whose way these tokens then go; not as codes.
            gate_weights: Floating-point, shape of ``expert_ids``; None on all ranks: `combine` adds without weights.
            async_op: Return a `Pending` at once, whose ``result()`` is what is said below; not with a state.

        Returns:
            ``(rows, counts, state)``: the rows for this rank's experts, ``[sum(counts), ...]``, sorted by expert, then
            by the rank they come from, then as they lay there; how many each local expert gets, rows of zeros up to
            the alignment included; and what `combine` needs. Rows and ``state.weights`` are differentiable.

        Raises:
            InvalidParamError, InvalidTensorError: this rank's or a peer's arguments.
            PeerMismatchError: ranks disagree about the dtypes, the row shape, the number of experts or the options.
            PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come; see `survivors`.
        """
        if isinstance(expert_ids, DispatchState):
            state = expert_ids
            rows, made = _Spread.apply(tokens, gate_weights, state.route)
            return (
                rows,
                state.counts,
                DispatchState(**{**vars(state), "weights": None if gate_weights is None else made}),
            )
        finish = self.begin_dispatch(tokens, expert_ids, gate_weights, async_op)
        return Pending(finish) if async_op else finish()

    def begin_dispatch(
        self, tokens: Tensor, expert_ids: Tensor, gate_weights: Tensor | None, begins: bool
    ) -> Callable[[], Any]:
        """What `dispatch` does before it waits."""
        comm = self.member()
        with guard(comm, OPERATOR):
            given = {"tokens": tokens, "expert_ids": expert_ids, "gate_weights": gate_weights}
            for name, value in given.items():
                if value is not None or name != "gate_weights":
                    check_tensor(name, value)
            x, ids, weights = (None if value is None else _array(value) for value in given.values())
            assert x is not None
            assert ids is not None
            shapes = x.shape, ids.shape, None if weights is None else weights.shape
            shape = routing.check_shapes(*shapes, ids.dtype.kind in "iu", ids.dtype)
            if weights is not None and weights.dtype.kind in "biuc":
                raise InvalidTensorError(f"gate_weights has dtype {weights.dtype}, expected a floating-point one", 13)
            weights = None if weights is None else weights.reshape(shape)
        arriving = dispatch.dispatch(comm, self.routing, x, ids.reshape(shape).astype(np.int64), weights, begins)

        def finish() -> tuple[Tensor, list[int], DispatchState[Tensor]]:
            arrived = arriving()
            state: DispatchState[Any] = arrived.state
            rows, made = _tensor(arrived.rows), _or_nothing(arrived.weights)
            if tracks(tokens, gate_weights) and not self.routing.codes:
                rows, made = _Arrived.apply(tokens, gate_weights, state.route, rows, made)
            state.weights = None if weights is None else made
            state.scales = None if state.scales is None else _tensor(state.scales)
            return rows, state.counts, state

        return finish

    def combine(self, expert_outputs: Tensor, state: DispatchState[Tensor], *, async_op: bool = False) -> Any:
        """Brings the rows back to their tokens and adds the k results of each.

        A row is multiplied by its gate weight where it is, in float32 or the wider of the two dtypes, and rounded to
        the dtype of ``expert_outputs``. The k results of a token are added in the order of its choices, in float32 or
        wider, and rounded once; dropped ones count as zero.

        Args:
            expert_outputs: Shape ``[sum(counts), ...]``, in the order of the rows of `dispatch`. The row shape and the
                dtype may differ from the tokens', but not between ranks.
            state: What `dispatch` returned.
            async_op: Return a `Pending` at once, whose ``result()`` is the tokens.

        Returns:
            Shape ``[n, ...]``, in the order of the tokens given to `dispatch`. Differentiable.

        Raises:
            As `dispatch`.
        """
        finish = self.begin_combine(expert_outputs, state, async_op)
        return Pending(finish) if async_op else finish()

    def begin_combine(self, expert_outputs: Tensor, state: DispatchState[Tensor], begins: bool) -> Callable[[], Tensor]:
        """What `combine` does before it waits."""
        route: Route = state.route
        with guard(route.communicator, OPERATOR):
            check_tensor("expert_outputs", expert_outputs)
            routing.check_outputs(expert_outputs.shape, len(route.source))
            rows = _weighted(expert_outputs, state.weights)
            array = _array(rows)
        arriving = dispatch.collect(route, array, None, self.routing.combine_payload, begins)

        def finish() -> Tensor:
            tokens = _tensor(arriving()[0])
            return _Combined.apply(rows, route, tokens) if tracks(rows) else tokens

        return finish

    def __call__(
        self,
        tokens: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor | None,
        experts: Sequence[Callable[[Tensor], Tensor]] | Callable[[Tensor, list[int]], Tensor],
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        chunks: int = 1,
    ) -> Tensor:
        """`dispatch`, every local expert on its rows, and `combine`.

        Args:
            tokens, expert_ids, gate_weights: As for `dispatch`.
            experts: This rank's, in the order of `local_experts`; each maps ``[rows, ...]`` to ``[rows, ...]``, also
                zero rows. Or one function of the rows and counts of all local experts.
            shared: An expert of all tokens, which every rank has; it works while rows are under way, and what it makes
                is added to the result.
            chunks: Parts of the tokens, as many on all ranks: while experts work on one, the next one arrives and the
                last one leaves. A capacity holds in every part.

        Returns:
            As `combine`.
        """
        return self.layer(tokens, expert_ids, gate_weights, experts, shared, chunks)

    def parts(self, tokens: Tensor, ends: Sequence[int]) -> list[Tensor]:
        """Neighbouring rows, cut at ``ends``."""
        return [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all parts."""
        return ops.concat([part for part in parts if part.shape[0]] or [parts[0]])

    def gathered(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of every rank, a row for each."""
        return counted.gathered(self.member(), numbers)


class _Arrived(_Function):
    """A dispatch whose rows have come."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor | None, route: Route, rows: Tensor, made: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.weighs = route, weights is not None
        ctx.shape = None if weights is None else weights.shape
        return rows, made

    @staticmethod
    def backward(ctx: Any, grad: Tensor, weight_grad: Tensor) -> tuple[Any, ...]:
        tokens, weights = _Collect.apply(grad, weight_grad if ctx.weighs else None, ctx.route)
        return tokens, weights.reshape(ctx.shape) if ctx.weighs else None, None, None, None


class _Spread(_Function):
    """By a way that is known."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor | None, route: Route) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.weighs = route, weights is not None
        rows, made = dispatch.spread(route, _array(tokens), None if weights is None else _array(weights))
        return _tensor(rows), _or_nothing(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, weight_grad: Tensor) -> tuple[Any, ...]:
        tokens, weights = _Collect.apply(grad, weight_grad if ctx.weighs else None, ctx.route)
        return tokens, weights if ctx.weighs else None, None


class _Collect(_Function):
    """Back by it; the rows of one token are added."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, route: Route) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.weighs = route, weights is not None
        tokens, made = dispatch.collect(route, _array(rows), None if weights is None else _array(weights))()
        return _tensor(tokens), _or_nothing(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, weight_grad: Tensor) -> tuple[Any, ...]:
        rows, weights = _Spread.apply(grad, weight_grad if ctx.weighs else None, ctx.route)
        return rows, weights if ctx.weighs else None, None


class _Combined(_Function):
    """A combine whose tokens have come."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, tokens: Tensor) -> Tensor:
        ctx.route = route
        return tokens

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Spread.apply(grad, None, ctx.route)[0], None, None


def _array(tensor: Tensor) -> Array:
    """The values where they lie."""
    x = as_input(tensor)
    made: Array = as_bytes(region(x)).view(numpy_dtype(x.dtype)).reshape(x.shape)
    return made.copy()  # MindSpore may reuse the memory of a tensor that nobody holds


def _tensor(array: Array) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(array))


def _or_nothing(array: Array | None) -> Tensor:
    return _tensor(np.zeros(0, np.float32) if array is None else array)


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Each row times its weight, in float32 or the wider of the dtypes, rounded to that of the rows."""
    if weights is None:
        return rows
    wide = getattr(mindspore, name_of(dispatch.sum_dtype(numpy_dtype(rows.dtype), numpy_dtype(weights.dtype))))
    each = weights.astype(wide).reshape(-1, *[1] * (rows.ndim - 1))
    return (rows.astype(wide) * each).astype(rows.dtype)
