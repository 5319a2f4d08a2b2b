"""Activations and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.registry import differentiate, expect, operator


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    expect(x.size(dim) % 2 == 0, "input", x, f"an even size of dimension {dim}")
    a, b = x.float().chunk(2, dim)
    return a, b


def swish_of_first(x: Tensor, dim: int) -> Tensor:
    """Returns SwiGLU in float32: swish of the first half of dimension ``dim``, times the second half."""
    a, b = _halves(x, dim)
    return functional.silu(a) * b


def _elementwise(name: str, backward: str, formula: Callable[[Tensor], Tensor]) -> None:
    """Registers an operator of one tensor, and its backward operator of the output's gradient and that tensor."""

    def run(input: Tensor) -> Tensor:
        return formula(input.float()).to(input.dtype)

    def gradient(grad: Tensor, input: Tensor) -> Tensor:
        return differentiate(run, [input], grad)[0]

    operator(name)(run)
    operator(backward)(gradient)


def _fast_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_elementwise("npu_fast_gelu", "npu_fast_gelu_backward", _fast_gelu)
_elementwise("npu_mish", "npu_mish_backward", functional.mish)
operator("fast_gelu")(lambda input: _fast_gelu(input.float()).to(input.dtype))


@operator("npu_swiglu")
def swiglu(input: Tensor, dim: int) -> Tensor:
    return swish_of_first(input, dim).to(input.dtype)


@operator("npu_swiglu_backward")
def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    return differentiate(lambda x: swiglu(x, dim), [input], grad_output)[0]


@operator("npu_silu")
def silu(input: Tensor) -> Tensor:
    return functional.silu(input.float()).to(input.dtype)


@operator("npu_silu_")
def silu_(input: Tensor) -> Tensor:
    return input.copy_(silu(input))


@operator("npu_silu_backward", ignores=("x1",))
def silu_backward(grad_output: Tensor, x0: Tensor) -> Tensor:
    """Returns silu's gradient. ``x0`` is the input; the result ``x1``, which torch_npu also passes, is not needed."""
    return differentiate(silu, [x0], grad_output)[0]


@operator("npu_gelu")
def gelu(input: Tensor, approximate: str) -> Tensor:
    return functional.gelu(input.float(), approximate=approximate).to(input.dtype)


@operator("npu_gelu_backward")
def gelu_backward(grad_output: Tensor, input: Tensor, approximate: str) -> Tensor:
    return differentiate(lambda x: gelu(x, approximate), [input], grad_output)[0]


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


@operator("npu_geglu_grad", ignores=("gelu",))
def geglu_grad(grad_output: Tensor, input: Tensor, dim: int, approximate: int, activate_left: bool) -> Tensor:
    return differentiate(lambda x: geglu(x, dim, approximate, activate_left)[0], [input], grad_output)[0]
