"""Brings the rows that experts made back to their tokens: MC2's combine, the other half of `moe_distribute`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alltoallv.npu_ops import groups
from alltoallv.npu_ops.groups import Group
from alltoallv.npu_ops.moe import by_expert
from alltoallv.npu_ops.moe_distribute import NEW_IN_V2, RESERVED, Experts, check, chosen, counts_of, with_shared
from alltoallv.npu_ops.norms import add_rms_norm
from alltoallv.npu_ops.quantization import quantize_rows
from alltoallv.npu_ops.registry import expect, variant


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
        for (name, there), given in zip(needed.items(), self, strict=True):
            expect(given is not None or not there, name, given, "a tensor, where there are copy or const experts")
            if given is not None and there:
                fits = given.shape == shape if name == "ori_x" else given.numel() in (there, there * shape[1])
                expect(fits, name, given, f"the shape {shape if name == 'ori_x' else (there, shape[1])}")

    def of(self, experts: Experts, ids: Tensor, mask: Tensor | None) -> Tensor | float:
        """Returns what these experts make of their choices' tokens; zeros for every other choice."""
        if self.tokens is None or not experts.copy + experts.const:
            return 0.0
        flat, tokens = ids.reshape(-1).long(), self.tokens.float().repeat_interleave(ids.size(1), 0)
        first, end = experts.first("copy"), experts.first("const")
        result = tokens * ((flat >= first) & (flat < end)).unsqueeze(1)
        if experts.const:
            number = (flat - end).clamp(min=0)
            one, two, value = (t.float().view(experts.const, -1)[number] for t in self[1:] if t is not None)
            result = result + (one * tokens + two * value) * (flat >= end).unsqueeze(1)
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
    given = x_active_mask, expert_scales, ep_rank_id, tp_world_size, global_bs, comm_alg, version
    same = check(experts, expand_x, expert_ids, *given)
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
    made = arrived.new_zeros(ids.numel(), rows.size(1)).index_copy(0, choices, arrived)
    made = made + special.of(experts, ids, mask)
    tokens = (made * weights.reshape(-1, 1)).view(-1, ids.size(1), rows.size(1)).sum(1)
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
