"""Rotary position embeddings: every pair of numbers is turned by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case

Array = np.ndarray[Any, Any]


def turned(x: Array, cos: Array, sin: Array, mode: str = "half") -> Array:
    result, size = np.zeros_like(x), x.shape[-1]
    cos, sin = (np.broadcast_to(one, x.shape) for one in (cos, sin))
    for i in range(size // 2):
        a, b = (i, i + size // 2) if mode == "half" else (2 * i, 2 * i + 1)
        result[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        result[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return result


def to_turn(**more: Any) -> Any:
    return lambda r: {
        "input": r.normal(size=(2, 3, 2, 8)), "r1": r.uniform(-1, 1, (1, 3, 1, 8)),
        "r2": r.uniform(-1, 1, (1, 3, 1, 8)), **more,
    }  # fmt: skip


def both(query: Array, key: Array, cos: Array, sin: Array) -> list[Array]:
    return [turned(query, cos, sin), turned(key, cos, sin)] * 2


def by_position(
    positions: Array, query: Array, key: Array, cos_sin_cache: Array, head_size: int, **known: Any
) -> list[Array]:
    """Every pair has the angle of its section's position: in order, or with interleave every third."""
    sections, mode = known.get("mrope_section"), known.get("rotary_mode", "half").removesuffix("d")
    tokens, pairs = positions.shape[-1], cos_sin_cache.shape[1] // 2
    cos, sin = np.zeros((2, tokens, 1, 2 * pairs))
    for token in range(tokens):
        for pair in range(pairs):
            place = positions[token] if positions.ndim == 1 else positions[0, token]
            if sections and known["cache_mode"] == "interleave" and pair < 3 * sections[1]:
                place = positions[pair % 3, token]
            elif sections and known["cache_mode"] == "default":
                place = positions[np.searchsorted(np.cumsum(sections), pair, "right"), token]
            for both in (pair, pair + pairs) if mode == "half" else (2 * pair, 2 * pair + 1):
                cos[token, 0, both], sin[token, 0, both] = cos_sin_cache[place, [pair, pair + pairs]]
    results = []
    for x in (query, key):
        heads = x.reshape(tokens, -1, head_size)
        made = np.concatenate([turned(heads[..., : 2 * pairs], cos, sin, mode), heads[..., 2 * pairs :]], -1)
        results.append(made.reshape(x.shape))
    return results


def to_position(size: int, **more: Any) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        rows = [len(more["mrope_section"])] if "mrope_section" in more else []
        return {
            "positions": r.integers(0, 9, (*rows, 5)), "query": r.normal(size=(5, 2 * size)), "head_size": size,
            "key": r.normal(size=(5, size)), "cos_sin_cache": r.uniform(-1, 1, (9, 32)), **more,
        }  # fmt: skip

    return inputs


CASES = [
    *(
        Case("npu_mrope", to_position(size, **more), by_position, note=note)
        for note, size, more in (
            ("one position", 32, {}),
            ("interleaved, some places pass", 48, {"rotary_mode": "interleaved"}),
            ("three sections", 32, {"mrope_section": [4, 6, 6], "cache_mode": "default"}),
            ("four sections", 32, {"mrope_section": [4, 4, 4, 4], "cache_mode": "default"}),
            ("sections interleaved", 32, {"mrope_section": [6, 5, 5], "cache_mode": "interleave"}),
        )
    ),
    *(
        Case("npu_rotary_mul", to_turn(rotary_mode=mode), lambda input, r1, r2, rotary_mode: turned(
            input, r1, r2, rotary_mode
        ), gradient=("input", "r1", "r2"), runs=("npu_rotary_mul_backward",))
        for mode in ("half", "interleave")
    ),
    Case("npu_rotary_mul", lambda r: {**to_turn()(r), "rotate": r.normal(size=(8, 8))},
         lambda input, r1, r2, rotate: input * r1 + input @ rotate * r2, note="rotate"),
    Case("npu_apply_rotary_pos_emb", lambda r: {
        "query": r.normal(size=(2, 3, 4, 8)), "key": r.normal(size=(2, 3, 1, 8)),
        "cos": r.uniform(-1, 1, (2, 3, 1, 8)), "sin": r.uniform(-1, 1, (2, 3, 1, 8)),
    }, both, writes=("query", "key")),
    Case("npu_interleave_rope", lambda r: {
        "x": r.normal(size=(2, 4, 3, 8)), "cos": r.uniform(-1, 1, (2, 1, 3, 8)), "sin": r.uniform(-1, 1, (2, 1, 3, 8)),
    }, lambda x, cos, sin: turned(np.concatenate([x[..., ::2], x[..., 1::2]], -1), cos, sin)),
]  # fmt: skip
