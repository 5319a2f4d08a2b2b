"""Norms by the root mean square of the last dimensions, with additions before and casts or quantization after."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import operator


def _normalize(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Normalizes float32 values; the dimensions of gamma make one row."""
    axes = list(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon)
    return x * rstd * gamma, rstd


@operator("npu_rms_norm")
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y, rstd = _normalize(input.float(), gamma.float(), epsilon)
    return y.to(input.dtype), rstd


@operator("npu_gemma_rms_norm")
def gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return rms_norm(input, gamma.float() + 1, epsilon)


@operator("npu_rms_norm_backward")
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients. ``rstd`` is the forward operator's output, which includes its epsilon."""
    x, weight, dy = input.float(), gamma.float(), dy.float()
    axes = list(range(-gamma.dim(), 0))
    scaled = dy * weight
    dx = rstd * (scaled - x * rstd.square() * (scaled * x).mean(axes, keepdim=True))
    dgamma = (dy * x * rstd).reshape(-1, *gamma.shape).sum(0)
    return dx.to(input.dtype), dgamma.to(torch.float32)


@operator("npu_add_rms_norm", "npu_add_rms_norm_v2_functional")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x1.float() + x2.float()
    y, rstd = _normalize(total, gamma.float(), epsilon)
    return y.to(x1.dtype), rstd, total.to(x1.dtype)


@operator("npu_add_rms_norm_cast")
def add_rms_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the result in float32 and in the inputs' dtype, the factors and the sum."""
    y, rstd, total = add_rms_norm(x1.float(), x2.float(), gamma, epsilon)
    return y, y.to(x1.dtype), rstd, total.to(x1.dtype)


@operator("npu_add_rms_norm_v2")
def add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Normalizes in place: x1 becomes the result, x2 the sum."""
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


@operator("npu_add_layer_norm", ignores=("additional_output",))
def add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x1.float() + x2.float()
    y, mean, rstd = torch.native_layer_norm(total, gamma.shape, gamma.float(), beta.float(), epsilon)
    return y.to(x1.dtype), mean, rstd, total.to(x1.dtype)


@operator("npu_deep_norm")
def deep_norm(
    x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor, alpha: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.float() * alpha + gx.float()
    y, mean, rstd = torch.native_layer_norm(total, gamma.shape, gamma.float(), beta.float(), epsilon)
    return mean, rstd, y.to(x.dtype)
