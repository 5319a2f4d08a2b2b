"""Attention for inference: keys and values as tensors or in blocks of a cache, each sequence with its own length."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alltoallv.npu_ops.attention_parts import attend, hidden, join, lengths_of, scores_of, split
from alltoallv.npu_ops.registry import expect, operator, renamed, takes


def from_blocks(cache: Tensor, table: Tensor, length: int, heads: int) -> Tensor:
    """Returns a sequence's rows as [heads, length, size] from a cache of shape [blocks, block size, heads * size] or
    [blocks, heads, block size, size].
    """
    expect(cache.dim() in (3, 4), "key", cache, "a cache of 3 or 4 dimensions")
    blocks = cache.unflatten(-1, (heads, -1)).transpose(1, 2) if cache.dim() == 3 else cache
    used = table[: -(-length // blocks.size(2))].long()
    return blocks[used].transpose(0, 1).flatten(1, 2)[:, :length]


def _lengths(given: Sequence[int] | None, batch: int, default: int) -> list[int]:
    if given is None:
        return [default] * batch
    lengths = [int(one) for one in given]
    return lengths * batch if len(lengths) == 1 else lengths[:batch]


@operator("_npu_fused_infer_attention_score_infer_output", ignores=("*",))
def infer_output(query: Tensor, input_layout: str, num_heads: int, softmax_lse_flag: bool) -> tuple[Tensor, Tensor]:
    """Returns zeroed tensors for the results, whose heads are as wide as the query's."""
    layout, result_layout = (input_layout.split("_") * 2)[:2]
    tokens = layout == "TND"
    queries = split(query, layout, num_heads, [query.size(0)] if tokens else None)
    sums = join([one[..., :1] for one in queries], "TND" if tokens else "BNSD").float()
    lse = torch.zeros_like(sums) if softmax_lse_flag else torch.zeros(1)
    return torch.zeros_like(join(queries, result_layout)), lse


@operator("npu_fused_infer_attention_score", ignores=("inner_precise", "block_size"))
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pse_shift: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    block_table: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    num_heads: int,
    scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    softmax_lse_flag: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the result, and the logarithm of each query's sum of exponentials.

    Rows after a sequence's end are zeros.
    """
    layout, result_layout = (input_layout.split("_") * 2)[:2]
    tokens = layout == "TND"
    kv_heads = num_key_value_heads or num_heads
    if query.numel() == 0:
        return infer_output(query, input_layout, num_heads, softmax_lse_flag)
    expect(not tokens or actual_seq_lengths is not None, "actual_seq_lengths", None, "the sequences' ends, for TND")
    q_lengths = lengths_of(actual_seq_lengths) if tokens and actual_seq_lengths is not None else None
    queries = split(query, layout, num_heads, q_lengths)
    ropes = None if query_rope is None else split(query_rope, layout, num_heads, q_lengths)
    if block_table is None:
        ends = lengths_of(actual_seq_lengths_kv or actual_seq_lengths or []) if tokens else None
        keys, values = (split(x, layout, kv_heads, ends) for x in (key, value))
        key_ropes = None if key_rope is None else split(key_rope, layout, kv_heads, ends)
        kv_lengths = ends or _lengths(actual_seq_lengths_kv, len(keys), keys[0].size(1) if keys else 0)
    else:
        expect(
            actual_seq_lengths_kv is not None, "actual_seq_lengths_kv", None, "lengths, where there is a block_table"
        )
        kv_lengths = _lengths(actual_seq_lengths_kv, len(queries), 0)
        rows = list(zip(block_table, kv_lengths, strict=False))
        keys, values = ([from_blocks(x, *row, kv_heads) for row in rows] for x in (key, value))
        key_ropes = None if key_rope is None else [from_blocks(key_rope, *row, kv_heads) for row in rows]
    results, sums = [], []
    for number, whole in enumerate(queries):
        full = whole.size(1)
        used = full if tokens or full == 1 else _lengths(actual_seq_lengths, len(queries), full)[number]
        length = kv_lengths[number]
        q, k, v = whole[:, :used], keys[number][:, :length], values[number][:, :length]
        if ropes is not None and key_ropes is not None:
            q, k = torch.cat([q, ropes[number][:, :used]], -1), torch.cat([k, key_ropes[number][:, :length]], -1)
        ignored = full == 1 and not tokens and sparse_mode > 1  # a single query sees every key
        mask = None if ignored else atten_mask
        if mask is not None and full == 1 and mask.dim() == 2 and sparse_mode < 2 and not tokens:
            mask = mask.unsqueeze(1).unsqueeze(1)
        unseen = hidden(mask, sparse_mode, number, used, length, pre_tokens, next_tokens)
        scores = scores_of(q, k, 1.0, None, None) * scale
        if pse_shift is not None:
            scores = scores + pse_shift[min(number, len(pse_shift) - 1)][..., :used, :length].float()
        done = attend(scores if unseen is None else scores.masked_fill(unseen, -torch.inf), v)
        padding = (0, 0, 0, full - used)
        results.append(torch.nn.functional.pad(done.result, padding))
        logarithms = (done.largest + done.total.log()).unsqueeze(-1)
        sums.append(torch.nn.functional.pad(logarithms, padding, value=torch.inf))
    lse = join(sums, "TND" if tokens else "BNSD") if softmax_lse_flag else torch.zeros(1)
    return join(results, result_layout).to(query.dtype), lse


_NAMES_V2 = {
    "actual_seq_qlen": "actual_seq_lengths", "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads", "softmax_scale": "scale", "return_softmax_lse": "softmax_lse_flag",
}  # fmt: skip
_NO_LSE: dict[str, Any] = {"query_rope": None, "key_rope": None, "softmax_lse_flag": False}

fused_infer_attention_score_v2 = operator(
    "npu_fused_infer_attention_score_v2", ignores=("inner_precise", "block_size")
)(renamed(fused_infer_attention_score, names=_NAMES_V2))
operator("npu_prompt_flash_attention")(
    renamed(
        fused_infer_attention_score,
        "Returns the attention of whole sequences.",
        {"scale_value": "scale"},
        lambda results: results[0],
        block_table=None,
        **_NO_LSE,
    )
)
operator("npu_incre_flash_attention", ignores=("inner_precise", "block_size"))(
    renamed(
        fused_infer_attention_score,
        "Returns the attention of one query per sequence; the lengths are those of keys and values.",
        {"scale_value": "scale", "actual_seq_lengths": "actual_seq_lengths_kv"},
        lambda results: results[0],
        actual_seq_lengths=None,
        pre_tokens=0,
        next_tokens=0,
        sparse_mode=0,
        **_NO_LSE,
    )
)


def _for_graphs(name: str, formula: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Registers what an inference graph calls in place of an operator, which writes into existing memory."""

    def into(out: list[Tensor], **given: Any) -> tuple[Tensor, Tensor]:
        for target, value in zip(out, formula(**given), strict=True):
            if target.numel() == value.numel():  # the logarithms may have no memory, where nobody asks for them
                target.copy_(value.view(target.shape))
        return out[0], out[1]

    takes(into, *inspect.signature(formula).parameters, "out")
    operator(f"{name}.out", ignores=("inner_precise", "block_size", "workspace"))(into)

    @operator(f"_{name}_get_max_workspace", ignores=("*",))
    def workspace(query: Tensor) -> Tensor:
        return query.new_zeros(1)


_for_graphs("npu_fused_infer_attention_score", fused_infer_attention_score)
_for_graphs("npu_fused_infer_attention_score_v2", fused_infer_attention_score_v2)
operator("_npu_fused_infer_attention_score_v2_infer_output", ignores=("*",))(renamed(infer_output, names=_NAMES_V2))
