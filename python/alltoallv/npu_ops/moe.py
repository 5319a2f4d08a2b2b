"""Mixture of experts: chooses each token's experts, sorts tokens by expert, and brings them back.

A map of tokens by experts may assign the tokens instead of numbers of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.matmuls import to_int8
from alltoallv.npu_ops.microscaling import E2M1, E4M3, E5M2, packed, quantize_blocks
from alltoallv.npu_ops.quantization import quantize_rows
from alltoallv.npu_ops.registry import backward, differentiate, expect, operator, present

_FEWER = "fewer than 2**31: experts' numbers are int32"


def _row_numbers(rows: int, k: int) -> Tensor:
    """Returns each choice's number when all first choices come first: row + choice * rows."""
    return torch.arange(rows * k, dtype=torch.int32).view(k, rows).t().contiguous()


def _top_k_softmax(x: Tensor, finished: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    y, experts = x.float().softmax(-1).topk(k, -1)
    if finished is not None:
        experts = experts.masked_fill(finished.unsqueeze(-1), x.size(-1))
    rows = _row_numbers(x.numel() // x.size(-1), k).view(experts.shape)
    return y, experts.to(torch.int32), rows


@operator("npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(x: Tensor, finished: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the k largest softmax values, their experts and row numbers.

    A finished row gets the number of experts in place of each expert, which stands for none.
    """
    y, experts, rows = _top_k_softmax(x, finished, k)
    return y.to(x.dtype), experts, rows


@operator("npu_moe_gating_top_k_softmax_v2")
def gating_top_k_softmax_v2(
    x: Tensor, k: int, finished: Tensor | None, renorm: int | None, output_softmax: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the k largest softmax values, their experts and, if asked for, the whole softmax.

    With ``renorm`` 1, which gives no whole softmax, the values are divided by their sum.
    """
    expect(renorm in (None, 0, 1), "renorm", renorm, "0 or 1")
    y, experts, _ = _top_k_softmax(x, finished, k)
    softmax = x.float().softmax(-1) if output_softmax and not renorm else torch.zeros(0)
    y = y / y.sum(-1, keepdim=True) if renorm else y
    return y.to(x.dtype), experts, softmax


@operator("npu_moe_gating_top_k", ignores=("out_flag",))
def gating_top_k(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses the k best experts of the best groups, by norm + bias; returns their norms, them, and all norms.

    The norms of the sigmoid are scaled to a sum of one.
    """
    expect(norm_type in (0, 1), "norm_type", norm_type, "0 (softmax) or 1 (sigmoid)")
    expect(renorm in (0, 1), "renorm", renorm, "0 or 1")
    norm = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    experts = _best(norm, k, bias, k_group, group_count, group_select_mode)
    y = norm.gather(1, experts)
    if norm_type == 1 or renorm == 1:
        y = y / (y.sum(-1, keepdim=True) + eps)
    return (y * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), norm


def _best(norm: Tensor, k: int, bias: Tensor | None, k_group: int, group_count: int, group_select_mode: int) -> Tensor:
    """Returns the k best experts of the ``k_group`` best groups, by norm + bias."""
    expect(group_select_mode in (0, 1), "group_select_mode", group_select_mode, "0 (largest) or 1 (sum of two)")
    choice = norm if bias is None else norm + bias.float()
    if group_count > 1:
        groups = choice.unflatten(1, (group_count, -1))
        score = groups.amax(-1) if group_select_mode == 0 else groups.topk(2, -1)[0].sum(-1)
        kept = torch.zeros_like(score).scatter(1, score.topk(k_group, -1)[1], 1.0).bool()
        choice = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).view(norm.shape)
    return choice.topk(k, -1)[1]


def gating_top_k_hash(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    input_ids: Tensor | None,
    tid2eid: Tensor | None,
    k_group: int,
    group_count: int,
    routed_scaling_factor: float,
    eps: float,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses experts as `gating_top_k`, or those that ``tid2eid`` has for each token of ``input_ids``.

    ``norm_type`` 2 is the root of softplus. Norms of the types 1 and 2 are scaled to a sum of one.
    """
    expect(norm_type in (0, 1, 2), "norm_type", norm_type, "0 (softmax), 1 (sigmoid) or 2 (root of softplus)")
    expect(renorm == 0, "renorm", renorm, "0")
    expect((input_ids is None) == (tid2eid is None), "tid2eid", tid2eid, "a table exactly where input_ids is given")
    wide = x.float()
    norm = (wide.softmax(-1), wide.sigmoid(), functional.softplus(wide, threshold=100).sqrt())[norm_type]
    if input_ids is None or tid2eid is None:
        experts = _best(norm, k, bias, k_group, group_count, group_select_mode)
    else:
        expect(tid2eid.dim() == 2 and tid2eid.size(1) == k, "tid2eid", tid2eid, f"{k} experts for each token")
        experts = tid2eid[input_ids.reshape(-1).long()].long()
    y = norm.gather(1, experts)
    if norm_type:
        y = y / (y.sum(-1, keepdim=True) + eps)
    return (y * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), norm


def _check_choices(name: str, experts: Tensor, tokens: Tensor) -> None:
    fits = not experts.is_floating_point() and len(experts) == len(tokens)
    expect(fits, name, experts, f"integers, for each of {len(tokens)} tokens")


def _sources(sorted_indices: Tensor, rows: int, tokens: int) -> Tensor:
    """Returns which token each of the sorted rows copies; ``sorted_indices`` has the place of each token's copies."""
    copies = max(1, len(sorted_indices) // max(1, tokens))
    return sorted_indices.argsort()[:rows] // copies


@operator("npu_moe_token_permute")
def token_permute(tokens: Tensor, indices: Tensor, num_out_tokens: int | None) -> tuple[Tensor, Tensor]:
    """Returns the tokens sorted by expert (stable), and the place of each choice."""
    _check_choices("indices", indices, tokens)
    places = indices.reshape(-1).argsort(stable=True).argsort()
    rows = num_out_tokens or len(places)
    rows = max(0, len(places) + rows) if rows < 0 else min(rows, len(places))
    return tokens[_sources(places, rows, len(tokens))], places.to(torch.int32)


@operator("npu_moe_token_permute_grad", ignores=("indices",))
def token_permute_grad(tokens: Tensor, grad_permuted_tokens: Tensor, sorted_indices: Tensor) -> Tensor:
    return token_permute_grad_v2(grad_permuted_tokens, sorted_indices, len(tokens), tokens.dtype)


@operator("npu_moe_token_permute_grad_v2", ignores=("num_topK",))
def token_permute_grad_v2(
    grad_permuted_tokens: Tensor, sorted_indices: Tensor, tokens_size_0: int, tokens_dtype: torch.dtype
) -> Tensor:
    rows, width = grad_permuted_tokens.shape
    sources = _sources(sorted_indices, rows, tokens_size_0)
    total = torch.zeros(tokens_size_0, width).index_add_(0, sources, grad_permuted_tokens.float())
    return total.to(tokens_dtype)


def rows_at(rows: Tensor, places: Tensor) -> Tensor:
    """Returns the rows at these places in float32, and zeros for places outside, which dropped choices have."""
    outside = (places < 0) | (places >= len(rows))
    return functional.pad(rows.float(), (0, 0, 0, 1))[places.long().masked_fill(outside, len(rows))]


_RESTORE = ("restore_shape",)  # counts where padded_mode is True, which is refused


@operator("npu_moe_token_unpermute", ignores=_RESTORE)
def token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None) -> Tensor:
    """Adds up each token's rows, times their probabilities. Dropped rows add nothing."""
    k = 1 if probs is None else probs.size(-1)
    rows = rows_at(permuted_tokens, sorted_indices)
    if probs is not None:
        rows = rows * probs.float().reshape(-1, 1)
    return rows.view(-1, k, permuted_tokens.size(1)).sum(1).to(permuted_tokens.dtype)


@operator("_npu_moe_token_unpermute", ignores=_RESTORE)
def token_unpermute_and_keep(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the tokens, and the rows, which the gradient needs."""
    return token_unpermute(permuted_tokens, sorted_indices, probs), permuted_tokens.clone()


token_unpermute_grad = backward(
    "npu_moe_token_unpermute_grad", token_unpermute, ("permuted_tokens", "probs"), "grad_unpermuted_tokens", _RESTORE
)


@operator("npu_moe_token_unpermute_grad_v2", ignores=_RESTORE)
def token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None,
    permuted_tokens: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if permuted_tokens is None:
        shape = permuted_tokens_size_0, grad_unpermuted_tokens.size(1)
        permuted_tokens = torch.zeros(shape, dtype=permuted_tokens_dtype)
    rows = {"permuted_tokens": permuted_tokens, "sorted_indices": sorted_indices, "probs": probs}
    return token_unpermute_grad(grad_unpermuted_tokens=grad_unpermuted_tokens, **rows)


@operator("npu_moe_init_routing")
def init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the rows by expert, each choice's place and the sorted experts.

    ``row_idx`` numbers the choices with all first choices first.
    """
    _check_choices("expert_idx", expert_idx, x)
    experts, order = expert_idx.reshape(-1).sort(stable=True)
    sorted_rows = row_idx.reshape(-1)[order].long()
    rows = min(len(x), active_num) * expert_idx.size(1)
    return x[sorted_rows[:rows] % len(x)], sorted_rows.argsort().to(torch.int32), experts


@operator("npu_moe_compute_expert_tokens")
def compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """Returns where each expert's rows end."""
    expect(0 <= num_expert < 2**31, "num_expert", num_expert, _FEWER)
    experts = torch.arange(num_expert, dtype=sorted_expert_for_source_row.dtype)
    return torch.searchsorted(sorted_expert_for_source_row, experts, right=True).to(torch.int32)


_MX = {2: E5M2, 3: E4M3, 9: E2M1}


@operator("npu_moe_init_routing_v2")
def init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    active_num: int,
    expert_capacity: int,
    expert_num: int,
    drop_pad_mode: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: list[int],
    row_idx_type: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the rows for a range of experts, sorted by expert; rows after the last are zeros, as are their scales.

    With ``active_num`` there are so many rows and scales at most; a choice that gets none has the place -1. With
    ``drop_pad_mode`` 1 each expert has ``expert_capacity`` rows, of its first choices and then of zeros, and
    ``active_num`` has no effect. ``quant_mode`` 0 gives int8, rows * scale + offset, 1 int8 with a scale for each row,
    and 2, 3 and 9 numbers of mx: float8_e5m2, float8_e4m3fn and float4_e2m1fn_x2.
    """
    expect(expert_tokens_num_flag, "expert_tokens_num_flag", expert_tokens_num_flag, "True")
    expect(drop_pad_mode in (0, 1), "drop_pad_mode", drop_pad_mode, "0 or 1")
    kinds, indices = ((1,), (0,)) if drop_pad_mode else ((0, 1, 2), (0, 1))
    expect(expert_tokens_num_type in kinds, "expert_tokens_num_type", expert_tokens_num_type, f"one of {kinds}")
    modes = (-1, 0, 1) if drop_pad_mode else (-1, 0, 1, *_MX)
    expect(quant_mode in modes, "quant_mode", quant_mode, f"one of {modes}, for drop_pad_mode {drop_pad_mode}")
    expect(quant_mode not in _MX or scale is None, "scale", scale, "None, for numbers of mx")
    for name, value in (("scale", scale), ("offset", offset)):
        is_number = value is not None and value.numel() == 1
        expect(quant_mode or is_number, name, value, "one number, for quant_mode 0")
    expect(not quant_mode or offset is None, "offset", offset, "None, but for quant_mode 0")
    expect(quant_mode != 9 or x.size(1) % 2 == 0, "x", x, "rows of an even size, for quant_mode 9")
    expect(expert_num < 2**31, "expert_num", expert_num, _FEWER)
    expect(row_idx_type in indices, "row_idx_type", row_idx_type, "0 (each choice's place) or 1 (each row's choice)")
    _check_choices("expert_idx", expert_idx, x)
    first, end = active_expert_range or (0, expert_num)
    all_experts = not drop_pad_mode or (first, end) == (0, expert_num)
    expect(all_experts, "active_expert_range", active_expert_range, "all experts, for drop_pad_mode 1")
    experts = expert_idx.reshape(-1).long()
    here = (experts >= first) & (experts < end)
    counts = experts[here].bincount(minlength=expert_num)
    order = experts.where(here, torch.full_like(experts, expert_num)).sort(stable=True)[1][: int(here.sum())]
    if drop_pad_mode == 1:
        expect(expert_capacity > 0, "expert_capacity", expert_capacity, "more than 0, for drop_pad_mode 1")
        number = experts[order]
        position = torch.arange(len(order)) - (counts.cumsum(0) - counts)[number]
        kept, places = position < expert_capacity, expert_num * expert_capacity
        choices, targets = order[kept], (number * expert_capacity + position)[kept]
    else:
        places = min(active_num, len(experts)) if active_num > 0 else len(experts)
        choices, targets = order[:places], torch.arange(min(places, len(order)))
    sources = choices // expert_idx.size(1)
    rows = x[sources]
    scales = torch.zeros(places)
    if quant_mode == 0 and scale is not None and offset is not None:
        rows = to_int8(rows.float() * scale.float().reshape(()) + offset.float().reshape(()))
    elif quant_mode == 1:
        smooth = 1.0 if scale is None else scale.float()[(experts[choices] - first).clamp(max=len(scale) - 1)]
        rows, scales[targets] = quantize_rows(rows.float() * smooth, torch.int8)
    elif quant_mode in _MX:
        rows, own = quantize_blocks(rows.detach().float(), _MX[quant_mode])
        rows = packed(rows, _MX[quant_mode])
        own = own if quant_mode == 9 else own.flatten(1)
        scales = own.new_zeros(places, *own.shape[1:]).index_copy(0, targets, own).view(torch.float8_e8m0fnu)
    elif scale is not None:
        scales[targets] = scale[sources]
    rows = rows.view(torch.uint8) if quant_mode in _MX else rows  # torch does not place float8
    expanded = rows.new_zeros(places, rows.size(1)).index_copy(0, targets, rows)
    expanded = expanded.view(_MX[quant_mode].dtype) if quant_mode in _MX else expanded
    index = torch.full_like(experts, -1)
    if row_idx_type == 0:
        index[choices] = targets
    else:
        index[: len(choices)] = choices
    tokens = counts[first:end]
    if expert_tokens_num_type == 0:
        tokens = tokens.cumsum(0)
    elif expert_tokens_num_type == 2:
        used = counts.nonzero().view(-1)
        tokens = counts.new_zeros(expert_num, 2)
        tokens[: len(used)] = torch.stack([used, counts[used]], 1)
    if drop_pad_mode == 1:
        expanded = expanded.unflatten(0, (expert_num, expert_capacity))
    return expanded, index.to(torch.int32), tokens, scales


@operator("npu_moe_finalize_routing")
def finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None,
    k: int | None = 1,
) -> Tensor:
    """Returns for each row the sum of its choices, each plus its expert's bias and times its scale, and of the skips.

    Choice k of row i has its place at ``i + k * rows`` (``drop_pad_mode`` 0 and 1), or at ``i * K + k`` (2 and 3); -1
    adds nothing. With 1 and 3 the expanded rows are [experts, capacity, size].
    """
    expect(drop_pad_mode in range(4), "drop_pad_mode", drop_pad_mode, "0 to 3")
    dimensions = 3 if drop_pad_mode in (1, 3) else 2
    fits = expanded_permuted_rows.dim() == dimensions
    expect(fits, "expanded_permuted_rows", expanded_permuted_rows, f"{dimensions} dimensions")
    expanded_permuted_rows = expanded_permuted_rows.flatten(0, -2)
    choices = (k or 1) if scales is None else scales.size(1)
    places = expanded_src_to_dst_row.long()
    places = places.view(choices, -1).t() if drop_pad_mode in (0, 1) else places.view(-1, choices)
    rows = rows_at(expanded_permuted_rows, places)
    if bias is not None:
        experts = present(export_for_source_row, "export_for_source_row", "the experts, where there is a bias")
        there = (places >= 0) & (places < len(expanded_permuted_rows))
        rows = rows + bias.float()[experts.long()] * there.unsqueeze(-1)
    total = (rows if scales is None else rows * scales.float().unsqueeze(-1)).sum(1)
    for skip in (skip1, skip2):
        total = total if skip is None else total + skip.float()
    return total.to(expanded_permuted_rows.dtype)


def by_expert(counts: Tensor) -> Tensor:
    """Returns where each row comes from when rows by (rank, expert) are sorted by (expert, rank).

    ``counts`` has one row per rank.
    """
    experts = torch.arange(counts.size(1)).repeat(counts.size(0)).repeat_interleave(counts.reshape(-1))
    return experts.argsort(stable=True)


@operator("npu_moe_re_routing")
def re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    per_token_scales: Tensor | None,
    expert_token_num_type: int,
    idx_type: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts rows that lie by (rank, expert) by (expert, rank); the counts have one row per rank."""
    expect(expert_token_num_type == 1, "expert_token_num_type", expert_token_num_type, "1 (counts)")
    expect(idx_type in (0, 1), "idx_type", idx_type, "0 (where a row comes from) or 1 (where it goes to)")
    counts = expert_token_num_per_rank.long()
    order = by_expert(counts)
    scales = torch.zeros(len(tokens)) if per_token_scales is None else per_token_scales[order]
    index = order if idx_type == 0 else order.argsort()
    return tokens[order], scales, index.to(torch.int32), counts.sum(0).to(expert_token_num_per_rank.dtype)


def _slots(routing_map: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Returns token and expert of each row, by expert and then by token. With a capacity each expert has as many rows;
    rows without a choice repeat tokens that did not choose the expert.
    """
    by_expert = routing_map.bool().t()
    if capacity is None:
        experts, tokens = by_expert.nonzero(as_tuple=True)
        return tokens, experts
    tokens = by_expert.int().sort(dim=1, descending=True, stable=True)[1][:, :capacity].reshape(-1)
    return tokens, torch.arange(len(by_expert)).repeat_interleave(capacity)


@operator("npu_moe_token_permute_with_routing_map")
def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_out_tokens: int | None, drop_and_pad: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns rows, their probabilities, if any, and each row's place by token (with ``drop_and_pad`` its token)."""
    rows = len(tokens) if num_out_tokens is None else num_out_tokens
    sources, experts = _slots(routing_map, rows // routing_map.size(1) if drop_and_pad else None)
    if not drop_and_pad:
        expect(len(sources) == rows, "num_out_tokens", num_out_tokens, f"the map's {len(sources)} ones")
    places = sources if drop_and_pad else sources.sort(stable=True)[1]
    permuted_probs = None if probs is None else probs[sources, experts]
    return tokens[sources], permuted_probs, places.to(torch.int32)


@operator("npu_moe_token_permute_with_routing_map_grad")
def permute_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    sources, experts = _slots(routing_map, len(sorted_indices) // experts_num if drop_and_pad else None)
    grad = permuted_token_out_grad.float()
    of_tokens = grad.new_zeros(tokens_num, grad.size(1)).index_add(0, sources, grad)
    of_probs = None
    if probs_grad is not None and probs_grad.numel():
        of_probs = probs_grad.new_zeros(tokens_num, experts_num).index_put((sources, experts), probs_grad)
    return of_tokens.to(permuted_token_out_grad.dtype), of_probs


@operator("npu_moe_token_unpermute_with_routing_map")
def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> Tensor:
    values, places = permuted_tokens.float(), sorted_indices.long()
    if drop_and_pad:
        if probs is not None:
            experts = torch.arange(probs.size(1)).repeat_interleave(len(values) // probs.size(1))
            values = values * probs.float()[places, experts].unsqueeze(-1)
        return values.new_zeros(restore_shape).index_add(0, places, values).to(permuted_tokens.dtype)
    if probs is not None:
        chosen = present(routing_map, "routing_map", "a map, where there are probabilities")
        values = values * probs.float()[_slots(chosen, None)].unsqueeze(-1)
    each = len(places) // max(restore_shape[0], 1)
    return rows_at(values, places).view(restore_shape[0], each, restore_shape[1]).sum(1).to(permuted_tokens.dtype)


@operator("_npu_moe_token_unpermute_with_routing_map")
def unpermute_and_keep(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the tokens, and what only the gradient needs: the indices twice, and an unused tensor."""
    result = unpermute(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)
    unused = None if probs is None else probs.new_zeros(len(sorted_indices))
    return result, sorted_indices.clone(), sorted_indices.clone(), unused


@operator("npu_moe_token_unpermute_with_routing_map_grad", ignores=("permuted_token_id",))
def unpermute_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
) -> tuple[Tensor | None, ...]:
    grad = unpermuted_tokens_grad
    rows = grad.new_zeros(len(out_index), grad.size(1)) if permuted_tokens is None else permuted_tokens

    def forward(rows: Tensor, probs: Tensor | None) -> Tensor:
        return unpermute(rows, out_index, restore_shape, probs, routing_map, drop_and_pad)

    return tuple(differentiate(forward, [rows, probs], grad))
