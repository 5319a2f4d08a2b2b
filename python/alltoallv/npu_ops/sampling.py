"""Chooses which words a language model may say next."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import expect, operator


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
