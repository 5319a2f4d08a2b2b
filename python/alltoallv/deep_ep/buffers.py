"""Dispatches and combines tokens that go once to each rank which has one of their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.dispatching import OPERATOR, named
from alltoallv._calls.experts import MOST
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.deep_ep import handles
from alltoallv.deep_ep.handles import EPHandle, LowLatencyHandle, rank_of
from alltoallv.deep_ep.utils import Config, EventHandle, EventOverlap
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.torch.api.dispatcher import check_experts
from alltoallv.torch.api.moe_ops import TENSORS, as_bytes, begin_collect, exchange, side_by_side, sum_dtype
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.group import AnyCommunicator
from alltoallv.torch.eager.tensors import core_name

Tokens = Any  # Tensor | tuple[Tensor, Tensor], values or codes with their scales
Experts = tuple[str, int | Sized | None]  # the argument that states how many there are, and its value: that, or as long


class BaseBuffer:
    """What both versions have in common."""

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
            raise InvalidParamError("the buffer has been destroyed, expected no call after destroy()", id=1226)

    def _parts(self, x: Tokens) -> Sequence[Tensor]:
        """Returns the tensors of ``x``; raises for others than the calls take."""
        self._check_usable()
        parts = (x,) if isinstance(x, Tensor) else x
        if not isinstance(parts, tuple | list) or not all(isinstance(part, Tensor) for part in parts):
            raise InvalidTensorError(f"x is {type(x).__name__}, expected a torch.Tensor or a pair of them", 5, id=2066)
        shapes = [tuple(part.shape) for part in parts]
        if any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
            shown = " and ".join(map(str, shapes))
            raise InvalidTensorError(
                f"x has shape {shown}, expected [n, hidden], or [n, …] of codes and of scales", id=2067
            )
        return parts

    def _refuse(self, x: Tokens, why: str, **arguments: object) -> None:
        """Raises InvalidParamError, on all ranks, for arguments that are given; None and False are not."""
        with guard(self._member(x), OPERATOR):
            for name, value in arguments.items():
                if value is not None and value is not False:
                    raise InvalidParamError(f"{name} is given {why}, expected a call without it", id=1227)

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
        waits: bool = True,
        masked: Iterable[int] = (),
        **kept: Any,
    ) -> tuple[Tokens, Tensor, Tensor | None, EPHandle]:
        comm = self._member(x)
        with guard(comm, OPERATOR):
            parts = self._parts(x)
            rows, (name, number) = len(parts[0]), experts
            if ids is None or number is None:
                raise InvalidParamError(f"topk_idx or {name} is None, expected both, or a handle", id=1228)
            number = number if isinstance(number, int) else len(number)
            local = _local(number, comm.size)
            _core.checked_least("expert_alignment", alignment, 1)
            if most and rows > most:
                raise InvalidParamError(
                    f"num_max_tokens_per_rank is {most}, expected at least {rows}, the rows of x", id=1230
                )
            if stats is not None and (tuple(stats.shape) != (local,) or stats.dtype not in (torch.int32, torch.int64)):
                local_ids = f"{stats.dtype} {tuple(stats.shape)}"
                raise InvalidTensorError(
                    f"cumulative_local_expert_recv_stats is {local_ids}, expected integers [{local}]", id=2068
                )
            if ids.dim() != 2 or ids.shape[0] != rows:
                raise InvalidTensorError(f"topk_idx has shape {tuple(ids.shape)}, expected [{rows}, k]", id=2069)
            if weights is not None:
                _core.check_shape("topk_weights", weights.shape, ids.shape)
            if not waits and most < 1:
                raise InvalidParamError(
                    "num_max_tokens_per_rank is 0, expected at least 1 with do_cpu_sync=False", id=1231
                )
            there = _in_rank(ids, number, comm.size)
            without = sorted(masked)
            if without:
                there[:, without] = False
                ids = ids.masked_fill(torch.isin(rank_of(ids, local), ids.new_tensor(without)), -1)
            for name, table, right in zip(_LAYOUT, layout, (there.sum(0), there), strict=True):
                if table is not None and (table.shape != right.shape or not bool((table == right).all())):
                    raise InvalidParamError(
                        f"{name} is not the layout of topk_idx, expected get_dispatch_layout's", id=1232
                    )
            rank, token = there.t().nonzero(as_tuple=True)
            here = ids[token] - rank[:, None] * local
            foreign = (here < 0) | (here >= local)
            columns = [*parts, torch.cat([here.masked_fill(foreign, -1).long(), token[:, None]], 1)]
            if weights is not None:
                columns.append(weights[token].masked_fill(foreign, 0))
            sends = there.sum(0).tolist()
            agreed_terms = {"x of": ", ".join(f"{part.dtype} ({part.shape[1]},)" for part in parts)}
            agreed_terms |= {"k": f"{ids.shape[1]}", "topk_weights": "None" if weights is None else str(weights.dtype)}
            agreed_terms |= {
                "num_experts": f"{number}",
                "expert_alignment": f"{alignment}",
                "num_worst_tokens": f"{worst}",
                "num_max_tokens_per_rank": f"{most}",
                "masked ranks": f"{without}",
            }
            worst = worst if waits else comm.size * most
            terms = _terms(parts, *agreed_terms.values())
        try:
            arrived, recvs = _exchange(comm, columns, token, len(parts), sends, None, worst, terms)
        except PeerMismatchError as error:
            raise named(comm, error, agreed_terms) from None
        received, of_rows = arrived[: len(parts)], arrived[len(parts)]
        local_ids, tokens = of_rows[:, :-1].contiguous(), of_rows[:, -1]
        each = local_ids[local_ids >= 0].bincount(minlength=local)
        if stats is not None:
            stats += each.to(stats.device, stats.dtype)
        counts = [-(-count // alignment) * alignment for count in each.tolist()]
        expanded = sum(counts)
        if not waits:
            expanded = worst * min(ids.shape[1], local) + (alignment - 1) * local
            expanded, counts = -(-expanded // alignment) * alignment, []
        limit = most or (2**31 - 1) // comm.size
        terms_of_call = {"num_experts": number, "expert_alignment": alignment, "num_max_tokens_per_rank": limit}
        handle = EPHandle(
            **terms_of_call | {"do_expand": False, "num_sms": 0} | kept,
            topk_idx=ids,
            num_recv_tokens_per_expert_list=counts,
            num_recv_tokens=len(local_ids),
            num_expanded_tokens=expanded,
            recv_topk_idx=local_ids,
            order=token * comm.size + rank,
            ranks=torch.tensor([sends, recvs], dtype=torch.int64, device="cpu"),
            tokens=tokens,
            counts=each,
            epoch=_epoch(comm),
        )
        return as_tokens(received), local_ids, None if weights is None else arrived[-1], handle

    def _send_again(self, x: Tokens, handle: EPHandle, weights: Tensor | None = None) -> tuple[Tokens, Tensor | None]:
        comm = self._member(x)
        with guard(comm, OPERATOR):
            parts = self._parts(x)
            _check_way(handle, comm)
            ids = handle.topk_idx
            if len(parts[0]) != len(ids):
                raise InvalidTensorError(
                    f"x has {len(parts[0])} rows, expected {len(ids)}, as dispatched before", id=2071
                )
            sends, recvs = handle.ranks.tolist()
            token, columns = handle.order // comm.size, [*parts]
            terms = _terms(parts) if weights is None else _terms(parts, weights.dtype)
            if weights is not None:
                _core.check_shape("topk_weights", weights.shape, ids.shape)
                ranks = rank_of(ids[token], handle.num_experts // comm.size)
                columns.append(weights[token].masked_fill(ranks != (handle.order % comm.size)[:, None], 0))
        rows = handle.num_recv_tokens
        arrived = _exchange(comm, columns, token, len(parts), sends, recvs, rows, terms, fill=0)[0]
        return as_tokens(arrived[: len(parts)]), None if weights is None else arrived[-1]

    def _collect(
        self, x: Tensor, handle: EPHandle, weights: Tensor | None, bias: Any, wide: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Adds up the ranks' rows; ``wide``: the sums of a rank's expanded rows travel in float32 or wider."""
        comm, tokens = self._member(x), len(handle.topk_idx)
        with guard(comm, OPERATOR):
            self._parts(x)
            _check_way(handle, comm)
            biases = (bias,) if isinstance(bias, Tensor) else tuple(bias or ())
            rows, of_weights = handle.num_recv_tokens, tuple(handle.recv_topk_idx.shape)
            if handle.do_expand:
                rows = handle.num_expanded_tokens
                of_weights = (rows,)
            shapes = [("x", x, (rows, x.shape[1])), ("topk_weights", weights, of_weights)]
            shapes += [("bias", each, (tokens, x.shape[1])) for each in biases]
            for name, value, shape in shapes:
                if value is not None:
                    _core.check_shape(name, value.shape, shape)
            dtype = x.dtype
            if handle.do_expand:
                x = handles.fold(x, handle.slots)
                x = x if wide else x.to(dtype)
                weights = None if weights is None else handles.fold_weights(weights, handle.slots)
            arrived = int(handle.ranks[1].sum())
            source = torch.arange(arrived, device=x.device)
            rest = None, tokens, comm.size, "", groups.name_of(self.group)
            route = handle.order, source, handle.ranks, source, *rest
        with torch.no_grad():
            weights_dtype = str(None if weights is None else weights.dtype)
            try:
                combined = begin_collect(x[:arrived], None, *route, agreed=weights_dtype)()[0].to(dtype)
            except PeerMismatchError as error:
                raise named(comm, error, {"topk_weights": weights_dtype}) from None
            for each in biases:
                combined = (combined.float() + each.float()).to(dtype)
            return combined, None if weights is None else begin_collect(weights[:arrived], None, *route)()[0]

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event that has happened."""
        return EventOverlap(EventHandle())


class Buffer(BaseBuffer):
    """The buffer of version 1: dispatch and combine use a layout that `get_dispatch_layout` returns before.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        num_nvl_bytes, num_rdma_bytes: Kept as attributes.
        enable_shrink: Whether ranks can be masked; see `low_latency_update_mask_buffer`.
        low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric,
            explicitly_destroy: Ignored: they are about memory and links that are not used here.
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
            raise InvalidParamError(
                "comm is given, expected a ProcessGroup or a Communicator as group instead", id=1233
            )
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self._masked: set[int] | None = set() if enable_shrink else None

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
                return self._send_again(x, handle)[0], None, None, None, handle, self.capture()
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

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank in the low-latency calls from the next dispatch on, or ends that; all ranks do so alike.

        No token goes to the experts of a masked rank, and a token gets the sum over its other choices, whose weights
        are not divided anew. The rank takes part in all calls, and its own tokens travel, where DeepEP leaves it out: a
        rank that is lost ends the group, and `Communicator.rejoin` makes one with its replacement.
        """
        masked, size = self._masks(), groups.world_size(self.group)
        _core.checked_rank("rank_to_mask", rank_to_mask, size)
        (masked.add if mask else masked.discard)(rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes into an int32 tensor ``[W]`` which ranks are masked: 1, else 0."""
        masked, size = self._masks(), groups.world_size(self.group)
        if mask_status.dtype is not torch.int32 or tuple(mask_status.shape) != (size,):
            shown = f"{mask_status.dtype} {tuple(mask_status.shape)}"
            raise InvalidTensorError(f"mask_status is {shown}, expected torch.int32 ({size},)", id=2073)
        mask_status.copy_(torch.tensor([rank in masked for rank in range(size)]))

    def low_latency_clean_mask_buffer(self) -> None:
        """Ends the masking of all ranks."""
        self._masks().clear()

    def _masks(self) -> set[int]:
        self._check_usable()
        if self._masked is None:
            raise InvalidParamError(
                "enable_shrink is False, expected a Buffer with enable_shrink=True to mask ranks", id=1235
            )
        return self._masked

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Returns at once: there is no memory to clean."""

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tokens, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Sends every token to its experts, whose rows lie in a tensor of the same shape on all ranks.

        Args:
            x: ``[n, hidden]`` of any dtype.
            topk_idx: Experts of every token, ``[n, k]``; -1: none.
            num_max_dispatch_tokens_per_rank: The most rows that ``x`` may have, equal on all ranks.
            num_experts: Experts on all ranks together.
            cumulative_local_expert_recv_stats: Integers, one per local expert, to which its rows are added.
            dispatch_wait_recv_cost_stats: Refused: kernels' times are not measured.
            use_fp8, round_scale, use_ue8m0: Rows travel as codes, with scales; see `handles.float8_codes`.
            async_finish: Ignored: the call is done when it returns.
            return_recv_hook: Whether to return a hook, which does nothing more.

        Returns:
            ``[experts, W * num_max_dispatch_tokens_per_rank, hidden]``, by the rank that rows come from, then zeros; of
            codes and of scales, whose columns are contiguous, with ``use_fp8``; rows of each expert, int32; the handle;
            an event; the hook, or None.
        """
        self._refuse(x, "though times are not measured", dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats)
        most, comm = num_max_dispatch_tokens_per_rank, self._member(x)
        with torch.no_grad():
            with guard(comm, OPERATOR):
                least = max(len(self._parts(x)[0]), 1)
                if most < least:
                    raise InvalidParamError(
                        f"num_max_dispatch_tokens_per_rank is {most}, expected at least {least}", id=1236
                    )
                tokens = handles.float8_codes(x, round_scale, use_ue8m0) if use_fp8 else x
            arguments = topk_idx, None, ("num_experts", num_experts), 1, 0, most
            masked = self._masked or ()
            received, _, _, sent = self._send(tokens, *arguments, cumulative_local_expert_recv_stats, masked=masked)
            local, capacity = len(sent.counts), comm.size * most
            slots, total = sent.fixed_slots(capacity), local * capacity
            parts = (received,) if isinstance(received, Tensor) else received
            laid_out = [handles.expand(part, slots, total).view(local, capacity, -1) for part in parts]
            if use_fp8:
                laid_out[1] = laid_out[1].mT.contiguous().mT
            source = handles.expand(sent.tokens[:, None] + 1, slots, total).view(local, capacity).int() - 1
            rank = torch.arange(comm.size).repeat_interleave(sent.ranks[1]).to(slots.device)
            of_ranks = torch.stack([
                (sent.recv_topk_idx[rank == each] == torch.arange(local, device=rank.device)[:, None, None]).sum((1, 2))
                for each in range(comm.size)
            ], 1)  # fmt: skip
            layout = ((of_ranks.cumsum(1) - of_ranks) << 32) + of_ranks
            handle = LowLatencyHandle(source, layout, most, x.shape[1], num_experts, sent)
            hook = _nothing if return_recv_hook else None
            return as_tokens(laid_out), sent.counts.int(), handle, self.capture(), hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Adds up each token's rows times their weights, in the order of its choices, in float32, rounded once.

        Args:
            x: ``[experts, W * num_max_dispatch_tokens_per_rank, hidden]``, in the order of dispatch.
            topk_idx: As dispatched; choices of ranks that were masked then add nothing.
            topk_weights: ``[n, k]``.
            handle: What `low_latency_dispatch` returned.
            use_logfmt, zero_copy, combine_wait_recv_cost_stats: Refused: rows travel as they are, from ``x``, and
                kernels' times are not measured.
            async_finish: Ignored: the call is done when it returns.
            return_recv_hook: Whether to return a hook, which does nothing more.
            out: Where to write the result, ``[n, hidden]``.

        Returns:
            ``[n, hidden]``; an event; the hook, or None.
        """
        times = combine_wait_recv_cost_stats
        self._refuse(x, "though rows travel as they are", use_logfmt=use_logfmt, zero_copy=zero_copy)
        self._refuse(x, "though times are not measured", combine_wait_recv_cost_stats=times)
        comm, sent = self._member(x), handle.sent
        with torch.no_grad():
            with guard(comm, OPERATOR):
                self._check_usable()
                _check_way(sent, comm)
                ids, local = sent.topk_idx, len(sent.counts)
                capacity = comm.size * handle.num_max_dispatch_tokens_per_rank
                of_masked = ids < 0 if self._masked is not None else torch.zeros_like(ids, dtype=torch.bool)
                if topk_idx.shape != ids.shape or not bool(((topk_idx == ids) | of_masked).all()):
                    raise InvalidParamError("topk_idx is not what was dispatched, expected the same", id=1237)
                for name, value, shape in (
                    ("x", x, (local, capacity, handle.hidden)),
                    ("topk_weights", topk_weights, tuple(ids.shape)),
                    ("out", out, (len(ids), handle.hidden)),
                ):
                    if value is not None:
                        _core.check_shape(name, value.shape, shape)
                slots = sent.fixed_slots(capacity)
                used, ranks = slots >= 0, rank_of(ids, local).reshape(-1)
                going = [int(part.sum()) for part in used[: int(sent.ranks[1].sum())].split(sent.ranks[1].tolist())]
                coming = [int((ranks == rank).sum()) for rank in range(comm.size)]
                places = (ranks >= 0).nonzero().squeeze(1)
                places = places[ranks[places].argsort(stable=True)]
                rows = x.reshape(local * capacity, handle.hidden)
                terms = _terms([rows], "combine")
            arrived = _exchange(comm, [rows], slots[used], 1, going, coming, 0, terms, fill=0)[0][0]
            wide = sum_dtype(x.dtype)
            choices = arrived.new_zeros(len(ranks), handle.hidden, dtype=wide)
            choices[places] = arrived.to(wide)
            choices = choices.view(*ids.shape, handle.hidden)
            total = torch.zeros_like(choices[:, 0]) if ids.shape[1] else choices.sum(1)
            for choice in range(ids.shape[1]):
                weight = topk_weights[:, choice].to(wide).masked_fill(ids[:, choice] < 0, 0)
                total += weight[:, None] * choices[:, choice]
            total = total.to(x.dtype)
            result = total if out is None else out.copy_(total)
            return result, self.capture(), _nothing if return_recv_hook else None


_LAYOUT = "num_tokens_per_rank", "is_token_in_rank"


def _local(experts: int, size: int) -> int:
    if not 1 <= experts <= MOST or experts % size:
        raise InvalidParamError(
            f"num_experts is {experts}, expected a multiple of {size} ranks, at most {MOST}", id=1238
        )
    return experts // size


def _check_way(handle: EPHandle, comm: AnyCommunicator) -> None:
    """Raises for a handle from before a loss: its rows have gone to ranks of another group, or to lost processes."""
    size = handle.ranks.shape[1]
    if size != comm.size:
        raise InvalidParamError(
            f"handle is of a dispatch among {size} ranks, expected one among {comm.size}: dispatch again", id=1239
        )
    if handle.epoch != _epoch(comm):
        raise InvalidParamError(
            f"handle is of a dispatch in epoch {handle.epoch}, expected one in epoch {_epoch(comm)}, after lost ranks "
            "have been replaced: dispatch again",
            id=1240,
        )


def _epoch(comm: AnyCommunicator) -> int:
    return comm.epoch if isinstance(comm, Communicator) else 0


def _nothing() -> None:
    """Receives nothing more."""


def _in_rank(ids: Tensor, experts: int, size: int) -> Tensor:
    """Returns whether each token goes to each rank, bool ``[n, W]``."""
    check_experts("topk_idx", ids, experts)
    ranks = rank_of(ids, experts // size)
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
    fill: int = -1,
) -> tuple[list[Tensor], list[int]]:
    """Sends rows ``token`` of the first ``chosen`` parts and all of the others; returns what arrives of each.

    Behind it come rows up to ``least``, of zeros, and of ``fill`` in the first part that is sent as a whole.
    """
    fills = [fill if i == chosen else 0 for i in range(len(parts))]
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


def as_tokens(parts: Sequence[Tensor]) -> Tokens:
    """Returns values, or codes and scales."""
    return parts[0] if len(parts) == 1 else tuple(parts)
