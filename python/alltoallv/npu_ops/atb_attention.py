"""The operators of ATB that serving calls by torch_npu's names: caches in pages, and attention without a mask.

torch_npu defines them in ``atb::``, by a library that needs ATB's own.
"""

from __future__ import annotations

from torch import Tensor

from alltoallv.npu_ops.attention_parts import attend, scores_of
from alltoallv.npu_ops.cache import rows_of, scatter_pa_kv_cache
from alltoallv.npu_ops.registry import expect, operator


@operator("_npu_reshape_and_cache")
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """Writes token i to slot ``slot_indices[i]`` of both caches [blocks, block size, heads, size], in place."""
    scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_indices, None)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
    """Attends to all keys, in float32; everything is [tokens, heads, size], and several heads share one of the keys."""
    q, k, v = (one.transpose(0, 1) for one in (query, key, value))
    out.copy_(attend(scores_of(q, k, scale, None, None), v).result.transpose(0, 1).reshape(out.shape))


def _check_heads(query: Tensor, key: Tensor, num_heads: int, num_kv_heads: int) -> None:
    expect(query.dim() == 3 and query.size(1) == num_heads, "query", query, f"[tokens, {num_heads}, size]")
    expect(key.size(-2) == num_kv_heads, "num_kv_heads", num_kv_heads, f"{key.size(-2)}, as the keys have")
    expect(num_heads % num_kv_heads == 0, "num_heads", num_heads, f"a multiple of num_kv_heads, {num_kv_heads}")


@operator("_npu_paged_attention", ignores=("workspace",))
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
) -> None:
    """Attends with the one token of each sequence to its ``context_lens`` keys, whose blocks ``block_table`` lists."""
    expect(key_cache.dim() == 4, "key_cache", key_cache, "[blocks, block size, heads, size]")
    _check_heads(query, key_cache, num_heads, num_kv_heads)
    lengths = context_lens.tolist()
    expect(len(lengths) == len(query) == len(block_table), "context_lens", lengths, f"{len(query)} lengths")
    for row, (table, length) in enumerate(zip(block_table, lengths, strict=True)):
        key, value = (rows_of(cache, table, length) for cache in (key_cache, value_cache))
        _attend(query[row : row + 1], key, value, scale_value, out[row : row + 1])


@operator("_npu_flash_attention_unpad")
def flash_attention_unpad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    """Attends within each sequence to all of its tokens; the sequences lie one after the other, ``seq_len`` long."""
    _check_heads(query, key, num_heads, num_kv_heads)
    lengths = seq_len.tolist()
    expect(sum(lengths) == len(query) == len(key), "seq_len", lengths, f"lengths of {len(query)} tokens in all")
    for q, k, v, result in zip(*(one.split(lengths) for one in (query, key, value, out)), strict=True):
        _attend(q, k, v, scale_value, result)
