"""Writes and reads caches of keys and values by slots and blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.layers import interleave_rope, rms_norm
from alltoallv.npu_ops.matmuls import to_int8
from alltoallv.npu_ops.microscaling import element_of, to_codes
from alltoallv.npu_ops.registry import expect, operator


def write(cache: Tensor, rows: Tensor, slots: Tensor, cache_mode: str | None) -> None:
    """Writes rows into a cache of shape [blocks, block size, heads, size].

    With PA_NZ the shape is [blocks, heads * size / last, block size, last].
    """
    expect(rows.dim() == 3, "key", rows, "[tokens, heads, size]")
    expect(cache_mode in (None, "Norm", "PA_NZ"), "cache_mode", cache_mode, "Norm or PA_NZ")
    nz = cache_mode == "PA_NZ"
    size = cache.size(2 if nz else 1)
    there = slots >= 0
    slots = slots.long()[there]
    block, offset = slots // size, slots % size
    if nz:
        cache[block, :, offset] = rows[there].flatten(1).unflatten(1, (-1, cache.size(-1))).to(cache.dtype)
    else:
        cache[block, offset] = rows[there].reshape(len(slots), *cache.shape[2:]).to(cache.dtype)


@operator("npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str | None
) -> None:
    """Writes token i to slot ``slot_mapping[i]`` of both caches, in place."""
    write(key_cache, key, slot_mapping, cache_mode)
    write(value_cache, value, slot_mapping, cache_mode)


@operator("npu_scatter_pa_kv_cache_functional")
def scatter_pa_kv_cache_functional(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str | None
) -> tuple[Tensor, Tensor]:
    caches = key_cache.clone(), value_cache.clone()
    scatter_pa_kv_cache(key, value, *caches, slot_mapping, cache_mode)
    return caches


def rows_of(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Returns a sequence's rows from a cache [blocks, block size, heads, size]; ``table`` lists its blocks.

    Rows of blocks that are not there are zeros.
    """
    used = -(-length // cache.size(1))
    table = functional.pad(table[:used].long(), (0, max(0, used - len(table))), value=-1)
    there = (table >= 0) & (table < len(cache))
    rows = cache[table.masked_fill(~there, 0)]
    return rows.masked_fill(~there.view(-1, *[1] * (cache.dim() - 1)), 0).flatten(0, 1)[:length]


@operator("npu_gather_pa_kv_cache")
def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    seq_offset: Tensor | None,
    is_seq_lens_cumsum: bool,
) -> None:
    """Copies the sequences' rows, one sequence after the other, from caches [blocks, block size, heads, size].

    The results go to ``key`` and ``value``. ``seq_lens`` holds lengths, or ends if ``is_seq_lens_cumsum``. A sequence
    begins with the block that has the row of ``seq_offset``; rows of blocks that are not there are zeros.
    """
    expect(key_cache.dim() == 4, "key_cache", key_cache, "[blocks, block size, heads, size]")
    lengths = seq_lens.diff().tolist() if is_seq_lens_cumsum else seq_lens.tolist()
    count = len(lengths)
    fits = seq_offset is None or seq_offset.shape == (count,)
    expect(fits, "seq_offset", seq_offset, f"{count} numbers, one for each sequence")
    firsts = [0] * count if seq_offset is None else (seq_offset // key_cache.size(1)).tolist()
    for cache, target in ((key_cache, key), (value_cache, value)):
        parts = [
            rows_of(cache, table[first:], length)
            for table, length, first in zip(block_tables, lengths, firsts, strict=True)
        ]
        joined = torch.cat([target[:0], *parts])
        target[: len(joined)] = joined


@operator("npu_scatter_nd_update_")
def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Sets ``input[indices[i]] = updates[i]``; the last dimension of ``indices`` has one entry per input dimension."""
    input[indices.long().unbind(-1)] = updates
    return input


@operator("npu_scatter_nd_update")
def scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return scatter_nd_update_(input.clone(), indices, updates)


def _write_paged(cache: Tensor, rows: Tensor, index: Tensor, cache_mode: str) -> None:
    """Writes rows [batch, length, size] into pages [pages, page size, 1, size] at their places in all pages together.

    ``index`` has the place of each row, or with BLK the first row's of each page's worth of them. With NZ memory
    has parts of 16 numbers, and of each part the rows of a page one after the other.
    """
    pages, page, _, size = cache.shape
    batch, length = rows.shape[:2]
    index = index.long()
    if "BLK" in cache_mode:
        starts = index.view(batch, index.numel() // max(batch, 1)).repeat_interleave(page, 1)[:, :length]
        index = (starts + torch.arange(length) % page).flatten()
    rows = rows.flatten(0, 1).to(cache.dtype)
    if cache_mode.endswith("NZ"):
        parts = cache.view(pages, size // 16, page, 16)
        parts[index // page, :, index % page] = rows.unflatten(-1, (-1, 16))
    else:
        cache.view(pages * page, size)[index] = rows


def _to_cache(name: str, cache: Tensor, values: Tensor, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """Returns values as a cache holds them: with a scale as int8 or float8, (values * scale + offset)."""
    if scale is None:
        expect(offset is None, f"{name}_offset", offset, f"None, where there is no {name}_scale")
        expect(cache.dtype == values.dtype, f"{name}_scale", None, f"a scale, for a cache of {cache.dtype}")
        return values
    fits = scale.numel() in (1, values.size(-1))
    expect(fits, f"{name}_scale", scale, f"1 or {values.size(-1)} numbers")
    scaled = values.float() * scale.float().reshape(-1) + (0.0 if offset is None else offset.float().reshape(-1))
    element = element_of(cache.dtype)
    expect(element or cache.dtype == torch.int8, f"{name}_scale", scale, f"None, for a cache of {cache.dtype}")
    return to_int8(scaled) if element is None else to_codes(scaled, element)


@operator("npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    epsilon: float,
    cache_mode: str,
    is_output_kv: bool,
    k_rope_scale: Tensor | None,
    c_kv_scale: Tensor | None,
    k_rope_offset: Tensor | None,
    c_kv_offset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalizes the first places of kv [batch, 1, length, size], rotates the others, and writes both to their caches.

    The caches are changed, and returned with the rotated and normalized values, which are NaN unless asked for. Caches
    of int8 or float8 get the values times their scale, plus their offset.
    """
    modes = "Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"
    expect(cache_mode in modes, "cache_mode", cache_mode, " or ".join(modes))
    expect(kv.dim() == 4 and kv.size(1) == 1, "kv", kv, "[batch, 1, length, size]")
    normal = rms_norm(kv[..., : len(gamma)], gamma, epsilon)[0]
    turned = interleave_rope(kv[..., len(gamma) :], cos, sin)
    scales = (k_rope_scale, k_rope_offset), (c_kv_scale, c_kv_offset)
    for name, cache, rows, of in zip(("k_rope", "c_kv"), (k_cache, ckv_cache), (turned, normal), scales, strict=True):
        values = _to_cache(name, cache, rows, *of)
        if cache_mode == "Norm":
            cache[:, 0].scatter_(1, index.long().unsqueeze(-1).expand(-1, -1, cache.size(-1)), values[:, 0])
        else:
            _write_paged(cache, values[:, 0], index, cache_mode)
    if not is_output_kv:
        turned, normal = torch.full_like(turned, torch.nan), torch.full_like(normal, torch.nan)
    return k_cache, ckv_cache, turned, normal
