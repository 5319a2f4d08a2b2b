"""Writes and reads caches of keys and values by slots and blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import expect, operator


def _write(cache: Tensor, rows: Tensor, slots: Tensor, cache_mode: str | None) -> None:
    """Writes rows into a cache of shape [blocks, block size, heads, size].

    With PA_NZ the shape is [blocks, heads * size / last, block size, last].
    """
    expect(rows.dim() == 3, "key", rows, "[tokens, heads, size]")
    expect(cache_mode in (None, "Norm", "PA_NZ"), "cache_mode", cache_mode, "Norm or PA_NZ")
    nz = cache_mode == "PA_NZ"
    size = cache.size(2 if nz else 1)
    there = slots >= 0
    slots = slots.long()[there]
    block, place = slots // size, slots % size
    if nz:
        cache[block, :, place] = rows[there].reshape(len(slots), -1, cache.size(-1)).to(cache.dtype)
    else:
        cache[block, place] = rows[there].reshape(len(slots), *cache.shape[2:]).to(cache.dtype)


@operator("npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str | None
) -> None:
    """Writes token i to slot ``slot_mapping[i]`` of both caches, in place."""
    _write(key_cache, key, slot_mapping, cache_mode)
    _write(value_cache, value, slot_mapping, cache_mode)


@operator("npu_scatter_pa_kv_cache_functional")
def scatter_pa_kv_cache_functional(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str | None
) -> tuple[Tensor, Tensor]:
    caches = key_cache.clone(), value_cache.clone()
    scatter_pa_kv_cache(key, value, *caches, slot_mapping, cache_mode)
    return caches


@operator("npu_gather_pa_kv_cache")
def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    is_seq_lens_cumsum: bool,
) -> None:
    """Copies the sequences' rows, one sequence after the other, from caches [blocks, block size, heads, size].

    The results go to ``key`` and ``value``. ``seq_lens`` holds lengths, or ends if ``is_seq_lens_cumsum``.
    """
    expect(key_cache.dim() == 4, "key_cache", key_cache, "[blocks, block size, heads, size]")
    lengths = seq_lens.diff().tolist() if is_seq_lens_cumsum else seq_lens.tolist()
    for cache, target in ((key_cache, key), (value_cache, value)):
        rows = [
            cache[table[: -(-length // cache.size(1))].long()].flatten(0, 1)[:length]
            for table, length in zip(block_tables, lengths, strict=True)
        ]
        whole = torch.cat(rows)
        target[: len(whole)] = whole


@operator("npu_scatter_nd_update_")
def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Sets ``input[indices[i]] = updates[i]``; the last dimension of ``indices`` has one entry per input dimension."""
    input[indices.long().unbind(-1)] = updates
    return input


@operator("npu_scatter_nd_update")
def scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return scatter_nd_update_(input.clone(), indices, updates)
