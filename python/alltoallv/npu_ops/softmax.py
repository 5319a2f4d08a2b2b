"""Softmax with a mask, cross entropy with probabilities, and which words a language model may say next."""

from __future__ import annotations

import torch
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


@operator("npu_top_k_top_p")
def top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    """Returns the logits, but -inf for all that are not among a row's ``k`` largest, or not among its likeliest.

    These are the fewest whose probabilities, after the choice of k, sum up to ``p`` at least. One is always left.
    """
    expect(logits.dim() == 2, "logits", logits, "[rows, words]")
    words = logits.size(1)
    ordered, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        expect(bool(((k >= 1) & (k <= words)).all()), "k", k.tolist(), f"numbers from 1 to {words}")
        ordered = ordered.masked_fill(ordered < ordered.gather(1, words - k.long().unsqueeze(1)), -torch.inf)
    if p is not None:
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - p.float().unsqueeze(1)
        dropped[:, -1] = False
        ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered).to(logits.dtype)
