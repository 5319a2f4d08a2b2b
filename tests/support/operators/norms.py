"""Norms."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case

Array = np.ndarray[Any, Any]


def rms(x: Array, gamma: Array, epsilon: float) -> tuple[Array, Array]:
    rows = x.reshape(-1, gamma.size)
    root = 1 / np.sqrt((rows * rows).sum(1) / gamma.size + epsilon)
    shape = (*x.shape[: x.ndim - gamma.ndim], *[1] * gamma.ndim)
    return (rows * root[:, None] * gamma.reshape(-1)).reshape(x.shape), root.reshape(shape)


def add_rms(x1: Array, x2: Array, gamma: Array, epsilon: float = 1e-6) -> tuple[Array, Array, Array]:
    return (*rms(x1 + x2, gamma, epsilon), x1 + x2)


def add_rms_cast(x1: Array, x2: Array, gamma: Array) -> tuple[Array, ...]:
    y, rstd, total = add_rms(x1, x2, gamma)
    return y, y, rstd, total


def layer(x: Array, gamma: Array, beta: Array, epsilon: float) -> tuple[Array, Array, Array]:
    mean = x.mean(-1, keepdims=True)
    root = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon)
    return (x - mean) * root * gamma + beta, mean, root


def deep(x: Array, gx: Array, beta: Array, gamma: Array, alpha: float) -> tuple[Array, Array, Array]:
    y, mean, root = layer(alpha * x + gx, gamma, beta, 1e-6)
    return mean, root, y


def two(r: np.random.Generator) -> dict[str, Any]:
    return {"x1": r.normal(size=(2, 3, 8)), "x2": r.normal(size=(2, 3, 8)), "gamma": r.normal(size=8)}


CASES = [
    Case(
        "npu_rms_norm",
        lambda r: {"input": r.normal(size=(3, 8)), "gamma": r.normal(size=8), "epsilon": 1e-3},
        lambda input, gamma, epsilon: rms(input, gamma, epsilon),
        gradient=("input", "gamma"),
        runs=("npu_rms_norm_backward",),
    ),
    Case(
        "npu_rms_norm",
        lambda r: {"input": r.normal(size=(2, 3, 4)), "gamma": r.normal(size=(3, 4)), "epsilon": 1e-6},
        lambda input, gamma, epsilon: rms(input, gamma, epsilon),
        gradient=("input", "gamma"),
        note="rows of two dimensions",
    ),
    Case(
        "npu_gemma_rms_norm",
        lambda r: {"input": r.normal(size=(3, 8)), "gamma": r.normal(size=8)},
        lambda input, gamma: rms(input, 1 + gamma, 1e-6),
    ),
    Case("npu_add_rms_norm", two, add_rms),
    Case(
        "npu_add_rms_norm_v2_functional", two, lambda x1, x2, gamma: [add_rms(x1, x2, gamma)[i] for i in (1, 0, 2)]
    ),
    Case("npu_add_rms_norm_cast", two, add_rms_cast),
    Case(
        "npu_add_rms_norm_v2",
        two,
        lambda x1, x2, gamma: [add_rms(x1, x2, gamma)[i] for i in (1, 0, 2)],
        writes=("x1", "x2"),
    ),
    Case(
        "npu_add_layer_norm",
        lambda r: {**two(r), "beta": r.normal(size=8)},
        lambda x1, x2, gamma, beta: (*layer(x1 + x2, gamma, beta, 1e-5), None),
    ),
    Case(
        "npu_deep_norm",
        lambda r: {
            "x": r.normal(size=(3, 8)), "gx": r.normal(size=(3, 8)), "beta": r.normal(size=8),
            "gamma": r.normal(size=8), "alpha": 0.4,
        },
        deep,
    ),
]  # fmt: skip
