"""Brings the rows that experts made back to their tokens: MC2's combine, the other half of `moe_distribute`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alltoallv.npu_ops import groups
from alltoallv.npu_ops.moe import by_expert
from alltoallv.npu_ops.moe_distribute import RESERVED, Experts, check, chosen, counts_of, with_shared
from alltoallv.npu_ops.norms import add_rms_norm
from alltoallv.npu_ops.quantization import quantize_rows
from alltoallv.npu_ops.registry import expect, operator


class _Special(NamedTuple):
    """Holds the arguments of copy and const experts: the original tokens, two factors and the summand."""

    tokens: Tensor | None = None
    alpha_1: Tensor | None = None
    alpha_2: Tensor | None = None
    value: Tensor | None = None

    def check(self, experts: Experts) -> None:
        needed = {"ori_x": experts.copy + experts.const}
        needed |= dict.fromkeys(("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"), experts.const)
        for (name, there), given in zip(needed.items(), self, strict=True):
            expect(given is not None or not there, name, given, "a tensor, where there are copy or const experts")

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


def _shared(experts: int, ranks: int, x: Tensor | None) -> tuple[int, int]:
    """Returns the numbers of shared experts and of their ranks; raises if this rank gives their part as well."""
    expect(x is None or not ranks, "shared_expert_x", x, "None, where ranks have the shared experts")
    return experts, ranks


def _combine(
    experts: Experts,
    rows: Tensor,
    expert_ids: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    mask: Tensor | None,
    shared: Tensor | None,
    special: _Special,
    comm_quant_mode: int,
) -> Tensor:
    """Returns, for each token, the sum of scale times expert's output over its choices, in float32."""
    group, local, held = experts.group, experts.local, experts.held
    expert_ids, mask, weights = with_shared(experts, expert_ids, mask, expert_scales)
    assert weights is not None
    k = expert_ids.size(1)
    ends = ep_send_counts[: held * group.size].long()
    back = ends.diff(prepend=ends.new_zeros(1)).view(held, group.size).t()
    back = torch.cat([back, back.new_zeros(group.size, local - held)], 1)
    choices = chosen(expert_ids, mask, experts)
    expected = counts_of(expert_ids, choices, experts)
    flat, wanted = back.reshape(-1).tolist(), expected.reshape(-1).tolist()
    groups.check_counts(group, experts.operator, flat, wanted)
    order = by_expert(back)
    leaving = torch.empty_like(rows[: len(order)])
    leaving = leaving.index_copy(0, order, rows[: len(order)])
    sends, recvs = back.sum(1).tolist(), expected.sum(1).tolist()
    if comm_quant_mode == 2:
        numbers, scale = quantize_rows(leaving.float(), torch.int8)
        arrived = group.all_to_all(numbers, sends, recvs).float()
        arrived = arrived * group.all_to_all(scale, sends, recvs).unsqueeze(1)
    else:
        arrived = group.all_to_all(leaving, sends, recvs).float()
    made = arrived.new_zeros(expert_ids.numel(), rows.size(1)).index_copy(0, choices, arrived)
    made = made + special.of(experts, expert_ids, mask)
    total = (made * weights.float().reshape(-1, 1)).view(-1, k, rows.size(1)).sum(1)
    if shared is not None:
        total = total + shared.float().reshape(total.shape)
    return total


@operator("npu_moe_distribute_combine_v2", ignores=(*RESERVED, "assist_info_for_combine"))
def combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
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
    zero_expert_num: int,
    copy_expert_num: int,
    const_expert_num: int,
) -> Tensor:
    """Returns the tokens: each is the sum of its experts' outputs, times their scales, and of ``shared_expert_x``.

    With ``comm_quant_mode`` 2 the rows travel as int8, each with the scale that its largest value needs.
    """
    expect(comm_quant_mode in (0, 2), "comm_quant_mode", comm_quant_mode, "0 (none) or 2 (int8)")
    group = groups.named(group_ep, ep_world_size)
    shared = _shared(shared_expert_num, shared_expert_rank_num, shared_expert_x)
    numbers = zero_expert_num, copy_expert_num, const_expert_num
    experts = Experts(group, "npu_moe_distribute_combine_v2", moe_expert_num, *shared, *numbers)
    special = _Special(ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
    special.check(experts)
    check(experts, expand_x, expert_ids, x_active_mask, ep_rank_id, tp_world_size, global_bs, comm_alg, 2)
    about = x_active_mask, shared_expert_x, special, comm_quant_mode
    return _combine(experts, expand_x, expert_ids, ep_send_counts, expert_scales, *about).to(expand_x.dtype)


@operator("npu_moe_distribute_combine", ignores=(*RESERVED, "expand_idx"))
def combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    x_active_mask: Tensor | None,
    shared_expert_x: Tensor | None,
    tp_world_size: int,
    shared_expert_num: int,
    shared_expert_rank_num: int,
    global_bs: int,
    comm_quant_mode: int,
) -> Tensor:
    """Computes version 2 without its special experts."""
    expect(comm_quant_mode in (0, 2), "comm_quant_mode", comm_quant_mode, "0 (none) or 2 (int8)")
    group = groups.named(group_ep, ep_world_size)
    shared = _shared(shared_expert_num, shared_expert_rank_num, shared_expert_x)
    experts = Experts(group, "npu_moe_distribute_combine", moe_expert_num, *shared)
    check(experts, expand_x, expert_ids, x_active_mask, ep_rank_id, tp_world_size, global_bs, "", 1)
    about = x_active_mask, shared_expert_x, _Special(), comm_quant_mode
    return _combine(experts, expand_x, expert_ids, ep_send_counts, expert_scales, *about).to(expand_x.dtype)


@operator("npu_moe_distribute_combine_add_rms_norm", ignores=(*RESERVED, "expand_idx", "comm_quant_mode"))
def combine_add_rms_norm(
    expand_x: Tensor,
    expert_ids: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    residual_x: Tensor,
    gamma: Tensor,
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
    comm_alg: str,
    norm_eps: float,
    zero_expert_num: int,
    copy_expert_num: int,
    const_expert_num: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the norm of combine's result plus ``residual_x``, the norm's factor, and that sum."""
    group = groups.named(group_ep, ep_world_size)
    shared = _shared(shared_expert_num, shared_expert_rank_num, shared_expert_x)
    numbers = zero_expert_num, copy_expert_num, const_expert_num
    experts = Experts(group, "npu_moe_distribute_combine_add_rms_norm", moe_expert_num, *shared, *numbers)
    special = _Special(ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
    special.check(experts)
    check(experts, expand_x, expert_ids, x_active_mask, ep_rank_id, tp_world_size, global_bs, comm_alg, 2)
    about = x_active_mask, shared_expert_x, special, 0
    tokens = _combine(experts, expand_x, expert_ids, ep_send_counts, expert_scales, *about)
    y, rstd, total = add_rms_norm(tokens.view(residual_x.shape), residual_x, gamma, norm_eps)
    return y.to(residual_x.dtype), rstd, total.to(residual_x.dtype)
