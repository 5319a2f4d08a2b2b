"""Makes optimizer steps, and tests whether gradients are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import expect, operator


@operator("npu_apply_adam_w.out")
def apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    out: list[Tensor],
) -> tuple[Tensor, ...]:
    """Makes one step in place on ``out``, the weights and both moments; the powers are those of the previous step."""
    expect(len(out) == 3, "out", len(out), "weights and both moments")
    var, m, v = out
    step = -grad.float() if maximize else grad.float()
    first = m.float() * beta1 + step * (1 - beta1)
    second = v.float() * beta2 + step * step * (1 - beta2)
    if amsgrad:
        expect(max_grad_norm is not None, "max_grad_norm", None, "a tensor, with amsgrad")
        second = torch.maximum(max_grad_norm.float(), second) if max_grad_norm is not None else second
    bias1, bias2 = 1 - beta1_power * beta1, 1 - beta2_power * beta2
    change = first / bias1 / ((second / bias2).sqrt() + epsilon)
    var.copy_(var.float() - lr * change - lr * weight_decay * var.float())
    m.copy_(first)
    v.copy_(second)
    return var, m, v


@operator("_amp_foreach_non_finite_check")
def amp_foreach_non_finite_check(scaled_grads: list[Tensor]) -> bool:
    return any(not bool(grad.isfinite().all()) for grad in scaled_grads)
