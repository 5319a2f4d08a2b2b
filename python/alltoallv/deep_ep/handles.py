"""Holds where the rows of a dispatch went, in DeepEP's handles, of which each field follows from the routing; lays
received rows out by expert, one row for each choice, and codes rows for the low-latency calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from alltoallv.errors import InvalidParamError
from alltoallv.torch.api.moe_ops import as_bytes, sum_dtype

_GROUP = 128  # values that have one scale
_LARGEST = 448.0  # of float8_e4m3fn


def choice_slots(chosen: Tensor, starts: Tensor) -> Tensor:
    """Returns where each choice of a local expert lies, int64 as ``chosen`` ``[r, k]``; -1 where there is no choice.

    An expert's rows begin at its start and are in the order of the received rows.
    """
    flat = chosen.reshape(-1)
    places = (flat >= 0).nonzero().squeeze(1)
    places = places[flat[places].argsort(stable=True)]
    experts = flat[places]
    counts = experts.bincount(minlength=len(starts))
    offsets = starts - (counts.cumsum(0) - counts)
    slots = torch.full_like(flat, -1)
    slots[places] = offsets[experts] + torch.arange(len(places), device=flat.device)
    return slots.view(chosen.shape)


def expand(part: Tensor, slots: Tensor, rows: int) -> Tensor:
    """Copies each row of ``[r, …]`` to its slots in ``[rows, …]``; all other rows are zeros."""
    used, out = slots >= 0, part.new_zeros(rows, *part.shape[1:])
    as_bytes(out)[slots[used]] = as_bytes(part)[used.nonzero()[:, 0]]
    return out


def expand_weights(weights: Tensor, slots: Tensor, rows: int) -> Tensor:
    """Copies the weight of each choice ``[r, k]`` to its slot in ``[rows]``; all others are 0."""
    used, out = slots >= 0, weights.new_zeros(rows)
    out[slots[used]] = weights[used]
    return out


def fold(rows: Tensor, slots: Tensor) -> Tensor:
    """Adds up the rows of each slot's choices, in their order, in float32 or wider; returns ``[r, …]``."""
    total = rows.new_zeros(len(slots), *rows.shape[1:], dtype=sum_dtype(rows.dtype))
    for column in slots.unbind(1):
        used = column >= 0
        total[used] += rows[column[used]]
    return total


def fold_weights(weights: Tensor, slots: Tensor) -> Tensor:
    """Returns each choice's weight of ``[rows]`` as ``[r, k]``, 0 without a choice."""
    return torch.where(slots >= 0, weights[slots.clamp(min=0)] if len(weights) else 0, 0).to(weights.dtype)


def float8_codes(x: Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Returns float8_e4m3fn codes of ``[n, hidden]``, and a scale for each 128 values.

    A scale is the largest magnitude, at least 0.0001, over 448, in float32; with ``round_scale`` the next power of two;
    with ``use_ue8m0`` four of their exponents in an int32. A code is the value times 448 over the magnitude, or over
    the power of two.
    """
    if use_ue8m0 and not round_scale:
        raise InvalidParamError("use_ue8m0 is True, expected round_scale with it", id=1242)
    multiple = _GROUP * (4 if use_ue8m0 else 1)
    if x.shape[1] % multiple:
        raise InvalidParamError(f"x has {x.shape[1]} columns, expected a multiple of {multiple} with use_fp8", id=1243)
    groups = x.float().unflatten(1, (-1, _GROUP))
    largest = groups.abs().amax(-1).clamp(min=1e-4)
    scales, factors = largest / _LARGEST, _LARGEST / largest
    if round_scale:
        fraction, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).int())
        factors = 1 / scales
    codes = (groups * factors[..., None]).to(torch.float8_e4m3fn).flatten(1)
    if use_ue8m0:
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return codes, scales


@dataclass(eq=False)
class EPHandle:
    """Holds where the rows of a dispatch went, for `combine` and for other tokens on the same way.

    Attributes:
        num_experts, expert_alignment, do_expand, num_sms: As given to the dispatch.
        num_max_tokens_per_rank: As given to the dispatch; if it was not, the most rows whose numbers an int32 holds.
        topk_idx: Experts of this rank's tokens, ``[n, k]``.
        num_recv_tokens_per_expert_list: Rows of each of this rank's experts, up to the alignment; ``[]`` where the
            host did not wait for them.
        num_recv_tokens: Received rows, and those after them up to the worst case.
        num_expanded_tokens: Rows of all experts, up to the alignment or the worst case.
        recv_topk_idx: Experts of the received rows, by this rank's numbers, -1 for others' experts, ``[rows, k]``.
        order: ``token * W + rank`` of every sent row, sorted by rank.
        ranks: Rows for and from every rank, int64 ``[2, W]``, in host memory.
        tokens: Of every received row, its number on its rank; -1: none.
        counts: Rows of each local expert, int64.
        epoch: Of the communicator: how often its ranks have met again with replacements.
        token_metadata_at_forward, channel_linked_list: None: rows travel in one step.
    """

    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    do_expand: bool
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    num_recv_tokens: int
    num_expanded_tokens: int
    recv_topk_idx: Tensor
    order: Tensor
    ranks: Tensor
    tokens: Tensor
    counts: Tensor
    epoch: int = 0
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """Rows from each rank and those before it, int32 ``[W]``."""
        return self.ranks[1].cumsum(0).int().to(self.topk_idx.device)

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """Where each local expert's rows end, int32 ``[experts]``: with their alignment, or where expanded without."""
        return (self._starts + (self.counts if self.do_expand else self._aligned)).int()

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor | None:
        """Rows of each local expert, int32 ``[experts]``, where expanded; else None."""
        return self.counts.int() if self.do_expand else None

    @cached_property
    def recv_src_metadata(self) -> Tensor:
        """Of each received row, int32 ``[rows, 2 + k]``.

        The token's number plus that of its rank times ``num_max_tokens_per_rank``; the rank's number times k plus the
        first choice of an expert of this rank; where expanded, the row of each choice. -1: none.
        """
        (_, recvs), (rows, k) = self.ranks, self.recv_topk_idx.shape
        rank = torch.arange(len(recvs)).repeat_interleave(recvs).to(self.tokens.device)
        metadata = self.recv_topk_idx.new_full((rows, 2 + k), -1)
        metadata[: len(rank), 0] = rank * self.num_max_tokens_per_rank + self.tokens[: len(rank)]
        if k:
            metadata[: len(rank), 1] = rank * k + (self.recv_topk_idx[: len(rank)] >= 0).int().argmax(1)
        if self.do_expand:
            metadata[:, 2:] = self.slots
        return metadata.int()

    @cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        """Of each choice, int32 ``[n, k]``: its row among those for its expert's rank; -1: none."""
        sends, size = self.ranks[0].to(self.order.device), self.ranks.shape[1]
        starts = (sends.cumsum(0) - sends)[self.order % size]
        at = torch.full((len(self.topk_idx), size + 1), -1, dtype=torch.int64, device=self.order.device)
        at[self.order // size, self.order % size] = torch.arange(len(self.order), device=at.device) - starts
        return at.gather(1, rank_of(self.topk_idx, self.num_experts // size).remainder(size + 1).long()).int()

    @property
    def _aligned(self) -> Tensor:
        return -(-self.counts // self.expert_alignment) * self.expert_alignment

    @property
    def _starts(self) -> Tensor:
        return self._aligned.cumsum(0) - self._aligned

    @cached_property
    def slots(self) -> Tensor:
        """Where every choice lies, int64 as ``recv_topk_idx``, -1 where there is none."""
        return choice_slots(self.recv_topk_idx, self._starts)

    def fixed_slots(self, capacity: int) -> Tensor:
        """Returns where every choice lies if each local expert has so many rows; see `choice_slots`."""
        starts = torch.arange(len(self.counts), device=self.recv_topk_idx.device) * capacity
        return choice_slots(self.recv_topk_idx, starts)


class LowLatencyHandle(NamedTuple):
    """Holds where the rows of `Buffer.low_latency_dispatch` went.

    Attributes:
        src_info: The tokens' numbers on their ranks, int32 ``[experts, rows]``; -1: none.
        layout_range: Of each expert and rank, int64 ``[experts, W]``: its first row times 2 to the 32, plus its rows.
        num_max_dispatch_tokens_per_rank, hidden, num_experts: As given.
        sent: Where the tokens went.
    """

    src_info: Tensor
    layout_range: Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    sent: EPHandle


def rank_of(ids: Tensor, local: int) -> Tensor:
    """Returns the rank of every expert, -1 for none."""
    return torch.div(ids, local, rounding_mode="floor")
