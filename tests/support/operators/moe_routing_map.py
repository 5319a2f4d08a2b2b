"""Mixture of experts by a map."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case

Array = np.ndarray[Any, Any]


def routed(r: np.random.Generator, tokens: int = 4, k: int = 2, experts: int = 3) -> Array:
    made = np.zeros((tokens, experts), bool)
    for token in range(tokens):
        made[token, r.permutation(experts)[:k]] = True
    return made


def slots(routing_map: Array, capacity: int | None) -> list[tuple[int, int]]:
    """Token and expert of each row."""
    made = []
    for expert in range(routing_map.shape[1]):
        tokens = [t for t in range(len(routing_map)) if routing_map[t, expert]]
        if capacity is not None:
            tokens = (tokens + [t for t in range(len(routing_map)) if not routing_map[t, expert]])[:capacity]
        made += [(token, expert) for token in tokens]
    return made


def permute(
    tokens: Array, routing_map: Array, num_out_tokens: int, drop_and_pad: bool, probs: Array | None = None
) -> tuple[Array, ...]:
    rows = slots(routing_map, num_out_tokens // routing_map.shape[1] if drop_and_pad else None)
    of_probs = None if probs is None else np.array([probs[row] for row in rows])
    places = [token for token, _ in rows]
    if not drop_and_pad:
        places = [rows.index(row) for row in sorted(rows)]
    return np.stack([tokens[token] for token, _ in rows]), of_probs, np.array(places, np.int32)


def unpermute(
    permuted_tokens: Array, sorted_indices: Array, restore_shape: list[int], drop_and_pad: bool,
    probs: Array | None = None, routing_map: Array | None = None,
) -> Array:  # fmt: skip
    result = np.zeros(restore_shape)
    for number, place in enumerate(sorted_indices):
        if drop_and_pad:
            token, row = place, number
            expert = number // (len(sorted_indices) // 3)
        else:
            token, row = number // (len(sorted_indices) // len(result)), place
            expert = 0 if routing_map is None else slots(routing_map, None)[place][1]
        result[token] += permuted_tokens[row] * (1 if probs is None else probs[token, expert])
    return result


def to_permute(pad: bool, with_probs: bool) -> Any:
    return lambda r: {
        "tokens": r.normal(size=(4, 5)), "routing_map": routed(r), "num_out_tokens": 6 if pad else 8,
        "drop_and_pad": pad, **({"probs": r.uniform(size=(4, 3))} if with_probs else {}),
    }  # fmt: skip


def to_unpermute(pad: bool, with_probs: bool) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        routing_map = routed(r)
        places = permute(np.zeros((4, 5)), routing_map, 6 if pad else 8, pad)[2]
        probs = {"probs": r.uniform(size=(4, 3)), "routing_map": routing_map} if with_probs else {}
        return {
            "permuted_tokens": r.normal(size=(len(places), 5)), "sorted_indices": places, "restore_shape": [4, 5],
            "drop_and_pad": pad, **probs,
        }  # fmt: skip

    return inputs


CASES = [
    case
    for pad in (False, True)
    for with_probs in (False, True)
    for case in (
        Case(
            "npu_moe_token_permute_with_routing_map",
            to_permute(pad, with_probs),
            permute,
            exact=True,
            gradient=("tokens", *(["probs"] if with_probs else [])),
            runs=("npu_moe_token_permute_with_routing_map_grad",),
        ),
        Case(
            "npu_moe_token_unpermute_with_routing_map",
            to_unpermute(pad, with_probs),
            unpermute,
            gradient=("permuted_tokens", *(["probs"] if with_probs else [])),
            runs=("_npu_moe_token_unpermute_with_routing_map", "npu_moe_token_unpermute_with_routing_map_grad"),
        ),
    )
]
