"""The whole layer of experts in one operator: rows to the experts' ranks, both products with SwiGLU, and back.

Rows go, are weighed and are added as in `moe_exchange`; every rank has equally many experts, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.layers import swish_of_first
from alltoallv.npu_ops.matmuls import dequantize, product, scale_and_offset, unpack
from alltoallv.npu_ops.microscaling import (
    E2M1,
    E4M3,
    E5M2,
    Blocks,
    Element,
    dequantize_blocks,
    element_of,
    packed,
    product_of_blocks,
    quantize_blocks,
)
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

    def __len__(self) -> int:
        return len(self.first)

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


class _BlockWeights:
    """Both matrices of each of this rank's experts in mx, transposed, as Ascend 950 has them.

    Rows and what is between the products are quantized in blocks too: as ``element``, and in between as float8_e4m3fn
    where that has four bits. ``returned`` is the format of what goes back, if it has one.
    """

    def __init__(
        self,
        weights: Sequence[Sequence[Tensor]],
        scales: Sequence[Sequence[Tensor]],
        dtypes: Sequence[int | None],
        element: Element,
        returned: Element | None,
    ) -> None:
        self._element, self._returned = element, returned
        self._inner = E4M3 if element is E2M1 else element
        self._matrices, widths = [], []
        for place, (own, scale, dtype) in enumerate(zip(weights, scales, dtypes, strict=True)):
            name = f"l{place + 1}_weights"
            expect(len(own) == 1 and own[0].dim() == 3, name, [tuple(part.shape) for part in own], "one tensor of all")
            codes = own[0]
            fours = codes.dtype in (torch.uint8, torch.int8)
            kind = E2M1 if fours else element_of(codes.dtype)
            known = kind in (E2M1, E5M2, E4M3) and (dtype is None or element_of(dtype) is kind)
            expected = "float8_e5m2, float8_e4m3fn, or float4_e2m1fn_x2 in bytes"
            expect(known, name, f"{codes.dtype} with weight{place + 1}_type {dtype}", expected)
            expect(fours or element is not E2M1, name, codes, "float4_e2m1fn_x2, for rows of four bits")
            expect(not fours or element is not E5M2, name, codes, "float8, for rows of float8_e5m2")
            width = codes.size(2) * (2 if fours else 1)
            shape = (*codes.shape[:2], -(-width // 64), 2)
            right = len(scale) == 1 and scale[0].shape == shape and scale[0].itemsize == 1
            expect(right, f"{name}_sf", [tuple(part.shape) for part in scale], f"one of {shape}, float8_e8m0fnu")
            self._matrices.append((codes, 296 if fours else None, scale[0]))
            widths.append((codes.size(1), width))
        (both, self.hidden), (hidden, inner) = widths
        fits = hidden == self.hidden and both == 2 * inner and len(weights[0][0]) == len(weights[1][0])
        expected = f"{len(weights[0][0])} matrices of {self.hidden} rows of {both // 2}"
        expect(fits, "l2_weights", tuple(weights[1][0].shape), expected)
        self.inner = inner

    def __len__(self) -> int:
        return len(self._matrices[0][0])

    def __str__(self) -> str:
        return f"{self._element.name}, back {self._returned.name if self._returned else 'bfloat16'}"

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows as they travel, and their scales: bytes."""
        codes, scales = quantize_blocks(x.float(), self._element)
        return packed(codes, self._element).view(torch.uint8), scales.flatten(1)

    def _product(self, place: int, expert: int, codes: Tensor, element: Element, scales: Tensor) -> Tensor:
        matrix, dtype, scale = self._matrices[place]
        columns = Blocks("weights", matrix[expert].mT, dtype, "weights_sf", scale[expert].transpose(0, 1))
        rows = Blocks("x", codes, 296 if element is E2M1 else None, "x's scales", scales.unflatten(-1, (-1, 2)))
        return product_of_blocks(rows, columns)

    def apply(self, rows: Tensor, row_scales: Tensor | None, counts: Sequence[int], limit: float) -> Tensor:
        """Returns the experts' outputs in bfloat16, of rows that lie by expert."""
        results = []
        scales = present(row_scales, "scales", "scales of the rows")
        parts = zip(rows.split_with_sizes(list(counts)), scales.split_with_sizes(list(counts)), strict=True)
        for expert, (part, own) in enumerate(parts):
            wide = self._product(0, expert, part.view(self._element.dtype), self._element, own)
            codes, again = quantize_blocks(swish_of_first(bounded(wide, limit), -1), self._inner)
            results.append(self._product(1, expert, codes, self._inner, again.flatten(1)))
        outputs = torch.cat(results)
        if self._returned is not None:
            codes, scale = quantize_blocks(outputs, self._returned)
            outputs = dequantize_blocks(codes.float(), scale, "x")
        return outputs.to(torch.bfloat16)


class _Layer(Protocol):
    """The matrices of this rank's experts."""

    hidden: int

    def __len__(self) -> int: ...

    def apply(self, rows: Tensor, row_scales: Tensor | None, counts: Sequence[int], limit: float) -> Tensor: ...


def _exchanged(
    name: str,
    experts: Experts,
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    mask: Tensor | None,
    weights: _Layer,
    rows_of: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    limit: float,
    most: int | None,
    same: groups.Values,
) -> tuple[Tensor, Tensor]:
    """Returns the tokens, and how many rows each of this rank's experts got; ``rows_of`` makes rows of choices."""
    group, (n, k) = experts.group, ids.shape
    local = len(weights)
    for argument, value, shape in (("probs", probs, (n, k)), ("x_active_mask", mask, (n,))):
        expect(value is None or value.shape == shape, argument, value, f"the shape {shape}")
    expect(x.shape == (n, weights.hidden), "x", x, f"{n} rows of {weights.hidden}")
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

    The latter may have any shape of as many numbers as this rank has experts.
    Weights of int8 have scales of their columns, as float32 or in int64; then tokens travel as int8 with a scale each.
    Weights of four bits, in int32, also have biases: 8 * the sums of their columns, scaled.
    A choice of the expert after the last is dropped. Ranks may have different numbers of tokens.
    """
    names = "weight1", "weight2", "scale1", "scale2", "bias1", "bias2"
    weights = _Weights(names, weight1, weight2, scale1, scale2, biases=(bias1, bias2))
    peers = groups.named(group)
    limits.check_dtype("x", x.dtype, ("bfloat16",))
    local = len(weights.first)
    total = local * peers.size
    expect(expert_idx.dim() == 2 and expert_idx.dtype == torch.int32, "expert_idx", expert_idx, "rows of int32")
    in_range = ((expert_idx >= 0) & (expert_idx <= total)).all()
    expect(in_range, "expert_idx", expert_idx.tolist(), f"numbers from 0 to {total - 1}, or {total} to drop a choice")
    expect(out.shape == x.shape and out.dtype == x.dtype, "out", out, f"the shape and dtype of x, {tuple(x.shape)}")
    fits = expert_token_nums.numel() == local and expert_token_nums.dtype == torch.int32
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
    return out.copy_(tokens), expert_token_nums.copy_(counts.view_as(expert_token_nums))


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
    limits.check_dtype("x", x.dtype, ("bfloat16",))
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
    quant_out_dtype: int | None = None,
    combine_quant_mode: int = 0,
    weight1_type: int | None = None,
    weight2_type: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the tokens, and how many rows each of this rank's experts got: CANN's form of `dispatch_ffn_combine`.

    With ``dispatch_quant_mode`` 4, of Ascend 950, rows and weights are in mx: rows of ``quant_out_dtype``, and with
    ``combine_quant_mode`` 3 and 4 what goes back is rounded to float8_e5m2 and float8_e4m3fn in blocks.
    """
    if dispatch_quant_mode == 4:
        element, returned = element_of(quant_out_dtype), {0: None, 3: E5M2, 4: E4M3}
        expected = "float8_e5m2 or float8_e4m3fn, or float4_e2m1fn_x2 for weights of four bits"
        expect(element in (E5M2, E4M3, E2M1), "dispatch_quant_out_dtype", quant_out_dtype, expected)
        expect(combine_quant_mode in returned, "combine_quant_mode", combine_quant_mode, "0, 3 or 4")
        expect(not (l1_bias or l2_bias), "l1_bias", "given, or l2_bias", "none, for weights of mx")
        expect(x_active_mask is None, "x_active_mask", x_active_mask, "None, for weights of mx")
        weights, scales = (l1_weights, l2_weights), (l1_weights_sf, l2_weights_sf)
        kinds = weight1_type, weight2_type
        made = _BlockWeights(weights, scales, kinds, element or E4M3, returned[combine_quant_mode])
        return _mega_moe_of_blocks(x, topk_ids, topk_weights, made, group, num_experts, max_recv_token_num)
    expect(combine_quant_mode == 0, "combine_quant_mode", combine_quant_mode, "0, without dispatch_quant_mode 4")
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


def _mega_moe_of_blocks(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: _BlockWeights, group: str, num_experts: int, most: int
) -> tuple[Tensor, Tensor]:
    peers, local, ids = groups.named(group), len(weights), topk_ids
    held = f"{local * peers.size}, as many as the ranks hold"
    expect(num_experts == local * peers.size, "num_experts", num_experts, held)
    expect(ids.dim() == 2, "topk_ids", ids, "rows of numbers")
    expect(((ids >= 0) & (ids < num_experts)).all(), "topk_ids", ids.tolist(), "numbers of experts")
    floats = x.dim() == 2 and x.dtype in (torch.bfloat16, torch.float16)
    expect(floats, "x", x, "rows of bfloat16 or float16")

    def breaches(product: limits.Product) -> Iterable[str]:
        hidden, both, k = weights.hidden, 2 * weights.inner, ids.size(1)
        for name, value, fits, expected in (
            ("the world size", peers.size, 2 <= peers.size <= 1024, "2 to 1024"),
            ("num_experts", num_experts, num_experts <= 2048, "2048 at most"),
            ("hidden", hidden, hidden in range(1024, 8193, 1024), "a multiple of 1024 up to 8192"),
            ("the width of l1_weights", both, both in (1024, 2048, 3072, 4096, 7168), "1024, 2048, 3072, 4096 or 7168"),
            ("num_topk", k, 1 <= k <= 32, "1 to 32"),
        ):
            if not fits:
                yield f"{name} is {value}, expected {expected} on {product}"

    limits.check(breaches, products=("950",))
    codes, scales = weights.rows(x)
    k = ids.size(1)
    same: groups.Values = {"the number of experts of a token": k, "the number of tokens": len(x)}
    same["the format"] = str(weights)
    experts = Experts(peers, "mega_moe", num_experts, 0, 0)
    tokens, counts = _exchanged(
        "mega_moe", experts, x, ids, topk_weights, None, weights,
        lambda choices: (codes[choices // k], scales[choices // k]), 0.0, most or None, same,
    )  # fmt: skip
    return tokens, counts.int()
