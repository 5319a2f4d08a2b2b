"""Mixture of experts. The references go through tokens and experts one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case

from operators.activations import sigmoid
from operators.quantization import symmetric

Array = np.ndarray[Any, Any]


def choices(r: np.random.Generator, tokens: int = 5, k: int = 2, experts: int = 4, dtype: Any = np.int32) -> Array:
    """Distinct experts for each token."""
    return np.stack([r.permutation(experts)[:k] for _ in range(tokens)]).astype(dtype)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def best(scores: Array, k: int) -> Array:
    return np.argsort(-scores, -1, kind="stable")[..., :k].astype(np.int32)


def top_k_softmax(x: Array, k: int, finished: Array | None = None) -> tuple[Array, Array, Array]:
    y = softmax(x)
    experts = best(y, k)
    values = np.take_along_axis(y, experts, -1)
    rows = np.arange(experts.size).reshape(k, -1).T.reshape(experts.shape).astype(np.int32)
    if finished is not None:
        experts = np.where(finished[..., None], x.shape[-1], experts).astype(np.int32)
    return values, experts, rows


def gating(
    x: Array, k: int, bias: Array, k_group: int, group_count: int, group_select_mode: int, norm_type: int,
    routed_scaling_factor: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    norm = sigmoid(x) if norm_type else softmax(x)
    y, chosen = np.zeros((len(x), k)), np.zeros((len(x), k), np.int32)
    for row in range(len(x)):
        groups = (norm[row] + bias).reshape(group_count, -1)
        scores = groups.max(1) if group_select_mode == 0 else np.sort(groups, 1)[:, -2:].sum(1)
        allowed = np.repeat(np.isin(np.arange(group_count), np.argsort(-scores)[:k_group]), groups.shape[1])
        chosen[row] = np.argsort(-np.where(allowed, groups.reshape(-1), -np.inf), kind="stable")[:k]
        y[row] = norm[row][chosen[row]]
        if norm_type:
            y[row] /= y[row].sum()
    return y * routed_scaling_factor, chosen, norm


def to_gate(**more: Any) -> Any:
    return lambda r: {
        "x": r.permutation(np.linspace(-2, 2, 48)).reshape(4, 12), "bias": r.permutation(np.linspace(-1, 1, 12)),
        "k": 3, **more,
    }  # fmt: skip


def in_order(indices: Array) -> list[int]:
    """Numbers of the choices, by expert and then as they come."""
    flat = indices.reshape(-1)
    return [i for expert in sorted(set(flat.tolist())) for i in range(len(flat)) if flat[i] == expert]


def permute(tokens: Array, indices: Array, num_out_tokens: int | None = None) -> tuple[Array, Array]:
    order, k = in_order(indices), 1 if indices.ndim == 1 else indices.shape[1]
    places = np.zeros(len(order), np.int32)
    for place, choice in enumerate(order):
        places[choice] = place
    return np.stack([tokens[choice // k] for choice in order])[: num_out_tokens or None], places


def unpermute(
    permuted_tokens: Array, sorted_indices: Array, probs: Array | None = None, restore_shape: Any = None
) -> Array:
    k = 1 if probs is None else probs.shape[1]
    result = np.zeros((len(sorted_indices) // k, permuted_tokens.shape[1]))
    for choice, place in enumerate(sorted_indices):
        if place < len(permuted_tokens):
            weight = 1 if probs is None else probs[choice // k, choice % k]
            result[choice // k] += weight * permuted_tokens[place]
    return result


def to_unpermute(kept: int, with_probs: bool, **more: Any) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        probs = {"probs": r.uniform(size=(3, 2))} if with_probs else {}
        return {
            "permuted_tokens": r.normal(size=(kept, 4)),
            "sorted_indices": r.permutation(6).astype(np.int32),
            **probs,
            **more,
        }

    return inputs


def init_routing(x: Array, row_idx: Array, expert_idx: Array, active_num: int) -> tuple[Array, Array, Array]:
    order = in_order(expert_idx)
    rows = [row_idx.reshape(-1)[choice] for choice in order]
    places = np.zeros(len(order), np.int32)
    for place, row in enumerate(rows):
        places[row] = place
    expanded = np.stack([x[row % len(x)] for row in rows])[: active_num * expert_idx.shape[1]]
    return expanded, places, expert_idx.reshape(-1)[order]


def init_routing_v2(
    x: Array, expert_idx: Array, expert_num: int, active_expert_range: list[int], expert_tokens_num_type: int,
    row_idx_type: int, quant_mode: int, active_num: int, expert_tokens_num_flag: bool, scale: Array | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    first, end = active_expert_range
    flat, k = expert_idx.reshape(-1), expert_idx.shape[1]
    order = [i for expert in range(first, end) for i in range(len(flat)) if flat[i] == expert]
    places = len(flat) if active_num <= 0 else min(active_num, len(flat))
    expanded = np.zeros((places, x.shape[1]))
    scales = np.zeros(places)
    counts = np.array([(flat == expert).sum() for expert in range(first, end)], np.int64)
    order = order[:places]
    index = np.full(len(flat), -1, np.int32)
    for place, choice in enumerate(order):
        expanded[place] = x[choice // k]
        if scale is not None:
            scales[place] = scale[choice // k]
        index[choice if row_idx_type == 0 else place] = place if row_idx_type == 0 else choice
    if quant_mode == 1:
        made = symmetric(expanded[: len(order)])
        expanded = np.concatenate([made[0], np.zeros((places - len(order), x.shape[1]), np.int8)])
        scales[: len(order)] = made[1]
    if expert_tokens_num_type == 2:
        pairs = [(first + i, count) for i, count in enumerate(counts) if count]
        counts = np.array(pairs + [(0, 0)] * (expert_num - len(pairs)), np.int64)
    return expanded, index, counts, scales


def to_capacity(capacity: int, quantized: bool) -> Any:
    return lambda r: {
        "x": r.normal(size=(5, 8)), "expert_idx": choices(r, k=3, experts=6), "expert_num": 6, "drop_pad_mode": 1,
        "expert_capacity": capacity, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True,
        "quant_mode": 1 if quantized else -1, "scale": np.float32(r.uniform(0.5, 2, (6, 8) if quantized else 5)),
    }  # fmt: skip


def with_capacity(
    x: Array, expert_idx: Array, expert_num: int, expert_capacity: int, quant_mode: int, scale: Array, **_: Any
) -> tuple[Any, ...]:
    """Each expert has its first choices' rows, and rows of zeros."""
    flat, k = expert_idx.reshape(-1), expert_idx.shape[1]
    rows = np.zeros((expert_num, expert_capacity, x.shape[1]))
    scales, index = np.zeros(expert_num * expert_capacity), np.full(len(flat), -1, np.int32)
    for expert in range(expert_num):
        for i, choice in enumerate(np.flatnonzero(flat == expert)[:expert_capacity]):
            place = index[choice] = expert * expert_capacity + i
            rows[expert, i], scales[place] = x[choice // k], scale[choice // k] if quant_mode < 0 else 0
            if quant_mode == 1:
                rows[expert, i], scales[place] = symmetric(x[choice // k].astype(np.float32) * scale[expert])
    return rows, index, np.bincount(flat, minlength=expert_num), scales


def to_route(kind: int, index: int, quantized: bool, scaled: bool, active: list[int], active_num: int = -1) -> Any:
    return lambda r: {
        "x": r.normal(size=(5, 8)), "expert_idx": choices(r, k=3, experts=6), "expert_num": 6,
        "active_expert_range": active, "expert_tokens_num_type": kind, "row_idx_type": index,
        "quant_mode": 1 if quantized else -1, "active_num": active_num, "expert_tokens_num_flag": True,
        **({"scale": np.float32(r.uniform(size=5))} if scaled else {}),
    }  # fmt: skip


def finalize(
    expanded_permuted_rows: Array, skip1: Any, skip2: Any, bias: Any, scales: Array, expanded_src_to_dst_row: Array,
    export_for_source_row: Array, drop_pad_mode: int = 0,
) -> Array:  # fmt: skip
    rows, k = scales.shape
    expanded_permuted_rows = expanded_permuted_rows.reshape(-1, expanded_permuted_rows.shape[-1])
    result = np.zeros((rows, expanded_permuted_rows.shape[1]))
    for i in range(rows):
        for j in range(k):
            place = expanded_src_to_dst_row[i + j * rows if drop_pad_mode in (0, 1) else i * k + j]
            if place == -1:
                continue
            own = 0 if bias is None else bias[export_for_source_row[i, j]]
            result[i] += scales[i, j] * (expanded_permuted_rows[place] + own)
    return result + (0 if skip1 is None else skip1) + (0 if skip2 is None else skip2)


def to_finalize(plain: bool, **more: Any) -> Any:
    return lambda r: {
        "expanded_permuted_rows": r.normal(size=(6, 4)), "skip1": None if plain else r.normal(size=(3, 4)),
        "skip2": None if plain else r.normal(size=(3, 4)), "bias": None if plain else r.normal(size=(5, 4)),
        "scales": r.uniform(size=(3, 2)), "expanded_src_to_dst_row": r.permutation(6).astype(np.int32),
        "export_for_source_row": choices(r, 3, 2, 5), **more,
    }  # fmt: skip


def re_routing(
    tokens: Array, expert_token_num_per_rank: Array, per_token_scales: Array, idx_type: int = 0
) -> tuple[Array, ...]:
    counts, order = expert_token_num_per_rank, []
    starts = np.concatenate([[0], np.cumsum(counts.reshape(-1))])
    for expert in range(counts.shape[1]):
        for rank in range(counts.shape[0]):
            start = starts[rank * counts.shape[1] + expert]
            order += list(range(start, start + counts[rank, expert]))
    index = np.array(order, np.int32)
    if idx_type:
        index = np.array([order.index(i) for i in range(len(order))], np.int32)
    return tokens[order], per_token_scales[order], index, counts.sum(0)


def to_re_route(**more: Any) -> Any:
    return lambda r: {
        "tokens": r.normal(size=(8, 3)), "expert_token_num_per_rank": np.array([[1, 0, 3], [2, 1, 1]], np.int32),
        "per_token_scales": np.float32(r.uniform(size=8)), **more,
    }  # fmt: skip


# Two rows for each of four experts, of which six choices use five.
PADDED = {
    "expanded_permuted_rows": np.linspace(-1, 1, 32).reshape(4, 2, 4),
    "expanded_src_to_dst_row": np.array([6, 0, -1, 3, 5, 2], np.int32),
}

CASES = [
    Case("npu_moe_gating_top_k_softmax", lambda r: {
        "x": r.permutation(np.linspace(-2, 2, 24)).reshape(3, 8), "finished": np.array([False, True, False]), "k": 3,
    }, top_k_softmax),
    Case("npu_moe_gating_top_k_softmax",
         lambda r: {"x": r.permutation(np.linspace(-2, 2, 24)).reshape(2, 3, 4), "k": 2}, top_k_softmax),
    Case("npu_moe_gating_top_k_softmax_v2", lambda r: {
        "x": r.permutation(np.linspace(-2, 2, 24)).reshape(3, 8), "k": 3, "output_softmax": True,
    }, lambda x, k, output_softmax: (*top_k_softmax(x, k)[:2], softmax(x))),
    Case("npu_moe_gating_top_k_softmax_v2",
         lambda r: {"x": r.permutation(np.linspace(-2, 2, 24)).reshape(3, 8), "k": 3, "renorm": 1},
         lambda x, k, renorm: (softmax(-np.sort(-x, -1)[:, :k]), best(x, k), np.zeros(0)), note="renorm"),
    *(
        Case("npu_moe_gating_top_k", to_gate(k_group=kept, group_count=groups, group_select_mode=mode, norm_type=norm,
                                             routed_scaling_factor=2.5), gating)
        for kept, groups, mode, norm in ((1, 1, 0, 0), (2, 4, 1, 1), (2, 4, 0, 1))
    ),
    Case("npu_moe_token_permute", lambda r: {"tokens": r.normal(size=(5, 4)), "indices": choices(r)}, permute,
         exact=True, gradient=("tokens",), runs=("npu_moe_token_permute_grad", "npu_moe_token_permute_grad_v2")),
    Case("npu_moe_token_permute",
         lambda r: {"tokens": r.normal(size=(5, 4)), "indices": choices(r, dtype=np.int64), "num_out_tokens": 7},
         permute, exact=True, gradient=("tokens",), note="dropped"),
    Case("npu_moe_token_permute", lambda r: {"tokens": r.normal(size=(5, 4)), "indices": choices(r)[:, 0]}, permute,
         exact=True, gradient=("tokens",), note="one expert"),
    *(
        Case("npu_moe_token_unpermute", to_unpermute(kept, probs, **more), unpermute,
             gradient=("permuted_tokens", *(["probs"] if probs else [])),
             runs=("_npu_moe_token_unpermute", "npu_moe_token_unpermute_grad", "npu_moe_token_unpermute_grad_v2"))
        for kept, probs, more in (
            (6, True, {}), (6, False, {}), (4, True, {}), (6, True, {"restore_shape": [3, 4]}),
        )
    ),
    Case("npu_moe_init_routing", lambda r: {
        "x": r.normal(size=(5, 4)), "row_idx": np.arange(10, dtype=np.int32).reshape(2, 5).T.copy(),
        "expert_idx": choices(r), "active_num": 4,
    }, init_routing, exact=True),
    Case("npu_moe_compute_expert_tokens", lambda r: {
        "sorted_expert_for_source_row": np.array([0, 0, 1, 3, 3, 3], np.int32), "num_expert": 5,
    }, lambda sorted_expert_for_source_row, num_expert: np.array([2, 3, 3, 6, 6], np.int32), dtypes=("int32",)),
    *(
        Case("npu_moe_init_routing_v2", to_route(*arguments), init_routing_v2, exact=True)
        for arguments in (
            (1, 0, False, True, [0, 6]), (1, 1, False, False, [2, 4]), (2, 0, False, False, [0, 6]),
            (1, 0, True, False, [1, 5]), (1, 0, False, True, [0, 6], 7), (1, 1, True, False, [2, 5], 4),
            (1, 0, False, False, [2, 4], 15),
        )
    ),
    *(
        Case("npu_moe_init_routing_v2", to_capacity(*arguments), with_capacity, exact=True, note="capacity")
        for arguments in ((2, False), (3, True))
    ),
    Case("npu_moe_finalize_routing", to_finalize(False), finalize),
    Case("npu_moe_finalize_routing", to_finalize(True, drop_pad_mode=2), finalize),
    *(Case("npu_moe_finalize_routing", to_finalize(False, drop_pad_mode=mode, **PADDED), finalize) for mode in (1, 3)),
    Case("npu_moe_re_routing", to_re_route(), re_routing, exact=True),
    Case("npu_moe_re_routing", to_re_route(idx_type=1), re_routing, exact=True),
]  # fmt: skip
