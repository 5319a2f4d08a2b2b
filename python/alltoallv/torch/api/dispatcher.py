"""Mixture of experts on torch tensors: tokens go to the ranks of their experts, and the results come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from alltoallv._calls import routing
from alltoallv._calls.dispatching import OPERATOR, Dispatching, Pending
from alltoallv._calls.guard import guard
from alltoallv._calls.routing import Routing
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.torch.api import moe_ops
from alltoallv.torch.api.rows import sum_dtype
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import AnyCommunicator
from alltoallv.torch.eager.graphs import is_tracing
from alltoallv.torch.eager.group import Group
from alltoallv.torch.eager.tensors import needs_grad

Counted: TypeAlias = list[int] | Tensor


@dataclass(eq=False)
class DispatchState:
    """Holds what `MoEDispatcher.dispatch` found out: the way back, and what came with the rows.

    Attributes:
        counts: Rows of every local expert, those of zeros that fill it up included; in a graph an int64 tensor.
        received: ``counts`` without the rows of zeros.
        weights: Gate weight of every row, shape ``[rows]``, differentiable; None if none were given.
        scales: Scale of every row, float32, shape ``[rows]``, where rows come as codes; else None.
        way: ``(order, source, ranks, token)``; see `alltoallv.torch.api.moe_ops`.
    """

    counts: Counted
    received: Counted
    weights: Tensor | None
    scales: Tensor | None
    ids: Tensor
    way: tuple[Tensor, Tensor, Tensor, Tensor]
    num_experts: int
    group: str
    communicator: AnyCommunicator | None  # kept alive with its name

    @property
    def experts(self) -> Tensor:
        """Local expert of every row: int64, shape ``[rows]``, ascending."""
        counts = torch.as_tensor(self.counts, dtype=torch.int64, device="cpu")
        return torch.arange(len(counts), device="cpu").repeat_interleave(counts)

    @property
    def sources(self) -> Tensor:
        """Rank that every row comes from: int64, shape ``[rows]``; ascending within an expert, -1 for rows of zeros."""
        _, source, rows, _ = self.way
        ranks = torch.arange(rows.shape[1], device="cpu").repeat_interleave(rows[1])
        return torch.cat([ranks, torch.tensor([-1], device="cpu")])[source.cpu()]

    @property
    def chosen(self) -> Tensor:
        """The times that this rank's tokens chose each expert: int64, shape ``[num_experts]``, on the CPU."""
        return self.ids.reshape(-1).cpu().bincount(minlength=self.num_experts)

    @property
    def kept(self) -> Tensor:
        """The rows that this rank sent to each expert: int64, shape ``[num_experts]``, on the CPU."""
        return self.ids.reshape(-1).cpu()[self.way[0].cpu()].bincount(minlength=self.num_experts)


class MoEDispatcher(torch.nn.Module, Dispatching[Tensor]):
    """Takes tokens to their experts, which live on the ranks of a group, and the results back.

    Rank r owns a block of neighbouring experts (`local_experts`): ``num_experts // W`` of them, one more on the first
    ``num_experts % W`` ranks. A token travels once to every rank that has an expert of it, with its gate weights and
    expert numbers, in one exchange, which also says how many rows arrive; on the host, results come back in pieces of
    about 16 MiB. Each way is the other's gradient, so gradients of any order flow to tokens and gate weights.

    Every method is collective: all ranks call it, also those without tokens or rows, and all of them call ``backward``.
    So that the gradient reaches every rank, apply experts to zero rows too. Results do not depend on how tokens and
    experts lie on the ranks, bit for bit, as long as an expert treats every row by itself and no capacity is set. Under
    ``torch.compile(fullgraph=True)`` `dispatch` and `combine` are operators of the graph, and counts are tensors.

    Args:
        num_experts: Experts on all ranks together.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        options: ``capacity``, ``drop``, ``alignment``, ``payload``, ``combine_payload``, ``codes``, ``placement``;
            equal on all ranks. See `alltoallv._calls.routing.Routing`.

    Example::

        dispatcher = MoEDispatcher(num_experts=8)
        experts = nn.ModuleList(make_expert(e) for e in dispatcher.local_experts)
        weights, ids = router(tokens).softmax(-1).topk(2)
        rows, counts, state = dispatcher.dispatch(tokens, ids, weights)
        outputs = torch.cat([expert(part) for expert, part in zip(experts, rows.split(counts))])
        tokens = dispatcher.combine(outputs, state)

    The last three lines are also ``dispatcher(tokens, ids, weights, experts)``.
    """

    def __init__(self, num_experts: int, group: Group = None, **options: Any) -> None:
        super().__init__()
        self.routing, self.group = Routing(num_experts, **options), group
        self._routing = moe_ops.as_text(self.routing)

    def dispatch(
        self,
        tokens: Tensor,
        expert_ids: Tensor | DispatchState,
        gate_weights: Tensor | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
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
            return self._again(tokens, expert_ids, gate_weights)
        if is_tracing():
            ids, weights = _matrices(tokens, expert_ids, gate_weights)
            flat = tokens.reshape(tokens.shape[0], math.prod(tokens.shape[1:]))
            made = moe_ops.moe_dispatch(flat, weights, ids, self._routing, groups.name_of(self.group))
            return self._state(made, tokens, ids, weights, None)
        finish = self.begin_dispatch(tokens, expert_ids, gate_weights, async_op)
        return Pending(finish) if async_op else finish()

    def begin_dispatch(
        self, tokens: Tensor, expert_ids: Tensor, gate_weights: Tensor | None, begins: bool
    ) -> Callable[[], Any]:
        """Starts `dispatch` and returns the function that waits for its result."""
        comm = self.carrier(tokens)
        with guard(comm, OPERATOR):
            ids, weights = _matrices(tokens, expert_ids, gate_weights)
            flat = tokens.reshape(tokens.shape[0], math.prod(tokens.shape[1:]))
        arguments = flat, weights, ids, self._routing, groups.name_of(self.group)
        if not begins:
            made = moe_ops.moe_dispatch(*arguments)
            return lambda: self._state(made, tokens, ids, weights, comm)
        finish = moe_ops.begin_dispatch(flat, weights, ids, self.routing, arguments[-1], True)
        return lambda: self._state(moe_ops.moe_dispatch.ran(finish(), *arguments), tokens, ids, weights, comm)

    def _state(
        self, made: list[Tensor], tokens: Tensor, ids: Tensor, weights: Tensor | None, comm: AnyCommunicator | None
    ) -> tuple[Tensor, Counted, DispatchState]:
        rows, row_weights, scales, order, source, ranks, token, experts = made
        counts, received = experts if comm is None else experts.tolist()
        state = DispatchState(
            counts,
            received,
            None if weights is None else row_weights,
            scales if self.routing.codes else None,
            ids,
            (order, source, ranks, token),
            self.routing.num_experts,
            groups.name_of(self.group),
            comm,
        )
        return rows.reshape(rows.shape[0], *tokens.shape[1:]), counts, state

    def _again(
        self, tokens: Tensor, state: DispatchState, weights: Tensor | None
    ) -> tuple[Tensor, Counted, DispatchState]:
        k = state.ids.shape[1]
        if not is_tracing():  # in a graph, moe_spread checks the shapes
            with guard(state.communicator or self.carrier(tokens), OPERATOR):
                _check_tensors(tokens, state.ids, weights)
                routing.check_again(tokens.shape, None if weights is None else weights.shape, *state.ids.shape)
        (n, *tail), weights = tokens.shape, None if weights is None else weights.reshape(weights.shape[0], k)
        rows, made = moe_ops.moe_spread(tokens.reshape(n, math.prod(tail)), weights, *state.way, k, state.group)
        other = replace(state, weights=None if weights is None else made, scales=None)
        return rows.reshape(rows.shape[0], *tail), state.counts, other

    def combine(self, expert_outputs: Tensor, state: DispatchState, *, async_op: bool = False) -> Any:
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
        if is_tracing():
            arguments, tail = self._outputs(expert_outputs, state)
            tokens = moe_ops.moe_collect(*arguments)[0]
            return tokens.reshape(tokens.shape[0], *tail)
        finish = self.begin_combine(expert_outputs, state, async_op, whole=async_op)
        return Pending(finish) if async_op else finish()

    def begin_combine(
        self, expert_outputs: Tensor, state: Any, begins: bool, whole: bool = False
    ) -> Callable[[], Tensor]:
        """Starts `combine` and returns the function that waits for its result."""
        comm = state.communicator or self.carrier(expert_outputs)
        with guard(comm, OPERATOR):
            arguments, tail = self._outputs(expert_outputs, state)
        if begins:
            arriving = moe_ops.begin_collect(*arguments, begins=True, whole=whole)
            return lambda: moe_ops.moe_collect.ran(arriving(), *arguments)[0].reshape(len(state.ids), *tail)
        tokens = moe_ops.moe_collect(*arguments)[0]
        return lambda: tokens.reshape(tokens.shape[0], *tail)

    def _outputs(self, outputs: Tensor, state: DispatchState) -> tuple[Any, Sequence[int]]:
        """Returns the arguments of the collecting operator, after the multiplication by the weights."""
        if not isinstance(outputs, Tensor):
            raise TypeError(f"expert_outputs is a {type(outputs).__name__}, expected a torch.Tensor")
        _check_dtype("expert_outputs", outputs)
        if not is_tracing():
            routing.check_outputs(outputs.shape, state.way[1].shape[0])
        tail = outputs.shape[1:]
        flat = outputs.reshape(outputs.shape[0], math.prod(tail))
        gates = state.weights
        if gates is not None and (is_tracing() or needs_grad(flat, gates)):  # collecting them has no gradient
            wide, length = sum_dtype(flat.dtype, gates.dtype), flat.shape[0]
            if is_tracing():  # the operator refuses other lengths, and the peers learn of it
                gates = torch.cat([gates, gates.new_zeros(length)]).narrow(0, 0, length)
            flat, gates = (flat.to(wide) * gates.to(wide)[:, None]).to(flat.dtype), None
        payload = self.routing.combine_payload or ""
        return (flat, None, *state.way, gates, *state.ids.shape, payload, state.group), tail

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
        if is_tracing():
            rows, counts, state = self.dispatch(tokens, expert_ids, gate_weights)
            whole: Any = experts
            made = self.combine(whole(rows, counts), state)
            return made if shared is None else made + shared(tokens)
        return self.layer(tokens, expert_ids, gate_weights, experts, shared, chunks)

    def parts(self, tokens: Tensor, ends: Sequence[int]) -> list[Tensor]:
        """Splits the rows at ``ends``."""
        return list(tokens.tensor_split(ends))[: len(ends)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the rows of all parts, concatenated."""
        return torch.cat(list(parts))

    def member(self) -> Communicator:
        """This rank in the dispatcher's group, in host memory."""
        return groups.on_host(self._communicator())

    def carrier(self, tokens: Tensor) -> AnyCommunicator:
        """Returns the communicator that carries tensors like these."""
        return self._communicator(groups.device_of(tokens))

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}"

    def _communicator(self, device: str = "cpu") -> AnyCommunicator:
        return groups.by_name(groups.name_of(self.group), device)


def _matrices(tokens: Tensor, ids: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns expert numbers and weights of shape [n, k]."""
    _check_tensors(tokens, ids, weights)
    integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool)
    shapes = tokens.shape, ids.shape, None if weights is None else weights.shape
    shape = routing.check_shapes(*shapes, integers, ids.dtype)
    return ids.reshape(shape), None if weights is None else weights.reshape(shape)


def _check_tensors(tokens: Tensor, ids: Tensor, weights: Tensor | None) -> None:
    for name, value in (("tokens", tokens), ("expert_ids", ids), ("gate_weights", weights)):
        if not isinstance(value, Tensor) and (value is not None or name != "gate_weights"):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor")
    _check_dtype("tokens", tokens)
    if weights is not None and not weights.is_floating_point():
        raise InvalidTensorError(f"gate_weights has dtype {weights.dtype}, expected a floating-point one", 13)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise InvalidTensorError(f"{name} has dtype {tensor.dtype}, expected a floating-point or complex one", 13)
