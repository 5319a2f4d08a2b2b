"""Modules: `AllToAllV`, and `MoEDispatcher` for experts that live on different ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from alltoallv._calls.counts import Counts, Unit, packed
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.calls import AnyCommunicator
from alltoallv.torch.api.functions import all_to_all_v
from alltoallv.torch.api.group import Group
from alltoallv.torch.api.rows import Route, collect, known, spread, sum_dtype
from alltoallv.torch.graph.graphs import between_graphs


class AllToAllV(torch.nn.Module):
    """`alltoallv.torch.all_to_all_v` as a module, with its group and unit fixed.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        unit: What counts and displacements count: ``"row"`` of dimension 0, or ``"element"``.
    """

    def __init__(self, group: Group = None, *, unit: Unit = "row") -> None:
        super().__init__()
        if unit not in ("element", "row"):
            raise InvalidParamError(f"unit is {unit!r}, expected 'element' or 'row'")
        self.group = group
        self.unit: Unit = unit

    def forward(
        self,
        input: Tensor,
        send_counts: Counts,
        recv_counts: Counts | None = None,
        *,
        sdispls: Counts | None = None,
        rdispls: Counts | None = None,
    ) -> Tensor:
        """The output of the exchange; differentiable. Arguments, shapes and errors as in `all_to_all_v`."""
        return all_to_all_v(
            input, send_counts, recv_counts, sdispls=sdispls, rdispls=rdispls, unit=self.unit, group=self.group
        )

    def extra_repr(self) -> str:
        return f"unit={self.unit!r}"


@dataclass(eq=False)
class DispatchState:
    """What `MoEDispatcher.dispatch` found out: the way back, and what came with the rows.

    Attributes:
        counts: Rows of every local expert.
        weights: Gate weight of every row, shape ``[rows]``, differentiable; None if none were given.
        experts: Local expert of every row, int64, shape ``[rows]``, ascending.
        sources: Rank that every row comes from, int64, shape ``[rows]``; ascending within an expert.
    """

    counts: list[int]
    weights: Tensor | None
    experts: Tensor
    sources: Tensor
    route: Route = field(repr=False)


class MoEDispatcher(torch.nn.Module):
    """Takes tokens to their experts, which live on the ranks of a group, and the results back.

    Rank r owns a block of neighbouring experts (`local_experts`): ``num_experts // W`` of them, one more on the first
    ``num_experts % W`` ranks. Token rows, gate weights and expert numbers travel in one exchange; how many rows arrive
    is learnt in it. The way back is the same exchange with the roles exchanged, and each is the other's gradient, so
    gradients of any order flow to tokens and gate weights, with one exchange per direction and order.

    Every method is collective: all ranks call it, also those without tokens or rows, and all of them call ``backward``.
    So that the gradient reaches every rank, apply experts to zero rows too. Results do not depend on how tokens and
    experts lie on the ranks, bit for bit, as long as an expert treats every row by itself. Under torch.compile the
    methods run as they are, between graphs.

    Args:
        num_experts: Experts on all ranks together.
        group: A ProcessGroup, a `Communicator`, or None for the default group.

    Example::

        dispatcher = MoEDispatcher(num_experts=8)
        experts = nn.ModuleList(make_expert(e) for e in dispatcher.local_experts)
        weights, ids = router(tokens).softmax(-1).topk(2)
        rows, counts, state = dispatcher.dispatch(tokens, ids, weights)
        outputs = torch.cat([expert(part) for expert, part in zip(experts, rows.split(counts))])
        tokens = dispatcher.combine(outputs, state)

    The last three lines are also ``dispatcher(tokens, ids, weights, experts)``.
    """

    def __init__(self, num_experts: int, group: Group = None) -> None:
        super().__init__()
        if not isinstance(num_experts, int) or num_experts < 1:
            raise InvalidParamError(f"num_experts is {num_experts!r}, expected an integer of at least 1")
        self.num_experts = num_experts
        self.group = group

    @property
    def local_experts(self) -> range:
        """The numbers of this rank's experts."""
        comm = self._communicator()
        begins = _first_experts(self.num_experts, comm.size)
        return range(begins[comm.rank], begins[comm.rank + 1])

    @between_graphs
    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, gate_weights: Tensor | None = None
    ) -> tuple[Tensor, list[int], DispatchState]:
        """Sends every token to each of its k experts.

        Args:
            tokens: Shape ``[n, ...]``, n >= 0, floating-point or complex. dtype and row shape agree on all ranks.
            expert_ids: Integers from 0 to ``num_experts - 1``, shape ``[n, k]``, or ``[n]`` for k = 1. k, as n, may
                differ between ranks; a token may name an expert twice.
            gate_weights: Floating-point, shape of ``expert_ids``; None on all ranks: `combine` adds without weights.

        Returns:
            ``(rows, counts, state)``: the rows for this rank's experts, shape ``[sum(counts), ...]``, sorted by expert,
            then by the rank they come from, then as they lay there; how many each local expert gets; and what `combine`
            needs. Rows and ``state.weights`` are differentiable.

        Raises:
            InvalidParamError, InvalidTensorError: this rank's or a peer's arguments.
            PeerMismatchError: ranks disagree about the dtypes, the row shape or the number of experts.
            PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
        """
        comm = self._communicator(groups.device_of(tokens))
        with guard(comm, "all_to_all_v"):
            ids, weights = _checked(tokens, expert_ids, gate_weights, self.num_experts)
            begins = torch.tensor(_first_experts(self.num_experts, comm.size), device="cpu")
            flat_ids = ids.reshape(-1)
            order = torch.argsort(flat_ids, stable=True)
            sorted_ids = flat_ids[order]
            owners = torch.searchsorted(begins[1:], sorted_ids, right=True)
            sends = torch.bincount(owners, minlength=comm.size)[: comm.size].tolist()
            signature = _signature(tokens, weights, self.num_experts)
            tags = torch.stack([sorted_ids - begins[owners], torch.full_like(sorted_ids, signature)], 1)
            route = Route(groups.name_of(self.group), comm, ids.shape[0], ids.shape[1], order.to(tokens.device), sends)
            flat = tokens.reshape(tokens.shape[0], math.prod(tokens.shape[1:]))
        rows, row_weights = spread(flat, weights, route, tags.to(torch.int32))
        with guard(comm, "all_to_all_v"):
            experts, sources = _check_tags(comm, route, signature)
            local = int(begins[comm.rank + 1] - begins[comm.rank])
            counts = torch.bincount(experts, minlength=local).tolist()
        state = DispatchState(counts, row_weights, experts, sources, route)
        return rows.reshape(rows.shape[0], *tokens.shape[1:]), counts, state

    @between_graphs
    def combine(self, expert_outputs: Tensor, state: DispatchState) -> Tensor:
        """Brings the rows back to their tokens and adds the k results of each.

        A row is multiplied by its gate weight where it is, in float32 or the wider of the two dtypes, and rounded to
        the dtype of ``expert_outputs``. The k results of a token are added in the order of its expert numbers, in
        float32 or wider, and rounded once.

        Args:
            expert_outputs: Shape ``[sum(counts), ...]``, floating-point or complex, in the order of the rows of
                `dispatch`. The row shape and the dtype may differ from the tokens', but not between ranks.
            state: What `dispatch` returned.

        Returns:
            Shape ``[n, ...]``, in the order of the tokens given to `dispatch`. Differentiable.

        Raises:
            As `dispatch`.
        """
        route = state.route
        with guard(route.communicator, "all_to_all_v"):
            if not isinstance(expert_outputs, Tensor):
                raise TypeError(f"expert_outputs is a {type(expert_outputs).__name__}, expected a torch.Tensor")
            _check_dtype("expert_outputs", expert_outputs)
            total = state.experts.shape[0]
            if expert_outputs.dim() == 0 or expert_outputs.shape[0] != total:
                raise InvalidTensorError(
                    f"expert_outputs has shape {tuple(expert_outputs.shape)}, expected {total} rows, as dispatched"
                )
            tail = expert_outputs.shape[1:]
            flat = expert_outputs.reshape(total, math.prod(tail))
            if state.weights is not None:
                wide = sum_dtype(flat.dtype, state.weights.dtype)
                flat = (flat.to(wide) * state.weights.to(wide)[:, None]).to(flat.dtype)
        tokens, _ = collect(flat, None, route)
        return tokens.reshape(tokens.shape[0], *tail)

    def forward(
        self,
        tokens: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor | None,
        experts: Sequence[Callable[[Tensor], Tensor]],
    ) -> Tensor:
        """`dispatch`, every local expert on its rows, and `combine`.

        ``experts`` are this rank's, in the order of `local_experts`; each maps ``[rows, ...]`` to ``[rows, ...]``, also
        zero rows. A rank without experts gets no rows, but needs the shape and dtype of its peers' results: there, the
        results must be like the tokens.
        """
        rows, counts, state = self.dispatch(tokens, expert_ids, gate_weights)
        with guard(state.route.communicator, "all_to_all_v"):
            if len(experts) != len(counts):
                raise InvalidParamError(
                    f"experts has {len(experts)} entries, expected {len(counts)}, one per local expert"
                )
            outputs = [expert(part) for expert, part in zip(experts, rows.split(counts), strict=True)]
            joined = torch.cat(outputs) if outputs else rows
        return self.combine(joined, state)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}"

    def _communicator(self, device: str = "cpu") -> AnyCommunicator:
        return groups.by_name(groups.name_of(self.group), device)


def _first_experts(num_experts: int, size: int) -> list[int]:
    """The first expert of every rank, and the number of all behind them."""
    each, more = divmod(num_experts, size)
    return [*packed([each + (rank < more) for rank in range(size)]), num_experts]


def _checked(tokens: Tensor, ids: Tensor, weights: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor | None]:
    """Expert numbers as int64 on the CPU and weights, both of shape [n, k]."""
    for name, value in (("tokens", tokens), ("expert_ids", ids), ("gate_weights", weights)):
        if not isinstance(value, Tensor) and (value is not None or name != "gate_weights"):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor")
    _check_dtype("tokens", tokens)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise InvalidTensorError(f"expert_ids has dtype {ids.dtype}, expected integers", 13)
    if tokens.dim() == 0 or ids.dim() not in (1, 2) or ids.shape[0] != tokens.shape[0] or 0 in ids.shape[1:]:
        raise InvalidTensorError(
            f"expert_ids has shape {tuple(ids.shape)} and tokens {tuple(tokens.shape)}, "
            "expected [n, k] or [n], with k at least 1, and [n, ...]"
        )
    if weights is not None:
        if weights.shape != ids.shape:
            raise InvalidTensorError(
                f"gate_weights has shape {tuple(weights.shape)}, expected {tuple(ids.shape)}, that of expert_ids"
            )
        if not weights.is_floating_point():
            raise InvalidTensorError(f"gate_weights has dtype {weights.dtype}, expected a floating-point one", 13)
        weights = weights.reshape(ids.shape[0], -1) if ids.dim() == 1 else weights
    numbers = ids.detach().to("cpu", torch.int64)
    wrong = numbers[(numbers < 0) | (numbers >= num_experts)]
    if len(wrong):
        raise InvalidParamError(f"expert_ids holds {int(wrong[0])}, expected 0 to {num_experts - 1}")
    return numbers[:, None] if ids.dim() == 1 else numbers, weights


def _check_dtype(name: str, tensor: Tensor) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise InvalidTensorError(f"{name} has dtype {tensor.dtype}, expected a floating-point or complex one", 13)


def _signature(tokens: Tensor, weights: Tensor | None, num_experts: int) -> int:
    """What ranks must agree on and cannot see from the length of a row."""
    text = f"{tokens.dtype} {tuple(tokens.shape[1:])} {None if weights is None else weights.dtype} {num_experts}"
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def _check_tags(comm: AnyCommunicator, route: Route, signature: int) -> tuple[Tensor, Tensor]:
    """Local expert and source rank of every row, sorted by expert."""
    tags, by_expert = known(route.tags).to("cpu", torch.int64), known(route.by_expert).cpu()
    sources = torch.arange(comm.size, device="cpu").repeat_interleave(torch.tensor(known(route.recvs), device="cpu"))
    other = (tags[:, 1] != signature).nonzero()
    if len(other):
        raise PeerMismatchError(
            f"rank {int(sources[other[0, 0]])} dispatches other rows than rank {comm.rank}: expected one dtype and row "
            "shape of tokens, one dtype of gate_weights and one number of experts on all ranks"
        )
    return tags[by_expert, 0], sources[by_expert]
