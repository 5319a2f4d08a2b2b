"""Mixture of experts on NumPy arrays: tokens to the ranks of their experts, and the results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from alltoallv._calls import dispatch, experts, routing
from alltoallv._calls.dispatching import OPERATOR, Dispatched, Dispatching, DispatchState, Pending
from alltoallv._calls.guard import guard
from alltoallv._calls.routing import Routing
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.numpy.arrays import Array, as_input, resolve


class MoEDispatcher(Dispatching[Array]):
    """Takes tokens to their experts, which live on the ranks of a group, and the results back.

    Token rows, gate weights and expert numbers travel in one exchange; how many rows arrive is learnt in it. Every
    method is collective: all ranks call it, also those without tokens or rows. Results do not depend on how tokens and
    experts lie on the ranks, bit for bit, as long as an expert treats every row by itself, and no capacity is set.

    Args:
        num_experts: Experts on all ranks together.
        group: A `Communicator`, or None for the default one.
        options: ``capacity``, ``drop``, ``alignment``, ``payload``, ``combine_payload``, ``placement``; equal on all
            ranks. See `alltoallv._calls.routing.Routing`.

    Example::

        dispatcher = MoEDispatcher(8)
        rows, counts, state = dispatcher.dispatch(tokens, ids, weights)
        parts = np.split(rows, np.cumsum(counts)[:-1])
        outputs = np.concatenate([expert(part) for expert, part in zip(experts, parts)])
        tokens = dispatcher.combine(outputs, state)

    The last four lines are also ``dispatcher(tokens, ids, weights, experts)``.
    """

    def __init__(self, num_experts: int, group: Communicator | None = None, **options: Any) -> None:
        self.routing, self.group = Routing(num_experts, **options), group

    def member(self) -> Communicator:
        """The dispatcher's communicator."""
        return resolve(self.group)

    @overload
    def dispatch(
        self,
        tokens: npt.ArrayLike,
        expert_ids: npt.ArrayLike | DispatchState[Array],
        gate_weights: npt.ArrayLike | None = None,
        *,
        async_op: Literal[False] = False,
    ) -> Dispatched[Array]: ...
    @overload
    def dispatch(
        self,
        tokens: npt.ArrayLike,
        expert_ids: npt.ArrayLike | DispatchState[Array],
        gate_weights: npt.ArrayLike | None = None,
        *,
        async_op: Literal[True],
    ) -> Pending[Dispatched[Array]]: ...
    def dispatch(
        self,
        tokens: npt.ArrayLike,
        expert_ids: npt.ArrayLike | DispatchState[Array],
        gate_weights: npt.ArrayLike | None = None,
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
            the alignment included; and what `combine` needs.

        Raises:
            InvalidParamError, InvalidTensorError: this rank's or a peer's arguments.
            PeerMismatchError: ranks disagree about the dtypes, the row shape, the number of experts or the options.
            PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come; see `survivors`.
        """
        if isinstance(expert_ids, DispatchState):
            state = expert_ids
            weights = None if gate_weights is None else as_input("gate_weights", gate_weights)
            rows, made = dispatch.spread(state.route, as_input("tokens", tokens), weights)
            return rows, state.counts, DispatchState(**{**vars(state), "weights": made})
        finish = self.begin_dispatch(tokens, expert_ids, gate_weights, async_op)
        return Pending(finish) if async_op else finish()

    def begin_dispatch(self, tokens: Any, expert_ids: Any, gate_weights: Any, begins: bool) -> Callable[[], Any]:
        """What `dispatch` does before it waits."""
        comm = self.member()
        with guard(comm, OPERATOR):
            x, ids = as_input("tokens", tokens), as_input("expert_ids", expert_ids)
            weights = None if gate_weights is None else as_input("gate_weights", gate_weights)
            shapes = x.shape, ids.shape, None if weights is None else weights.shape
            shape = routing.check_shapes(*shapes, ids.dtype.kind in "iu", ids.dtype)
            if weights is not None and weights.dtype.kind in "biuc":
                raise InvalidTensorError(f"gate_weights has dtype {weights.dtype}, expected a floating-point one", 13)
            weights = None if weights is None else weights.reshape(shape)
        arriving = dispatch.dispatch(comm, self.routing, x, ids.reshape(shape).astype(np.int64), weights, begins)

        def finish() -> Dispatched[Array]:
            rows, made, state = arriving()
            state.weights = made
            return rows, state.counts, state

        return finish

    def combine(self, expert_outputs: npt.ArrayLike, state: DispatchState[Array], *, async_op: bool = False) -> Any:
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
            Shape ``[n, ...]``, in the order of the tokens given to `dispatch`.

        Raises:
            As `dispatch`.
        """
        finish = self.begin_combine(expert_outputs, state, async_op)
        return Pending(finish) if async_op else finish()

    def begin_combine(self, expert_outputs: Any, state: DispatchState[Array], begins: bool) -> Callable[[], Array]:
        """What `combine` does before it waits."""
        with guard(state.route.communicator, OPERATOR):
            rows = as_input("expert_outputs", expert_outputs)
            routing.check_outputs(rows.shape, len(state.route.source))
            rows = dispatch.weighted(rows, state.weights)
        arriving = dispatch.collect(state.route, rows, None, self.routing.combine_payload, begins)
        return lambda: arriving()[0]

    def __call__(
        self,
        tokens: npt.ArrayLike,
        expert_ids: npt.ArrayLike,
        gate_weights: npt.ArrayLike | None,
        experts: Sequence[Callable[[Array], Array]],
        *,
        shared: Callable[[Array], Array] | None = None,
        chunks: int = 1,
    ) -> Array:
        """`dispatch`, every local expert on its rows, and `combine`.

        Args:
            tokens, expert_ids, gate_weights: As for `dispatch`.
            experts: This rank's, in the order of `local_experts`; each maps ``[rows, ...]`` to ``[rows, ...]``, also
                zero rows. A rank without experts needs results like the tokens.
            shared: An expert of all tokens, which every rank has; it works while rows are under way, and what it makes
                is added to the result.
            chunks: Parts of the tokens, as many on all ranks: while experts work on one, the next one arrives and the
                last one leaves. A capacity holds in every part.

        Returns:
            As `combine`.
        """
        x, ids = np.asarray(tokens), np.asarray(expert_ids)
        weights = None if gate_weights is None else np.asarray(gate_weights)
        return self.layer(x, ids, weights, experts, shared, chunks)

    def parts(self, tokens: Array, ends: Sequence[int]) -> list[Array]:
        """Neighbouring rows, cut at ``ends``."""
        return np.split(tokens, ends)[: len(ends)]

    def joined(self, parts: Sequence[Array]) -> Array:
        """The rows of all parts."""
        return np.concatenate(parts)

    def gathered(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of every rank, a row for each."""
        return experts.gathered(self.member(), numbers)
