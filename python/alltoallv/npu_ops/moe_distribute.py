"""Sends tokens to the ranks of their experts: MC2's dispatch. The way back is in `moe_combine`.

A choice is one of a token's K experts. Rows go sorted by expert, and within an expert by token; a receiver has them by
its expert, then by the rank that they come from. So combine finds the way back by the experts and by how many rows came
from whom, and needs nothing else that dispatch announced.

Ranks of shared experts come first. Each such rank counts as many experts as the others, of which only the first gets
rows: every token has one more choice for each shared expert, in front of its own, with weight 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.groups import Group
from alltoallv.npu_ops.matmuls import to_int8
from alltoallv.npu_ops.moe import by_expert
from alltoallv.npu_ops.registry import expect, variant

RESERVED = ("group_tp", "tp_rank_id", "tp_send_counts", "expand_scales", "performance_info")
NEW_IN_V2 = {"comm_alg": "", "zero_expert_num": 0, "copy_expert_num": 0, "const_expert_num": 0}


class Experts(NamedTuple):
    """Says which rank has which experts. Zero, copy and const experts, which no rank has, follow by number."""

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

    def room(self, tokens: int, k: int) -> int:
        """Returns how many rows this rank may receive when all ranks together have ``tokens``."""
        if self.group.rank < self.shared_ranks:
            return tokens // self.group.size * -(-self.group.size // self.copies)
        return tokens * min(self.local, k)

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


def check(
    experts: Experts,
    x: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    rank: int,
    tp: int,
    global_bs: int,
    algorithm: str,
    version: int,
) -> groups.Values:
    """Raises for what the formulas do not cover or the device refuses; returns what must be equal on all ranks."""
    expect(tp in (0, 1), "tp_world_size", tp, "0 or 1: ranks of group_tp do not share experts here")
    expect(x.dim() == 2, "x", x, "two dimensions")
    expect(ids.dim() == 2 and ids.size(1) > 0, "expert_ids", ids, "a row for each token")
    expect(ids.dtype == torch.int32, "expert_ids", ids, "int32")
    group, hidden, (n, k) = experts.group, x.size(1), ids.shape
    expect(mask is None or mask.shape in ((n,), (n, k)), "x_active_mask", mask, f"the shape ({n},) or ({n}, {k})")
    expect(weights is None or weights.shape == (n, k), "expert_scales", weights, f"the shape ({n}, {k})")
    expect(rank == group.rank, "ep_rank_id", rank, f"{group.rank}, this rank of the group")
    count, ranks = experts.moe, experts.shared_ranks
    expect(0 <= ranks < group.size, "shared_expert_rank_num", ranks, f"0 to {group.size - 1}")
    divides = not ranks or (experts.shared > 0 and ranks % experts.shared == 0)
    expect(divides, "shared_expert_num", experts.shared, f"a divisor of shared_expert_rank_num, {ranks}")
    others = group.size - ranks
    last = count + experts.zero + experts.copy + experts.const
    fits = last + ranks * experts.local < 2**31
    expect(fits, "moe_expert_num", count, "fewer than 2**31 experts together: expert_ids are int32")
    expect(count > 0 and count % others == 0, "moe_expert_num", count, f"a multiple of {others} ranks")
    expect(global_bs % group.size == 0, "global_bs", global_bs, f"0 or a multiple of {group.size} ranks")
    expect(((ids >= 0) & (ids < last)).all(), "expert_ids", ids.tolist(), f"numbers from 0 to {last - 1}")
    first = mask is None or mask.dim() == 2 or mask.equal(mask.sort(descending=True)[0])
    expect(first, "x_active_mask", None if mask is None else mask.tolist(), "the active tokens first")
    distinct = ids.sort(1)[0].diff(dim=1).ne(0).all()
    expect(distinct, "expert_ids", ids.tolist(), "distinct experts for each token")
    most = global_bs // group.size or n
    expect(n <= most, "global_bs", global_bs, f"{n * group.size} at least, for {n} tokens")
    limits.check_dtype("x", x.dtype)
    use = limits.MoE(group.size, count, hidden, most, k, algorithm, experts.shared, ranks, version)
    limits.check(use.breaches)
    same: groups.Values = {"the dtype of the rows": str(x.dtype), "the hidden size": hidden}
    same |= {"the number of experts of a token": k, "moe_expert_num": count}
    same |= {"global_bs": global_bs, "zero_expert_num": experts.zero, "copy_expert_num": experts.copy}
    same |= {"const_expert_num": experts.const, "the number of tokens": most}
    return same | {"shared_expert_num": experts.shared, "shared_expert_rank_num": ranks}


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


def _quantized(
    experts: Experts, x: Tensor, scales: Tensor | None, ids: Tensor, choices: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns each choice's token, times its expert's smooth scales, as int8 with a scale of its own.

    ``scales`` has one row for each shared expert, then one for each other expert.
    """
    rows = x.detach().float()[choices // ids.size(1)]
    if scales is not None:
        column, behind = choices % ids.size(1), experts.shared_ranks * experts.local - experts.extra
        number = torch.where(column < experts.extra, column, ids.reshape(-1)[choices].long() - behind)
        rows = rows * scales.float()[number]
    factor = torch.div(torch.tensor(127.0), rows.abs().amax(1))  # a number divided by a tensor would round twice
    return to_int8((rows * factor.unsqueeze(1)).nan_to_num(0.0)), 1.0 / factor


def _dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    scales: Tensor | None,
    x_active_mask: Tensor | None,
    expert_scales: Tensor | None,
    tp_world_size: int,
    shared_expert_num: int,
    shared_expert_rank_num: int,
    quant_mode: int,
    global_bs: int,
    expert_token_nums_type: int,
    comm_alg: str,
    zero_expert_num: int,
    copy_expert_num: int,
    const_expert_num: int,
    version: int,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    expect(quant_mode in (0, 2), "quant_mode", quant_mode, "0 (none) or 2 (a scale for each row)")
    kinds = "0 (sums) or 1 (counts)"
    expect(expert_token_nums_type in (0, 1), "expert_token_nums_type", expert_token_nums_type, kinds)
    group = groups.named(group_ep, ep_world_size)
    shared, special = (shared_expert_num, shared_expert_rank_num), (zero_expert_num, copy_expert_num, const_expert_num)
    experts = Experts(group, name, moe_expert_num, *shared, *special)
    given = x_active_mask, expert_scales, ep_rank_id, tp_world_size, global_bs, comm_alg, version
    same = check(experts, x, expert_ids, *given)
    expect(len(x) == len(expert_ids), "x", x, f"{len(expert_ids)} rows, as many as expert_ids has")
    shape = experts.extra + experts.moe, x.size(1)
    fits = quant_mode == 0 or scales is None or scales.shape == shape
    expect(fits, "scales", scales, f"the shape {shape}: a row for each expert")
    same |= {"quant_mode": quant_mode, "expert_token_nums_type": expert_token_nums_type}
    for argument, value in (("scales", scales), ("expert_scales", expert_scales)):
        same[f"the presence of {argument}"] = int(value is not None)
    group.agree(name, same)
    room = experts.room(global_bs or len(x) * group.size, expert_ids.size(1))
    ids, mask, weights = with_shared(experts, expert_ids, x_active_mask, expert_scales)
    choices = chosen(ids, mask, experts)
    sent = counts_of(ids, choices, experts)
    received = group.all_to_all(sent, [1] * group.size, [1] * group.size)
    sends, recvs, order = sent.sum(1).tolist(), received.sum(1).tolist(), by_expert(received)

    def exchanged(rows: Tensor) -> Tensor:
        arrived = group.all_to_all(rows, sends, recvs)[order]
        return torch.cat([arrived, arrived.new_zeros(room - len(arrived), *arrived.shape[1:])])

    if quant_mode == 2:
        rows, row_scales = _quantized(experts, x, scales, ids, choices)
        dynamic = exchanged(row_scales)
    else:
        rows, dynamic = x[choices // ids.size(1)], torch.zeros(1)
    held = received[:, : experts.held]
    per_expert = held.sum(0)
    arrived_weights = torch.zeros(0) if weights is None else exchanged(weights.reshape(-1)[choices])
    ends = held.t().reshape(-1).cumsum(0).to(torch.int32)
    numbers = per_expert.cumsum(0) if expert_token_nums_type == 0 else per_expert
    if version == 2:
        places = torch.zeros(128 * room, dtype=torch.int32)
    else:
        of_choices = torch.zeros(ids.numel(), dtype=torch.int32)
        of_choices[choices] = torch.cat([torch.arange(n) for n in sent.view(-1).tolist()]).to(torch.int32)
        places = of_choices.view(ids.shape)[:, experts.extra :].reshape(-1)
    return exchanged(rows), dynamic, places, numbers, ends, torch.zeros(1, dtype=torch.int32), arrived_weights


_RESULTS = "Returns this rank's rows, their scales, {}, the rows per expert, and the ends per expert and rank."
_PLACES = "the place of each choice among those of its expert"
variant(_dispatch, "npu_moe_distribute_dispatch_v2", _RESULTS.format("zeros"), RESERVED, version=2)
variant(_dispatch, "npu_moe_distribute_dispatch", _RESULTS.format(_PLACES), RESERVED, version=1, **NEW_IN_V2)
