"""The whole layer of experts in one operator: rows to the experts' ranks, both products with SwiGLU, and back.

Rows go, are weighed and are added as in `moe_exchange`; every rank has equally many experts, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.layers import swish_of_first
from alltoallv.npu_ops.matmuls import dequantize, product, scale_and_offset, unpack
from alltoallv.npu_ops.moe import by_expert
from alltoallv.npu_ops.moe_exchange import Experts, Precision, chosen, counts_of
from alltoallv.npu_ops.quantization import bounded, quantize_rows
from alltoallv.npu_ops.registry import Refused, expect, present

__all__ = ["dispatch_ffn_combine", "dispatch_gmm_combine_decode", "mega_moe"]


def _matrices(
    name: str, tensors: Sequence[Tensor], four_bits: bool, shape: tuple[int, int] | None = None
) -> list[Tensor]:
    """Returns one matrix per expert, of a tensor of all or of one each; numbers of four bits as int8."""
    each = [matrix for part in tensors for matrix in (part if part.dim() == 3 else [part])]
    if each and each[0].dtype == torch.int32:
        if not four_bits:
            raise Refused(f"{name} has int32, expected int8 or bfloat16: numbers of four bits are not supported here")
        each = [unpack(words) for words in each]
    expected = "a matrix for each expert" if shape is None else f"matrices of {shape}"
    fits = len(each) > 0 and all(matrix.dim() == 2 and matrix.shape == (shape or each[0].shape) for matrix in each)
    expect(fits, name, [tuple(part.shape) for part in tensors], expected)
    return each


def _columns(name: str, scales: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns float32 scales of each expert's columns, which int64 may hold; None for weights that need none."""
    if matrices[0].dtype != torch.int8:
        return [None] * len(matrices)
    columns = matrices[0].size(1)
    numbers = sum(scale.numel() for scale in scales)
    expect(numbers == len(matrices) * columns, name, numbers, f"{columns} scales for each of {len(matrices)} experts")
    flat = torch.cat([scale_and_offset(scale)[0].reshape(-1) for scale in scales])
    return list(flat.view(len(matrices), columns))


def _added(
    name: str, biases: Sequence[Tensor], four_bits: bool, matrices: Sequence[Tensor], scales: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns what is added to the products with each expert's matrix of four bits before the rows' scales.

    The device multiplies rows less 8, and the given numbers should make up for it: then nothing is left.
    """
    if not four_bits:
        none = not any(bias.numel() for bias in biases)
        expect(none, name, biases, "no numbers, for weights of int8 or bfloat16")
        return [None] * len(matrices)
    columns = matrices[0].size(1)
    rows = [row for part in biases for row in (part if part.dim() == 2 else [part])]
    fits = len(rows) == len(matrices) and all(row.shape == (columns,) for row in rows)
    expect(fits, name, [tuple(part.shape) for part in biases], f"{columns} numbers for each of {len(matrices)} experts")
    return [
        (row.double() - 8 * matrix.double().sum(0) * present(scale, "scale", "scales of columns").double()).float()
        for row, matrix, scale in zip(rows, matrices, scales, strict=True)
    ]


def _scaled(total: Tensor, scale: Tensor, added: Tensor | None, tokens: Tensor | None, dtype: torch.dtype) -> Tensor:
    if added is None or tokens is None:
        return dequantize(total, scale, None, tokens, None, dtype)
    return (dequantize(total, scale, None, None, added, torch.float32) * tokens.unsqueeze(-1)).to(dtype)


class _Weights:
    """Both matrices of each of this rank's experts, with the scales of their columns."""

    def __init__(
        self,
        names: Sequence[str],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        *scales: Sequence[Tensor],
        biases: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        four_bits = bool(biases) and first[0].dtype == torch.int32
        self.first = _matrices(names[0], first, bool(biases))
        hidden, both = self.first[0].shape
        expect(both % 2 == 0, names[0], tuple(self.first[0].shape), "an even number of columns")
        self.second = _matrices(names[1], second, bool(biases), (both // 2, hidden))
        self.hidden, self.dtype = hidden, self.first[0].dtype
        same = len(self.second) == len(self.first) and self.second[0].dtype == self.dtype
        expect(same, names[1], self.second[0], f"{len(self.first)} matrices of {self.dtype}, as {names[0]}")
        both_matrices = self.first, self.second
        self.scales = [_columns(*each) for each in zip(names[2:4], scales, both_matrices, strict=True)]
        both_biases = biases or ((), ())
        named = zip(names[4:] or names[2:4], both_biases, both_matrices, self.scales, strict=True)
        self.added = [_added(name, bias, four_bits, *of) for name, bias, *of in named]

    def apply(self, rows: Tensor, row_scales: Tensor | None, counts: Sequence[int], limit: float) -> Tensor:
        """Returns the experts' outputs in bfloat16, of rows that lie by expert; in between rows are quantized again."""
        results = []
        parts = rows.split_with_sizes(list(counts))
        scales_of = [None] * len(parts) if row_scales is None else row_scales.split_with_sizes(list(counts))
        for part, own, first, second, scale_1, scale_2, added_1, added_2 in zip(
            parts, scales_of, self.first, self.second, *self.scales, *self.added, strict=True
        ):
            if scale_1 is None or scale_2 is None:
                inner = swish_of_first(bounded(product(part, first), limit), -1).to(part.dtype)
                results.append(product(inner, second).to(part.dtype))
            else:
                wide = _scaled(product(part, first), scale_1, added_1, own, torch.float32)
                codes, again = quantize_rows(swish_of_first(bounded(wide, limit), -1), torch.int8)
                results.append(_scaled(product(codes, second), scale_2, added_2, again, torch.bfloat16))
        return torch.cat(results)


def _exchanged(
    name: str,
    experts: Experts,
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    mask: Tensor | None,
    weights: _Weights,
    rows_of: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    limit: float,
    most: int | None,
    same: groups.Values,
) -> tuple[Tensor, Tensor]:
    """Returns the tokens, and how many rows each of this rank's experts got; ``rows_of`` makes rows of choices."""
    group, (n, k) = experts.group, ids.shape
    local = len(weights.first)
    for argument, value, shape in (("probs", probs, (n, k)), ("x_active_mask", mask, (n,))):
        expect(value is None or value.shape == shape, argument, value, f"the shape {shape}")
    expect(x.shape == (n, weights.hidden), "x", x, f"{n} rows of {weights.hidden}")
    limits.check_dtype("x", x.dtype, ("bfloat16",))
    group.agree(name, same | {"experts of a rank": local, "the hidden size": weights.hidden, "max_output_size": most})
    choices = chosen(ids, mask, experts)
    sent = counts_of(ids, choices, experts)
    every = group.all_gather(sent)  # by sender, receiver and expert
    largest = int(every.sum((0, 2)).max())
    expect(most is None or largest <= most, "max_output_size", most, f"{largest} at least, the rows of one rank")
    received = every[:, group.rank]
    sends, recvs, order = sent.sum(1).tolist(), received.sum(1).tolist(), by_expert(received)
    rows, scales = rows_of(choices)
    arrived = group.all_to_all(rows, sends, recvs)[order]
    own = None if scales is None else group.all_to_all(scales, sends, recvs)[order]
    counts = received.sum(0)
    outputs = weights.apply(arrived, own, counts.tolist(), limit)
    back = group.all_to_all(torch.empty_like(outputs).index_copy(0, order, outputs), recvs, sends).float()
    moved = back.new_zeros(n * k, x.size(1)).index_copy(0, choices, back)
    tokens = (moved * probs.float().reshape(-1, 1)).view(n, k, -1).sum(1)
    return tokens.to(x.dtype), counts


def dispatch_ffn_combine(
    x: Tensor,
    weight1: list[Tensor],
    weight2: list[Tensor],
    expert_idx: Tensor,
    scale1: list[Tensor],
    scale2: list[Tensor],
    bias1: list[Tensor],
    bias2: list[Tensor],
    probs: Tensor,
    group: str,
    max_output_size: int,
    out: Tensor,
    expert_token_nums: Tensor,
    x_active_mask: Tensor | None,
    swiglu_limit: float,
) -> tuple[Tensor, Tensor]:
    """Writes the tokens to ``out``, and how many rows each of this rank's experts got to ``expert_token_nums``.

    Weights of int8 have scales of their columns, as float32 or in int64; then tokens travel as int8 with a scale each.
    Weights of four bits, in int32, also have biases: 8 * the sums of their columns, scaled.
    A choice of the expert after the last is dropped. Ranks may have different numbers of tokens.
    """
    names = "weight1", "weight2", "scale1", "scale2", "bias1", "bias2"
    weights = _Weights(names, weight1, weight2, scale1, scale2, biases=(bias1, bias2))
    peers = groups.named(group)
    local = len(weights.first)
    total = local * peers.size
    expect(expert_idx.dim() == 2 and expert_idx.dtype == torch.int32, "expert_idx", expert_idx, "rows of int32")
    in_range = ((expert_idx >= 0) & (expert_idx <= total)).all()
    expect(in_range, "expert_idx", expert_idx.tolist(), f"numbers from 0 to {total - 1}, or {total} to drop a choice")
    expect(out.shape == x.shape and out.dtype == x.dtype, "out", out, f"the shape and dtype of x, {tuple(x.shape)}")
    fits = expert_token_nums.shape == (local,) and expert_token_nums.dtype == torch.int32
    expect(fits, "expert_token_nums", expert_token_nums, f"{local} numbers of int32")
    need = len(x) * expert_idx.size(1) * x.size(1) * 3 / 2**20 + 10
    breach = f"HCCL_BUFFSIZE is {limits.buffer_mb()}, expected {need:.0f} MB at least, for {len(x)} tokens,"
    limits.check(lambda product: [f"{breach} on {product}"] if limits.buffer_mb() < need else [])
    quantized = weights.dtype == torch.int8
    k = expert_idx.size(1)

    def rows_of(choices: Tensor) -> tuple[Tensor, Tensor | None]:
        if not quantized:
            return x[choices // k], None
        codes, scales = quantize_rows(x.float(), torch.int8)
        return codes[choices // k], scales[choices // k]

    mask = x_active_mask if quantized else None  # products of bfloat16 take none
    same: groups.Values = {"the number of experts of a token": k, "swiglu_limit": f"{swiglu_limit:g}"}
    experts = Experts(peers, "dispatch_ffn_combine", total, 0, 0)
    tokens, counts = _exchanged(
        "dispatch_ffn_combine",
        experts,
        x,
        expert_idx,
        probs,
        mask,
        weights,
        rows_of,
        swiglu_limit,
        max_output_size,
        same,
    )
    return out.copy_(tokens), expert_token_nums.copy_(counts)


def dispatch_gmm_combine_decode(
    x: Tensor,
    expert_ids: Tensor,
    gmm1_permuted_weight: list[Tensor],
    gmm1_permuted_weight_scale: list[Tensor],
    gmm2_weight: list[Tensor],
    gmm2_weight_scale: list[Tensor],
    expert_scales: Tensor,
    x_active_mask: Tensor | None,
    group_ep: str,
    ep_rank_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    global_bs: int,
) -> tuple[Tensor, Tensor]:
    """Returns the tokens, and how many rows each of this rank's experts got.

    It is dispatch with ``quant_mode`` 2 for weights of int8, or 0, then both products with SwiGLU, and combine; the
    device uses no smooth scales.
    """
    names = "gmm1_permuted_weight", "gmm2_weight", "gmm1_permuted_weight_scale", "gmm2_weight_scale"
    scales = gmm1_permuted_weight_scale, gmm2_weight_scale
    weights = _Weights(names, gmm1_permuted_weight, gmm2_weight, *scales)
    peers, local = groups.named(group_ep, ep_rank_size), len(weights.first)
    expect(ep_rank_id == peers.rank, "ep_rank_id", ep_rank_id, f"{peers.rank}, this rank of the group")
    held = f"{local * peers.size}, as many as the ranks hold"
    expect(moe_expert_num == local * peers.size, "moe_expert_num", moe_expert_num, held)
    ids = expert_ids
    expect(ids.dim() == 2 and ids.dtype == torch.int32, "expert_ids", ids, "rows of int32")
    in_range = ((ids >= 0) & (ids < moe_expert_num)).all()
    expect(in_range, "expert_ids", ids.tolist(), f"numbers from 0 to {moe_expert_num - 1}")
    most = global_bs // peers.size or len(x)
    expect(len(x) <= most, "global_bs", global_bs, f"{len(x) * peers.size} at least, for {len(x)} tokens")
    use = limits.MoE(peers.size, moe_expert_num, x.size(1), most, ids.size(1), "", 1, 0, 2)
    limits.check(use.breaches)
    experts = Experts(peers, "dispatch_gmm_combine_decode", moe_expert_num, 0, 0)
    travels = Precision(2 if weights.dtype == torch.int8 else 0, None, None)
    travels.check(x, experts, None, None)
    same: groups.Values = {"the number of experts of a token": ids.size(1), "the number of tokens": most}
    return _exchanged(
        "dispatch_gmm_combine_decode", experts, x, ids, expert_scales, x_active_mask, weights,
        lambda choices: travels.rows(experts, x, ids, choices), 0.0, None, same,
    )  # fmt: skip


def mega_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    l1_weights: list[Tensor],
    l2_weights: list[Tensor],
    l1_weights_sf: list[Tensor],
    l2_weights_sf: list[Tensor],
    l1_bias: list[Tensor],
    l2_bias: list[Tensor],
    x_active_mask: Tensor | None,
    group: str,
    num_experts: int,
    max_recv_token_num: int,
    dispatch_quant_mode: int,
) -> tuple[Tensor, Tensor]:
    """Returns the tokens, and how many rows each of this rank's experts got: CANN's form of `dispatch_ffn_combine`."""
    peers, local = groups.named(group), sum(len(part) if part.dim() == 3 else 1 for part in l1_weights)
    held = f"{local * peers.size}, as many as the ranks hold"
    expect(num_experts == local * peers.size, "num_experts", num_experts, held)
    expect(((topk_ids >= 0) & (topk_ids < num_experts)).all(), "topk_ids", topk_ids.tolist(), "numbers of experts")
    mode = 0 if l1_weights[0].dtype in (torch.bfloat16, torch.float16) else 2
    expect(dispatch_quant_mode == mode, "dispatch_quant_mode", dispatch_quant_mode, f"{mode}, for these weights")
    scale1, scale2 = (
        [each.view(torch.int64) if each.dtype == torch.uint64 else each for each in part]
        for part in (l1_weights_sf, l2_weights_sf)
    )
    most = max_recv_token_num or len(x) * peers.size * min(topk_ids.size(1), local)
    results = torch.empty_like(x), torch.empty(local, dtype=torch.int32)
    mask = None if x_active_mask is None else x_active_mask.bool()
    if mode == 0:  # the other operator has no mask for these weights: it drops the choices of number num_experts
        topk_ids = topk_ids if mask is None else topk_ids.masked_fill(~mask.unsqueeze(1), num_experts)
        mask = None
    return dispatch_ffn_combine(
        x, l1_weights, l2_weights, topk_ids.int(), scale1, scale2, l1_bias, l2_bias, topk_weights, group, most,
        *results, mask, 0.0,
    )  # fmt: skip
