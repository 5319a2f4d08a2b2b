"""Activations and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.registry import backward, expect, operator, renamed


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    expect(x.size(dim) % 2 == 0, "input", x, f"an even size of dimension {dim}")
    a, b = x.float().chunk(2, dim)
    return a, b


def swish_of_first(x: Tensor, dim: int) -> Tensor:
    """Returns SwiGLU in float32: swish of the first half of dimension ``dim``, times the second half."""
    a, b = _halves(x, dim)
    return functional.silu(a) * b


@operator("npu_fast_gelu", "fast_gelu")
def fast_gelu(input: Tensor) -> Tensor:
    x = input.float()
    return (x * torch.sigmoid(1.702 * x)).to(input.dtype)


@operator("npu_mish")
def mish(input: Tensor) -> Tensor:
    return functional.mish(input.float()).to(input.dtype)


@operator("npu_swiglu")
def swiglu(input: Tensor, dim: int) -> Tensor:
    return swish_of_first(input, dim).to(input.dtype)


@operator("npu_silu")
def silu(input: Tensor) -> Tensor:
    return functional.silu(input.float()).to(input.dtype)


@operator("npu_silu_")
def silu_(input: Tensor) -> Tensor:
    return input.copy_(silu(input))


@operator("npu_gelu")
def gelu(input: Tensor, approximate: str) -> Tensor:
    return functional.gelu(input.float(), approximate=approximate).to(input.dtype)


@operator("npu_gelu_mul")
def gelu_mul(input: Tensor, approximate: str) -> Tensor:
    a, b = _halves(input, -1)
    return (functional.gelu(a, approximate=approximate) * b).to(input.dtype)


@operator("npu_geglu")
def geglu(input: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    """Returns one half times GELU of the other half, and that GELU; ``approximate``: 1 for tanh, 0 for none."""
    expect(approximate in (0, 1), "approximate", approximate, "0 or 1")
    first, second = _halves(input, dim)
    activated, factor = (first, second) if activate_left else (second, first)
    activated = functional.gelu(activated, approximate="tanh" if approximate else "none")
    return (factor * activated).to(input.dtype), activated.to(input.dtype)


backward("npu_fast_gelu_backward", fast_gelu, grad="grad")
backward("npu_mish_backward", mish, grad="grad")
backward("npu_swiglu_backward", swiglu)
backward("npu_silu_backward", renamed(silu, names={"x0": "input"}), inputs=("x0",), ignores=("x1",))  # x1: the result
backward("npu_gelu_backward", gelu)
backward("npu_geglu_grad", geglu, ignores=("gelu",))
