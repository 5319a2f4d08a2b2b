"""The dispatcher of NumPy and MindSpore, except for their tensors and gradients."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, overload

import numpy as np

from alltoallv._calls import routing
from alltoallv._calls.adapters import A
from alltoallv._calls.array_rows import Array, ArrayMover
from alltoallv._calls.dispatching import OPERATOR, Dispatched, Dispatching, DispatchState, Pending
from alltoallv._calls.guard import guard
from alltoallv._calls.pieces import pieces
from alltoallv._calls.routing import Numbers, Routing
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError


@dataclass(eq=False)
class Route:
    """Says which row goes where. `spread` sends rows along it and `collect` brings them back."""

    communicator: Communicator
    tokens: int
    k: int
    order: Numbers
    source: Numbers
    ranks: list[list[int]]
    token: Numbers

    def spread(self, tokens: Array, weights: Array | None) -> tuple[Array, Array | None]:
        """Sends tokens ``[n, ...]`` and weights ``[n, k]`` to the experts; returns rows and weights ``[rows]``."""
        way = self.order, self.source, self.token, self.ranks[0], self.k
        rows, made = ArrayMover(self.communicator).spread(_matrix(tokens), weights, *way)
        return rows.reshape(len(rows), *tokens.shape[1:]), made

    def collect(
        self,
        rows: Array,
        weights: Array | None,
        payload: str | None = None,
        begins: bool = False,
        gates: Array | None = None,
        whole: bool = False,
    ) -> Callable[[], tuple[Array, Array | None]]:
        """Brings rows and weights back, which ``gates`` multiply before; the result receives both."""
        matrix = _matrix(rows)
        with guard(self.communicator, OPERATOR):
            row = matrix.shape[1] * matrix.itemsize
            ranks = self.ranks[:2] if whole else self.ranks
            way = pieces(self.order, self.source, ranks, self.token, self.tokens, self.k, row)
        arriving = ArrayMover(self.communicator).collect(way, matrix, weights, gates, payload, begins)

        def finish() -> tuple[Array, Array | None]:
            total, flat = arriving()
            return total.reshape(len(total), *rows.shape[1:]), flat

        return finish


def _matrix(rows: Array) -> Array:
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


class HostDispatching(Dispatching[A]):
    """The dispatcher of a front end whose tensors are read as arrays of NumPy."""

    def __init__(self, num_experts: int, group: Any = None, **options: Any) -> None:
        self.routing, self.group = Routing(num_experts, **options), group

    @abstractmethod
    def array(self, name: str, x: Any) -> Array:
        """Returns the values of an argument as a NumPy array; raises InvalidTensorError if it is no tensor."""

    def arrived(
        self, tokens: Any, gate_weights: Any, rows: Array, weights: Array | None, state: DispatchState[Any]
    ) -> Dispatched[A]:
        """Returns what a dispatch returns once rows and weights have arrived; ``state`` has no weights yet.

        This, like `combined`, is for a framework of arrays without gradients.
        """
        state.weights = weights
        return rows, state.counts, state

    @abstractmethod
    def weighted(self, expert_outputs: Any, state: DispatchState[A]) -> tuple[A, Array | None]:
        """Multiplies each row by its weight in float32 or the wider dtype, rounded to the dtype of the rows.

        Or it returns the rows unchanged, with the weights by which they are still to be multiplied.

        Raises:
            InvalidTensorError: the rows are not as many as were dispatched.
        """

    def combined(self, rows: A, route: Route, tokens: Array) -> A:
        """Returns what a combine of these rows returns once its tokens have arrived."""
        return cast("A", tokens)

    @overload
    def dispatch(
        self, tokens: Any, expert_ids: Any, gate_weights: Any = None, *, async_op: Literal[False] = False
    ) -> Dispatched[A]: ...
    @overload
    def dispatch(
        self, tokens: Any, expert_ids: Any, gate_weights: Any = None, *, async_op: Literal[True]
    ) -> Pending[Dispatched[A]]: ...
    def dispatch(self, tokens: Any, expert_ids: Any, gate_weights: Any = None, *, async_op: bool = False) -> Any:
        """Sends every token to each of its k experts.

        Args:
            tokens: Shape ``[n, ...]``, n >= 0. dtype and row shape agree on all ranks; in torch floating-point or
                complex.
            expert_ids: Integers from 0 to ``num_experts - 1``, shape ``[n, k]``, or ``[n]`` for k = 1. k, as n, may
                differ between ranks; a token may name an expert twice. Or the state of an earlier dispatch, whose way
                these tokens then go; not as codes.
            gate_weights: Floating-point, shape of ``expert_ids``; None on all ranks: `combine` adds without weights.
            async_op: Return a `Pending` at once, whose ``result()`` is what is said below; not with a state, nor in a
                graph of torch.

        Returns:
            ``(rows, counts, state)``: the rows for this rank's experts, ``[sum(counts), ...]``, sorted by expert, then
            by the rank they come from, then as they lay there; how many each local expert gets, rows of zeros up to
            the alignment included; and what `combine` needs. In torch and MindSpore rows and
            ``state.weights`` are differentiable.

        Raises:
            InvalidParamError, InvalidTensorError: this rank's or a peer's arguments.
            PeerMismatchError: ranks disagree about the dtypes, the row shape, the number of experts or the options.
            PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come; see `survivors`.
        """
        if isinstance(expert_ids, DispatchState):
            route: Route = expert_ids.route
            with guard(route.communicator, OPERATOR):
                x, weights = self._arrays(tokens, gate_weights)
                routing.check_again(x.shape, None if weights is None else weights.shape, route.tokens, route.k)
            state: DispatchState[Any] = replace(expert_ids, weights=None, scales=None)
            return self.arrived(tokens, gate_weights, *route.spread(x, weights), state)
        finish = self.begin_dispatch(tokens, expert_ids, gate_weights, async_op)
        return Pending(finish) if async_op else finish()

    def _arrays(self, tokens: Any, gate_weights: Any) -> tuple[Array, Array | None]:
        x, weights = self.array("tokens", tokens), None
        if gate_weights is not None:
            weights = self.array("gate_weights", gate_weights)
            if weights.dtype.kind in "biuc":
                raise InvalidTensorError(f"gate_weights has dtype {weights.dtype}, expected a floating-point one", 13)
        return x, weights

    def begin_dispatch(
        self, tokens: Any, expert_ids: Any, gate_weights: Any, begins: bool
    ) -> Callable[[], Dispatched[A]]:
        """Starts `dispatch` and returns the function that waits for its result."""
        comm = self.member()
        with guard(comm, OPERATOR):
            (x, weights), ids = self._arrays(tokens, gate_weights), self.array("expert_ids", expert_ids)
            shapes = x.shape, ids.shape, None if weights is None else weights.shape
            shape = routing.check_shapes(*shapes, ids.dtype.kind in "iu", ids.dtype)
            weights = None if weights is None else weights.reshape(shape)
        about = f"{x.dtype} {x.shape[1:]}, gate_weights {None if weights is None else weights.dtype}"
        ids = ids.reshape(shape).astype(np.int64)
        arriving = ArrayMover(comm).dispatch(self.routing, _matrix(x), ids, weights, about, begins)

        def finish() -> Dispatched[A]:
            made = arriving()
            sending, told, arrival = made.sending, made.headers, made.arrival
            ranks = [sending.sends, told.pairs, told.tokens, told.choices]
            route = Route(comm, *shape, sending.order, arrival.source, ranks, made.token)
            counts, source, flat = arrival.counts, arrival.source, ids.reshape(-1)
            state: DispatchState[Any] = DispatchState(
                counts=counts.tolist(),
                received=arrival.received.tolist(),
                weights=None,
                experts=np.repeat(np.arange(len(counts)), counts),
                sources=np.append(np.repeat(np.arange(comm.size), told.pairs), -1)[source],
                chosen=np.bincount(flat, minlength=self.num_experts),
                kept=np.bincount(flat[sending.order], minlength=self.num_experts),
                route=route,
                scales=made.scales,
            )
            rows = made.rows.reshape(len(made.rows), *x.shape[1:])
            return self.arrived(tokens, gate_weights, rows, made.weights, state)

        return finish

    def combine(self, expert_outputs: Any, state: DispatchState[A], *, async_op: bool = False) -> Any:
        """Brings the rows back to their tokens and adds the k results of each.

        A row is multiplied by its gate weight where it is, in float32 or the wider of the two dtypes, and rounded to
        the dtype of ``expert_outputs``. The k results of a token are added in the order of its choices, in float32 or
        wider, and rounded once; dropped ones count as zero.

        Args:
            expert_outputs: Shape ``[sum(counts), ...]``, in the order of the rows of `dispatch`. The row shape and the
                dtype may differ from the tokens', but not between ranks.
            state: What `dispatch` returned.
            async_op: Return a `Pending` at once, whose ``result()`` is the tokens; not in a graph of torch. The same on
                all ranks.

        Returns:
            Shape ``[n, ...]``, in the order of the tokens given to `dispatch`. In torch and MindSpore differentiable.

        Raises:
            The errors of `dispatch`.
        """
        finish = self.begin_combine(expert_outputs, state, async_op, whole=async_op)
        return Pending(finish) if async_op else finish()

    def begin_combine(
        self, expert_outputs: Any, state: DispatchState[A], begins: bool, whole: bool = False
    ) -> Callable[[], A]:
        """Starts `combine` and returns the function that waits for its result."""
        route: Route = state.route
        with guard(route.communicator, OPERATOR):
            rows, gates = self.weighted(expert_outputs, state)
            array = self.array("expert_outputs", rows)
        arriving = route.collect(array, None, self.routing.combine_payload, begins, gates, whole)
        return lambda: self.combined(rows, route, arriving()[0])

    def __call__(
        self,
        tokens: Any,
        expert_ids: Any,
        gate_weights: Any,
        experts: Sequence[Callable[[A], A]] | Callable[[A, list[int]], A],
        *,
        shared: Callable[[A], A] | None = None,
        chunks: int = 1,
    ) -> A:
        """Runs `dispatch`, every local expert on its rows, and `combine`.

        Args:
            tokens, expert_ids, gate_weights: See `dispatch`.
            experts: This rank's, in the order of `local_experts`; each maps ``[rows, ...]`` to ``[rows, ...]``, also
                zero rows. A rank without experts gets no rows, but needs the shape and dtype of its peers' results:
                there, the results must be like the tokens. Or one function of the rows and counts of all local experts,
                which is what can be in a graph of torch, where ``chunks`` is 1.
            shared: An expert of all tokens, which every rank has; it works while rows are under way, and what it makes
                is added to the result.
            chunks: Parts of the tokens, as many on all ranks: while experts work on one, the next one arrives and the
                last one leaves. A capacity holds in every part.

        Returns:
            The tokens, as `combine` returns them.
        """
        return self.layer(tokens, expert_ids, gate_weights, experts, shared, chunks)
