"""Attention for training, with its gradient. It has no dropout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alltoallv.npu_ops.attention_parts import (
    Attention,
    attend,
    attend_backward,
    batch_of,
    hidden,
    join,
    lengths_of,
    scores_of,
    split,
)
from alltoallv.npu_ops.registry import operator, renamed

_IGNORED = ("inner_precise", "gen_mask_parallel", "sync", "softmax_layout", "seed", "offset", "numels", "softmax_in")
_IGNORED_V2 = (*_IGNORED, "q_start_idx", "kv_start_idx")
_NAMES_V2 = {"pre_tokens": "pre_tockens", "next_tokens": "next_tockens"}


class _Sequences:
    """Holds the sequences of a batch, each as [heads, length, size] or all together, and computes their scores."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: int,
        layout: str,
        ends: tuple[Sequence[int] | None, Sequence[int] | None],
    ) -> None:
        self._heads, self._layout = heads, layout
        self._lengths = [None if one is None else lengths_of(one) for one in ends]
        self.query = self.split_like_query(query)
        size = self.query[0].size(-1) if self.query else 1
        kv_heads = key.size(-1) // size if key.dim() == 3 and layout != "TND" else heads
        self.key, self.value = (self._split(x, kv_heads, self._lengths[1]) for x in (key, value))

    def _split(self, x: Tensor, heads: int, lengths: Sequence[int] | None, layout: str = "") -> list[Tensor]:
        layout = layout or self._layout
        return split(x, layout, heads, lengths) if layout == "TND" else [batch_of(x, layout, heads)]

    def scores(
        self, scale: float, mask: Tensor | None, sparse_mode: int, band: tuple[int, int], pse: Tensor | None
    ) -> list[Tensor]:
        made = []
        for number, (query, key) in enumerate(zip(self.query, self.key, strict=True)):
            whole = query.dim() == 4
            unseen = hidden(mask, sparse_mode, None if whole else number, query.size(-2), key.size(-2), *band)
            own = pse if pse is None or whole else pse[min(number, len(pse) - 1)]
            made.append(scores_of(query, key, scale, unseen, own))
        return made

    def split_like_query(self, x: Tensor) -> list[Tensor]:
        return self._split(x, self._heads, self._lengths[0])

    def rows(self, x: Tensor) -> list[Tensor]:
        """Returns one number for each query and head of ``x``, which holds each of them eight times."""
        layout = "TND" if self._layout == "TND" else "BNSD"
        return [one[..., 0] for one in self._split(x, self._heads, self._lengths[0], layout)]

    def eight(self, rows: list[Tensor]) -> Tensor:
        return join(
            [row.unsqueeze(-1).expand(*row.shape, 8) for row in rows], "TND" if self._layout == "TND" else "BNSD"
        )


_Forward = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


@operator("npu_fusion_attention", ignores=_IGNORED)
def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None,
    atten_mask: Tensor | None,
    scale: float,
    pre_tockens: int,
    next_tockens: int,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
) -> _Forward:
    """Returns the result, each query's largest score and sum of exponentials (each eight times), and dropout's."""
    batch = _Sequences(query, key, value, head_num, input_layout, (actual_seq_qlen, actual_seq_kvlen))
    scores = batch.scores(scale, atten_mask, sparse_mode, (pre_tockens, next_tockens), pse)
    done = [attend(*each) for each in zip(scores, batch.value, strict=True)]
    result = join([one.result for one in done], input_layout).to(query.dtype)
    rows = [batch.eight([one[i] for one in done]) for i in (1, 2)]
    return result, rows[0], rows[1], query.new_zeros(0), 0, 0, 0


operator("npu_fusion_attention_v2", ignores=_IGNORED_V2)(
    renamed(fusion_attention, "Computes npu_fusion_attention where ``pse_type`` is 1.", _NAMES_V2)
)


@operator("npu_fusion_attention_grad", ignores=_IGNORED)
def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None,
    atten_mask: Tensor | None,
    softmax_max: Tensor | None,
    softmax_sum: Tensor | None,
    attention_in: Tensor | None,
    scale_value: float,
    pre_tockens: int,
    next_tockens: int,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of query, key, value and pse from the forward operator's outputs."""
    batch = _Sequences(query, key, value, head_num, input_layout, (actual_seq_qlen, actual_seq_kvlen))
    scores = batch.scores(scale_value, atten_mask, sparse_mode, (pre_tockens, next_tockens), pse)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        forward = [attend(*each) for each in zip(scores, batch.value, strict=True)]
    else:
        given = batch.split_like_query(attention_in), batch.rows(softmax_max), batch.rows(softmax_sum)
        forward = [Attention(*each) for each in zip(*given, strict=True)]
    parts = zip(batch.query, batch.key, batch.value, batch.split_like_query(dy), scores, forward, strict=True)
    found = [attend_backward(q, k, v, grad, s, done, scale_value) for q, k, v, grad, s, done in parts]
    dq, dk, dv = (join([one[i] for one in found], input_layout).to(query.dtype) for i in range(3))
    dpse = None if pse is None else torch.stack([one[3] for one in found]).sum_to_size(pse.shape).to(pse.dtype)
    return dq, dk, dv, dpse, None


operator("npu_fusion_attention_grad_v2", ignores=_IGNORED_V2)(
    renamed(
        fusion_attention_grad,
        "Returns the gradients of query, key, value and pse, and None for three arguments that are not covered.",
        _NAMES_V2,
        lambda gradients: (*gradients[:4], None, None, None),
    )
)
