"""Holds where the rows of a dispatch went: DeepEP's handles, of which each field follows from the routing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from alltoallv.deep_ep.expert_rows import choice_slots


@dataclass(eq=False)
class EPHandle:
    """Holds where the rows of a dispatch went, for `combine` and for other tokens on the same way.

    Attributes:
        num_experts, expert_alignment, num_max_tokens_per_rank, do_expand, num_sms: As given to the dispatch; where no
            most rows were given, the most whose numbers an int32 holds.
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
