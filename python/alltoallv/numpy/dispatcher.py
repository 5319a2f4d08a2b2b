"""Mixture of experts on NumPy arrays: sends tokens to the ranks of their experts and brings the results back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alltoallv import _core
from alltoallv._calls.dispatching import WEIGHED, Dispatching, sum_dtype
from alltoallv._calls.dispatching import DispatchState as DispatchState
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.numpy.arrays import ADAPTER, Array, as_input, resolve


class MoEDispatcher(Dispatching[Array]):
    """Sends tokens to their experts, which are spread over the ranks of a group, and brings the results back.

    A token travels once to every rank that has one of its experts, with its gate weights and expert numbers, in one
    exchange, which also states how many rows arrive; results come back in pieces of about 16 MiB. Every method is
    collective: all ranks call it, also those without tokens or rows. Results do not depend, to the bit, on which rank
    holds a token or an expert, if an expert treats every row by itself and no capacity is set.

    Args:
        num_experts: Number of experts on all ranks together.
        group: A `Communicator`, or None for the default one.
        options: ``capacity``, ``drop``, ``alignment``, ``payload``, ``combine_payload``, ``codes``, ``placement``,
            ``active_ranks``; equal on all ranks. See `RoutingOptions`.

    A step:

        dispatcher = MoEDispatcher(8)
        rows, counts, state = dispatcher.dispatch(tokens, ids, weights)
        parts = np.split(rows, np.cumsum(counts)[:-1])
        outputs = np.concatenate([expert(part) for expert, part in zip(experts, parts)])
        tokens = dispatcher.combine(outputs, state)

    The last four lines are also ``dispatcher(tokens, ids, weights, experts)``.
    """

    adapter = ADAPTER

    def member(self) -> Communicator:
        return resolve(self.group)

    def array(self, name: str, x: Any) -> Array:
        return as_input(name, x)

    def weighted(self, expert_outputs: Any, state: DispatchState[Array]) -> tuple[Array, Array | None]:
        """Returns rows and weights separately where the combine multiplies them."""
        rows, weights = as_input("expert_outputs", expert_outputs), state.weights
        if weights is None or {core_name(rows.dtype), core_name(weights.dtype)} <= {*WEIGHED}:
            return rows, weights
        _core.moe_check_outputs(rows.shape, len(weights))
        wide = sum_dtype(rows.dtype, weights.dtype)
        each = weights.astype(wide).reshape(-1, *[1] * (rows.ndim - 1))
        return (rows.astype(wide) * each).astype(rows.dtype), None

    def layer(self, tokens: Any, expert_ids: Any, gate_weights: Any, *options: Any) -> Array:
        """Accepts everything that NumPy can convert to arrays."""
        weights = None if gate_weights is None else np.asarray(gate_weights)
        return super().layer(np.asarray(tokens), np.asarray(expert_ids), weights, *options)

    def parts(self, tokens: Array, ends: Sequence[int]) -> list[Array]:
        return np.split(tokens, ends)[: len(ends)]

    def joined(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)
