"""Exchanges of experts by the names of CANN's package; what is for Ascend 950 only is refused by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv.npu_ops.fused_experts import mega_moe as formula
from alltoallv.npu_ops.registry import Formula, Operator
from alltoallv_emulator.host_views import on_host

from .elastic import ElasticBuffer, EngramFetchCtx, EPHandle
from .member import Member
from .reductions import quant_all_reduce, quant_reduce_scatter
from .workers import (
    AttentionToFfnBuffer,
    FFNToAttentionBuffer,
    attention_to_ffn,
    ffn_to_attention,
    get_buffer_for_attention_to_ffn,
    get_buffer_for_ffn_to_attention,
)

__all__ = [
    "AttentionToFfnBuffer", "EPHandle", "ElasticBuffer", "EngramFetchCtx", "FFNToAttentionBuffer",
    "MoeDistributeBuffer", "SymmBuffer", "all_gather_quant_matmul", "all_to_all_quant_matmul", "attention_to_ffn",
    "ffn_to_attention", "get_buffer_for_attention_to_ffn", "get_buffer_for_ffn_to_attention",
    "get_symm_buffer_for_mega_moe", "mega_moe", "quant_all_reduce", "quant_reduce_scatter",
]  # fmt: skip

_MiB = 1 << 20
_CODES = {torch.float8_e5m2: 291, torch.float8_e4m3fn: 292}
# Modes of `mega_moe`, and what rows may be in each.
_MODES = {0: (None,), 2: (None, torch.int8, 1, 258), 4: (*_CODES, 23, 24, 291, 292, 296)}
_npu: Any = importlib.import_module("torch_npu")

_library = torch.library.Library("cann_ops_transformer", "FRAGMENT")
_library.define(
    "npu_mega_moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] l1_weights, Tensor[] l2_weights,"
    " Tensor[] l1_weights_sf, Tensor[] l2_weights_sf, Tensor[] l1_bias, Tensor[] l2_bias, Tensor? x_active_mask,"
    " str group, int num_experts, int max_recv_token_num, int dispatch_quant_mode, int? quant_out_dtype,"
    " int combine_quant_mode, int? weight1_type, int? weight2_type) -> (Tensor, Tensor)"
)
_operator = torch.ops.cann_ops_transformer.npu_mega_moe.default
_formula = Operator("npu_mega_moe", _operator._schema, Formula(formula, frozenset(), True))
_library.impl("npu_mega_moe", on_host(_formula), "PrivateUse1")


def _aligned(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class MoeDistributeBuffer(Member):
    """Sends tokens to the ranks of their experts and back."""

    def __init__(self, group: dist.ProcessGroup, ccl_buffer_size: int = 0, comm_alg: int = 0) -> None:
        super().__init__(group)
        self.ccl_buffer_size = ccl_buffer_size

    def update_ctx(self, new_group: dist.ProcessGroup) -> bool:
        """Changes to another group of as many ranks."""
        if dist.get_world_size(new_group) != self.world_size:
            raise ValueError(f"new_group has {dist.get_world_size(new_group)} ranks, expected {self.world_size}")
        super().__init__(new_group)
        return True

    @staticmethod
    def get_low_latency_ccl_buffer_size(
        world_size: int,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_moe_expert: int,
        topk: int,
        num_shared_expert: int = 0,
        num_shared_expert_ranks: int = 0,
        comm_alg: str = "",
    ) -> int:
        """Returns the MB of a buffer that is large enough."""
        local = num_moe_expert // (world_size - num_shared_expert_ranks)
        there, back = _aligned(_aligned(2 * hidden, 32) + 44, 512), _aligned(2 * hidden, 512)
        if comm_alg == "fullmesh_v2":
            there = -(-(_aligned(2 * hidden, 32) + 44) // 480) * 512
        rows = there * world_size * local + back * (topk + num_shared_expert)
        size = 2 * num_max_dispatch_tokens_per_rank * rows + _MiB
        return _aligned(-(-size // _MiB), 2) // 2

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_experts: int,
        *,
        x_smooth_scale: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_max_dispatch_tokens_per_rank: int = 0,
        shared_expert_num: int = 1,
        shared_expert_rank_num: int = 0,
        x_smooth_scales_dtype: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """Returns rows, their scales, what combine needs, the rows per expert, the ends, and the rows' weights."""
        if options.get("elastic_info") is not None:
            raise NotImplementedError("low_latency_dispatch: elastic_info is a tensor, expected None")
        results = _npu.npu_moe_distribute_dispatch_v2(
            x, topk_idx, *self._place(num_experts), scales=x_smooth_scale, expert_scales=topk_weights,
            shared_expert_num=shared_expert_num, shared_expert_rank_num=shared_expert_rank_num,
            global_bs=num_max_dispatch_tokens_per_rank * self.world_size, scales_dtype=x_smooth_scales_dtype, **options,
        )  # fmt: skip
        return *results[:5], results[6]

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        assist_info_for_combine: Tensor,
        ep_send_counts: Tensor,
        *,
        num_experts: int = 0,
        num_max_dispatch_tokens_per_rank: int = 0,
        expert_shared_type: int = 0,
        **options: Any,
    ) -> Tensor:
        """Returns, for each token, the weighted sum of its experts' rows."""
        for name, value in (("assist_info_for_combine", assist_info_for_combine), ("ep_send_counts", ep_send_counts)):
            if value is None:
                raise ValueError(f"{name} is None, expected what low_latency_dispatch returned")
        tokens: Tensor = _npu.npu_moe_distribute_combine_v2(
            x, topk_idx, assist_info_for_combine, ep_send_counts, topk_weights, *self._place(num_experts),
            expert_shard_type=expert_shared_type, global_bs=num_max_dispatch_tokens_per_rank * self.world_size,
            **options,
        )  # fmt: skip
        return tokens

    def _place(self, num_experts: int) -> tuple[str, int, int, int]:
        return self.group_name, self.world_size, self.rank_id, num_experts


class SymmBuffer(Member):
    """Says for `mega_moe` how many experts and tokens there are, and how rows travel."""

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(group)
        vars(self).update(options, ep_world_size=self.world_size)

    def destroy(self) -> None:
        """Frees nothing: the memory is the group's."""


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    max_recv_token_num: int = 0,
    dispatch_quant_mode: int = 0,
    dispatch_quant_out_dtype: Any = None,
    combine_quant_mode: int = 0,
    comm_alg: str = "",
    topk_weights_type: int = 0,
) -> SymmBuffer:
    """Returns what `mega_moe` takes of a group."""
    if dispatch_quant_mode not in _MODES or combine_quant_mode not in (0, 3, 4)[: 3 if dispatch_quant_mode == 4 else 1]:
        raise NotImplementedError(
            f"dispatch_quant_mode is {dispatch_quant_mode} and combine_quant_mode {combine_quant_mode}, expected 0, 2 "
            "or 4, and 0, or with 4 also 3 or 4"
        )
    if dispatch_quant_out_dtype not in _MODES[dispatch_quant_mode]:
        wanted = {0: "None", 2: "torch.int8", 4: "float8_e5m2, float8_e4m3fn or float4_e2m1fn_x2"}[dispatch_quant_mode]
        raise NotImplementedError(f"dispatch_quant_out_dtype is {dispatch_quant_out_dtype}, expected {wanted}")
    return SymmBuffer(
        group, num_experts=num_experts, num_max_tokens_per_rank=num_max_tokens_per_rank, num_topk=num_topk,
        hidden=hidden, intermediate_hidden=intermediate_hidden, max_recv_token_num=max_recv_token_num,
        dispatch_quant_mode=dispatch_quant_mode, dispatch_quant_out_dtype=dispatch_quant_out_dtype,
        combine_quant_mode=combine_quant_mode, comm_alg=comm_alg, topk_weights_type=topk_weights_type,
    )  # fmt: skip


def mega_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    l1_weights: Sequence[Tensor],
    l2_weights: Sequence[Tensor],
    sym_buffer: Any,
    *,
    l1_weights_sf: Sequence[Tensor] | None = None,
    l2_weights_sf: Sequence[Tensor] | None = None,
    l1_bias: Sequence[Tensor] | None = None,
    l2_bias: Sequence[Tensor] | None = None,
    x_active_mask: Tensor | None = None,
    activation: str = "swiglu",
    weight1_type: int | None = None,
    weight2_type: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Returns the tokens after their experts, and how many rows each of this rank's experts got.

    The weights say by their dtype what they are: bfloat16, int8, or four bits in int32; with ``dispatch_quant_mode`` 4,
    of Ascend 950, float8, or with ``weight1_type`` and ``weight2_type`` 296 or in bytes float4_e2m1fn_x2.
    """
    given = [f"{name} is {value!r}" for name, value in others.items() if value is not None]
    given += [f"activation is {activation!r}"] * (activation != "swiglu")
    if given:
        raise NotImplementedError(f"mega_moe: {given[0]}, expected SwiGLU without more, and no shared experts")
    if not isinstance(sym_buffer, SymmBuffer):
        raise TypeError(f"mega_moe: sym_buffer is {sym_buffer!r}, expected what get_symm_buffer_for_mega_moe returns")
    lists = [list(each or ()) for each in (l1_weights, l2_weights, l1_weights_sf, l2_weights_sf, l1_bias, l2_bias)]
    buffer: Any = sym_buffer
    mx = buffer.dispatch_quant_mode == 4
    results: tuple[Tensor, Tensor] = _operator(
        x, topk_ids, topk_weights, *lists, x_active_mask, buffer.group_name, buffer.num_experts,
        buffer.max_recv_token_num, buffer.dispatch_quant_mode,
        _CODES.get(buffer.dispatch_quant_out_dtype, buffer.dispatch_quant_out_dtype) if mx else None,
        buffer.combine_quant_mode, weight1_type, weight2_type,
    )  # fmt: skip
    return results


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*given: object, **options: object) -> Any:
        raise NotImplementedError(f"{name} is for Ascend 950 only, expected a product that the emulator has: A2 or A3")

    refuse.__name__ = name
    return refuse


all_gather_quant_matmul = _refused("all_gather_quant_matmul")
all_to_all_quant_matmul = _refused("all_to_all_quant_matmul")
