"""Stands for the extension module ``vllm_ascend.vllm_ascend_C`` where vllm-ascend was built without CANN.

Importing it registers operators of vllm-ascend's namespace ``_C_ascend``, by the formulas of `alltoallv.npu_ops`. What
it lacks is no attribute of ``torch.ops._C_ascend``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.fused_experts import dispatch_ffn_combine, dispatch_gmm_combine_decode
from alltoallv.npu_ops.layers import add_rms_norm, gemma_rms_norm, rms_norm, turn
from alltoallv.npu_ops.moe import gating_top_k, gating_top_k_hash, init_routing_v2
from alltoallv.npu_ops.quantization import dequant_swiglu_quant, grouped_matmul_swiglu_quant_v2, quantize_rows
from alltoallv.npu_ops.registry import Formula, Operator, expect, renamed
from alltoallv_emulator.host_views import on_host

_LIBRARY = torch.library.Library("_C_ascend", "FRAGMENT")


def _add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes the sum of x1 and x2, times gamma, plus beta; returns that, the factors and the sum."""
    y, rstd, total = add_rms_norm(x1.float(), x2.float(), gamma, epsilon)
    return (y if beta is None else y + beta.float()).to(x1.dtype), rstd, total.to(x1.dtype)


def _add_rms_norm_bias_shapes(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    factors = *x1.shape[: x1.dim() - gamma.dim()], *[1] * gamma.dim()
    return torch.empty_like(x1), x1.new_empty(factors, dtype=torch.float32), torch.empty_like(x1)


def _gating_top_k_shapes(x: Tensor, k: int, *options: object, **more: object) -> tuple[Tensor, Tensor, Tensor]:
    chosen = x.new_empty((len(x), k))
    return chosen, chosen.to(torch.int32), x.float()


def _init_routing_custom_shapes(
    x: Tensor,
    expert_idx: Tensor,
    *,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = (),
    **more: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, end = active_expert_range or (0, expert_num)
    places = expert_idx.numel()
    counts = (expert_num, 2) if expert_tokens_num_type == 2 else (end - first,)
    rows = x.new_empty((places, x.size(1)), dtype=torch.int8 if quant_mode == 1 else x.dtype)
    index, scales = x.new_empty(places, dtype=torch.int32), x.new_empty(places, dtype=torch.float32)
    return rows, index, x.new_empty(counts, dtype=torch.int64), scales


def _rms_norm_dynamic_quant(
    x: Tensor, gamma: Tensor, smooth_scale: Tensor | None, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Normalizes rows, times gamma, plus beta, and quantizes them, times the smooth scale; returns int8 and scales."""
    y, _ = rms_norm(x.float(), gamma, epsilon)
    y = y if beta is None else y + beta.float()
    return quantize_rows(y if smooth_scale is None else y * smooth_scale.float(), torch.int8)


def _rms_norm_dynamic_quant_shapes(x: Tensor, *others: object, **more: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _gemma_rms_norm_shapes(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    factors = *x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()
    return torch.empty_like(x), x.new_empty(factors, dtype=torch.float32)


def _partial_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, partial_slice: list[int]) -> None:
    """Turns the numbers from the first to before the second of ``partial_slice`` in each row, in place."""
    fits = len(partial_slice) == 2 and 0 <= partial_slice[0] < partial_slice[1] <= x.size(-1)
    expect(fits, "partial_slice", partial_slice, f"two numbers in ascending order, up to {x.size(-1)}")
    part = x[..., slice(*partial_slice)]
    part.copy_(turn(part, r1, r2, rotary_mode))


def _scatter_nd_update(var: Tensor, indices: Tensor, update: Tensor) -> None:
    """Sets ``var[indices[i]] = update[i]``, in order; leaves out places that ``var`` does not have."""
    each = indices.reshape(-1, indices.size(-1)).long()
    sizes = each.new_tensor(var.shape[: each.size(1)])
    there = ((each >= 0) & (each < sizes)).all(1)
    rows = update.reshape(len(each), *var.shape[each.size(1) :])
    for place, row in zip(each[there].tolist(), rows[there], strict=True):
        var[tuple(place)] = row


def _gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float, threshold: float
) -> tuple[Tensor, Tensor]:
    """Returns -exp(A_log) * softplus(a + dt_bias) in float32 and the sigmoid of b, of a batch of one sequence."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    return decay.unsqueeze(0), b.float().sigmoid().to(b.dtype).unsqueeze(0)


def _batch_matmul_transpose(tensor_a: Tensor, tensor_b: Tensor, tensor_c: Tensor) -> None:
    """Writes the products of tensor_a[:, i] and tensor_b[i] to tensor_c[:, i]."""
    tensor_c.copy_(torch.einsum("mbk,bkn->mbn", tensor_a.float(), tensor_b.float()))


def _lora_products(x: Tensor, weight: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's product with the matrix of its adapter, and which rows have one: its number is not below 0."""
    matrices = weight.squeeze(1) if weight.dim() == 4 else weight
    there = indices >= 0
    chosen = matrices[indices.clamp(min=0).long()].float()
    return torch.einsum("tk,tnk->tn", x.float(), chosen), there


def _bgmv_shrink(x: Tensor, weight: Tensor, indices: Tensor, y: Tensor, scale: float) -> None:
    """Sets each row of y to the scaled product of its row of x with its adapter's matrix."""
    products, there = _lora_products(x, weight, indices)
    y[there] = (products * scale).to(y.dtype)[there]


def _bgmv_expand(x: Tensor, weight: Tensor, indices: Tensor, y: Tensor, slice_offset: int, slice_size: int) -> Tensor:
    """Adds to a slice of each row of y the product of its row of x with its adapter's matrix; returns y."""
    products, there = _lora_products(x, weight, indices)
    expect(products.size(1) == slice_size, "slice_size", slice_size, f"{products.size(1)}, as the weights have")
    part = y[:, slice_offset : slice_offset + slice_size]
    part[there] = (part.float() + products).to(y.dtype)[there]
    return y


def _sgmv_shrink(x: Tensor, weight: Tensor, lora_indices: Tensor, seq_len: Tensor, y: Tensor, scale: float) -> None:
    _bgmv_shrink(x, weight, lora_indices.repeat_interleave(seq_len.long()), y, scale)


def _sgmv_expand(
    x: Tensor,
    weight: Tensor,
    lora_indices: Tensor,
    seq_len: Tensor,
    y: Tensor,
    slice_offset: int,
    slice_size: int,
) -> Tensor:
    return _bgmv_expand(x, weight, lora_indices.repeat_interleave(seq_len.long()), y, slice_offset, slice_size)


def _nothing(*arguments: object, **more: object) -> None:
    """Gives operators that only write into their arguments no results."""


def _gdn_gating_shapes(A_log: Tensor, a: Tensor, b: Tensor, *others: object, **more: object) -> tuple[Tensor, Tensor]:
    return a.new_empty((1, *a.shape), dtype=torch.float32), b.new_empty((1, *b.shape))


def _masked_input_and_mask(
    input: Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[Tensor, Tensor]:
    """Returns the rows of this rank's part of a vocabulary, 0 for tokens of others, and which tokens those are.

    The part has the tokens of the original range, padding, and those of the added range.
    """
    original = (input >= org_vocab_start_index) & (input < org_vocab_end_index)
    added = (input >= added_vocab_start_index) & (input < added_vocab_end_index)
    first_added = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    rows = torch.where(added, input - added_vocab_start_index + first_added, torch.zeros_like(input))
    return torch.where(original, input - org_vocab_start_index, rows), ~(original | added)


def _grouped_matmul_swiglu_quant(
    x: Tensor,
    weight: Tensor | list[Tensor],
    weight_scale: Tensor | list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    swiglu_limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies groups of int8 rows, up to the ends in group_list, applies scales and SwiGLU, and quantizes each row.

    The offsets, the third result, are of no use: they are empty.
    """
    weights, scales = ([each] if isinstance(each, Tensor) else each for each in (weight, weight_scale))
    y, scale = grouped_matmul_swiglu_quant_v2(x, weights, scales, x_scale, group_list, 0, 0, 0, limit=swiglu_limit)
    return y, scale, scale.new_empty(0)


def _grouped_matmul_swiglu_quant_shapes(
    x: Tensor, weight: Tensor | list[Tensor], *others: object, **more: object
) -> tuple[Tensor, Tensor, Tensor]:
    columns = (weight if isinstance(weight, Tensor) else weight[0]).size(-1)
    scale = x.new_empty(len(x), dtype=torch.float32)
    return x.new_empty((len(x), columns // 2), dtype=torch.int8), scale, scale.new_empty(0)


def _grouped_v2_shapes(x: Tensor, weight: list[Tensor], *others: object, **more: object) -> tuple[Tensor, Tensor]:
    y, scale, _ = _grouped_matmul_swiglu_quant_shapes(x, weight)
    return y, scale


def _dequant_swiglu_quant_shapes(x: Tensor, **more: object) -> tuple[Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], x.size(-1) // 2), dtype=torch.int8)
    return y, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _dispatch_ffn_combine_shapes(*arguments: object, out: Tensor, **more: Tensor) -> tuple[Tensor, Tensor]:
    return out, more["expert_token_nums"]


def _dispatch_gmm_combine_decode_shapes(
    x: Tensor, expert_ids: Tensor, gmm1_permuted_weight: list[Tensor], *others: object, **more: object
) -> tuple[Tensor, Tensor]:
    local = sum(len(part) if part.dim() == 3 else 1 for part in gmm1_permuted_weight)
    return torch.empty_like(x), x.new_empty(local, dtype=torch.int64)


def _grouped_schema(name: str, weights: str = "Tensor") -> str:
    return (
        f"{name}(Tensor x, {weights} weight, {weights} weight_scale, Tensor x_scale, Tensor group_list, *,"
        " Tensor? bias=None, Tensor? offset=None, float swiglu_limit=0.0)"
        " -> (Tensor output, Tensor output_scale, Tensor output_offset)"
    )


_GROUPED = _grouped_matmul_swiglu_quant, _grouped_matmul_swiglu_quant_shapes
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None,"
    " int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0,"
    " bool expert_tokens_num_flag=False, int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0)"
    " -> (Tensor expanded_x, Tensor expanded_row_idx, Tensor expert_tokens, Tensor expanded_scale)": (
        init_routing_v2,
        _init_routing_custom_shapes,
    ),
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index,"
    " int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index)"
    " -> (Tensor masked_input, Tensor mask)": (_masked_input_and_mask, None),
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-06)"
    " -> (Tensor y, Tensor rstd, Tensor x)": (_add_rms_norm_bias, _add_rms_norm_bias_shapes),
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, int norm_type,"
    " bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None)"
    " -> (Tensor y, Tensor expert_idx, Tensor out)": (
        renamed(gating_top_k, names={"bias_opt": "bias"}),
        _gating_top_k_shapes,
    ),
    "dispatch_ffn_combine(Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1,"
    " Tensor[] scale2, Tensor[] bias1, Tensor[] bias2, Tensor probs, str group, int max_output_size, Tensor! out,"
    " Tensor! expert_token_nums, Tensor? x_active_mask=None, float swiglu_limit=1000000.0)"
    " -> (Tensor out, Tensor expert_token_nums)": (dispatch_ffn_combine, _dispatch_ffn_combine_shapes),
    "dispatch_gmm_combine_decode(Tensor x, Tensor expert_ids, Tensor[] gmm1_permuted_weight,"
    " Tensor[] gmm1_permuted_weight_scale, Tensor[] gmm2_weight, Tensor[] gmm2_weight_scale, Tensor expert_scales,"
    " Tensor? expert_smooth_scales=None, Tensor? x_active_mask=None, str group_ep='', int ep_rank_size=0,"
    " int ep_rank_id=0, int moe_expert_num=0, int shared_expert_num=1, int shared_expert_rank_num=0, int quant_mode=0,"
    " int global_bs=0) -> (Tensor output, Tensor expert_token_nums)": (
        dispatch_gmm_combine_decode,
        _dispatch_gmm_combine_decode_shapes,
    ),
    "moe_gating_top_k_hash(Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None,"
    " int k_group=1, int group_count=1, float routed_scaling_factor=1.0, float eps=1e-20, int group_select_mode=0,"
    " int renorm=0, int norm_type=0, bool out_flag=False) -> (Tensor y, Tensor expert_idx, Tensor out)": (
        gating_top_k_hash,
        _gating_top_k_shapes,
    ),
    "npu_rms_norm_dynamic_quant(Tensor x, Tensor gamma, Tensor? smooth_scale=None, Tensor? beta=None,"
    " float epsilon=1e-6) -> (Tensor y_out, Tensor scale_out)": (
        _rms_norm_dynamic_quant,
        _rms_norm_dynamic_quant_shapes,
    ),
    "npu_gemma_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor y, Tensor rstd)": (
        renamed(gemma_rms_norm, names={"x": "input"}),
        _gemma_rms_norm_shapes,
    ),
    "inplace_partial_rotary_mul(Tensor(a!) x, Tensor r1, Tensor r2, str rotary_mode, int[] partial_slice) -> ()": (
        _partial_rotary_mul,
        _nothing,
    ),
    "npu_scatter_nd_update_v2(Tensor(a!) var, Tensor indices, Tensor update) -> ()": (_scatter_nd_update, _nothing),
    "npu_fused_gdn_gating(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias, float beta=1.0, float threshold=20.0)"
    " -> (Tensor g, Tensor beta_output)": (_gdn_gating, _gdn_gating_shapes),
    "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor(a!) tensor_c, str? format_mode=None,"
    " str? quant_mode=None) -> ()": (_batch_matmul_transpose, _nothing),
    "bgmv_shrink(Tensor x, Tensor weight, Tensor indices, Tensor(a!) y, float scale) -> ()": (_bgmv_shrink, _nothing),
    "sgmv_shrink(Tensor x, Tensor weight, Tensor lora_indices, Tensor seq_len, Tensor(a!) y, float scale) -> ()": (
        _sgmv_shrink,
        _nothing,
    ),
    # vllm-ascend gives these two their shapes when it is imported.
    "bgmv_expand(Tensor x, Tensor weight, Tensor indices, Tensor(a!) y, int slice_offset, int slice_size) -> Tensor": (
        _bgmv_expand,
        None,
    ),
    "sgmv_expand(Tensor x, Tensor weight, Tensor lora_indices, Tensor seq_len, Tensor(a!) y, int slice_offset,"
    " int slice_size) -> Tensor": (_sgmv_expand, None),
    "grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale,"
    " Tensor group_list, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None,"
    " int? dequant_mode=0, int? dequant_dtype=0, int? quant_mode=0, int? quant_dtype=0, bool transpose_weight=False,"
    " int group_list_type=0, int[2] tuning_config=[], float swiglu_limit=0.0)"
    " -> (Tensor output, Tensor output_scale)": (
        renamed(
            grouped_matmul_swiglu_quant_v2,
            names={"swiglu_limit": "limit"},
            quant_dtype=None,
            x_dtype=None,
            weight_dtype=None,
            weight_scale_dtype=None,
            x_scale_dtype=None,
        ),
        _grouped_v2_shapes,
    ),
    _grouped_schema("grouped_matmul_swiglu_quant"): _GROUPED,
    _grouped_schema("grouped_matmul_swiglu_quant_weight_nz"): _GROUPED,
    _grouped_schema("grouped_matmul_swiglu_quant_weight_nz_tensor_list", "Tensor[]"): _GROUPED,
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale, Tensor? activation_scale, Tensor? bias,"
    " Tensor? quant_scale, Tensor? quant_offset, Tensor? group_index=None, bool activate_left=True, int quant_mode=0,"
    " int swiglu_mode=0, float clamp_limit=0.0, float glu_alpha=1.0, float glu_bias=0.0) -> (Tensor y, Tensor scale)": (
        renamed(dequant_swiglu_quant, halves=True),
        _dequant_swiglu_quant_shapes,
    ),
}
for _schema, (_function, _shapes) in _OPERATORS.items():
    _name = _LIBRARY.define(_schema)
    _formula = Formula(_function, frozenset(["out_flag", "tuning_config"]), True)
    _operator = getattr(torch.ops._C_ascend, _name).default
    _LIBRARY.impl(_name, on_host(Operator(_name, _operator._schema, _formula)), "PrivateUse1")
    if _shapes is not None:
        _LIBRARY.impl(_name, _shapes, "Meta")
