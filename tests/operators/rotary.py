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


CASES = [
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
