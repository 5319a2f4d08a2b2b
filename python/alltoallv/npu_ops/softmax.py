"""Softmax with a mask, and cross entropy with probabilities."""

from __future__ import annotations

from torch import Tensor

from alltoallv.npu_ops.registry import backward, expect, operator


@operator("npu_scaled_masked_softmax")
def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns the softmax of x * scale over the last dimension; what the mask hides counts as -10000."""
    return (x.float() * scale).masked_fill(mask.bool(), -10000.0).softmax(-1).to(x.dtype)


@operator("npu_scaled_masked_softmax_backward")
def scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    expect(not fixed_triu_mask, "fixed_triu_mask", fixed_triu_mask, "False")
    grad, result = y_grad.float(), y.float()
    inner = (grad * result).sum(-1, keepdim=True)
    return (result * (grad - inner) * scale).masked_fill(mask.bool(), 0.0).to(y_grad.dtype)


@operator("npu_softmax_cross_entropy_with_logits")
def softmax_cross_entropy_with_logits(input: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy of each row, with a probability for each class."""
    return -(labels.float() * input.float().log_softmax(-1)).sum(-1).to(input.dtype)


backward("npu_softmax_cross_entropy_with_logits_backward", softmax_cross_entropy_with_logits, grad="grad")
