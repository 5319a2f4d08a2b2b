"""ATB's operators for serving, which torch_npu registers in ``atb::``.

They write what they compute into a tensor that the caller gives. Tokens of several sequences lie one after the other,
[tokens, heads, size] or [tokens, heads * size], and caches are [blocks, block size, heads, size].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from alltoallv.npu_ops.attention import attend, scores_of
from alltoallv.npu_ops.inference import rows_of, write_cache
from alltoallv.npu_ops.layers import rms_norm, turn
from alltoallv.npu_ops.matmuls import to_int8
from alltoallv.npu_ops.registry import expect, operator, present, renamed

_ALIBI, _CAUSAL, _PAGED_CAUSAL = 2, 3, 5  # of ATB's numbers of masks
_BFLOAT16_MASK = -10000.0  # a mask of bfloat16 holds ones where it hides keys
_ACL_DTYPES = {1: torch.float16, 27: torch.bfloat16}


@operator("_npu_matmul_add_fp32")
def matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:
    """Adds x transposed times weight to C, in float32."""
    C.add_(x.float().mT @ weight.float())


@operator("_npu_group_topk")
def group_topk(self: Tensor, k: int, group_num: int, n: int) -> None:
    """Sets a token's values to 0 but for its k best groups; a group is as good as the sum of its n largest values."""
    fits = self.dim() == 2 and group_num > 0 and self.size(1) % group_num == 0
    expect(fits, "group_num", group_num, f"a divisor of the number of experts, where self has {tuple(self.shape)}")
    expect(0 < k <= group_num, "k", k, f"1 to group_num, {group_num}")
    groups = self.view(len(self), group_num, -1)
    expect(0 < n <= groups.size(2), "n", n, f"1 to {groups.size(2)}, the experts of a group")
    best = groups.float().topk(n).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
    groups.scatter_(1, best[:, k:, None].expand(-1, -1, groups.size(2)), 0)


@operator("_npu_quantize_per_tensor")
def quantize_per_tensor(x: Tensor, scale: Tensor, zero_point: Tensor, y: Tensor) -> None:
    """Writes x / scale, rounded, + zero_point as int8; an empty ``zero_point`` is 0."""
    rounded = (x.float() / scale.float()).round()
    y.copy_(to_int8(rounded + zero_point.float() if zero_point.numel() else rounded))


@operator("_npu_quant_rms_norm")
def quant_rms_norm(
    self: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, offset: Tensor, output: Tensor, eps: float
) -> None:
    """Writes (rms_norm(self) + beta) / scale + offset, rounded to int8."""
    normal = rms_norm(self.float(), gamma.float().flatten(), eps)[0] + beta.float()
    output.copy_(to_int8(normal / scale.float() + offset.float()))


@operator("_npu_rotary_embedding")
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    """Rotates query and key in place, by the cosines and then the sines in the cache's row of each token's position."""
    size = cos_sin_cache.size(-1)
    expect(size == head_size, "head_size", head_size, f"{size}, the columns of cos_sin_cache")
    rows = cos_sin_cache[positions.flatten().long()].unsqueeze(1)
    cos, sin = (
        torch.cat([half, half], -1) if is_neox_style else half.repeat_interleave(2, -1) for half in rows.chunk(2, -1)
    )
    for x in (query, key):
        heads = x.reshape(rows.size(0), -1, size)
        x.copy_(turn(heads, cos, sin, "half" if is_neox_style else "interleave").view(x.shape))


@operator("_npu_reshape_and_cache")
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """Writes token i to slot ``slot_indices[i]`` of both caches, in place."""
    write_cache(key_cache, key, slot_indices, None)
    write_cache(value_cache, value, slot_indices, None)


@operator("_npu_reshape_and_cache_siso")
def reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """Writes token i to slot ``slot_indices[i]`` of the cache, in place."""
    write_cache(key_cache, key, slot_indices, None)


@operator("npu_paged_cache_load")
def paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    seq_starts: Tensor | None,
    cumsum: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the rows of all sequences, one sequence after the other, of both caches.

    A sequence has ``context_lens`` rows from ``seq_starts`` on; with ``cumsum`` these are 0 and the sequences' ends.
    """
    lengths = (context_lens.diff() if cumsum else context_lens).tolist()
    starts = [0] * len(lengths) if seq_starts is None else seq_starts.tolist()
    places = list(zip(block_table, starts, lengths, strict=True))
    keys, values = (
        torch.cat([cache.flatten(0, 1)[:0], *(rows_of(cache, table, start + n)[start:] for table, start, n in places)])
        for cache in (key_cache, value_cache)
    )
    return keys, values


@operator("npu_paged_cache_load.out")
def paged_cache_load_out(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    seq_starts: Tensor | None,
    cumsum: bool,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Writes what `paged_cache_load` returns into ``key`` and ``value``, which must have its sizes."""
    loaded = paged_cache_load(key_cache, value_cache, block_table, context_lens, seq_starts, cumsum)
    for name, target, rows in zip(("key", "value"), (key, value), loaded, strict=True):
        expect(target.shape == rows.shape, name, target, f"shape {tuple(rows.shape)}")
        target.copy_(rows)
    return key, value


def _heads(x: Tensor, argument: str, heads: int) -> Tensor:
    """Returns tokens as [heads, tokens, size]."""
    fits = x.size(1) == heads if x.dim() == 3 else x.dim() == 2 and x.size(1) % max(heads, 1) == 0
    expect(fits, argument, x, f"[tokens, {heads}, size]")
    return x.view(len(x), heads, -1).transpose(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Returns the attention of one sequence's tokens [heads, tokens, size]; several heads share one of the keys.

    ``mask`` is added to the scores. With ``causal`` the last query sees all keys, and each before it one key less.
    """
    unseen = None
    if causal:
        unseen = torch.ones(query.size(1), key.size(1), dtype=torch.bool).triu(key.size(1) - query.size(1) + 1)
    scores = scores_of(query, key, scale, unseen, None)
    return attend(scores if mask is None else scores + mask.float(), value).result


def _check_heads(num_heads: int, num_kv_heads: int) -> int:
    """Returns how many heads keys and values have: 0 means as many as queries."""
    shared = num_kv_heads or num_heads
    expect(num_heads % shared == 0, "num_heads", num_heads, f"a multiple of num_kv_heads, {num_kv_heads}")
    return shared


def _lengths(lengths: Tensor, argument: str, tokens: int) -> list[int]:
    each = [int(length) for length in lengths.flatten().tolist()]
    expect(sum(each) == tokens, argument, each, f"lengths of {tokens} tokens in all")
    return each


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
) -> None:
    """Attends within each sequence; the sequences lie one after the other, ``seq_len`` long."""
    kv_heads = _check_heads(num_heads, num_kv_heads)
    lengths = _lengths(seq_len, "seq_len", len(query))
    q, k, v = _heads(query, "query", num_heads), _heads(key, "key", kv_heads), _heads(value, "value", kv_heads)
    expect(k.size(1) == v.size(1) == q.size(1), "key", key, f"{len(query)} tokens, as query and value have")
    parts = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
    _put(out, [
        _attend(part[0], part[1], part[2], scale_value, _mask_of(mask, row, lengths[row]), causal)
        for row, part in enumerate(parts)
    ])  # fmt: skip


def _put(out: Tensor, results: list[Tensor]) -> None:
    """Writes the sequences' results [heads, tokens, size]."""
    if not results:
        return
    joined = torch.cat(results, 1).transpose(0, 1)
    expect(out.numel() == joined.numel(), "out", out, f"{joined.numel()} numbers, for {tuple(joined.shape)}")
    out.copy_(joined.reshape(out.shape))


def _mask_of(mask: Tensor | None, sequence: int, length: int) -> Tensor | None:
    """Returns what is added to a sequence's scores, of a mask for all or one for each."""
    if mask is None:
        return None
    fits = mask.dim() in (2, 3) and min(mask.shape[-2:]) >= length
    expect(fits, "mask", mask, f"at least {length} rows and columns, for all sequences or for each")
    own = (mask if mask.dim() == 2 else mask[sequence])[:length, :length].float()
    return own * _BFLOAT16_MASK if mask.dtype == torch.bfloat16 else own


operator("_npu_flash_attention")(
    renamed(flash_attention, "Attends within each sequence; the mask is added, times -10000 in bfloat16.", causal=False)
)
operator("_npu_flash_attention_unpad")(renamed(flash_attention, mask=None, causal=False))
operator("_npu_flash_attention_unpad_v2", ignores=("kernel_type",))(renamed(flash_attention, mask=None, causal=False))


@operator("_npu_flash_attention_v3", ignores=("mask",))
def flash_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    mask_type: int | None,
    out: Tensor,
) -> None:
    """Attends to no later token of the sequence: the compressed ``mask`` says no more."""
    expect(mask_type in (None, _CAUSAL), "mask_type", mask_type, f"{_CAUSAL}")
    flash_attention(query, key, value, seq_len, scale_value, num_heads, num_kv_heads, out, causal=True)


def _sequences(
    caches: tuple[Tensor, Tensor], block_table: Tensor, context_lens: Tensor, num_kv_heads: int, sequences: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields keys and values of each sequence from the blocks that ``block_table`` lists, [heads, length, size]."""
    expect(caches[0].dim() == 4, "key_cache", caches[0], "[blocks, block size, heads, size]")
    expect(caches[0].size(2) == num_kv_heads, "num_kv_heads", num_kv_heads, f"{caches[0].size(2)}, as key_cache has")
    lengths = [int(length) for length in context_lens.flatten().tolist()]
    fits = len(lengths) == sequences <= len(block_table)
    expect(fits, "context_lens", lengths, f"{sequences} lengths, one for each row of block_table and each sequence")
    for table, length in zip(block_table, lengths, strict=False):
        key, value = (rows_of(cache, table, length).transpose(0, 1) for cache in caches)
        yield key, value


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
    kv_heads = _check_heads(num_heads, num_kv_heads)
    rows = _heads(query, "query", num_heads).split(1, 1)
    each = _sequences((key_cache, value_cache), block_table, context_lens, kv_heads, len(query))
    _put(out, [_attend(row, *there, scale_value) for row, there in zip(rows, each, strict=True)])


@operator("_npu_paged_attention_v2.out", ignores=("workspace",))
def paged_attention_v2(
    query: Tensor,
    key_cache: Tensor,
    block_table: Tensor,
    context_lens: list[int],
    value_cache: Tensor | None,
    mask: Tensor | None,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    mask_type: int,
    out: Tensor,
) -> Tensor:
    """Computes `paged_attention`; with ``mask_type`` 2, ``mask`` [sequences, heads, 1, keys] is added to scores."""
    expect(mask_type in (0, _ALIBI), "mask_type", mask_type, f"0 or {_ALIBI}")
    expect((mask is None) == (mask_type == 0), "mask", mask, "a tensor where mask_type is not 0")
    values = present(value_cache, "value_cache", "a tensor")
    kv_heads = _check_heads(num_heads, num_kv_heads)
    rows = _heads(query, "query", num_heads).split(1, 1)
    each = _sequences((key_cache, values), block_table, torch.tensor(context_lens), kv_heads, len(query))
    results = []
    for number, (row, (key, value)) in enumerate(zip(rows, each, strict=True)):
        own = mask[number] if mask is not None and mask.dim() == 4 else mask
        shown = None if own is None else own[..., : key.size(1)]
        results.append(_attend(row, key, value, scale_value, shown))
    _put(out, results)
    return out


@operator("_npu_paged_attention_get_workspace", "_npu_paged_attention_v2_get_workspace", ignores=("*",))
def paged_attention_get_workspace(query: Tensor) -> Tensor:
    """Returns memory for `paged_attention` and `paged_attention_v2`, which need none here."""
    return query.new_zeros(1, dtype=torch.uint8)


@operator("_npu_paged_attention_mla")
def paged_attention_mla(
    query: Tensor,
    key_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    mla_vheadsize: int,
    out: Tensor,
) -> None:
    """Computes `paged_attention` where the values are the first ``mla_vheadsize`` places of the keys."""
    fits = 0 < mla_vheadsize <= key_cache.size(-1)
    expect(fits, "mla_vheadsize", mla_vheadsize, f"1 to {key_cache.size(-1)}, the size of a key")
    values = key_cache[..., :mla_vheadsize]
    paged_attention(query, key_cache, values, num_kv_heads, num_heads, scale_value, block_table, context_lens, out)


def _descale(scale: Tensor) -> Tensor:
    """Returns factors in float32, which int64 holds in its lower half."""
    return scale.int().view(torch.float32) if scale.dtype == torch.int64 else scale.float()


_BY_CHANNEL, _BY_HEAD = 1, 3  # of ATB's numbers of quantizations


@operator("_npu_paged_attention_quant")
def paged_attention_quant(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    quant_type: int,
    outdata_type: int,
    k_descale: Tensor,
    v_descale: Tensor,
    out: Tensor,
) -> None:
    """Computes `paged_attention` with caches of int8.

    With ``quant_type`` 1, keys and values are multiplied by the factor of their channel. With 3 the query is int8 too,
    scores are multiplied by their head's ``k_descale``, weights become int8 by each query's and head's largest one, and
    results are multiplied by their head's ``v_descale``.
    """
    kinds = (_BY_CHANNEL, _BY_HEAD)
    expect(quant_type in kinds, "quant_type", quant_type, "1 (factors of channels) or 3 (int8 queries)")
    dtype = _ACL_DTYPES.get(outdata_type)
    expect(dtype == out.dtype, "outdata_type", outdata_type, f"1 (float16) or 27 (bfloat16), where out is {out.dtype}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        expect(cache.dtype == torch.int8, name, cache, "int8")
    kv_heads = _check_heads(num_heads, num_kv_heads)
    rows = _heads(query, "query", num_heads).split(1, 1)
    each = _sequences((key_cache, value_cache), block_table, context_lens, kv_heads, len(query))
    factors = [_descale(scale).view(kv_heads if quant_type == _BY_CHANNEL else num_heads, 1, -1) for scale in (
        k_descale, v_descale)]  # fmt: skip
    if quant_type == _BY_CHANNEL:
        _put(out, [
            _attend(row, key.float() * factors[0], value.float() * factors[1], scale_value)
            for row, (key, value) in zip(rows, each, strict=True)
        ])  # fmt: skip
        return
    expect(query.dtype == torch.int8, "query", query, "int8, for quant_type 3")
    results = []
    for row, (key, value) in zip(rows, each, strict=True):
        scores = scores_of(row, key, 1.0, None, None) * factors[0] * scale_value
        weights = (scores - scores.amax(-1, keepdim=True)).exp()  # the largest is 1, so 127 of them make 1
        values = value.float().repeat_interleave(num_heads // kv_heads, 0)
        results.append((weights * 127).round() @ values * (factors[1] / 127) / weights.sum(-1, keepdim=True))
    _put(out, results)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_len: Tensor,
    context_lens: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
    mask: Tensor | None = None,
) -> None:
    """Attends with the last ``seq_len`` tokens of each sequence to its ``context_lens`` keys, but no later ones."""
    kv_heads = _check_heads(num_heads, num_kv_heads)
    lengths = _lengths(seq_len, "seq_len", len(query))
    parts = _heads(query, "query", num_heads).split(lengths, 1)
    masks: Any = [None] * len(parts) if mask is None else mask.split(lengths)
    results = []
    each = _sequences((key_cache, value_cache), block_table, context_lens, kv_heads, len(parts))
    for part, own, (key, value) in zip(parts, masks, each, strict=True):
        shown = None if own is None else own[:, : key.size(1)]
        results.append(_attend(part, key, value, scale_value, shown, causal=mask is None))
    _put(out, results)


_BY_POSITION = "Attends with the last ``seq_len`` tokens of each sequence to no later key: ``mask`` says no more."
operator("_npu_flash_attention_qlens", ignores=("mask",))(renamed(paged_prefill, _BY_POSITION, mask=None))


@operator("_npu_paged_attention_splitfuse")
def paged_attention_splitfuse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
) -> None:
    """Attends with the last ``seq_len`` tokens of each sequence; a token's row of ``mask`` is added to its scores."""
    fits = mask.dim() == 2 and len(mask) == len(query)
    expect(fits, "mask", mask, f"[{len(query)}, keys], a row for each token")
    shared = query, key_cache, value_cache, block_table, seq_len, context_lens
    paged_prefill(*shared, num_kv_heads, num_heads, scale_value, out, mask)


@operator("_npu_paged_attention_splitfuse_v2", ignores=("mask",))
def paged_attention_splitfuse_v2(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    mask_type: int | None,
    out: Tensor,
) -> None:
    """Attends with the last ``seq_len`` tokens of each sequence to no later key: ``mask`` says no more."""
    expect(mask_type in (None, _PAGED_CAUSAL), "mask_type", mask_type, f"{_PAGED_CAUSAL}")
    shared = query, key_cache, value_cache, block_table, seq_len, context_lens
    paged_prefill(*shared, num_kv_heads, num_heads, scale_value, out)
