"""Stands for the extension module ``vllm_ascend.vllm_ascend_C`` where vllm-ascend was built without CANN.

Importing it registers operators of vllm-ascend's namespace ``_C_ascend``, by the formulas of `alltoallv.npu_ops` and of
`alltoallv_emulator.vllm_ascend`. Those that it does not compute raise an error with the reason.
"""

from __future__ import annotations

import torch

from alltoallv.npu_ops.registry import Formula, Operator
from alltoallv_emulator.host_views import on_host
from alltoallv_emulator.vllm_ascend import caches, experts, layers, printing, recurrent, refused, sparse, speculation

_LIBRARY = torch.library.Library("_C_ascend", "FRAGMENT")
_ROOMS = caches, experts, layers, recurrent, sparse, speculation
# Arguments that describe how a device works or repeat others, and those that are documented to be of no effect.
_IGNORES = {
    "dispatch_gmm_combine_decode": ["expert_smooth_scales"],
    "grouped_matmul_swiglu_quant_v2": ["tuning_config"],
    "matmul_allreduce_add_rmsnorm": ["tpRankSize", "tpRankId"],
    "mla_preprocess": ["kv_cache", "kv_cache_rope", "ctkv_scale", "q_nope_scale"],
    "moe_gating_top_k": ["out_flag"],
    "moe_gating_top_k_hash": ["out_flag"],
    "npu_hamming_dist_top_k": ["max_seq_len"],
    "npu_kv_quant_sparse_flash_attention": ["value"],
    "npu_sparse_attn_sharedkv": ["metadata", "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv", "seqused_q"],
    "npu_vllm_quant_lightning_indexer": ["metadata"],
}

for _room in _ROOMS:
    for _schema, (_function, _shapes) in _room.OPERATORS.items():
        _name = _LIBRARY.define(_schema)
        _operator = getattr(torch.ops._C_ascend, _name).default
        _formula = Formula(_function, frozenset(_IGNORES.get(_name, ())), True)
        _LIBRARY.impl(_name, on_host(Operator(_name, _operator._schema, _formula)), "PrivateUse1")
        if _shapes is not None:
            _LIBRARY.impl(_name, _shapes, "Meta")
_LIBRARY.impl(_LIBRARY.define(caches.SWAP_BLOCKS_BATCH), caches.swap_blocks_batch, "CPU")
for _schema in sparse.METADATA:
    _LIBRARY.impl(_LIBRARY.define(_schema), sparse.metadata, "CompositeExplicitAutograd")
for _schema, _plain in (printing.OPERATORS | refused.OPERATORS).items():
    _LIBRARY.impl(_LIBRARY.define(_schema), _plain, "CompositeExplicitAutograd")
