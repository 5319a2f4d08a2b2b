"""Caches of keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case

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
    return [
        np.stack([cache[block_tables[b, i // 4], i % 4] for b, length in enumerate(lengths) for i in range(length)])
        for cache in (key_cache, value_cache)
    ]


def to_gather(ends: bool) -> Any:
    return lambda r: {
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


CASES = [
    *(
        Case("npu_scatter_pa_kv_cache", to_scatter(mode), scatter, exact=True, writes=("key_cache", "value_cache"))
        for mode in (None, "Norm", "PA_NZ")
    ),
    Case("npu_scatter_pa_kv_cache_functional", to_scatter("Norm"), scatter, exact=True),
    *(
        Case("npu_gather_pa_kv_cache", to_gather(ends), gather, exact=True, writes=("key", "value"))
        for ends in (False, True)
    ),
    Case("npu_scatter_nd_update", to_update, scattered, exact=True),
    Case("npu_scatter_nd_update_", to_update, lambda **known: [scattered(**known)] * 2, exact=True, writes=("input",)),
]
