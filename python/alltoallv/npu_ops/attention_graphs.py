"""An inference graph calls these operators for npu_fused_infer_attention_score: they write into existing memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from alltoallv.npu_ops import attention_inference as inference
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


_register("npu_fused_infer_attention_score", inference.fused_infer_attention_score)
_register("npu_fused_infer_attention_score_v2", inference.fused_infer_attention_score_v2)
_NAMES_V2 = {"num_query_heads": "num_heads", "return_softmax_lse": "softmax_lse_flag"}
operator("_npu_fused_infer_attention_score_v2_infer_output", ignores=("*",))(
    renamed(inference.infer_output, names=_NAMES_V2)
)
