"""Dispatches and combines tokens that go once to each rank which has one of their experts."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.dispatching import OPERATOR, named
from alltoallv._calls.guard import guard
from alltoallv._calls.routing import MOST
from alltoallv.deep_ep.utils import Config, EventHandle, EventOverlap
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.torch.api.moe_ops import TENSORS, begin_collect
from alltoallv.torch.api.rows import as_bytes, exchange, side_by_side
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import AnyCommunicator
from alltoallv.torch.eager.tensors import core_name

Tokens = Any  # Tensor | tuple[Tensor, Tensor], values or codes with their scales
Experts = tuple[str, int | Sized | None]  # the argument that states how many there are, and its value: that, or as long


@dataclass(eq=False)
class EPHandle:
    """Says where the rows of a dispatch went, for `combine` and for other tokens on the same way.

    Attributes:
        topk_idx: Experts of the received rows, by this rank's numbers, -1 for others' experts; None without weights.
        num_recv_tokens_per_expert_list: Rows of each of this rank's experts, up to the alignment.
    """

    tokens: int
    num_experts: int
    expert_alignment: int
    order: Tensor  # token * W + rank of every sent row, sorted by rank
    ranks: Tensor  # int64 [2, W]: rows for and from every rank
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    rows: int  # received rows, and those after them up to the worst case


class _Buffer:
    """Holds the common part of both versions."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._destroyed = False

    def destroy(self) -> None:
        """Ends the use of the buffer on this rank: later calls raise InvalidParamError. There is no memory to free."""
        self._destroyed = True

    def _member(self, x: Tokens) -> AnyCommunicator:
        first = x[0] if isinstance(x, tuple | list) and x else x
        return groups.by_name(groups.name_of(self.group), groups.device_of(first))

    def _check_usable(self) -> None:
        if self._destroyed:
            raise InvalidParamError("the buffer has been destroyed, expected no call after destroy()")

    def _parts(self, x: Tokens) -> Sequence[Tensor]:
        """Returns the tensors of ``x``; raises for others than the calls take."""
        self._check_usable()
        parts = (x,) if isinstance(x, Tensor) else x
        if not isinstance(parts, tuple | list) or not all(isinstance(part, Tensor) for part in parts):
            raise InvalidTensorError(f"x is {type(x).__name__}, expected a torch.Tensor or a pair of them", 5)
        shapes = [tuple(part.shape) for part in parts]
        if any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
            shown = " and ".join(map(str, shapes))
            raise InvalidTensorError(f"x has shape {shown}, expected [n, hidden], or [n, …] of codes and of scales")
        return parts

    def _refuse(self, x: Tokens, why: str, **arguments: object) -> None:
        """Raises InvalidParamError, on all ranks, for arguments that are given; None and False are not."""
        with guard(self._member(x), OPERATOR):
            for name, value in arguments.items():
                if value is not None and value is not False:
                    raise InvalidParamError(f"{name} is given {why}, expected a call without it")

    def _send(
        self,
        x: Tokens,
        ids: Tensor | None,
        weights: Tensor | None,
        experts: Experts,
        alignment: int,
        worst: int,
        most: int = 0,
        stats: Tensor | None = None,
        layout: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> tuple[Tokens, Tensor, Tensor | None, EPHandle]:
        comm = self._member(x)
        with guard(comm, OPERATOR):
            parts = self._parts(x)
            rows, (name, number) = len(parts[0]), experts
            if ids is None or number is None:
                raise InvalidParamError(f"topk_idx or {name} is None, expected both, or a handle")
            number = number if isinstance(number, int) else len(number)
            local = _local(number, comm.size)
            if alignment < 1:
                raise InvalidParamError(f"expert_alignment is {alignment}, expected at least 1")
            if most and rows > most:
                raise InvalidParamError(f"num_max_tokens_per_rank is {most}, expected at least {rows}, the rows of x")
            if stats is not None and (tuple(stats.shape) != (local,) or stats.dtype not in (torch.int32, torch.int64)):
                local_ids = f"{stats.dtype} {tuple(stats.shape)}"
                raise InvalidTensorError(
                    f"cumulative_local_expert_recv_stats is {local_ids}, expected integers [{local}]"
                )
            if ids.dim() != 2 or ids.shape[0] != rows:
                raise InvalidTensorError(f"topk_idx has shape {tuple(ids.shape)}, expected [{rows}, k]")
            if weights is not None and weights.shape != ids.shape:
                shapes = tuple(weights.shape), tuple(ids.shape)
                raise InvalidTensorError(f"topk_weights has shape {shapes[0]}, expected {shapes[1]} as topk_idx")
            there = _in_rank(ids, number, comm.size)
            for name, table, right in zip(_LAYOUT, layout, (there.sum(0), there), strict=True):
                if table is not None and (table.shape != right.shape or not bool((table == right).all())):
                    raise InvalidParamError(f"{name} is not the layout of topk_idx, expected get_dispatch_layout's")
            rank, token = there.t().nonzero(as_tuple=True)
            here = ids[token] - rank[:, None] * local
            foreign = (here < 0) | (here >= local)
            columns = [*parts, here.masked_fill(foreign, -1).long()]
            if weights is not None:
                columns.append(weights[token].masked_fill(foreign, 0))
            sends = there.sum(0).tolist()
            agreed_terms = {"x of": ", ".join(f"{part.dtype} ({part.shape[1]},)" for part in parts)}
            agreed_terms |= {"k": f"{ids.shape[1]}", "topk_weights": "None" if weights is None else str(weights.dtype)}
            agreed_terms |= {
                "num_experts": f"{number}",
                "expert_alignment": f"{alignment}",
                "num_worst_tokens": f"{worst}",
            }
            terms = _terms(parts, *agreed_terms.values())
        try:
            arrived, recvs = _exchange(comm, columns, token, len(parts), sends, None, worst, terms)
        except PeerMismatchError as error:
            raise named(comm, error, agreed_terms) from None
        received, local_ids = arrived[: len(parts)], arrived[len(parts)]
        each = torch.stack([(local_ids == expert).any(1).sum() for expert in range(local)])
        if stats is not None:
            stats += each.to(stats.device, stats.dtype)
        counts = [-(-count // alignment) * alignment for count in each.tolist()]
        ranks = torch.tensor([sends, recvs], dtype=torch.int64, device="cpu")
        order = token * comm.size + rank
        handle = EPHandle(rows, number, alignment, order, ranks, local_ids, counts, len(local_ids))
        return _tokens(received), local_ids, None if weights is None else arrived[-1], handle

    def _send_again(self, x: Tokens, handle: EPHandle) -> Tokens:
        comm = self._member(x)
        with guard(comm, OPERATOR):
            parts = self._parts(x)
            if len(parts[0]) != handle.tokens:
                raise InvalidTensorError(f"x has {len(parts[0])} rows, expected {handle.tokens}, as dispatched before")
            sends, recvs = handle.ranks.tolist()
        exchange_arguments = handle.order // comm.size, len(parts), sends, recvs, handle.rows, _terms(parts)
        return _tokens(_exchange(comm, [*parts], *exchange_arguments)[0])

    def _collect(self, x: Tensor, handle: EPHandle, weights: Tensor | None, bias: Any) -> tuple[Tensor, Tensor | None]:
        comm = self._member(x)
        with guard(comm, OPERATOR):
            self._parts(x)
            biases = (bias,) if isinstance(bias, Tensor) else tuple(bias or ())
            shapes = [("x", x, (handle.rows, x.shape[1])), ("topk_weights", weights, tuple(handle.topk_idx.shape))]
            shapes += [("bias", each, (handle.tokens, x.shape[1])) for each in biases]
            for name, value, shape in shapes:
                if value is not None and tuple(value.shape) != shape:
                    raise InvalidTensorError(f"{name} has shape {tuple(value.shape)}, expected {shape}")
            arrived = int(handle.ranks[1].sum())
            source = torch.arange(arrived, device=x.device)
            rest = None, handle.tokens, comm.size, "", groups.name_of(self.group)
            route = handle.order, source, handle.ranks, source, *rest
        with torch.no_grad():
            weights_dtype = str(None if weights is None else weights.dtype)
            try:
                combined = begin_collect(x[:arrived], None, *route, beside=weights_dtype)()[0]
            except PeerMismatchError as error:
                raise named(comm, error, {"topk_weights": weights_dtype}) from None
            for each in biases:
                combined = (combined.float() + each.float()).to(x.dtype)
            return combined, None if weights is None else begin_collect(weights[:arrived], None, *route)()[0]

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event that has happened."""
        return EventOverlap(EventHandle())


class Buffer(_Buffer):
    """The buffer of version 1: dispatch and combine use a layout that `get_dispatch_layout` returns before.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        num_nvl_bytes, num_rdma_bytes: Kept as attributes.
        low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric,
            explicitly_destroy, enable_shrink: Ignored: they are about memory and links that are not used here.
        comm: Refused: give a `Communicator` as ``group``.
    """

    num_sms = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        super().__init__(group)
        if comm is not None:
            raise InvalidParamError("comm is given, expected a ProcessGroup or a Communicator as group instead")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Keeps the number as an attribute."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns a config that asks for no memory."""
        return Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns 0: no memory is needed."""
        return 0

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Returns how many tokens go where. Communicates with no peer.

        Args:
            topk_idx: Experts of every token, int64 ``[n, k]``; -1: none.
            num_experts: Experts on all ranks together, a multiple of the number of ranks.
            previous_event, async_finish, allocate_on_comm_stream: Ignored: the call is done when it returns.

        Returns:
            Tokens for each rank, int32 ``[W]``; None, tokens for each RDMA rank; tokens for each expert, int32
            ``[num_experts]``; bool ``[n, W]``; an event.
        """
        self._check_usable()
        size = self._member(topk_idx).size
        _local(num_experts, size)
        there = _in_rank(topk_idx, num_experts, size)
        counts = topk_idx[topk_idx >= 0].bincount(minlength=num_experts).int()
        return there.sum(0).int(), None, counts, there, self.capture()

    def dispatch(
        self,
        x: Tokens,
        handle: EPHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tokens, Tensor | None, Tensor | None, list[int] | None, EPHandle, EventOverlap]:
        """Sends every token to each rank that has one of its experts.

        Args:
            x: ``[n, hidden]`` of any dtype, or a pair of codes and scales ``[n, …]``.
            handle: The handle of an earlier dispatch, whose way the tokens go; ``topk_idx`` and ``topk_weights`` are
                then refused, and what else is about the layout is ignored.
            num_tokens_per_rank, is_token_in_rank: As `get_dispatch_layout` returns them, or left out.
            num_tokens_per_rdma_rank: Ignored: it follows from ``topk_idx``.
            num_tokens_per_expert: Only its length matters: it is the number of experts.
            topk_idx, topk_weights: Experts and weights of every token, ``[n, k]``; -1: no expert.
            expert_alignment: The experts' counts are rounded up to multiples of it.
            num_worst_tokens: Rows of the results, if more than arrive; the additional rows belong to no expert.
            config, previous_event, async_finish, allocate_on_comm_stream: Ignored: the call is done when it returns.

        Returns:
            Rows received, in the order of ranks; their experts by this rank's numbers, -1 for others', and weights, 0
            for others' (None with a handle); rows for each local expert; the handle; an event.
        """
        with torch.no_grad():
            if handle is not None:
                self._refuse(x, "with a handle", topk_idx=topk_idx, topk_weights=topk_weights)
                return self._send_again(x, handle), None, None, None, handle, self.capture()
            experts = "num_tokens_per_expert", num_tokens_per_expert
            arguments = topk_idx, topk_weights, experts, expert_alignment, num_worst_tokens
            layout = num_tokens_per_rank, is_token_in_rank
            received, ids, weights, handle = self._send(x, *arguments, layout=layout)
            return received, ids, weights, handle.num_recv_tokens_per_expert_list, handle, self.capture()

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Adds up the ranks' outputs for every token, in the order of ranks, in float32 or wider, rounded once.

        Args:
            x: ``[rows, hidden]``, in the order of dispatch, its experts' results added and weighted.
            handle: What dispatch returned.
            topk_weights: ``[rows, k]``, added up in the same way.
            bias: A tensor ``[n, hidden]`` that is added, or a pair.
            config, previous_event, async_finish, allocate_on_comm_stream: Ignored: the call is done when it returns.

        Returns:
            ``[n, hidden]``; the weights' sums ``[n, k]``, or None; an event.
        """
        return *self._collect(x, handle, topk_weights, bias), self.capture()

    def low_latency_dispatch(self, *unused: Any, **named: Any) -> NoReturn:
        """Raises NotImplementedError: low-latency calls are missing."""
        raise NotImplementedError("low-latency calls are not in alltoallv.deep_ep, expected dispatch and combine")

    low_latency_combine = low_latency_dispatch


class ElasticBuffer(_Buffer):
    """The buffer of version 2: one call for dispatch, without a layout before it.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        num_bytes: Kept as attribute.
        num_max_tokens_per_rank: The most rows that a dispatch may have, unless it says so itself; 0: any number.
        deterministic: Results always are.
        num_cpu_bytes, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode, allow_multiple_reduction,
            prefer_overlap_with_compute, sl_idx, num_allocated_qps, num_cpu_timeout_secs, num_gpu_timeout_secs,
            explicitly_destroy: Ignored: they are about memory, links and kernels that are not used here. Codes and
            their scales are given as a pair; a sum is always rounded once; the group's timeout counts.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(group)
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes or 0, num_max_tokens_per_rank

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns 0: no memory is needed."""
        return 0

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Returns 0: no SMs are needed."""
        return 0

    def dispatch(
        self,
        x: Tokens,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tokens, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Does `Buffer.dispatch`; the handle has the experts' counts.

        Args:
            x, topk_idx, topk_weights, handle: See `Buffer.dispatch`.
            cumulative_local_expert_recv_stats: Integers, one per local expert, to which its rows are added; not with a
                handle.
            num_experts: Experts on all ranks together; with a handle, the handle's or None.
            num_max_tokens_per_rank: The most rows that ``x`` may have; None: the constructor's.
            expert_alignment: The experts' counts are rounded up to multiples of it; with a handle, the handle's or
                None.
            num_sms, num_qps, previous_event, previous_event_before_epilogue, async_with_compute_stream,
                allocate_on_comm_stream, do_handle_copy: Ignored: the call is done when it returns, with copies.
            do_cpu_sync: True or None; with a handle False or None: the number of received rows is always known.
            do_expand, do_zero_padding, use_tma_aligned_col_major_sf: Refused: the layouts are not offered.
        """
        layouts = {"do_expand": do_expand, "do_zero_padding": do_zero_padding}
        layouts["use_tma_aligned_col_major_sf"] = use_tma_aligned_col_major_sf
        with torch.no_grad():
            self._refuse(x, "for a layout that is not offered here", **layouts)
            most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            if handle is not None:
                unsupported = {"topk_idx": topk_idx, "topk_weights": topk_weights, "do_cpu_sync": do_cpu_sync}
                unsupported["cumulative_local_expert_recv_stats"] = cumulative_local_expert_recv_stats
                self._refuse(x, "with a handle", **unsupported)
                for name, value in (("num_experts", num_experts), ("expert_alignment", expert_alignment)):
                    other = None if value in (None, getattr(handle, name)) else value
                    self._refuse(x, f"with a handle of {getattr(handle, name)}", **{name: other})
                return self._send_again(x, handle), None, None, handle, self.capture()
            self._refuse(x, "as False without a handle", do_cpu_sync=None if do_cpu_sync is not False else 0)
            alignment = 1 if expert_alignment is None else expert_alignment
            arguments = topk_idx, topk_weights, ("num_experts", num_experts), alignment, 0, most
            return *self._send(x, *arguments, stats=cumulative_local_expert_recv_stats), self.capture()

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Does `Buffer.combine`; arguments from ``num_sms`` on are ignored: the call is done when it returns."""
        return *self._collect(x, handle, topk_weights, bias), self.capture()


_LAYOUT = "num_tokens_per_rank", "is_token_in_rank"


def _local(experts: int, size: int) -> int:
    if not 1 <= experts <= MOST or experts % size:
        raise InvalidParamError(f"num_experts is {experts}, expected a multiple of {size} ranks, at most {MOST}")
    return experts // size


def _in_rank(ids: Tensor, experts: int, size: int) -> Tensor:
    """Returns whether each token goes to each rank, bool ``[n, W]``."""
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < experts:
        raise InvalidParamError(f"topk_idx holds numbers from {ids.min()} to {ids.max()}, expected -1 to {experts - 1}")
    ranks = torch.div(ids, experts // size, rounding_mode="floor")  # -1 stays -1
    return torch.stack([(ranks == rank).any(1) for rank in range(size)], 1)


def _terms(parts: Sequence[Tensor], *rest: object) -> int:
    """Returns what all ranks agree on about the values, or codes and scales, and about what travels with them."""
    first, *others = parts
    text = f"{[(part.dtype, part.shape[1]) for part in others]} {rest}"
    return _core.moe_terms(core_name(first.dtype), first.shape[1], text)


def _exchange(
    comm: Any,
    parts: Sequence[Tensor],
    token: Tensor,
    chosen: int,
    sends: list[int],
    recvs: list[int] | None,
    least: int,
    terms: int,
) -> tuple[list[Tensor], list[int]]:
    """Sends rows ``token`` of the first ``chosen`` parts and all of the others; returns what arrives of each.

    Behind it come rows up to ``least``, of zeros, and of -1 in the part of the experts.
    """
    fills = [-1 if i == chosen else 0 for i in range(len(parts))]
    if parts[0].is_cpu:
        arguments = parts, token, chosen, sends, recvs, fills, least, terms
        arrived, counts = _core.moe_columns(TENSORS, comm.core, *arguments)
        return arrived, counts
    with guard(comm, OPERATOR):
        buffer, columns = side_by_side([(as_bytes(x), token if i < chosen else None) for i, x in enumerate(parts)])
    received, counts = exchange(comm, buffer, sends, recvs, terms, False)()
    arrived = []
    for x, span, fill in zip(parts, columns, fills, strict=True):
        values = received[:, span].contiguous().view(x.dtype)
        more = values.new_full((max(least - len(values), 0), values.shape[1]), fill)
        arrived.append(torch.cat([values, more]))
    return arrived, counts


def _tokens(parts: Sequence[Tensor]) -> Tokens:
    """Returns values, or codes and scales."""
    return parts[0] if len(parts) == 1 else tuple(parts)
