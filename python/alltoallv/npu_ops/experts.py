"""Holds which rank has which experts, also after ranks have left, and where the choices of tokens go."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alltoallv.npu_ops import limits
from alltoallv.npu_ops.groups import Group
from alltoallv.npu_ops.registry import expect, this_call


class Experts(NamedTuple):
    """Holds which rank has which experts. Zero, copy and const experts, which no rank has, follow by number."""

    group: Group
    operator: str
    moe: int  # experts of tokens' own choices, on the ranks after the shared experts'
    shared: int
    shared_ranks: int
    zero: int = 0
    copy: int = 0
    const: int = 0

    @property
    def local(self) -> int:
        return self.moe // (self.group.size - self.shared_ranks)

    @property
    def total(self) -> int:
        """Experts of all ranks, shared ones included."""
        return self.local * self.group.size

    @property
    def held(self) -> int:
        """Experts of this rank that receive rows."""
        return 1 if self.group.rank < self.shared_ranks else self.local

    @property
    def extra(self) -> int:
        """Choices of each token that are for shared experts."""
        return self.shared if self.shared_ranks else 0

    @property
    def copies(self) -> int:
        """Ranks that have each shared expert; the tokens of one rank go to one of them."""
        return self.shared_ranks // max(self.extra, 1)

    def room(self, tokens: int, k: int, any_rank: bool = False) -> int:
        """Returns how many rows this rank, or any, may receive when all ranks together have ``tokens``."""
        of_others = tokens * min(self.local, k)
        if not self.shared_ranks or not (any_rank or self.group.rank < self.shared_ranks):
            return of_others
        of_shared = tokens // self.group.size * -(-self.group.size // self.copies)
        return max(of_shared, of_others) if any_rank else of_shared

    def first(self, kind: str) -> int:
        """Returns the number of the first zero, copy or const expert."""
        return self.total + {"zero": 0, "copy": self.zero, "const": self.zero + self.copy}[kind]


def with_shared(
    experts: Experts, ids: Tensor, mask: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns choices by the experts' numbers on all ranks, shared experts first, with their mask and weights."""
    ranks = [experts.group.rank % experts.copies + i * experts.copies for i in range(experts.extra)]
    first = (ids.new_tensor(ranks) * experts.local).expand(len(ids), experts.extra)
    if mask is not None and mask.dim() == 2:
        mask = torch.cat([mask.bool().any(1, keepdim=True).expand(first.shape), mask.bool()], 1)
    if weights is not None:
        weights = torch.cat([torch.ones(first.shape), weights.float()], 1)
    return torch.cat([first, ids + experts.shared_ranks * experts.local], 1), mask, weights


def remaining(experts: Experts, elastic_info: Tensor | None) -> Experts:
    """Returns the experts of the ranks that ``elastic_info`` leaves, which have as many each as before.

    It holds whether ranks have left (0 or 1), how many ranks, ranks of shared experts and other experts are left, each
    rank's new number or -1, and the old number of each rank that is left. ``expert_ids`` number the experts left.
    """
    if elastic_info is None:
        return experts
    size, name = experts.group.size, "elastic_info"
    fits = elastic_info.dtype == torch.int32 and elastic_info.shape == (4 + 2 * size,)
    expect(fits, name, elastic_info, f"{4 + 2 * size} numbers of int32")
    limits.check(lambda product: ["elastic_info is given, expected None on A2"] if product == "A2" else [])
    shrunk, left, shared_ranks, moe, *tables = elastic_info.tolist()
    if not shrunk:
        return experts
    new, old = tables[:size], tables[size : size + left]
    ascend = old == sorted(set(old)) and all(0 <= rank < size for rank in old)
    right = ascend and len(old) == left and new == [old.index(i) if i in old else -1 for i in range(size)]
    expect(right, name, tables, "each rank's new number, or -1, and the old numbers in ascending order")
    expect(experts.group.rank in old, name, old, f"rank {experts.group.rank} among those that are left")
    as_before = moe == experts.local * (left - shared_ranks) > 0
    expect(as_before, name, [left, shared_ranks, moe], f"{experts.local} experts for each rank, as before")
    special = experts.zero + experts.copy + experts.const
    expect(not special, name, shrunk, "0, where there are zero, copy or const experts")
    this_call.part = experts.group.part(old)
    return experts._replace(group=this_call.part, moe=moe, shared_ranks=shared_ranks)


def chosen(ids: Tensor, mask: Tensor | None, experts: Experts) -> Tensor:
    """Returns the numbers of the choices that travel, sorted by expert."""
    there = ids < experts.total
    if mask is not None:
        there = there & (mask.bool().unsqueeze(1) if mask.dim() == 1 else mask.bool())
    order = ids.reshape(-1).long().sort(stable=True)[1]
    return order[there.reshape(-1)[order]]


def counts_of(ids: Tensor, choices: Tensor, experts: Experts) -> Tensor:
    """Returns how many rows go to each expert: one row of counts per rank."""
    numbers = ids.reshape(-1)[choices].long()
    return numbers.bincount(minlength=experts.total).view(experts.group.size, experts.local)
