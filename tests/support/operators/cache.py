"""Caches of keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case

from operators.rotary import turned

Array = np.ndarray[Any, Any]


def written(cache: Array, rows: Array, slots: Array, nz: bool) -> Array:
    made = cache.copy()
    for row, slot in zip(rows, slots, strict=True):
        size = cache.shape[2] if nz else cache.shape[1]
        if slot >= 0 and nz:
            for i, number in enumerate(row.reshape(-1)):
                made[slot // size, i // cache.shape[3], slot % size, i % cache.shape[3]] = number
        elif slot >= 0:
            made[slot // size, slot % size] = row
    return made


def scatter(
    key: Array, value: Array, key_cache: Array, value_cache: Array, slot_mapping: Array, cache_mode: Any
) -> list[Array]:
    nz = cache_mode == "PA_NZ"
    return [written(key_cache, key, slot_mapping, nz), written(value_cache, value, slot_mapping, nz)]


def to_scatter(mode: str | None) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        shapes = [(3, 4, 2, 8), (3, 4, 2, 6)] if mode != "PA_NZ" else [(3, 4, 4, 4), (3, 3, 4, 4)]
        return {
            "key": r.normal(size=(5, 2, 8)), "value": r.normal(size=(5, 2, 6)), "key_cache": r.normal(size=shapes[0]),
            "value_cache": r.normal(size=shapes[1]), "slot_mapping": np.array([7, 0, -1, 11, 3], np.int32),
            "cache_mode": mode,
        }  # fmt: skip

    return inputs


def gather(key_cache: Array, value_cache: Array, block_tables: Array, seq_lens: Array, **known: Any) -> list[Array]:
    lengths = np.diff(seq_lens) if known["is_seq_lens_cumsum"] else seq_lens
    first = known.get("seq_offset", [0, 0])

    def row(cache: Array, b: int, i: int) -> Array:
        place = first[b] // 4 + i // 4
        block = block_tables[b, place] if place < len(block_tables[b]) else -1
        return cache[block, i % 4] if 0 <= block < len(cache) else np.zeros_like(cache[0, 0])

    return [
        np.stack([row(cache, b, i) for b, length in enumerate(lengths) for i in range(length)])
        for cache in (key_cache, value_cache)
    ]


def to_gather(ends: bool, **more: Any) -> Any:
    return lambda r: more | {
        "key_cache": r.normal(size=(5, 4, 2, 8)), "value_cache": r.normal(size=(5, 4, 2, 6)),
        "block_tables": np.array([[3, 0], [1, 4]], np.int32), "is_seq_lens_cumsum": ends,
        "seq_lens": np.array([0, 3, 10] if ends else [3, 7], np.int32),
        "key": np.zeros((10, 2, 8)), "value": np.zeros((10, 2, 6)),
    }  # fmt: skip


def scattered(input: Array, indices: Array, updates: Array) -> Array:
    made = input.copy()
    for index, update in zip(indices, updates, strict=True):
        made[tuple(index)] = update
    return made


def to_update(r: np.random.Generator) -> dict[str, Any]:
    return {
        "input": r.normal(size=(3, 4, 5)), "indices": np.array([[0, 1], [2, 3], [1, 0]], np.int64),
        "updates": r.normal(size=(3, 5)),
    }  # fmt: skip


def rotated_and_normalized(kv: Array, gamma: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    first, last = kv[:, 0, :, : len(gamma)], kv[:, 0, :, len(gamma) :]
    sorted_pairs = np.concatenate([last[..., ::2], last[..., 1::2]], -1)
    normal = first / np.sqrt((first**2).mean(-1, keepdims=True) + 1e-5) * gamma
    return turned(sorted_pairs, cos[:, 0], sin[:, 0]), normal


def joined(
    kv: Array, gamma: Array, cos: Array, sin: Array, index: Array, k_cache: Array, ckv_cache: Array,
    cache_mode: str, is_output_kv: bool, c_kv_scale: Any = None, c_kv_offset: Any = None, k_rope_scale: Any = None,
) -> list[Any]:  # fmt: skip
    values = rotated_and_normalized(kv, gamma, cos, sin)
    caches = k_cache.copy(), ckv_cache.copy()
    kept = [
        rows if scale is None else np.clip(np.rint(rows * scale + (0 if offset is None else offset)), -128, 127)
        for rows, scale, offset in zip(values, (k_rope_scale, c_kv_scale), (None, c_kv_offset), strict=True)
    ]
    for cache, rows in zip(caches, kept, strict=True):
        for b, t in np.ndindex(rows.shape[:2]):
            if cache_mode == "Norm":
                cache[b, 0, index[b, t]] = rows[b, t]
                continue
            page = cache.shape[1]
            per_page = "BLK" in cache_mode
            place = index.reshape(2, -1)[b, t // page] + t % page if per_page else index.reshape(2, -1)[b, t]
            if "NZ" in cache_mode:
                whole = cache.reshape(len(cache), -1, page, 16)  # a view: the array has this order
                whole[place // page, :, place % page] = rows[b, t].reshape(-1, 16)
            else:
                cache[place // page, place % page, 0] = rows[b, t]
    outputs = [one[:, None] for one in values] if is_output_kv else [None] * 2
    return [*caches, *outputs, *caches]


def to_join(mode: str, output: bool, **more: Any) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        made = joined_inputs(r)
        codes = {"c_kv_scale": "ckv_cache", "k_rope_scale": "k_cache"}
        return made | more | {cache: made[cache].astype(np.int8) for scale, cache in codes.items() if scale in more}

    def joined_inputs(r: np.random.Generator) -> dict[str, Any]:
        pages = mode != "Norm"
        index = {"Norm": [[5, 0, 2], [1, 3, 4]], "PA_BLK_BNSD": [4, 8, 0, 12], "PA_BLK_NZ": [4, 8, 0, 12]}
        return {
            "kv": r.normal(size=(2, 1, 3, 48)), "gamma": r.normal(size=32), "cos": r.uniform(-1, 1, (2, 1, 3, 16)),
            "sin": r.uniform(-1, 1, (2, 1, 3, 16)), "index": np.array(index.get(mode, [7, 0, 11, 3, 12, 5]), np.int64),
            "k_cache": r.normal(size=(8, 2, 1, 16) if pages else (2, 1, 6, 16)), "is_output_kv": output,
            "ckv_cache": r.normal(size=(8, 2, 1, 32) if pages else (2, 1, 6, 32)), "cache_mode": mode,
        }  # fmt: skip

    return inputs


CASES = [
    *(
        Case("npu_kv_rmsnorm_rope_cache", to_join(mode, output), joined, writes=("k_cache", "ckv_cache"), note=mode)
        for mode, output in (
            ("Norm", False),
            ("PA", True),
            ("PA_BNSD", False),
            ("PA_NZ", False),
            ("PA_BLK_BNSD", False),
            ("PA_BLK_NZ", True),
        )
    ),
    Case(
        "npu_kv_rmsnorm_rope_cache",
        to_join(
            "PA_NZ",
            True,
            c_kv_scale=np.float32([31.0]),
            k_rope_scale=np.float32(np.linspace(20, 31, 16)),
            c_kv_offset=np.float32([3.0]),
        ),
        joined,
        dtypes=("float32",),
        writes=("k_cache", "ckv_cache"),
        note="int8",
    ),
    *(
        Case("npu_scatter_pa_kv_cache", to_scatter(mode), scatter, exact=True, writes=("key_cache", "value_cache"))
        for mode in (None, "Norm", "PA_NZ")
    ),
    Case("npu_scatter_pa_kv_cache_functional", to_scatter("Norm"), scatter, exact=True),
    *(
        Case("npu_gather_pa_kv_cache", to_gather(ends, **more), gather, exact=True, writes=("key", "value"))
        for ends, more in ((False, {}), (True, {}), (True, {"seq_offset": np.array([2, 5], np.int32)}))
    ),
    Case("npu_scatter_nd_update", to_update, scattered, exact=True),
    Case("npu_scatter_nd_update_", to_update, lambda **known: [scattered(**known)] * 2, exact=True, writes=("input",)),
]
