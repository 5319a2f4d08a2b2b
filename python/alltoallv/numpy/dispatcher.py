"""Mixture of experts on NumPy arrays: tokens to the ranks of their experts, and the results back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alltoallv._calls import dispatch, routing
from alltoallv._calls.dispatch import Arrived, Route
from alltoallv._calls.dispatching import Dispatched
from alltoallv._calls.dispatching import DispatchState as DispatchState
from alltoallv._calls.host_dispatching import HostDispatching
from alltoallv.communicator import Communicator
from alltoallv.numpy.arrays import Array, as_input, resolve


class MoEDispatcher(HostDispatching[Array]):
    """Takes tokens to their experts, which live on the ranks of a group, and the results back.

    A token travels once to every rank that has an expert of it, with its gate weights and expert numbers, in one
    exchange, which also tells how many rows arrive; results come back in pieces of about 16 MiB. Every method is
    collective: all ranks call it, also those without tokens or rows. Results do not depend on how tokens and
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

    def member(self) -> Communicator:
        """The dispatcher's communicator."""
        return resolve(self.group)

    def array(self, name: str, x: Any) -> Array:
        """A contiguous array."""
        return as_input(name, x)

    def arrived(self, tokens: Any, weights: Any, made: Arrived) -> Dispatched[Array]:
        """As it is."""
        made.state.weights = made.weights
        return made.rows, made.state.counts, made.state

    def again(self, tokens: Any, weights: Any, route: Route) -> tuple[Array, Array | None]:
        """Rows and weights by a way that is known."""
        given = None if weights is None else as_input("gate_weights", weights)
        return dispatch.spread(route, as_input("tokens", tokens), given)

    def weighted(self, expert_outputs: Any, state: DispatchState[Array]) -> tuple[Array, Array | None]:
        """Multiplied on their way."""
        rows = as_input("expert_outputs", expert_outputs)
        routing.check_outputs(rows.shape, len(state.route.source))
        return rows, state.weights

    def combined(self, rows: Array, route: Route, tokens: Array) -> Array:
        """As they are."""
        return tokens

    def layer(self, tokens: Any, expert_ids: Any, gate_weights: Any, *how: Any) -> Array:
        """Takes also what can be made arrays."""
        weights = None if gate_weights is None else np.asarray(gate_weights)
        return super().layer(np.asarray(tokens), np.asarray(expert_ids), weights, *how)

    def parts(self, tokens: Array, ends: Sequence[int]) -> list[Array]:
        """Neighbouring rows, cut at ``ends``."""
        return np.split(tokens, ends)[: len(ends)]

    def joined(self, parts: Sequence[Array]) -> Array:
        """The rows of all parts."""
        return np.concatenate(parts)
