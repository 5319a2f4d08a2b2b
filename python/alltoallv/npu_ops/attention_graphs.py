"""An inference graph calls these operators for npu_fused_infer_attention_score: they write into existing memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alltoallv.npu_ops import attention_inference as inference
from alltoallv.npu_ops.attention_parts import join, split
from alltoallv.npu_ops.registry import operator, renamed


def _register(name: str, formula: Callable[..., tuple[Tensor, Tensor]]) -> None:
    def into(out: list[Tensor], **given: Any) -> tuple[Tensor, Tensor]:
        for target, value in zip(out, formula(**given), strict=True):
            if target.numel() == value.numel():  # the logarithms may have no memory, where nobody asks for them
                target.copy_(value.view(target.shape))
        return out[0], out[1]

    takes = inspect.signature(formula).parameters
    into.__signature__ = inspect.Signature([*takes.values(), inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY)])  # type: ignore[attr-defined]
    operator(f"{name}.out", ignores=("inner_precise", "block_size", "workspace"))(into)

    @operator(f"_{name}_get_max_workspace", ignores=("*",))
    def workspace(query: Tensor) -> Tensor:
        return query.new_zeros(1)


@operator("_npu_fused_infer_attention_score_infer_output", ignores=("*",))
def infer_output(query: Tensor, input_layout: str, num_heads: int, softmax_lse_flag: bool) -> tuple[Tensor, Tensor]:
    """Returns zeroed tensors for the results, whose heads are as wide as the query's."""
    layout, result_layout = (input_layout.split("_") * 2)[:2]
    tokens = layout == "TND"
    queries = split(query, layout, num_heads, [query.size(0)] if tokens else None)
    sums = join([one[..., :1] for one in queries], "TND" if tokens else "BNSD").float()
    lse = torch.zeros_like(sums) if softmax_lse_flag else torch.zeros(1)
    return torch.zeros_like(join(queries, result_layout)), lse


_register("npu_fused_infer_attention_score", inference.fused_infer_attention_score)
_register("npu_fused_infer_attention_score_v2", inference.fused_infer_attention_score_v2)
_NAMES_V2 = {"num_query_heads": "num_heads", "return_softmax_lse": "softmax_lse_flag"}
operator("_npu_fused_infer_attention_score_v2_infer_output", ignores=("*",))(renamed(infer_output, names=_NAMES_V2))
