"""Experts of vllm-ascend: which of them a token goes to, their products, and all in one operator."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alltoallv.npu_ops.fused_experts import dispatch_ffn_combine, dispatch_gmm_combine_decode
from alltoallv.npu_ops.layers import add_rms_norm
from alltoallv.npu_ops.moe import gating_top_k, gating_top_k_hash, init_routing_v2
from alltoallv.npu_ops.parallel_matmuls import mm_all_reduce_base
from alltoallv.npu_ops.quantization import dequant_swiglu_quant, grouped_matmul_swiglu_quant_v2
from alltoallv.npu_ops.registry import expect, renamed, takes
from alltoallv_emulator.vllm_ascend import Table


def _gating_top_k_shapes(x: Tensor, k: int, *options: object, **more: object) -> tuple[Tensor, Tensor, Tensor]:
    chosen = x.new_empty((len(x), k))
    return chosen, chosen.to(torch.int32), x.float()


_UNWRITTEN = int.from_bytes(b"\xa5" * 8, "little", signed=True)


def _init_routing_custom(**given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Routes as ``npu_moe_init_routing_v2``; without ``expert_tokens_num_flag`` nothing writes the numbers of rows."""
    rows, index, counts, scales = init_routing_v2(**given | {"expert_tokens_num_flag": True})
    return rows, index, counts if given["expert_tokens_num_flag"] else torch.full_like(counts, _UNWRITTEN), scales


takes(_init_routing_custom, *inspect.signature(init_routing_v2).parameters)


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
    rows = x.new_empty((places, x.size(1)), dtype=torch.int8 if quant_mode in (0, 1) else x.dtype)
    index, scales = x.new_empty(places, dtype=torch.int32), x.new_empty(places, dtype=torch.float32)
    return rows, index, x.new_empty(counts, dtype=torch.int64), scales


def _grouped_matmul_swiglu_quant(
    x: Tensor,
    weight: Tensor | list[Tensor],
    weight_scale: Tensor | list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    bias: Tensor | None,
    swiglu_limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies groups of int8 rows, up to the ends in group_list, applies scales and SwiGLU, and quantizes each row.

    ``bias`` goes with weights of four bits. The offsets, the third result, are of no use: they are empty.
    """
    weights, scales = ([each] if isinstance(each, Tensor) else each for each in (weight, weight_scale))
    expect(bias is None or weights[0].dtype == torch.int32, "bias", bias, "None, but for weights of four bits in int32")
    more = None if bias is None else [bias]
    y, scale = grouped_matmul_swiglu_quant_v2(
        x, weights, scales, x_scale, group_list, 0, 0, 0, limit=swiglu_limit, weight_assist_matrix=more
    )
    return y, scale, scale.new_empty(0)


def _grouped_matmul_swiglu_quant_shapes(
    x: Tensor, weight: Tensor | list[Tensor], *others: object, **more: object
) -> tuple[Tensor, Tensor, Tensor]:
    first = weight if isinstance(weight, Tensor) else weight[0]
    columns = first.size(-1) * (8 if first.dtype == torch.int32 else 1)
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


def _matmul_allreduce_norm(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    groupTp: str,
    epsilon: float,
    isTransB: bool,
    isGatherAddOut: bool,
) -> tuple[Tensor, Tensor]:
    """Adds up x1 @ x2 over the ranks, and residual; returns the norm of that, times gamma, and the sum."""
    expect(isGatherAddOut, "isGatherAddOut", isGatherAddOut, "True")
    matrix = x2.T if isTransB else x2
    product = mm_all_reduce_base(x1, matrix, groupTp, None, None, None, None, None, None, None, None, 0)
    y, _, total = add_rms_norm(product.float(), residual.float(), gamma, epsilon)
    return y.to(x1.dtype), total.to(x1.dtype)


_GROUPED = _grouped_matmul_swiglu_quant, _grouped_matmul_swiglu_quant_shapes
OPERATORS: Table = {
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None,"
    " int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0,"
    " bool expert_tokens_num_flag=False, int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0)"
    " -> (Tensor expanded_x, Tensor expanded_row_idx, Tensor expert_tokens, Tensor expanded_scale)": (
        _init_routing_custom,
        _init_routing_custom_shapes,
    ),
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
    "matmul_allreduce_add_rmsnorm(Tensor x1, Tensor x2, Tensor residual, Tensor gamma, str groupTp, int tpRankSize,"
    " int tpRankId, float epsilon, bool isTransB, bool isGatherAddOut) -> (Tensor output, Tensor add_out)": (
        _matmul_allreduce_norm,
        lambda x1, x2, residual, *others, **more: (torch.empty_like(residual), torch.empty_like(residual)),
    ),
}
