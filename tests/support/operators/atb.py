"""ATB's operators for serving: caches in pages, attention, quantization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from operator_case import Case

from operators.cache import scatter
from operators.moe import softmax

Array = np.ndarray[Any, Any]


def attended(query: Array, key: Array, value: Array, scale: float, added: Array | float = 0.0) -> Array:
    """``added`` is [queries, keys], or [heads, queries, keys]."""
    shared, heads = query.shape[1] // key.shape[1], []
    for head in range(query.shape[1]):
        own = added[head] if isinstance(added, np.ndarray) and added.ndim == 3 else added
        scores = query[:, head] @ key[:, head // shared].T * scale + own
        heads.append(softmax(scores) @ value[:, head // shared])
    return np.stack(heads, 1)


def later(queries: int, keys: int) -> Array:
    """What hides from the last ``queries`` of as many tokens as keys those that come after each."""
    return np.array([[-np.inf if j > keys - queries + i else 0.0 for j in range(keys)] for i in range(queries)])


def from_pages(cache: Array, blocks: Array, length: int, start: int = 0) -> Array:
    size = cache.shape[1]
    return np.stack([cache[blocks[i // size], i % size] for i in range(start, start + length)])


def paged(
    query: Array, key_cache: Array, value_cache: Array, scale_value: float, block_table: Array,
    context_lens: Sequence[int], mask: Array | None = None, **_: Any,
) -> list[Array]:  # fmt: skip
    rows = []
    for row, (blocks, length) in enumerate(zip(block_table, context_lens, strict=True)):
        key, value = (from_pages(cache, blocks, length) for cache in (key_cache, value_cache))
        own = 0.0 if mask is None else (mask[row] if mask.ndim == 4 else mask)[..., :length]
        rows.append(attended(query[row : row + 1], key, value, scale_value, own))
    return [np.concatenate(rows)]


def by_latent(key_cache: Array, mla_vheadsize: int, **known: Any) -> list[Array]:
    return paged(key_cache=key_cache, value_cache=key_cache[..., :mla_vheadsize], **known)


def paged_int8(
    query: Array, key_cache: Array, value_cache: Array, scale_value: float, block_table: Array, context_lens: Array,
    quant_type: int, k_descale: Array, v_descale: Array, num_heads: int, num_kv_heads: int, **_: Any,
) -> list[Array]:  # fmt: skip
    if k_descale.dtype == np.int64:
        k_descale, v_descale = (scale.astype(np.uint32).view(np.float32) for scale in (k_descale, v_descale))
    if quant_type == 1:
        caches = [cache * scale.reshape(num_kv_heads, -1) for cache, scale in (
            (key_cache, k_descale), (value_cache, v_descale))]  # fmt: skip
        return paged(query, *caches, scale_value, block_table, context_lens)
    rows = np.zeros(query.shape)
    for row, length in enumerate(context_lens):
        key, value = (from_pages(cache, block_table[row], length) for cache in (key_cache, value_cache))
        for head in range(num_heads):
            shared = head // (num_heads // num_kv_heads)
            scores = key[:, shared].astype(float) @ query[row, head] * k_descale[head] * scale_value
            weights = np.exp(scores - scores.max())
            sums = np.rint(weights * 127) @ value[:, shared] * v_descale[head] / 127
            rows[row, head] = sums / weights.sum()
    return [rows]


def to_page(r: np.random.Generator) -> dict[str, Any]:
    return {
        "query": r.normal(size=(3, 4, 8)), "key_cache": r.normal(size=(6, 4, 2, 8)), "num_kv_heads": 2, "num_heads": 4,
        "value_cache": r.normal(size=(6, 4, 2, 8)), "scale_value": 0.3, "out": np.zeros((3, 4, 8)),
        "block_table": np.array([[3, 0], [1, 5], [2, 2]], np.int32), "context_lens": np.array([1, 7, 4], np.int32),
    }  # fmt: skip


def to_page_v2(r: np.random.Generator, alibi: bool = False) -> dict[str, Any]:
    given = to_page(r) | {"context_lens": [1, 7, 4]}
    return given | ({"mask": r.normal(size=(3, 4, 1, 8)), "mask_type": 2} if alibi else {})


def to_page_latent(r: np.random.Generator) -> dict[str, Any]:
    given = to_page(r) | {"mla_vheadsize": 6, "out": np.zeros((3, 4, 6))}
    return {name: value for name, value in given.items() if name != "value_cache"}


def to_page_int8(r: np.random.Generator, by_head: bool, bits: bool = False) -> dict[str, Any]:
    scales = [np.exp(r.normal(size=4 if by_head else 16) - 4).astype(np.float32) for _ in range(2)]
    scales = [scale.view(np.uint32).astype(np.int64) for scale in scales] if bits else scales
    caches = {name: r.integers(-128, 128, (6, 4, 2, 8), np.int8) for name in ("key_cache", "value_cache")}
    return to_page(r) | caches | {
        "query": r.integers(-128, 128, (3, 4, 8), np.int8) if by_head else r.normal(size=(3, 4, 8)),
        "k_descale": scales[0], "v_descale": scales[1], "quant_type": 3 if by_head else 1, "outdata_type": 1,
        "out": np.zeros((3, 4, 8)),
    }  # fmt: skip


def prefilled(
    query: Array, key_cache: Array, value_cache: Array, block_table: Array, context_lens: Array, seq_len: Array,
    scale_value: float, mask: Array | None, causal: bool, **_: Any,
) -> list[Array]:  # fmt: skip
    rows, ends = [], np.cumsum(seq_len)
    for blocks, length, count, end in zip(block_table, context_lens, seq_len, ends, strict=True):
        key, value = (from_pages(cache, blocks, length) for cache in (key_cache, value_cache))
        own = later(count, length) if causal or mask is None else mask[end - count : end, :length]
        rows.append(attended(query[end - count : end], key, value, scale_value, own))
    return [np.concatenate(rows)]


def to_prefill(r: np.random.Generator, mask: Array) -> dict[str, Any]:
    return to_page(r) | {
        "query": r.normal(size=(6, 4, 8)), "seq_len": np.array([1, 3, 2], np.int32), "mask": mask,
        "out": np.zeros((6, 4, 8)),
    }  # fmt: skip


def unpadded(
    query: Array, key: Array, value: Array, seq_len: Array, scale_value: float, mask: Array | None = None,
    causal: bool = False, factor: float = 1.0, **_: Any,
) -> list[Array]:  # fmt: skip
    rows, ends = [], np.cumsum(seq_len)
    for number, (length, end) in enumerate(zip(seq_len, ends, strict=True)):
        one = slice(end - length, end)
        own: Any = later(length, length) if causal else 0.0
        if mask is not None and not causal:
            own = (mask if mask.ndim == 2 else mask[number])[:length, :length] * factor
        rows.append(attended(query[one], key[one], value[one], scale_value, own))
    return [np.concatenate(rows)]


def to_unpad(r: np.random.Generator) -> dict[str, Any]:
    return {
        "query": r.normal(size=(7, 4, 8)), "key": r.normal(size=(7, 1, 8)), "value": r.normal(size=(7, 1, 8)),
        "seq_len": np.array([5, 2], np.int32), "scale_value": 0.3, "num_heads": 4, "num_kv_heads": 1,
        "out": np.zeros((7, 4, 8)),
    }  # fmt: skip


def grouped(self: Array, k: int, group_num: int, n: int) -> list[Array]:
    result = self.copy()
    for row in result.reshape(len(self), group_num, -1):
        merit = [sum(sorted(group)[-n:]) for group in row]
        for group in sorted(range(group_num), key=lambda one: (-merit[one], one))[k:]:
            row[group] = 0
    return [result]


def int8(values: Array) -> Array:
    return np.clip(np.rint(values), -128, 127).astype(np.int8)


def quantized_norm(
    self: Array, gamma: Array, beta: Array, scale: Array, offset: Array, eps: float, **_: Any
) -> list[Array]:
    normal = self / np.sqrt((self**2).mean(-1, keepdims=True) + eps) * gamma + beta
    return [int8(normal / scale + offset)]


def rotated(
    positions: Array, query: Array, key: Array, head_size: int, cos_sin_cache: Array, is_neox_style: bool
) -> list[Array]:
    results = []
    for x in (query, key):
        result, half = x.copy().reshape(len(positions), -1, head_size), head_size // 2
        for token, position in enumerate(positions):
            cos, sin = cos_sin_cache[position, :half], cos_sin_cache[position, half:]
            for i in range(half):
                a, b = (i, i + half) if is_neox_style else (2 * i, 2 * i + 1)
                first, second = result[token, :, a].copy(), result[token, :, b].copy()
                result[token, :, a] = first * cos[i] - second * sin[i]
                result[token, :, b] = second * cos[i] + first * sin[i]
        results.append(result.reshape(x.shape))
    return results


def to_rotate(r: np.random.Generator, neox: bool) -> dict[str, Any]:
    return {
        "positions": np.array([4, 0, 2]), "query": r.normal(size=(3, 16)), "key": r.normal(size=(3, 8)),
        "head_size": 8, "cos_sin_cache": r.normal(size=(5, 8)), "is_neox_style": neox,
    }  # fmt: skip


def loaded(
    key_cache: Array, value_cache: Array, block_table: Array, context_lens: Array, cumsum: bool = False,
    seq_starts: Array | None = None, **_: Any,
) -> list[Array]:  # fmt: skip
    lengths = np.diff(context_lens) if cumsum else context_lens
    starts = np.zeros_like(lengths) if seq_starts is None else seq_starts
    return [
        np.concatenate([from_pages(cache, *one) for one in zip(block_table, lengths, starts, strict=True)])
        for cache in (key_cache, value_cache)
    ]


def to_load(r: np.random.Generator, **more: Any) -> dict[str, Any]:
    given = to_page(r)
    names = "key_cache", "value_cache", "block_table", "context_lens"
    return {name: given[name] for name in names} | more


_ONES = np.triu(np.ones((7, 7)), 1)
_ADDED = np.triu(np.full((6, 8), -2.5), 2)

CASES = [
    Case("_npu_matmul_add_fp32", lambda r: {
        "x": r.normal(size=(5, 3)), "weight": r.normal(size=(5, 4)), "C": r.normal(size=(3, 4)).astype(np.float32),
    }, lambda x, weight, C: [x.T @ weight + C], writes=("C",)),
    *[Case("_npu_group_topk", lambda r, k=k, n=n: {
        "self": r.normal(size=(4, 12)), "k": k, "group_num": 3, "n": n,
    }, grouped, exact=True, writes=("self",)) for k, n in ((1, 1), (2, 2), (3, 4))],
    *[Case("_npu_quantize_per_tensor", lambda r, zero=zero: {
        "x": r.normal(size=(2, 3, 4)) * 3, "scale": np.exp2(r.integers(-5, 2, 4)) * 1.0, "zero_point": zero,
        "y": np.zeros((2, 3, 4), np.int8),
    }, lambda x, scale, zero_point, y: [int8(np.rint(x / scale) + (zero_point if zero_point.size else 0))],
        writes=("y",)) for zero in (np.array([3, -120, 0, 1], np.int8), np.zeros(0, np.int8))],
    Case("_npu_quant_rms_norm", lambda r: {
        "self": r.normal(size=(3, 8)), "gamma": r.normal(size=(1, 8)), "beta": r.normal(size=(1, 8)),
        "scale": np.array([0.0625]), "offset": np.array([2], np.int8), "output": np.zeros((3, 8), np.int8), "eps": 1e-5,
    }, quantized_norm, writes=("output",)),
    *[Case("_npu_rotary_embedding", lambda r, neox=neox: to_rotate(r, neox), rotated, writes=("query", "key"))
        for neox in (True, False)],
    Case("_npu_reshape_and_cache", lambda r: {
        "key": r.normal(size=(3, 2, 8)), "value": r.normal(size=(3, 2, 6)), "key_cache": r.normal(size=(3, 4, 2, 8)),
        "value_cache": r.normal(size=(3, 4, 2, 6)), "slot_indices": np.array([7, 0, 11], np.int32),
    }, lambda slot_indices, **known: scatter(**known, slot_mapping=slot_indices, cache_mode=None),
        exact=True, writes=("key_cache", "value_cache")),
    Case("_npu_reshape_and_cache_siso", lambda r: {
        "key": r.normal(size=(3, 2, 8)), "key_cache": r.normal(size=(3, 4, 2, 8)),
        "slot_indices": np.array([7, 0, 11], np.int32),
    }, lambda key, key_cache, slot_indices: scatter(key, key, key_cache, key_cache.copy(), slot_indices, None)[:1],
        exact=True, writes=("key_cache",)),
    Case("npu_paged_cache_load", to_load, loaded, exact=True),
    Case("npu_paged_cache_load", lambda r: to_load(
        r, seq_starts=np.array([3, 0, 4], np.int32), cumsum=True, context_lens=np.array([0, 2, 5, 9], np.int32)),
        loaded, exact=True),
    Case("npu_paged_cache_load.out", lambda r: to_load(
        r, key=np.zeros((12, 2, 8)), value=np.zeros((12, 2, 8))), lambda **known: loaded(**known) * 2, exact=True,
        writes=("key", "value")),
    Case("_npu_paged_attention", to_page, paged, writes=("out",)),
    Case("_npu_paged_attention_v2.out", to_page_v2, lambda **known: paged(**known) * 2, writes=("out",)),
    Case("_npu_paged_attention_v2.out", lambda r: to_page_v2(r, alibi=True), lambda **known: paged(**known) * 2,
        writes=("out",)),
    Case("_npu_paged_attention_mla", to_page_latent, by_latent, writes=("out",)),
    *[Case("_npu_paged_attention_quant", lambda r, by_head=by_head, bits=bits: to_page_int8(r, by_head, bits),
        paged_int8, ("float16",), writes=("out",)) for by_head, bits in ((False, False), (False, True), (True, False))],
    Case("_npu_paged_attention_get_workspace", to_page, lambda **_: [np.zeros(1, np.uint8)], ("float16",)),
    Case("_npu_paged_attention_v2_get_workspace", to_page_v2, lambda **_: [np.zeros(1, np.uint8)], ("float16",)),
    Case("_npu_paged_attention_splitfuse", lambda r: to_prefill(r, _ADDED), lambda **known: prefilled(
        **known, causal=False), writes=("out",)),
    *[Case(name, lambda r: to_prefill(r, _ONES), lambda **known: prefilled(**known, causal=True), writes=("out",))
        for name in ("_npu_paged_attention_splitfuse_v2", "_npu_flash_attention_qlens")],
    *[Case(name, to_unpad, unpadded, writes=("out",))
        for name in ("_npu_flash_attention_unpad", "_npu_flash_attention_unpad_v2")],
    Case("_npu_flash_attention", lambda r: to_unpad(r) | {"mask": _ONES * -2.5}, unpadded, ("float32", "float16"),
        writes=("out",)),
    Case("_npu_flash_attention", lambda r: to_unpad(r) | {"mask": np.stack([_ONES, _ONES.T])},
        lambda **known: unpadded(**known, factor=-10000.0), ("bfloat16",), writes=("out",)),
    Case("_npu_flash_attention_v3", lambda r: to_unpad(r) | {"mask": _ONES}, lambda **known: unpadded(
        **known, causal=True), writes=("out",)),
]  # fmt: skip
