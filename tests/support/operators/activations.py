"""Activations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from operator_case import Case

Array = np.ndarray[Any, Any]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def swiglu(input: Array, dim: int = -1) -> Array:
    a, b = np.split(input, 2, dim)
    return a * sigmoid(a) * b


def geglu(input: Array, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Array, Array]:
    a, b = np.split(input, 2, dim)
    if activate_left:
        a, b = b, a
    activated = gelu(b, "tanh" if approximate else "none")
    return a * activated, activated


def one(**more: Any) -> Any:
    return lambda r: {"input": r.normal(size=(3, 8)) * 2, **more}


def elementwise(name: str, formula: Any, runs: tuple[str, ...]) -> Case:
    return Case(name, one(), lambda input: formula(input), gradient=("input",) if runs else (), runs=runs)


def fast_gelu(x: Array) -> Array:
    return x * np.exp(0.851 * (x - abs(x))) / (1 + np.exp(-1.702 * abs(x)))


CASES = [
    Case("npu_swiglu", one(), swiglu, gradient=("input",), runs=("npu_swiglu_backward",)),
    Case("npu_swiglu", lambda r: {"input": r.normal(size=(4, 3)), "dim": 0}, swiglu, gradient=("input",)),
    elementwise("npu_silu", lambda x: x * sigmoid(x), ("npu_silu_backward",)),
    Case("npu_silu_", one(), lambda input: [input * sigmoid(input)] * 2, writes=("input",)),
    elementwise("npu_mish", lambda x: x * np.tanh(np.log1p(np.exp(x))), ("npu_mish_backward",)),
    elementwise("npu_fast_gelu", fast_gelu, ("npu_fast_gelu_backward",)),
    elementwise("fast_gelu", fast_gelu, ()),
    *(
        Case("npu_gelu", one(approximate=kind), gelu_of, gradient=("input",), runs=("npu_gelu_backward",))
        for kind, gelu_of in (
            ("none", lambda input, approximate: gelu(input)),
            ("tanh", lambda input, approximate: gelu(input, "tanh")),
        )
    ),
    Case("npu_gelu_mul", one(), lambda input: gelu(input[:, :4]) * input[:, 4:]),
    Case("npu_geglu", one(), geglu, gradient=("input",), runs=("npu_geglu_grad",)),
    Case("npu_geglu", one(approximate=0, activate_left=True), geglu, gradient=("input",)),
]
