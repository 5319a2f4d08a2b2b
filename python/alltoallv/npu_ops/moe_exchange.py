"""Sends tokens to the ranks of their experts and back (MC2), and experts' products fused with their exchange.

A choice is one of a token's K experts. Rows go sorted by expert, and within an expert by token; a receiver has them by
its expert, then by the rank that they come from. So combine finds the way back by the experts and by how many rows came
from whom, and needs nothing else that dispatch announced.

Ranks of shared experts come first. Each such rank counts as many experts as the others, of which only the first gets
rows: every token has one more choice for each shared expert, in front of its own, with weight 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.groups import Group
from alltoallv.npu_ops.layers import add_rms_norm
from alltoallv.npu_ops.matmuls import check_dtypes, product, to_int8
from alltoallv.npu_ops.moe import by_expert
from alltoallv.npu_ops.quantization import quantize_rows
from alltoallv.npu_ops.registry import dtype_of, expect, variant

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


def check_moe(
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
    terms = x_active_mask, expert_scales, ep_rank_id, tp_world_size, global_bs, comm_alg, version
    same = check_moe(experts, x, expert_ids, *terms)
    expect(len(x) == len(expert_ids), "x", x, f"{len(expert_ids)} rows, as many as expert_ids has")
    shape = experts.extra + experts.moe, x.size(1)
    fits = scales is None or (quant_mode == 2 and scales.shape == shape)
    expect(fits, "scales", scales, f"the shape {shape}, a row for each expert, and None with quant_mode 0")
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
        rows, dynamic = x[choices // ids.size(1)], torch.zeros(room)
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
    of_tp = torch.zeros(tp_world_size, dtype=torch.int32)
    return exchanged(rows), dynamic, places, numbers, ends, of_tp, arrived_weights


_RESULTS = "Returns this rank's rows, their scales, {}, the rows per expert, and the ends per expert and rank."
_PLACES = "the place of each choice among its expert's choices"
variant(_dispatch, "npu_moe_distribute_dispatch_v2", _RESULTS.format("zeros"), RESERVED, version=2)
variant(_dispatch, "npu_moe_distribute_dispatch", _RESULTS.format(_PLACES), RESERVED, version=1, **NEW_IN_V2)


class _Special(NamedTuple):
    """Holds the arguments of copy and const experts: the original tokens, two factors and the summand."""

    tokens: Tensor | None = None
    alpha_1: Tensor | None = None
    alpha_2: Tensor | None = None
    value: Tensor | None = None

    def check(self, experts: Experts, shape: tuple[int, int]) -> None:
        """Raises unless there is what the experts need, for tokens of that shape."""
        needed = {"ori_x": experts.copy + experts.const}
        needed |= dict.fromkeys(("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"), experts.const)
        for (name, there), value in zip(needed.items(), self, strict=True):
            expect(value is not None or not there, name, value, "a tensor, where there are copy or const experts")
            if value is not None and there:
                fits = value.shape == shape if name == "ori_x" else value.numel() in (there, there * shape[1])
                expect(fits, name, value, f"the shape {shape if name == 'ori_x' else (there, shape[1])}")

    def of(self, experts: Experts, ids: Tensor, mask: Tensor | None) -> Tensor | float:
        """Returns what these experts make of their choices' tokens; zeros for every other choice."""
        if self.tokens is None or not experts.copy + experts.const:
            return 0.0
        flat, tokens = ids.reshape(-1).long(), self.tokens.float().repeat_interleave(ids.size(1), 0)
        first, end = experts.first("copy"), experts.first("const")
        result = tokens * ((flat >= first) & (flat < end)).unsqueeze(1)
        if experts.const:
            number = (flat - end).clamp(min=0)
            scale_1, scale_2, value = (t.float().view(experts.const, -1)[number] for t in self[1:] if t is not None)
            result = result + (scale_1 * tokens + scale_2 * value) * (flat >= end).unsqueeze(1)
        if mask is not None:
            mask = mask.repeat_interleave(ids.size(1)) if mask.dim() == 1 else mask.reshape(-1)
            result = result * mask.unsqueeze(1)
        return result


class _Rounded(torch.autograd.Function):
    """Exchanges rows as int8, each with a scale; gradients pass as if the rows had not been rounded."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, sends: list[int], recvs: list[int]) -> Tensor:
        ctx.group, ctx.sends, ctx.recvs, ctx.dtype = group, sends, recvs, rows.dtype
        codes, scale = quantize_rows(rows.float(), torch.int8)
        return group.all_to_all(codes, sends, recvs).float() * group.all_to_all(scale, sends, recvs).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.group.all_to_all(grad, ctx.recvs, ctx.sends).to(ctx.dtype), None, None, None


def _combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    residual_x: Tensor | None,
    gamma: Tensor | None,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    x_active_mask: Tensor | None,
    shared_expert_x: Tensor | None,
    ori_x: Tensor | None,
    const_expert_alpha_1: Tensor | None,
    const_expert_alpha_2: Tensor | None,
    const_expert_v: Tensor | None,
    tp_world_size: int,
    shared_expert_num: int,
    shared_expert_rank_num: int,
    global_bs: int,
    comm_quant_mode: int,
    comm_alg: str,
    norm_eps: float,
    zero_expert_num: int,
    copy_expert_num: int,
    const_expert_num: int,
    version: int,
    name: str,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Returns, for each token, the sum of scale times expert's output over its choices; with ``gamma`` its norm."""
    expect(comm_quant_mode in (0, 2), "comm_quant_mode", comm_quant_mode, "0 (none) or 2 (int8)")
    group = groups.named(group_ep, ep_world_size)
    alone = shared_expert_x is None or not shared_expert_rank_num
    expect(alone, "shared_expert_x", shared_expert_x, "None, where ranks have the shared experts")
    numbers = shared_expert_num, shared_expert_rank_num, zero_expert_num, copy_expert_num, const_expert_num
    experts = Experts(group, name, moe_expert_num, *numbers)
    special = _Special(ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
    terms = x_active_mask, expert_scales, ep_rank_id, tp_world_size, global_bs, comm_alg, version
    same = check_moe(experts, expand_x, expert_ids, *terms)
    same |= {"comm_quant_mode": comm_quant_mode, "norm_eps": f"{norm_eps:g}"}
    shape, count = (len(expert_ids), expand_x.size(1)), experts.held * group.size
    special.check(experts, shape)
    for argument, value in (("shared_expert_x", shared_expert_x), ("residual_x", residual_x)):
        fits = value is None or value.numel() == math.prod(shape)
        expect(fits, argument, value, f"{math.prod(shape)} numbers, as the tokens have")
    expect(gamma is None or gamma.shape == shape[1:], "gamma", gamma, f"{shape[1]} numbers")
    enough = ep_send_counts.dim() == 1 and len(ep_send_counts) >= count
    expect(enough, "ep_send_counts", ep_send_counts, f"{count} numbers at least")
    ends = ep_send_counts[:count].long()
    expect(len(expand_x) >= ends[-1], "expand_x", expand_x, f"{ends[-1]} rows at least, as ep_send_counts says")
    group.agree(name, same)
    ids, mask, weights = with_shared(experts, expert_ids, x_active_mask, expert_scales)
    assert weights is not None
    back = ends.diff(prepend=ends.new_zeros(1)).view(experts.held, group.size).t()
    back = torch.cat([back, back.new_zeros(group.size, experts.local - experts.held)], 1)
    choices = chosen(ids, mask, experts)
    expected = counts_of(ids, choices, experts)
    groups.check_counts(group, name, back.reshape(-1).tolist(), expected.reshape(-1).tolist())
    order = by_expert(back)
    rows = expand_x[: len(order)]
    leaving = torch.empty_like(rows).index_copy(0, order, rows)
    sends, recvs = back.sum(1).tolist(), expected.sum(1).tolist()
    if comm_quant_mode == 2:
        arrived = _Rounded.apply(leaving, group, sends, recvs)
    else:
        arrived = group.all_to_all(leaving, sends, recvs).float()
    moved = arrived.new_zeros(ids.numel(), rows.size(1)).index_copy(0, choices, arrived)
    moved = moved + special.of(experts, ids, mask)
    tokens = (moved * weights.reshape(-1, 1)).view(-1, ids.size(1), rows.size(1)).sum(1)
    if shared_expert_x is not None:
        tokens = tokens + shared_expert_x.float().reshape(tokens.shape)
    if gamma is None or residual_x is None:
        return tokens.to(expand_x.dtype)
    y, rstd, total = add_rms_norm(tokens.view(residual_x.shape), residual_x, gamma, norm_eps)
    return y.to(residual_x.dtype), rstd, total.to(residual_x.dtype)


_NO_NORM = {"residual_x": None, "gamma": None, "norm_eps": 0.0}
_NO_CONSTANTS = dict.fromkeys(("ori_x", "const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"))
variant(
    _combine,
    "npu_moe_distribute_combine_v2",
    """Returns the tokens: each is the sum of its experts' outputs, times their scales, and of ``shared_expert_x``.

    With ``comm_quant_mode`` 2 the rows travel as int8, each with the scale that its largest value needs.
    """,
    (*RESERVED, "assist_info_for_combine"),
    version=2,
    **_NO_NORM,
)
variant(
    _combine,
    "npu_moe_distribute_combine",
    "Computes version 2 without its special experts.",
    (*RESERVED, "expand_idx"),
    version=1,
    **_NO_NORM,
    **_NO_CONSTANTS,
    **NEW_IN_V2,
)
variant(
    _combine,
    "npu_moe_distribute_combine_add_rms_norm",
    "Returns the norm of combine's result plus ``residual_x``, the norm's factor, and that sum.",
    (*RESERVED, "expand_idx"),
    version=2,
    comm_quant_mode=0,
)


_PER_TENSOR = 1


def _checked(
    group: Group, x: Tensor, weight: Tensor, sends: Sequence[int], recvs: Sequence[int], sent_width: int, scaled: bool
) -> groups.Values:
    """Raises for what the formula does not cover or the device refuses; returns what must be equal on all ranks.

    ``sent_width`` is the number of bytes of a row that travels; ``scaled`` is true if there are scales.
    """
    expect(x.dim() == 2, "gmm_x", x, "two dimensions")
    expect(weight.dim() == 3 and x.size(1) == weight.size(1), "gmm_weight", weight, f"(e, {x.size(1)}, N1)")
    check_dtypes("gmm_x", x, "gmm_weight", weight, scaled)
    each, count = weight.size(0), weight.size(0) * group.size
    for argument, counts in (("send_counts", sends), ("recv_counts", recvs)):
        expected = f"{count} numbers from 0 on, {each} for each rank"
        expect(len(counts) == count and min(counts, default=0) >= 0, argument, list(counts), expected)
    expect(x.size(0) == sum(sends), "gmm_x", x, f"{sum(sends)} rows, as many as send_counts says")
    nbytes = sum(sends) * sent_width
    limits.check(limits.GroupedMatmul(group.size, each, x.size(1), weight.size(2), nbytes).breaches)
    same: groups.Values = {"the number of experts of a rank": each, "H1": x.size(1), "N1": weight.size(2)}
    return same | {"the dtype of gmm_x": str(x.dtype)}


def _transposed(rows: Tensor, counts: Sequence[int], inner: int) -> Tensor:
    """Returns rows that lie by (a, b) in the order (b, a); ``counts`` are by (a, b), with ``inner`` values of b."""
    parts = rows.split_with_sizes(list(counts))
    return torch.cat([part for b in range(inner) for part in parts[b::inner]])


def _products(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiplies rows that lie by expert by their weights, in float32; ``counts`` are by rank and expert."""
    parts = rows.split_with_sizes([sum(counts[expert :: len(weight)]) for expert in range(len(weight))])
    return torch.cat([product(part, matrix) for part, matrix in zip(parts, weight, strict=True)])


def _shared(
    x: Tensor | None, weight: Tensor | None, scales: Sequence[Tensor | None], transposed: bool, dtype: torch.dtype
) -> Tensor | None:
    """Returns the product of the shared expert's rows, if there are any, times its scales."""
    expect((x is None) == (weight is None), "mm_weight", weight, "a matrix exactly where mm_x is given")
    for argument, scale in zip(("mm_x_scale", "mm_weight_scale"), scales, strict=True):
        expect(x is not None or scale is None, argument, scale, "None, where there is no mm_x")
    if x is None or weight is None:
        return None
    expect(x.dim() == 2, "mm_x", x, "two dimensions")
    inner, axis = x.size(1), int(transposed)
    fits = weight.dim() == 2 and weight.size(axis) == inner
    expect(fits, "mm_weight", weight, f"a matrix of {inner} {'columns' if transposed else 'rows'}")
    return _scaled(product(x, weight.t() if transposed else weight), scales).to(dtype)


def _scaled(y: Tensor, scales: Sequence[Tensor | None]) -> Tensor:
    for scale in scales:
        y = y if scale is None else y.float() * scale.reshape(())
    return y


def _grouped_matmul(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    gmm_x_scale: Tensor | None,
    gmm_weight_scale: Tensor | None,
    hcom: str,
    ep_world_size: int,
    send_counts: list[int],
    recv_counts: list[int],
    gmm_y_dtype: int | None,
    mm_x: Tensor | None,
    mm_weight: Tensor | None,
    mm_x_scale: Tensor | None,
    mm_weight_scale: Tensor | None,
    gmm_x_quant_mode: int | None,
    gmm_weight_quant_mode: int | None,
    mm_x_quant_mode: int | None,
    mm_weight_quant_mode: int | None,
    trans_gmm_weight: bool,
    trans_mm_weight: bool,
    permute_out_flag: bool,
    mm_y_dtype: int | None,
    travels_first: bool,
    name: str,
) -> tuple[Tensor | None, ...]:
    """Multiplies the rows of this rank's experts after their exchange (``travels_first``) or before it."""
    modes = gmm_x_quant_mode, gmm_weight_quant_mode, mm_x_quant_mode, mm_weight_quant_mode
    scales = gmm_x_scale, gmm_weight_scale, mm_x_scale, mm_weight_scale
    for argument, mode, scale in zip(("gmm_x", "gmm_weight", "mm_x", "mm_weight"), modes, scales, strict=True):
        expect(mode in (None, _PER_TENSOR), f"{argument}_quant_mode", mode, "1 (one scale for the whole tensor)")
        expect(scale is None or scale.numel() == 1, f"{argument}_scale", scale, "one number")
    dtype = dtype_of(gmm_y_dtype, gmm_x.dtype, "gmm_y_dtype")
    default = dtype if gmm_x_scale is None else torch.bfloat16
    shared = _shared(mm_x, mm_weight, scales[2:], trans_mm_weight, dtype_of(mm_y_dtype, default, "mm_y_dtype"))
    weight, group = gmm_weight.mT if trans_gmm_weight else gmm_weight, groups.named(hcom, ep_world_size)
    travels = gmm_x.size(-1) * gmm_x.itemsize if travels_first else weight.size(-1) * dtype.itemsize
    same = _checked(group, gmm_x, weight, send_counts, recv_counts, travels, gmm_weight_scale is not None)
    same |= {"the dtype of the result": str(dtype), "permute_out_flag": permute_out_flag}
    if travels_first:
        arrived = group.exchange_agreed(name, same, gmm_x, send_counts, recv_counts)
        rows = _transposed(arrived, recv_counts, len(weight))
        y = _scaled(_products(rows, weight, recv_counts), scales[:2]).to(dtype)
        return y, shared, rows if permute_out_flag else None
    y = _scaled(_products(gmm_x, weight, send_counts), scales[:2]).to(dtype)
    by_expert = [count for expert in range(len(weight)) for count in send_counts[expert :: len(weight)]]
    leaving = _transposed(y, by_expert, group.size)
    return group.exchange_agreed(name, same, leaving, send_counts, recv_counts), shared


_EXACT: dict[str, Any] = dict.fromkeys(
    [f"{one}_{what}" for one in ("gmm_x", "gmm_weight", "mm_x", "mm_weight") for what in ("scale", "quant_mode")]
    + ["gmm_y_dtype", "mm_y_dtype"]
)
_AS_GIVEN: dict[str, Any] = {"trans_gmm_weight": False, "trans_mm_weight": False}
_register = functools.partial(variant, _grouped_matmul, ignores=("comm_mode",))
_register(
    "npu_alltoallv_gmm",
    """Multiplies the rows that all ranks send to this rank's experts; returns that, the shared product, and the rows.

    Counts are by rank and then by expert, like the rows of ``gmm_x``; the results are by expert and then by rank.
    What nobody asks for is None.
    """,
    travels_first=True,
    **_EXACT,
)
_register(
    "npu_gmm_alltoallv",
    """Multiplies the rows of this rank's experts by their weights and sends them back to the ranks they came from.

    ``gmm_x`` is sorted by expert and then by rank; counts and result are by rank and then by expert.
    """,
    travels_first=False,
    permute_out_flag=False,
    **_EXACT,
)
_OF_SCALES = "Computes {} of quantized numbers, with one scale for each tensor."
_register("npu_alltoallv_quant_gmm", _OF_SCALES.format("npu_alltoallv_gmm"), travels_first=True, **_AS_GIVEN)
_register(
    "npu_quant_gmm_alltoallv",
    _OF_SCALES.format("npu_gmm_alltoallv"),
    travels_first=False,
    permute_out_flag=False,
    **_AS_GIVEN,
)
