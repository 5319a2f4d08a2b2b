"""The attention operators share this code: layouts, masks, and attention of sequences, forwards and backwards.

Sequences are [heads, length, size]; those of one length may come together, with one more dimension in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import expect, present

# The order of axes from each layout to [batch, heads, length, size], once BSH and SBH have heads split off.
_TO_BNSD = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3)}


def lengths_of(ends: Sequence[int]) -> list[int]:
    """Returns the lengths of sequences with these ends; zeros at the end stand for sequences without tokens.

    A batch of no sequences is one without tokens.
    """
    ends = list(accumulate((int(end) for end in ends), max)) or [0]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def split(x: Tensor, layout: str, heads: int, lengths: Sequence[int] | None) -> list[Tensor]:
    """Returns each sequence as [heads, length, size], or the batch where it is empty; only TND needs the lengths."""
    if layout == "TND":
        each = list(present(lengths, "actual_seq_qlen", "where each sequence ends, for layout TND"))
        return [part.transpose(0, 1) for part in x[: sum(each)].split(each)]
    whole = batch_of(x, layout, heads)
    return list(whole) or [whole]


def batch_of(x: Tensor, layout: str, heads: int) -> Tensor:
    """Returns all sequences as [batch, heads, length, size], for layouts that have them equally long."""
    expect(layout in _TO_BNSD, "input_layout", layout, "BSH, SBH, BSND, BNSD or TND")
    return (x.unflatten(-1, (heads, -1)) if x.dim() == 3 else x).permute(_TO_BNSD[layout])


def join(parts: Sequence[Tensor], layout: str) -> Tensor:
    """Reverses `split`, and `batch_of` where there is one part."""
    if layout == "TND":
        return torch.cat([part.transpose(0, 1) for part in parts])
    order = _TO_BNSD[layout]
    whole = parts[0] if parts[0].dim() == 4 else torch.stack(list(parts))
    whole = whole.permute([order.index(axis) for axis in range(4)])
    return (whole.flatten(2) if layout in ("BSH", "SBH") else whole).contiguous()


def hidden(
    mask: Tensor | None, sparse_mode: int, batch: int | None, queries: int, keys: int, before: int, after: int
) -> Tensor | None:
    """Returns what a sequence, or all (None), must not see: [queries, keys], with the mask's batch and heads."""
    expect(sparse_mode in (0, 1, 2, 3, 4), "sparse_mode", sparse_mode, "0 to 4")
    if mask is None:
        return None
    if sparse_mode in (0, 1):
        mask = mask.bool()
        if mask.dim() == 3:
            mask = mask.unsqueeze(1)
        if mask.dim() == 4 and batch is not None:
            mask = mask[min(batch, mask.size(0) - 1)]
        return mask[..., :queries, :keys]
    shift = 0 if sparse_mode == 2 else keys - queries
    distance = torch.arange(keys) - (torch.arange(queries) + shift).unsqueeze(1)
    return distance > 0 if sparse_mode != 4 else (distance > after) | (distance < -before)


class Attention(NamedTuple):
    """Holds the result [heads, queries, size], and each query's largest score and sum of exponentials."""

    result: Tensor
    largest: Tensor
    total: Tensor


def scores_of(query: Tensor, key: Tensor, scale: float, unseen: Tensor | None, pse: Tensor | None) -> Tensor:
    """Returns scale * (query * key + pse) in float32, -inf where a query must not look.

    Groups of query heads share the heads of keys.
    """
    scores = query.float() @ _for_heads(key, query.size(-3)).mT
    scores = (scores if pse is None else scores + pse.float()) * scale
    return scores if unseen is None else scores.masked_fill(unseen, -torch.inf)


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Returns keys or values in float32, each repeated for its group of heads."""
    groups = heads // x.size(-3)
    return x.float() if groups == 1 else x.float().repeat_interleave(groups, -3)


def attend(scores: Tensor, value: Tensor) -> Attention:
    """Returns the attention of these scores; queries that see nothing give zeros."""
    largest = scores.amax(-1) if scores.size(-1) else scores.new_full(scores.shape[:-1], -torch.inf)
    largest = largest.clamp(min=torch.finfo(torch.float32).min)
    weights = (scores - largest.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    values = _for_heads(value, scores.size(-3))
    return Attention(weights / total.clamp(min=1e-30).unsqueeze(-1) @ values, largest, total)


def attend_backward(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, scores: Tensor, forward: Attention, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key, value and of what was added to the scores.

    Where key and value are only a part of the sequence, ``forward`` is still that of the whole.
    """
    heads = query.size(-3)

    def of_heads(gradient: Tensor) -> Tensor:
        return gradient.unflatten(-3, (key.size(-3), -1)).sum(-3)

    keys, values = _for_heads(key, heads), _for_heads(value, heads)
    weights = (scores - forward.largest.unsqueeze(-1)).exp() / forward.total.clamp(min=1e-30).unsqueeze(-1)
    grad = grad.float()
    inner = (grad * forward.result.float()).sum(-1, keepdim=True)
    of_scores = weights * (grad @ values.mT - inner) * scale
    return of_scores @ keys, of_heads(of_scores.mT @ query.float()), of_heads(weights.mT @ grad), of_scores
