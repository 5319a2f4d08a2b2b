"""`ElasticBuffer`, of Ascend 950: rows for experts and back, and a table in the host memory of all ranks (engram)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.registry import Formula, Operator, expect
from alltoallv_emulator.host_views import on_host, to_npu
from alltoallv_emulator.windows import Place

from .member import Member

__all__ = ["EPHandle", "ElasticBuffer", "EngramFetchCtx"]

_MiB = 1 << 20
_ENTRIES = (torch.bfloat16, torch.float16, torch.float32)  # of a table
_EIGHTS = (torch.float8_e5m2, torch.float8_e4m3fn)
_EXPERTS, _CHOSEN, _HIDDEN, _RANKS = 2048, 32, 8192, 1024  # at most
_UNSET = 0xA5  # fills what the device leaves as it is
_kept: dict[int, Tensor] = {}  # parts of tables that only `destroy` frees, by address

_library = torch.library.Library("cann_ops_transformer", "FRAGMENT")


def _operator(schema: str, function: Callable[..., Any]) -> Any:
    """Defines an operator of tensors on NPUs, whose formula gets host tensors."""
    name = schema.partition("(")[0]
    _library.define(schema)
    operator = getattr(torch.ops.cann_ops_transformer, name).default
    _library.impl(name, on_host(Operator(name, operator._schema, Formula(function, frozenset(), True))), "PrivateUse1")
    return operator


def _aligned(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _unset(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full((math.prod(shape) * dtype.itemsize,), _UNSET, dtype=torch.uint8).view(dtype).view(shape)


def _padded(part: Tensor, rows: int) -> Tensor:
    """Returns rows in room for so many, or just them where ``rows`` is negative."""
    if rows < 0:
        return part
    result = _unset(rows, *part.shape[1:], dtype=part.dtype)
    result[: len(part)] = part
    return result


def _buffer_mb(size: int, tokens: int, hidden: int, experts: int, chosen: int) -> int:
    """Returns the HCCL_BUFFSIZE that dispatch and combine need."""
    row, numbers = _aligned(2 * hidden, 32), _aligned(4 * chosen, 32)
    sent, returned = _aligned(row + 2 * numbers + 32, 512), _aligned(row + 32, 512)
    relayed = _aligned(sent + 4 * chosen, 512)
    state = size * (_aligned(4 * (experts // size), 512) + 512 * (2 + -(-tokens // 15000))) + 512 * tokens * chosen
    direct, hybrid = size * sent, (size + 1) * relayed + size * 512  # hybrid: each rank is a server of its own
    need = state + tokens * (size * sent + max(direct, hybrid) + chosen * returned)
    return -(-need // (2 * _MiB))


class _Setting(NamedTuple):
    """What all ranks agree on: tokens of a rank and experts of a token at most, width of a row, experts of all."""

    tokens: int
    hidden: int
    chosen: int
    experts: int

    def breaches(self, size: int) -> list[str]:
        """Returns what the device would refuse."""
        found = [
            f"{name} is {value}, expected {low} to {high} on 950"
            for name, value, low, high in (
                ("world_size", size, 2, _RANKS), ("num_experts", self.experts, 2, _EXPERTS),
                ("num_topk", self.chosen, 1, _CHOSEN), ("hidden", self.hidden, 1, _HIDDEN),
            )
            if not low <= value <= high
        ]  # fmt: skip
        need = _buffer_mb(size, self.tokens, self.hidden, self.experts, self.chosen)
        enough = limits.buffer_mb() >= need
        return found + [f"HCCL_BUFFSIZE is {limits.buffer_mb()}, expected {need} at least on 950"] * (not enough)


def _check_choice(topk_idx: Tensor, setting: _Setting, size: int) -> int:
    """Checks which experts tokens have; returns how many experts a rank has."""
    shape = (len(topk_idx), setting.chosen)
    expect(topk_idx.shape == shape and topk_idx.dtype == torch.int32, "topk_idx", topk_idx, f"int32 in {shape}")
    expect(len(topk_idx) <= setting.tokens, "topk_idx", topk_idx, f"{setting.tokens} tokens at most")
    experts = setting.experts
    expect(experts > 0 and experts % size == 0, "num_experts", experts, f"a multiple of {size}, the number of ranks")
    in_range = ((topk_idx >= -1) & (topk_idx < experts)).all()
    expect(in_range, "topk_idx", topk_idx.tolist(), f"numbers from 0 to {experts - 1}, or -1 for none")
    return experts // size


def _bytes(*parts: Tensor) -> Tensor:
    """Returns rows of several tensors side by side."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def _split(rows: Tensor, *parts: tuple[torch.dtype, int]) -> list[Tensor]:
    """Returns what `_bytes` has put side by side: of each part its dtype and its width."""
    pieces = rows.split([dtype.itemsize * width for dtype, width in parts], 1)
    return [
        piece.reshape(-1).view(dtype).view(len(rows), width)
        for piece, (dtype, width) in zip(pieces, parts, strict=True)
    ]


def _dispatch(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    cached: Tensor | None,
    group: str,
    num_experts: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    rows: int,
) -> tuple[Tensor, ...]:
    """Sends each token once to every rank of its experts; a row comes out for each token and expert of this rank.

    Rows lie by expert, then by their rank, token and place in ``topk_idx``, or as ``cached`` says. ``rows`` is how many
    the results have, -1 for as many as there are.
    """
    peers = groups.named(group)
    setting = _Setting(num_max_tokens_per_rank, hidden, num_topk, num_experts)
    kinds = (torch.bfloat16, torch.float16, *_EIGHTS)
    expect(x.dim() == 2 and x.dtype in kinds, "x", x, "rows of bfloat16, float16, float8_e5m2 or float8_e4m3fn")
    expect(x.size(1) == hidden, "x", x, f"rows of {hidden}, the hidden of the buffer")
    local = _check_choice(topk_idx, setting, peers.size)
    tokens = len(x)
    expect(len(topk_idx) == tokens, "topk_idx", topk_idx, f"{tokens} rows, as x has")
    scale = torch.zeros(tokens, 0) if scales is None else scales
    if scales is not None:
        expect(x.dtype in _EIGHTS, "x", x, "float8 where there are scales")
        fits = scale.dim() == 2 and len(scale) == tokens and scale.dtype in (torch.float32, torch.float8_e8m0fnu)
        expect(fits, "x[1]", scale, f"float32 or float8_e8m0fnu in {tokens} rows")
    weights = torch.zeros(tokens, 0) if topk_weights is None else topk_weights
    fits = topk_weights is None or (weights.shape == topk_idx.shape and weights.dtype == torch.float32)
    expect(fits, "topk_weights", weights, f"float32 in {tuple(topk_idx.shape)}, as topk_idx")
    limits.check(lambda product: setting.breaches(peers.size), products=("950",))
    same: groups.Values = {name: int(value) for name, value in setting._asdict().items()}
    same |= {"x's dtype": str(x.dtype), "scales": f"{scale.dtype} of {scale.size(1)}", "weights": weights.size(1)}
    peers.agree("npu_elastic_dispatch", same | {"handle": cached is not None})

    targets = torch.where(topk_idx < 0, peers.size, topk_idx // local).long()
    hits = functional.one_hot(targets, peers.size + 1)[..., : peers.size].amax(1)
    slots = functional.pad(hits.cumsum(0) - 1, (0, 1), value=-1).gather(1, targets).int()
    target, token = hits.T.nonzero().unbind(1)
    numbers = peers.all_to_all(hits.sum(0).unsqueeze(1), [1] * peers.size, [1] * peers.size).flatten()
    payload = _bytes(x, scale, topk_idx, weights, torch.arange(tokens, dtype=torch.int32).unsqueeze(1))[token]
    arrived = peers.all_to_all(payload, target.bincount(minlength=peers.size).tolist(), numbers.tolist())
    parts = (x.dtype, hidden), (scale.dtype, scale.size(1)), (torch.int32, num_topk), (torch.float32, weights.size(1))
    x, scale, ids, weights, tokens_of = _split(arrived, *parts, (torch.int32, 1))

    source = torch.arange(peers.size).repeat_interleave(numbers)
    starts = numbers.cumsum(0) - numbers
    own = ids - peers.rank * local
    place, choice = ((own >= 0) & (own < local)).nonzero().unbind(1)
    order = own[place, choice].sort(stable=True).indices
    place, choice = place[order], choice[order]
    per_expert = own[place, choice].long().bincount(minlength=local)
    if cached is not None:
        count = len(place)
        expect(len(cached) >= count, "handle", cached, f"of a dispatch of the same choice, of {count} rows")
        known = cached[:count].long()
        place, choice = starts[known[:, 0]] + known[:, 3], known[:, 2]
    slot = torch.arange(len(source)) - starts[source]
    metadata = torch.stack([source[place], tokens_of[place, 0].long(), choice, slot[place]], 1).int()
    of_rows = [x[place], scale[place], weights[place, choice] if weights.size(1) else None, metadata]
    results = [torch.empty(0) if part is None else _padded(part, rows) for part in of_rows]
    return (*results, slots, numbers.int(), per_expert)


def _combine(
    x: Tensor,
    topk_idx: Tensor,
    metadata: Tensor,
    per_expert: Tensor,
    topk_weights: Tensor | None,
    group: str,
    num_experts: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
) -> tuple[Tensor, Tensor]:
    """Adds for each token the rows of its experts, times their weights if there are any, in float32, rounded once.

    Also returns the weights by token. What a token without an expert at a place has there is 0.
    """
    peers = groups.named(group)
    setting = _Setting(num_max_tokens_per_rank, hidden, num_topk, num_experts)
    halves = (torch.bfloat16, torch.float16)
    expect(x.dim() == 2 and x.dtype in halves, "x", x, "rows of bfloat16 or float16")
    expect(x.size(1) == hidden, "x", x, f"rows of {hidden}, the hidden of the buffer")
    local = _check_choice(topk_idx, setting, peers.size)
    count = int(per_expert.sum())
    expect(metadata.shape == (len(x), 4) and count <= len(x), "x", x, "as many rows as dispatch returned")
    weighted = topk_weights is not None
    weights = torch.zeros(len(x), 0) if topk_weights is None else topk_weights.unsqueeze(-1)
    fits = not weighted or (weights.shape == (len(x), 1) and weights.dtype == torch.float32)
    expect(fits, "topk_weights", weights.squeeze(-1), f"float32 for {len(x)} rows")
    limits.check(lambda product: setting.breaches(peers.size), products=("950",))
    source, token, choice, _ = metadata[:count].long().unbind(1)
    targets = torch.where(topk_idx < 0, peers.size, topk_idx // local).long()
    sends, recvs = (
        each.flatten().bincount(minlength=peers.size + 1)[: peers.size].tolist() for each in (source, targets)
    )
    same: groups.Values = {name: int(value) for name, value in setting._asdict().items()}
    same |= {"x's dtype": str(x.dtype), "weights": weighted}
    peers.agree("npu_elastic_combine", same, sends, recvs)
    order = source.sort(stable=True).indices
    place = torch.stack([token, choice], 1).int()
    arrived = peers.all_to_all(_bytes(x[:count], weights[:count], place)[order], sends, recvs)
    parts = (x.dtype, hidden), (torch.float32, weights.size(1)), (torch.int32, 2)
    rows, factors, places = _split(arrived, *parts)
    token, choice = places.long().unbind(1)
    each = torch.zeros(len(topk_idx), num_topk, hidden)
    each[token, choice] = rows.float() * (factors if weighted else 1)
    total = torch.zeros(len(topk_idx), hidden)
    for part in each.unbind(1):
        total += part
    result = torch.zeros(len(topk_idx) if weighted else 0, num_topk)
    if weighted:
        result[token, choice] = factors[:, 0]
    return total.to(x.dtype), result


def _fetch_with_gradient(indices: Tensor, group: str, num_entries: int, most: int) -> tuple[Tensor, ...]:
    """Tells each rank which of its entries are fetched; returns what `_fetch_gradient` takes.

    That is the order of ``indices`` by rank, those of no rank last; the numbers for each rank, in room for 8 times as
    many; the numbers from each rank; their entries, by rank; and how many these are.
    """
    peers = groups.named(group)
    expect(len(indices) <= most, "indices", indices, f"{most} numbers at most, num_max_tokens_per_rank")
    peers.agree("npu_engram_fetch", {"num_entries": num_entries, "num_max_tokens_per_rank": most})
    rank = indices.long().div(num_entries, rounding_mode="floor")
    rank = torch.where((rank < 0) | (rank >= peers.size), peers.size, rank)
    perm = rank.sort(stable=True).indices
    sends = rank.bincount(minlength=peers.size + 1)[: peers.size]
    recvs = peers.all_to_all(sends.unsqueeze(1), [1] * peers.size, [1] * peers.size).flatten()
    entries = (indices.long() % num_entries).int()[perm][: int(sends.sum())]
    arrived = peers.all_to_all(entries, sends.tolist(), recvs.tolist())
    local = _unset(most * peers.size, dtype=torch.int32)
    local[: len(arrived)] = arrived
    padded = functional.pad(sends, (0, 7 * peers.size))
    return perm.int(), padded.int(), recvs.int(), local, torch.tensor([len(arrived)], dtype=torch.int32)


def _fetch_gradient(
    grad: Tensor, perm: Tensor, send_counts: Tensor, recv_counts: Tensor, local_entries: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    """Returns for each entry that ranks have fetched of this one the sum of their gradients, and its number.

    Sums are in float32, in the order of ranks, and rounded once; entries ascend.
    """
    peers = groups.named(group)
    sends, recvs = send_counts[: peers.size].tolist(), recv_counts.tolist()
    same: groups.Values = {"grad_fetched's dtype": str(grad.dtype), "hidden": grad.size(1)}
    peers.agree("npu_engram_fetch_grad", same, sends, recvs)
    rows = peers.all_to_all(grad[perm.long()][: sum(sends)], sends, recvs)
    unique, places = local_entries[: len(rows)].unique(return_inverse=True)
    sums = torch.zeros(len(unique), grad.size(1)).index_add_(0, places, rows.float())
    return sums.to(grad.dtype), unique


_SETTING = "str group, int num_experts, int num_max_tokens_per_rank, int hidden, int num_topk"
_dispatched = _operator(
    "npu_elastic_dispatch(Tensor x, Tensor? scales, Tensor topk_idx, Tensor? topk_weights, Tensor? cached,"
    f" {_SETTING}, int rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
)
_combined = _operator(
    "npu_elastic_combine(Tensor x, Tensor topk_idx, Tensor metadata, Tensor per_expert, Tensor? topk_weights,"
    f" {_SETTING}) -> (Tensor, Tensor)",
    _combine,
)
_fetched = _operator(
    "npu_engram_fetch(Tensor indices, str group, int num_entries, int most)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fetch_with_gradient,
)
_gradient = _operator(
    "npu_engram_fetch_grad(Tensor grad, Tensor perm, Tensor send_counts, Tensor recv_counts, Tensor local_entries,"
    " str group) -> (Tensor, Tensor)",
    _fetch_gradient,
)


@dataclass
class EPHandle:
    """What `ElasticBuffer.dispatch` did, for `combine` and for a dispatch of other rows in the same way.

    Attributes:
        dst_buffer_slot_idx: int32 [tokens, K]: the number of the token among those for the expert's rank; -1 without
            an expert.
        recv_src_metadata: int32 [rows, 4]: a row's rank, token, place in topk_idx, and number among the rank's tokens.
        num_recv_tokens_per_rank: int32 [ranks]: tokens that have come, once for all experts of this rank.
        num_recv_tokens_per_expert: int64 [experts of this rank]: rows.
        route_count, route_dst_scaleout, route_scaleout_slot: None: between servers only.
    """

    dst_buffer_slot_idx: Tensor
    recv_src_metadata: Tensor
    num_recv_tokens_per_rank: Tensor
    num_recv_tokens_per_expert: Tensor
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    topk_idx: Tensor
    route_count: Tensor | None = None
    route_dst_scaleout: Tensor | None = None
    route_scaleout_slot: Tensor | None = None

    @property
    def num_recv_tokens(self) -> int:
        """How many tokens have come."""
        return int(self.num_recv_tokens_per_rank.sum())


@dataclass
class EngramFetchCtx:
    """What `ElasticBuffer.engram_fetch_grad` takes of a fetch: int32 tensors."""

    perm: Tensor
    send_counts: Tensor
    recv_counts: Tensor
    recv_local_entry: Tensor
    num_recv: Tensor


@dataclass
class _Table:
    """A table whose parts lie in the host memory of all ranks."""

    own: Tensor
    places: list[Place]
    entries: int
    hidden: int
    dtype: torch.dtype

    def rows(self, indices: Tensor) -> Tensor:
        """Reads rows, zeros for numbers outside of the table."""
        result = torch.zeros(len(indices), self.hidden, dtype=self.dtype)
        for row, index in zip(result, indices.tolist(), strict=True):
            rank, entry = divmod(index, self.entries)
            if 0 <= rank < len(self.places):
                self.places[rank].copy("process_vm_readv", rank, entry * row.nbytes, row.data_ptr(), row.nbytes)
        return result


class ElasticBuffer(Member):
    """Sends rows to the ranks of experts and back, and reads a table that all ranks hold. Ascend 950 has it.

    Args:
        group: The ranks. All of them make a buffer.
        num_cpu_bytes: The host memory for this rank's part of a table, a multiple of 2 MiB.
        num_max_tokens_per_rank: The most tokens of a rank in a call.
        hidden: The width of their rows.
        num_topk: How many experts a token has. The three are given together, or, for tables, none of them.
        with_grad: Fetches keep what their gradients need; it asks for ``num_max_tokens_per_rank``.
        explicitly_destroy: Only `destroy` frees the memory, not the end of the buffer.

    Raises:
        ValueError: One of these does not hold.
        InvalidParamError: The product is not 950.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int | None = None,
        hidden: int | None = None,
        num_topk: int | None = None,
        with_grad: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        limits.check(lambda product: (), products=("950",))
        if num_cpu_bytes < 0 or num_cpu_bytes % (2 * _MiB):
            raise ValueError(f"num_cpu_bytes is {num_cpu_bytes}, expected a multiple of 2 MiB")
        given = {"num_max_tokens_per_rank": num_max_tokens_per_rank, "hidden": hidden, "num_topk": num_topk}
        missing = [name for name, value in given.items() if value is None]
        if with_grad and not (num_max_tokens_per_rank or 0) > 0:
            raise ValueError(f"num_max_tokens_per_rank is {num_max_tokens_per_rank}, expected 1 at least for gradients")
        if not with_grad and len(missing) not in (0, 3):
            raise ValueError(f"{missing[0]} is None, expected num_max_tokens_per_rank, hidden and num_topk together")
        super().__init__(group)
        self._most, self._hidden, self._num_topk = num_max_tokens_per_rank, hidden, num_topk
        self._num_cpu_bytes, self._with_grad, self._explicitly_destroy = num_cpu_bytes, with_grad, explicitly_destroy
        self._table: _Table | None = None
        self._pending = self._destroyed = False

    @staticmethod
    def get_engram_storage_size_hint(num_entries: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Returns the num_cpu_bytes for a part of a table, a multiple of 2 MiB."""
        if num_entries < 0:
            raise ValueError(f"num_entries is {num_entries}, expected 0 at least")
        _check_width("hidden", hidden, dtype)
        return _aligned(num_entries * _aligned(hidden * dtype.itemsize, 32), 2 * _MiB)

    @staticmethod
    def get_moe_ep_ccl_buffer_size(
        world_size: int, num_max_tokens_per_rank: int, hidden: int, num_experts: int, topk: int
    ) -> int:
        """Returns the HCCL_BUFFSIZE, in MB, that `dispatch` and `combine` need."""
        for name, value, low, high in (("num_experts", num_experts, 2, _EXPERTS), ("topk", topk, 1, _CHOSEN)):
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, expected {low} to {high}")
        return _buffer_mb(world_size, num_max_tokens_per_rank, hidden, num_experts, topk)

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        handle: EPHandle | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        do_cpu_sync: bool | None = None,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], None, Tensor | None, EPHandle]:
        """Sends tokens to the ranks of their experts, and returns a row for each token and expert of this rank.

        Args:
            x: Rows [tokens, hidden] of bfloat16, float16 or float8, of float8 also with scales, which travel along.
            topk_idx: int32 [tokens, K]: each token's experts, -1 for none.
            topk_weights: float32 [tokens, K]; the result has each row's.
            handle: Of an earlier dispatch, in place of the two and of `num_experts`: for other rows in the same way.
            num_experts: How many there are, as many on each rank.
            num_max_tokens_per_rank: The most tokens of a rank, if it is not the buffer's number.
            expert_alignment: 1.
            do_cpu_sync: True (the default without a handle) for as many rows as have come; with False there are as
                many as could come, and the first of each result count.

        Returns:
            The rows, by expert (with their scales, if there are any), None, the weights, and a handle.
        """
        setting = self._moe_setting()
        if expert_alignment not in (None, 1):
            raise NotImplementedError(f"expert_alignment is {expert_alignment}, expected 1")
        rows, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            others = {"topk_idx": topk_idx, "topk_weights": topk_weights, "do_cpu_sync": do_cpu_sync or None}
            for name, value in others.items():
                if value is not None:
                    raise ValueError(f"{name} is given together with handle, expected one of them")
            choice, experts, most = handle.topk_idx, handle.num_experts, handle.num_max_tokens_per_rank
            cached, count = handle.recv_src_metadata, len(handle.recv_src_metadata)
        else:
            if topk_idx is None or num_experts is None:
                missing = "topk_idx" if topk_idx is None else "num_experts"
                raise ValueError(f"{missing} is None, expected it where there is no handle")
            choice, experts, cached = topk_idx.clone(), num_experts, None
            most = setting[0] if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            local = min(setting[2], experts // self.world_size)
            count = -1 if do_cpu_sync in (None, True) else self.world_size * most * local
        given = (rows, scales, choice, topk_weights, cached, self.group_name, experts, most, *setting[1:], count)
        recv_x, recv_scales, weights, metadata, slots, per_rank, per_expert = _dispatched(*given)
        made = EPHandle(slots, metadata, per_rank, per_expert, experts, 1, most, choice)
        results = recv_x if scales is None else (recv_x, recv_scales)
        return results, None, None if topk_weights is None else weights, made

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        *,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns for each token the sum of its experts' rows, and the weights by token.

        Args:
            x: bfloat16 or float16 [rows, hidden], in the order of what `dispatch` returned.
            handle: Of that dispatch.
            topk_weights: float32 [rows], by which rows are multiplied.
            bias: None.
        """
        setting = self._moe_setting()
        if bias is not None:
            raise NotImplementedError("bias is given, expected None: ElasticBuffer takes none")
        results = _combined(
            x, handle.topk_idx, handle.recv_src_metadata, handle.num_recv_tokens_per_expert, topk_weights,
            self.group_name, handle.num_experts, handle.num_max_tokens_per_rank, *setting[1:],
        )  # fmt: skip
        return results[0], None if topk_weights is None else results[1]

    def engram_write(self, storage: Tensor) -> None:
        """Writes this rank's part of the table; all ranks call it, with as many entries each.

        Args:
            storage: bfloat16, float16 or float32 of the host, [entries, hidden], hidden a multiple of 128.
        """
        self._check_alive("engram_write")
        if not storage.is_cpu or storage.dim() != 2 or not storage.is_contiguous():
            raise ValueError(f"storage is a tensor of {storage.device} in {storage.dim()} dimensions, expected a "
                             "contiguous matrix of the host")  # fmt: skip
        _check_width("storage", storage.size(1), storage.dtype)
        if storage.nbytes > self._num_cpu_bytes:
            raise ValueError(f"storage has {storage.nbytes} bytes, expected {self._num_cpu_bytes} at most")
        peers = groups.named(self.group_name)
        torch.npu.synchronize()
        same: groups.Values = {"num_entries": len(storage), "hidden": storage.size(1), "dtype": str(storage.dtype)}
        peers.agree("engram_write", same)  # nobody reads any more what was there
        own = torch.empty(self._num_cpu_bytes, dtype=torch.uint8) if self._table is None else self._table.own
        own[: storage.nbytes] = storage.view(-1).view(torch.uint8)
        if self._explicitly_destroy:
            _kept[own.data_ptr()] = own
        place = Place(os.getpid(), own.data_ptr(), storage.nbytes)
        places = [Place(*each) for each in peers.all_gather(torch.tensor(place)).tolist()]
        self._table = _Table(own, places, len(storage), storage.size(1), storage.dtype)

    def engram_fetch(self, indices: Tensor) -> Callable[[], Any]:
        """Starts to read rows of the table: index i is entry i % entries of rank i // entries; zeros beyond the last.

        Args:
            indices: int32 on the NPU.

        Returns:
            A function that waits for the rows and returns them, with the context for gradients if the buffer has them.
            In this case all ranks fetch.
        """
        self._check_alive("engram_fetch")
        table = self._written("engram_fetch")
        if indices.is_cpu or indices.dim() != 1 or indices.dtype != torch.int32:
            raise RuntimeError(f"indices is {indices.dtype} on {indices.device} in {indices.dim()} dimensions, "
                               "expected int32 on an NPU in one")  # fmt: skip
        if self._pending:
            raise RuntimeError("engram_fetch is called before the last one's function, expected one at a time")
        context = None
        if self._with_grad:
            context = EngramFetchCtx(*_fetched(indices, self.group_name, table.entries, self._most))
        rows = to_npu(table.rows(indices.cpu()), indices.device)
        self._pending = True

        def wait() -> Any:
            self._pending = False
            return rows if context is None else (rows, context)

        return wait

    def engram_fetch_grad(self, grad_fetched: Tensor, fetch_ctx: EngramFetchCtx) -> tuple[Tensor, Tensor]:
        """Returns the gradient of this rank's entries that were fetched, and their numbers; all ranks call it.

        Args:
            grad_fetched: Of the rows of a fetch, with the table's dtype.
            fetch_ctx: Of that fetch.
        """
        self._check_alive("engram_fetch_grad")
        table = self._written("engram_fetch_grad")
        if not self._with_grad or self._pending:
            raise RuntimeError("engram_fetch_grad is called without with_grad, or before the fetch's function")
        shape = (len(fetch_ctx.perm), table.hidden)
        if grad_fetched.shape != shape or grad_fetched.dtype != table.dtype:
            raise RuntimeError(f"grad_fetched is {grad_fetched.dtype} of shape {tuple(grad_fetched.shape)}, expected "
                               f"{table.dtype} of shape {shape}")  # fmt: skip
        results: tuple[Tensor, Tensor] = _gradient(
            grad_fetched, fetch_ctx.perm, fetch_ctx.send_counts, fetch_ctx.recv_counts, fetch_ctx.recv_local_entry,
            self.group_name,
        )  # fmt: skip
        return results

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False) -> None:
        """Waits for all ranks, which call it too. Both switches change only what a device waits for by itself."""
        self._check_alive("barrier")
        torch.npu.synchronize()
        groups.named(self.group_name).agree("barrier", {})

    def destroy(self) -> None:
        """Frees the table."""
        if self._table is not None:
            _kept.pop(self._table.own.data_ptr(), None)
        self._table, self._destroyed, self._pending = None, True, False

    def _check_alive(self, method: str) -> None:
        if self._destroyed:
            raise RuntimeError(f"{method} is called after destroy, expected a new ElasticBuffer")

    def _written(self, method: str) -> _Table:
        if self._table is None:
            raise RuntimeError(f"{method} is called before engram_write")
        return self._table

    def _moe_setting(self) -> tuple[int, int, int]:
        self._check_alive("the buffer")
        if self._most is None or self._hidden is None or self._num_topk is None:
            raise ValueError("num_max_tokens_per_rank, hidden or num_topk is None, expected all for experts' rows")
        return self._most, self._hidden, self._num_topk


def _check_width(name: str, hidden: int, dtype: torch.dtype) -> None:
    if hidden <= 0 or hidden % 128 or dtype not in _ENTRIES:
        raise ValueError(f"{name} has rows of {hidden} in {dtype}, expected a multiple of 128 in bfloat16, float16 or "
                         "float32")  # fmt: skip
