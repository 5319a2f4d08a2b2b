"""Softmax with a mask, and cross entropy with probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case

from operators.moe import softmax

Array = np.ndarray[Any, Any]


def masked(x: Array, mask: Array, scale: float) -> Array:
    return softmax(np.where(mask, -10000.0, scale * x))


def cross_entropy(input: Array, labels: Array) -> Array:
    return np.array(
        [-sum(p * np.log(q) for p, q in zip(*pair, strict=True)) for pair in zip(labels, softmax(input), strict=True)]
    )


def to_mask(r: np.random.Generator) -> dict[str, Any]:
    return {"x": r.normal(size=(2, 2, 3, 4)), "mask": np.triu(np.ones((2, 1, 3, 4), bool), 1), "scale": 0.5}


CASES = [
    Case("npu_scaled_masked_softmax", to_mask, masked, gradient=("x",), runs=("npu_scaled_masked_softmax_backward",)),
    Case(
        "npu_softmax_cross_entropy_with_logits",
        lambda r: {"input": r.normal(size=(3, 5)), "labels": softmax(r.normal(size=(3, 5)))},
        cross_entropy,
        gradient=("input",),
        runs=("npu_softmax_cross_entropy_with_logits_backward",),
    ),
]
