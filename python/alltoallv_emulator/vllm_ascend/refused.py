"""Operators of vllm-ascend that the emulator has no formula for: a call raises an error with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def _refusal(schema: str, why: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: object, **more: object) -> NoReturn:
        raise NotImplementedError(f"_C_ascend::{schema.partition('(')[0]} has no formula on the emulator: {why}")

    return refuse


_ONLY_950 = "the operator is for Ascend 950 only, and the emulator's formulas are for Ascend 910"
_LENGTHS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None,"
    " Tensor? seqused_q=None, Tensor? seqused_kv=None"
)
_MASKS = (
    "int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, str layout_q='BSND',"
    " str layout_kv='PA_ND'"
)
_WHY = {
    "kv_compress_epilog(Tensor(a!) kv_compress_cache, Tensor x, Tensor slot_mapping, int quant_group_size,"
    " int quant_mode, bool round_scale_flag, int layout) -> ()": _ONLY_950,
    "indexer_compress_epilog(Tensor(a!) indexer_compress_cache, Tensor(b!) indexer_compress_cache_scale, Tensor x,"
    " Tensor slot_mapping, int quant_mode=1, bool round_scale=True) -> ()": _ONLY_950,
    "indexer_compress_epilog_v2(Tensor(a!) indexer_compress_cache, Tensor x, Tensor slot_mapping, int layout=2)"
    " -> ()": _ONLY_950,
    "npu_load_index_kv_cache(Tensor kv_cache, Tensor slot_mapping) -> (Tensor out, Tensor out_scale)": _ONLY_950,
    "npu_swiglu_group_quant(Tensor x, Tensor? topk_weight, Tensor? group_index, ScalarType dst_type=39,"
    " int quant_mode=1, int group_size=128, bool round_scale=False, bool ue8m0_scale=False, bool output_origin=False,"
    " int group_list_type=0, float clamp_value=0.0) -> (Tensor y, Tensor scale, Tensor y_origin)": _ONLY_950,
    "npu_kv_quant_sparse_attn_sharedkv(Tensor q, int kv_quant_mode, Tensor? ori_kv=None, Tensor? cmp_kv=None,"
    " Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None,"
    f" Tensor? cmp_block_table=None, {_LENGTHS}, Tensor? sinks=None, Tensor? metadata=None, int tile_size=0,"
    f" int rope_head_dim=0, float softmax_scale=0.0, int cmp_ratio=0, {_MASKS}, bool return_softmax_lse=False)"
    " -> (Tensor out, Tensor softmax_lse)": _ONLY_950,
    "npu_kv_quant_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, int kv_quant_mode,"
    f" {_LENGTHS}, int batch_size=0, int max_seqlen_q=0, int max_seqlen_kv=0, int ori_topk=0, int cmp_topk=0,"
    f" int tile_size=0, int rope_head_dim=0, int cmp_ratio=-1, {_MASKS}, bool has_ori_kv=True, bool has_cmp_kv=True,"
    " str device='npu') -> Tensor": _ONLY_950,
    "moe_grouped_matmul(Tensor x, Tensor weight, Tensor group_list, int split_item, int group_type,"
    " int group_list_type) -> Tensor[]": "what group_list means is not documented",
    "compressor(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) state_cache, Tensor ape, Tensor norm_weight,"
    " Tensor rope_sin, Tensor rope_cos, Tensor? state_block_table, Tensor? cu_seqlens, Tensor? seqused,"
    " Tensor? start_pos, int rope_head_dim, int cmp_ratio, int coff, float norm_eps, int rotary_mode, int cache_mode)"
    " -> Tensor": "its documentation and its signature describe different states",
}
# By schema: what the operator does.
OPERATORS = {schema: _refusal(schema, why) for schema, why in _WHY.items()}
