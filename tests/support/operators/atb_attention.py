"""ATB's operators for serving: caches in pages, and attention without a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case

from operators.cache import scatter
from operators.moe import softmax

Array = np.ndarray[Any, Any]


def attended(query: Array, key: Array, value: Array, scale: float) -> Array:
    shared = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // shared].T * scale
        heads.append(softmax(scores) @ value[:, head // shared])
    return np.stack(heads, 1)


def paged(
    query: Array, key_cache: Array, value_cache: Array, scale_value: float, block_table: Array, context_lens: Array,
    **_: Any,
) -> list[Array]:  # fmt: skip
    rows = []
    for row, length in enumerate(context_lens):
        places = [(block_table[row, i // 4], i % 4) for i in range(length)]
        key, value = (np.stack([cache[place] for place in places]) for cache in (key_cache, value_cache))
        rows.append(attended(query[row : row + 1], key, value, scale_value))
    return [np.concatenate(rows)]


def to_page(r: np.random.Generator) -> dict[str, Any]:
    return {
        "query": r.normal(size=(3, 4, 8)), "key_cache": r.normal(size=(6, 4, 2, 8)), "num_kv_heads": 2, "num_heads": 4,
        "value_cache": r.normal(size=(6, 4, 2, 8)), "scale_value": 0.3, "out": np.zeros((3, 4, 8)),
        "block_table": np.array([[3, 0], [1, 5], [2, 2]], np.int32), "context_lens": np.array([1, 7, 4], np.int32),
    }  # fmt: skip


def unpadded(query: Array, key: Array, value: Array, seq_len: Array, scale_value: float, **_: Any) -> list[Array]:
    ends = np.cumsum(seq_len)
    parts = [slice(end - length, end) for end, length in zip(ends, seq_len, strict=True)]
    return [np.concatenate([attended(query[one], key[one], value[one], scale_value) for one in parts])]


def to_unpad(r: np.random.Generator) -> dict[str, Any]:
    return {
        "query": r.normal(size=(7, 4, 8)), "key": r.normal(size=(7, 1, 8)), "value": r.normal(size=(7, 1, 8)),
        "seq_len": np.array([5, 2], np.int32), "scale_value": 0.3, "num_heads": 4, "num_kv_heads": 1,
        "out": np.zeros((7, 4, 8)),
    }  # fmt: skip


CASES = [
    Case("_npu_reshape_and_cache", lambda r: {
        "key": r.normal(size=(3, 2, 8)), "value": r.normal(size=(3, 2, 6)), "key_cache": r.normal(size=(3, 4, 2, 8)),
        "value_cache": r.normal(size=(3, 4, 2, 6)), "slot_indices": np.array([7, 0, 11], np.int32),
    }, lambda slot_indices, **known: scatter(**known, slot_mapping=slot_indices, cache_mode=None),
        exact=True, writes=("key_cache", "value_cache")),
    Case("_npu_paged_attention", to_page, paged, writes=("out",)),
    Case("_npu_flash_attention_unpad", to_unpad, unpadded, writes=("out",)),
]  # fmt: skip
