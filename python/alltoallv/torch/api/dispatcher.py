"""Mixture of experts on torch tensors: tokens go to the ranks of their experts, and the results come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv import _core
from alltoallv._calls import dispatching
from alltoallv._calls.counts import split_layout
from alltoallv._calls.dispatching import OPERATOR, WEIGHED, Dispatching, check_state
from alltoallv._calls.experts import MOST, RoutingOptions
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.api import moe_ops
from alltoallv.torch.api.exchange import all_to_all_v
from alltoallv.torch.api.moe_ops import sum_dtype
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.group import AnyCommunicator, Group
from alltoallv.torch.eager.observers import is_tracing
from alltoallv.torch.eager.tensors import core_name, needs_grad
from alltoallv.torch.graph.ops import communicator_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Counted: TypeAlias = list[int] | Tensor
_WEIGHED = {getattr(torch, name) for name in WEIGHED}


@dataclass(eq=False)
class DispatchState(dispatching.DispatchState[Tensor]):
    """Holds the way back of a dispatch, and what came with its rows, as tensors; in a graph counts are also tensors."""

    group: str

    @property
    def experts(self) -> Tensor:
        counts = torch.as_tensor(self.counts, dtype=torch.int64, device="cpu")
        return torch.arange(len(counts), device="cpu").repeat_interleave(counts)

    @property
    def sources(self) -> Tensor:
        _, source, rows, _ = self.route
        ranks = torch.arange(rows.shape[1], device="cpu").repeat_interleave(rows[1])
        return torch.cat([ranks, torch.tensor([-1], device="cpu")])[source.cpu()]

    @property
    def chosen(self) -> Tensor:
        return self.ids.reshape(-1).cpu().bincount(minlength=self.num_experts)

    @property
    def kept(self) -> Tensor:
        return self.ids.reshape(-1).cpu()[self.route[0].cpu()].bincount(minlength=self.num_experts)


class MoEDispatcher(torch.nn.Module, Dispatching[Tensor]):
    """Takes tokens to their experts, which live on the ranks of a group, and the results back.

    Rank r owns a block of neighbouring experts (`local_experts`): ``num_experts // W`` of them, one more on the first
    ``num_experts % W`` ranks. A token travels once to every rank that has an expert of it, with its gate weights and
    expert numbers, in one exchange, which also states how many rows arrive; on the host, results come back in pieces of
    about 16 MiB. Each way is the other's gradient, so gradients of any order flow to tokens and gate weights.

    Every method is collective: all ranks call it, also those without tokens or rows, and all of them call ``backward``.
    So that the gradient reaches every rank, apply experts to zero rows too. Results do not depend on how tokens and
    experts lie on the ranks, bit for bit, as long as an expert treats every row by itself and no capacity is set. Under
    ``torch.compile(fullgraph=True)`` `dispatch` and `combine` are operators of the graph, and counts are tensors.

    Args:
        num_experts: Experts on all ranks together.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        options: ``capacity``, ``drop``, ``alignment``, ``payload``, ``combine_payload``, ``codes``, ``placement``,
            ``active_ranks``; equal on all ranks. In a graph ``active_ranks`` is a
            tensor. See `RoutingOptions`.

    A step:

        dispatcher = MoEDispatcher(num_experts=8)
        experts = nn.ModuleList(make_expert(e) for e in dispatcher.local_experts)
        weights, ids = router(tokens).softmax(-1).topk(2)
        rows, counts, state = dispatcher.dispatch(tokens, ids, weights)
        outputs = torch.cat([expert(part) for expert, part in zip(experts, rows.split(counts))])
        tokens = dispatcher.combine(outputs, state)

    The last three lines are also ``dispatcher(tokens, ids, weights, experts)``.
    """

    def __init__(self, num_experts: int, group: Group = None, **options: Unpack[RoutingOptions]) -> None:
        torch.nn.Module.__init__(self)
        Dispatching.__init__(self, num_experts, group, **options)
        self._routing = moe_ops.as_text(self.routing)
        self._texts = self.routing, self._routing  # of the last call

    def begin_dispatch(
        self, tokens: Tensor, expert_ids: Tensor, gate_weights: Tensor | None, begins: bool
    ) -> Callable[[], Any]:
        """Sends tokens; the function that it returns receives rows. ``begins`` moves them in the background."""
        tracing = is_tracing()
        comm = None if tracing else self.carrier(tokens)
        with guard(comm, OPERATOR):
            ids, weights = _matrices(tokens, expert_ids, gate_weights, tracing)
            flat = tokens.reshape(tokens.shape[0], math.prod(tokens.shape[1:]))
            routing = self.routing if tracing else self.current_routing()
            if not tracing and routing is not self._texts[0]:
                self._texts = routing, moe_ops.as_text(routing)
            active = self._active() if tracing else None
        group = groups.name_of(self.group) if comm is None else comm
        arguments: Any = flat, weights, ids, self._routing if tracing else self._texts[1], active, group
        if comm is None or not begins:
            results = moe_ops.moe_dispatch(*arguments)
            return lambda: self._state(results, tokens, ids, weights, comm)
        finish = moe_ops.begin_dispatch(flat, weights, ids, routing, comm, True)
        return lambda: self._state(moe_ops.moe_dispatch.ran(finish(), *arguments), tokens, ids, weights, comm)

    def _active(self) -> Tensor | None:
        """Returns the ranks that are active as a tensor, which a graph reads as it runs."""
        active = self.active_ranks
        if active is None or isinstance(active, Tensor):
            return active if active is None or self.ranks is None else active[self.ranks]
        kind = type(active).__name__
        raise InvalidParamError(
            f"active_ranks is a {kind}, expected a torch.Tensor, which a graph reads as it runs", id=1419
        )

    def _state(
        self, results: list[Tensor], tokens: Tensor, ids: Tensor, weights: Tensor | None, comm: AnyCommunicator | None
    ) -> tuple[Tensor, Counted, DispatchState]:
        rows, row_weights, scales, order, source, ranks, token, experts = results
        counts, received = experts if comm is None else experts.tolist()
        state = DispatchState(
            counts,
            received,
            None if weights is None else row_weights,
            scales if self.routing.codes else None,
            ids,
            (order, source, ranks, token),
            self.routing.num_experts,
            comm,
            groups.name_of(self.group),
        )
        return rows.reshape(rows.shape[0], *tokens.shape[1:]), counts, state

    def again(self, tokens: Tensor, state: Any, gate_weights: Tensor | None) -> tuple[Tensor, Counted, DispatchState]:
        """Sends other tokens by the way of an earlier dispatch."""
        (n, k), weights, tracing = state.ids.shape, gate_weights, is_tracing()
        with guard(None if tracing else state.communicator or self.carrier(tokens), OPERATOR):
            _check_tensors(tokens, state.ids, weights)
            if not tracing:  # in a graph, moe_spread checks the shapes
                _core.moe_check_again(tokens.shape, None if weights is None else weights.shape, n, k)
        (n, *tail), weights = tokens.shape, None if weights is None else weights.reshape(weights.shape[0], k)
        group = state.group if tracing else state.communicator or state.group
        rows, of_rows = moe_ops.moe_spread(tokens.reshape(n, math.prod(tail)), weights, *state.route, k, group)
        other = replace(state, weights=None if weights is None else of_rows, scales=None)
        return rows.reshape(rows.shape[0], *tail), state.counts, other

    def begin_combine(
        self, expert_outputs: Tensor, state: Any, begins: bool, single: bool = False
    ) -> Callable[[], Tensor]:
        """Sends rows back; the function that it returns receives tokens; see `Dispatching.begin_combine`."""
        tracing = is_tracing()
        with guard(None if tracing else state.communicator or self.carrier(expert_outputs), OPERATOR):
            arguments, tail = self._outputs(expert_outputs, state, tracing)
        if begins and not tracing:
            arriving = moe_ops.begin_collect(*arguments, begins=True, single=single)
            return lambda: moe_ops.moe_collect.ran(arriving(), *arguments)[0].reshape(len(state.ids), *tail)
        tokens = moe_ops.moe_collect(*arguments)[0]
        return lambda: tokens.reshape(tokens.shape[0], *tail)

    def _outputs(self, outputs: Tensor, state: DispatchState, tracing: bool) -> tuple[Any, Sequence[int]]:
        """Returns the arguments of the collecting operator, after the multiplication by the weights."""
        if not isinstance(outputs, Tensor):
            raise TypeError(f"expert_outputs is a {type(outputs).__name__}, expected a torch.Tensor")
        _check_dtype("expert_outputs", outputs)
        if not tracing:
            _core.moe_check_outputs(outputs.shape, state.route[1].shape[0])
        tail = outputs.shape[1:]
        flat = outputs.reshape(outputs.shape[0], math.prod(tail))
        gates = state.weights
        if gates is not None and (tracing or not _core_weighs(flat, gates) or needs_grad(flat, gates)):
            wide, length = sum_dtype(flat.dtype, gates.dtype), flat.shape[0]
            if tracing:  # the operator refuses other lengths, and the peers learn of it
                gates = torch.cat([gates, gates.new_zeros(length)]).narrow(0, 0, length)
            flat, gates = (flat.to(wide) * gates.to(wide)[:, None]).to(flat.dtype), None
        group = state.group if tracing else state.communicator or state.group
        payload = self.routing.combine_payload or ""
        return (flat, None, *state.route, gates, *state.ids.shape, payload, group), tail

    def forward(
        self,
        tokens: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor | None,
        experts: Sequence[Callable[[Tensor], Tensor]] | Callable[[Tensor, Counted], Tensor],
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        chunks: int = 1,
    ) -> Tensor:
        """Does what calling the dispatcher does; see `Dispatching.__call__`."""
        if is_tracing():
            rows, counts, state = self.dispatch(tokens, expert_ids, gate_weights)
            function: Any = experts
            combined = self.combine(function(rows, counts), state)
            return combined if shared is None else combined + shared(tokens)
        return self.layer(tokens, expert_ids, gate_weights, experts, shared, chunks)

    def parts(self, tokens: Tensor, ends: Sequence[int]) -> list[Tensor]:
        """Splits the rows at ``ends``."""
        return list(tokens.tensor_split(ends))[: len(ends)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the rows of all parts, concatenated."""
        return torch.cat(list(parts))

    def member(self) -> Communicator:
        """This rank in the dispatcher's group, in host memory."""
        return groups.on_host(groups.by_name(groups.name_of(self.group)))

    def carrier(self, tokens: Tensor) -> AnyCommunicator:
        """Returns the communicator that carries tensors like these."""
        return communicator_of(self.group, tokens)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}"


@dataclass(frozen=True, eq=False)
class StaticState:
    """Holds the way back of a dispatch, on the device.

    Attributes:
        slots: Where each choice went, ``[n, k]``; a number beyond all slots where it was left out.
        kept: Which choices had room, bools ``[n, k]``.
        weights: The gate weights, ``[n, k]``, or None.
    """

    slots: Tensor
    kept: Tensor
    weights: Tensor | None


class StaticMoEDispatcher(torch.nn.Module):
    """Takes tokens to their experts in tensors of one shape, so that the host waits for no device.

    Every expert has room for ``capacity`` rows of each rank; what has no room is left out, the last tokens first.
    Nothing that the program does depends on how many rows come, so a step can be enqueued without reading expert
    numbers, compiled as one graph, or captured in a CUDA graph. All room travels, filled or not, and a token once to
    every expert; `MoEDispatcher` sends what is filled, a token once to every rank.

    Rank r owns a block of neighbouring experts, as with `MoEDispatcher`. Both methods are collective, and gradients of
    any order flow to tokens and gate weights. While nothing is left out, the result has `MoEDispatcher`'s bits. Options
    and what tokens are must be equal on all ranks, or PeerMismatchError is raised on all; over NCCL and HCCL this is
    compared in a group's first calls, as everywhere, and in a graph only how much travels.

    Args:
        num_experts: Experts on all ranks together.
        capacity: Rows from each rank for each expert, at least 1.
        group: A ProcessGroup, a `Communicator`, or None for the default group.

    Attributes:
        local_experts: The experts of this rank, a range.
    """

    def __init__(self, num_experts: int, capacity: int, group: Group = None) -> None:
        super().__init__()
        for name, value in (("num_experts", num_experts), ("capacity", capacity)):
            _core.checked_integer(name, value, 1, MOST)
        self.num_experts, self.capacity, self.group = num_experts, capacity, group
        self._size, rank = groups.world_size(group), groups.rank_in(group)
        # The first `_extra` ranks have one expert more than the `_base` of the others; slots are as many everywhere.
        self._base, self._extra = divmod(num_experts, self._size)
        self._most = self._base + (self._extra > 0)
        first = rank * self._base + min(rank, self._extra)
        self.local_experts = range(first, first + self._base + (rank < self._extra))

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, gate_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, StaticState]:
        """Sends every token to its experts.

        Args:
            tokens: ``[n, ...]``, floating-point or complex; n may differ between ranks.
            expert_ids: Integers ``[n, k]`` or ``[n]``; -1: no expert. In host memory other numbers outside of
                0 to ``num_experts - 1`` raise InvalidParamError on all ranks; on a device, where the host does not read
                them, and in a graph they count as -1.
            gate_weights: What `combine` multiplies the experts' rows by, like ``expert_ids``; None: nothing.

        Returns:
            Rows ``[experts of this rank, W * capacity, ...]``: rows of rank j begin at ``j * capacity``, then zeros;
            how many of each rank are filled, int64 ``[experts of this rank, W]``; what `combine` needs. All lie on the
            tokens' device.
        """
        tracing = is_tracing()
        comm = None if tracing else communicator_of(self.group, tokens)
        with guard(comm, OPERATOR):
            ids, weights = _matrices(tokens, expert_ids, gate_weights, tracing)
            if comm is not None and ids.is_cpu:
                check_experts("expert_ids", ids, self.num_experts)
        (n, k), tail = ids.shape, tokens.shape[1:]
        flat, total = tokens.reshape(n, math.prod(tail)), self._size * self._most * self.capacity
        home, kept, slots = self._slots(ids.reshape(-1))
        filled = torch.zeros(self._size * self._most + 1, dtype=torch.int64, device=ids.device)
        filled = filled.scatter_add(0, torch.where(kept, home, len(filled) - 1), kept.long())[:-1]
        counts = self._exchange_counts(filled, flat, comm)
        room = flat.new_zeros(total + 1, flat.shape[1])
        sent = room.index_copy(0, slots, flat.repeat_interleave(k, 0))[:total]
        arrived = self._exchange(sent)
        rows = arrived.view(self._size, self._most, self.capacity, flat.shape[1]).transpose(0, 1)
        own = len(self.local_experts)
        state = StaticState(slots.view(n, k), kept.view(n, k), weights)
        return rows[:own].reshape(own, self._size * self.capacity, *tail), counts.view(self._size, -1).T[:own], state

    def combine(self, expert_outputs: Tensor, state: StaticState) -> Tensor:
        """Brings the experts' rows back to their tokens.

        Each row is multiplied by its weight and rounded; a token's rows are added in the order of its choices, in
        float32 or wider, and rounded once. What was left out adds nothing.

        Args:
            expert_outputs: ``[experts of this rank, W * capacity, ...]``, in the order of `dispatch`'s rows.
            state: What `dispatch` returned.

        Returns:
            ``[n, ...]``.
        """
        own, shape = len(self.local_experts), tuple(expert_outputs.shape)
        with guard(None if is_tracing() else communicator_of(self.group, expert_outputs), OPERATOR):
            check_state(state, StaticState)
            _check_dtype("expert_outputs", expert_outputs)
            if shape[:2] != (own, self._size * self.capacity):
                expected = f"[{own}, {self._size * self.capacity}, ...]"
                raise InvalidTensorError(f"expert_outputs has shape {shape}, expected {expected}", id=2133)
        (n, k), width = state.slots.shape, math.prod(shape[2:])
        parts = expert_outputs.reshape(own, self._size, self.capacity * width).transpose(0, 1)
        padded = functional.pad(parts, (0, 0, 0, self._most - own))
        back = self._exchange(padded.reshape(self._size * self._most * self.capacity, width))
        rows = torch.cat([back, back.new_zeros(1, width)])[state.slots]
        if state.weights is not None:
            wide = sum_dtype(rows.dtype, state.weights.dtype)
            rows = (rows.to(wide) * state.weights.to(wide)[:, :, None]).to(rows.dtype)
            rows = rows.masked_fill(~state.kept[:, :, None], 0)  # a weight may be infinite
        result = rows.new_zeros(n, width, dtype=sum_dtype(rows.dtype))
        for choice in range(k):
            result = result + rows[:, choice]
        return result.to(rows.dtype).reshape(n, *shape[2:])

    def _slots(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns each choice's expert, numbered with as many for every rank; whether it has room; its slot."""
        count, wide, narrow = self.num_experts, self._base + 1, max(self._base, 1)
        valid = (ids >= 0) & (ids < count)
        expert = torch.where(valid, ids.long(), count)
        order = expert.argsort(stable=True)
        ordered = expert[order]
        firsts = torch.searchsorted(ordered, torch.arange(count + 1, device=ids.device))
        slot = torch.zeros_like(expert).scatter(0, order, torch.arange(len(ids), device=ids.device) - firsts[ordered])
        end = self._extra * wide  # of the experts on ranks that have one more
        rank = torch.where(expert < end, expert // wide, self._extra + (expert - end) // narrow)
        index = torch.where(expert < end, expert % wide, (expert - end) % narrow)
        home, kept = rank * self._most + index, valid & (slot < self.capacity)
        beyond = self._size * self._most * self.capacity
        return home, kept, torch.where(kept, home * self.capacity + slot, beyond)

    def _exchange(self, rows: Tensor) -> Tensor:
        parts = [self._most * self.capacity] * self._size
        return all_to_all_v(rows, parts, parts, unit="row", group=self.group)

    def _exchange_counts(self, filled: Tensor, tokens: Tensor, comm: AnyCommunicator | None) -> Tensor:
        """Exchanges how many slots are filled; first, so that ranks which differ learn it before rows move."""
        parts = [self._most] * self._size
        if comm is None:
            return all_to_all_v(filled, parts, parts, unit="element", group=self.group)
        with guard(comm, OPERATOR):
            options = f"{self.num_experts} experts with room for {self.capacity} rows"
            terms = _core.moe_terms(core_name(tokens.dtype), tokens.shape[1], options)
            counts = torch.empty_like(filled)
            exchange = calls.exchange(comm, OPERATOR, counts, filled, split_layout(parts, parts, 1), terms=terms)
        exchange.run()
        return counts


def _core_weighs(rows: Tensor, weights: Tensor) -> bool:
    """Returns whether collecting multiplies such rows by such weights; that has no gradient."""
    return rows.is_cpu and rows.dtype in _WEIGHED and weights.dtype in _WEIGHED


def _matrices(tokens: Tensor, ids: Tensor, weights: Tensor | None, tracing: bool) -> tuple[Tensor, Tensor | None]:
    """Returns expert numbers and weights of shape [n, k]."""
    _check_tensors(tokens, ids, weights)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        name = "expert_ids"
        raise InvalidTensorError(f"{name} has dtype {ids.dtype}, expected integers", 13, id=2013)
    shape: tuple[int, int] = (ids.shape[0], math.prod(ids.shape[1:]))
    if not tracing:  # in a graph, the operator checks them
        shape = _core.moe_check_shapes(tokens.shape, ids.shape, None if weights is None else weights.shape)
    return ids.reshape(shape), None if weights is None else weights.reshape(shape)


def _check_tensors(tokens: Tensor, ids: Tensor, weights: Tensor | None) -> None:
    for name, value in (("tokens", tokens), ("expert_ids", ids), ("gate_weights", weights)):
        if not isinstance(value, Tensor) and (value is not None or name != "gate_weights"):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor")
    _check_dtype("tokens", tokens)
    if weights is not None and not weights.is_floating_point():
        raise InvalidTensorError(f"gate_weights has dtype {weights.dtype}, expected a floating-point one", 13, id=2014)


def check_experts(name: str, ids: Tensor, experts: int) -> None:
    """Raises InvalidParamError for a number that is none of the experts'; -1 is none."""
    low, high = (int(each) for each in ids.aminmax()) if ids.numel() else (0, 0)
    if low < -1 or high >= experts:
        raise InvalidParamError(f"{name} holds numbers from {low} to {high}, expected -1 to {experts - 1}", id=1241)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise InvalidTensorError(
            f"{name} has dtype {tensor.dtype}, expected a floating-point or complex one", 13, id=2103
        )
