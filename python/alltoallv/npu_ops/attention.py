"""Attention for training, with its gradient; `inference` has inference's, and `atb` ATB's.

Inside, sequences are [heads, length, size]; sequences of one length may come together, with one more dimension in
front.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import differentiate, expect, operator, present, renamed

# The order of axes from each layout to [batch, heads, length, size], once BSH and SBH have heads split off.
_TO_BNSD = {
    "BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "NBSD": (1, 0, 2, 3),
}  # fmt: skip
PACKED = {"TND": 0, "NTD": 1}  # the axis along which sequences lie one after the other


def lengths_of(ends: Sequence[int]) -> list[int]:
    """Returns the lengths of sequences with these ends; zeros at the end stand for sequences without tokens.

    A batch of no sequences is one without tokens.
    """
    ends = list(accumulate((int(end) for end in ends), max)) or [0]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def split(x: Tensor, layout: str, heads: int, lengths: Sequence[int] | None) -> list[Tensor]:
    """Returns each sequence as [heads, length, size], or the batch where it is empty; only TND and NTD need lengths."""
    if layout in PACKED:
        axis = PACKED[layout]
        each = list(present(lengths, "actual_seq_qlen", f"where each sequence ends, for layout {layout}"))
        return [part.movedim(axis, 1) for part in x.narrow(axis, 0, sum(each)).split(each, axis)]
    batched = batch_of(x, layout, heads)
    return list(batched) or [batched]


def batch_of(x: Tensor, layout: str, heads: int) -> Tensor:
    """Returns all sequences as [batch, heads, length, size], for layouts that have them equally long."""
    expect(layout in _TO_BNSD, "input_layout", layout, "BSH, SBH, BSND, BNSD or TND")
    return (x.unflatten(-1, (heads, -1)) if x.dim() == 3 else x).permute(_TO_BNSD[layout])


def join(parts: Sequence[Tensor], layout: str) -> Tensor:
    """Reverses `split`, and `batch_of` where there is one part."""
    if layout in PACKED:
        return torch.cat([part.movedim(1, PACKED[layout]) for part in parts], PACKED[layout])
    order = _TO_BNSD[layout]
    joined = parts[0] if parts[0].dim() == 4 else torch.stack(list(parts))
    joined = joined.permute([order.index(axis) for axis in range(4)])
    return (joined.flatten(2) if layout in ("BSH", "SBH") else joined).contiguous()


def hidden(
    mask: Tensor | None, sparse_mode: int, batch: int | None, queries: int, keys: int, before: int, after: int
) -> Tensor | None:
    """Returns what a sequence, or all (None), must not see: [queries, keys], with the mask's batch and heads."""
    expect(sparse_mode in range(5), "sparse_mode", sparse_mode, "0 to 4")
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


def attend(scores: Tensor, value: Tensor, dropout: Tensor | None = None, sink: Tensor | None = None) -> Attention:
    """Returns the attention of these scores, whose weights are multiplied by ``dropout``.

    Queries that see nothing give zeros. Where there are no keys at all, the largest score is 0, as on the device.
    ``sink`` has for each head the score of one more key, which has no value.
    """
    largest = scores.amax(-1) if scores.size(-1) else scores.new_zeros(scores.shape[:-1])
    largest = largest.clamp(min=torch.finfo(torch.float32).min)
    if sink is not None:
        largest = torch.maximum(largest, sink.float().unsqueeze(-1))
    weights = (scores - largest.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    if sink is not None:
        total = total + (sink.float().unsqueeze(-1) - largest).exp()
    values = _for_heads(value, scores.size(-3))
    shares = weights / total.clamp(min=1e-30).unsqueeze(-1)
    return Attention((shares if dropout is None else shares * dropout) @ values, largest, total)


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    scores: Tensor,
    forward: Attention,
    scale: float,
    dropout: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of query, key, value, of what was added to the scores, and of ``sink``.

    Where key and value are only a part of the sequence, ``forward`` is still the whole sequence's.
    """
    heads = query.size(-3)

    def of_heads(gradient: Tensor) -> Tensor:
        return gradient.unflatten(-3, (key.size(-3), -1)).sum(-3)

    keys, values = _for_heads(key, heads), _for_heads(value, heads)
    total = forward.total.clamp(min=1e-30)
    weights = (scores - forward.largest.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    grad = grad.float()
    inner = (grad * forward.result.float()).sum(-1, keepdim=True)
    of_weights = grad @ values.mT
    kept = weights
    if dropout is not None:
        of_weights, kept = of_weights * dropout, weights * dropout
    of_scores = weights * (of_weights - inner) * scale
    of_sink = None
    if sink is not None:
        shares = (sink.float().unsqueeze(-1) - forward.largest).exp() / total
        of_sink = -(shares * inner.squeeze(-1)).sum(-1).view(-1, heads).sum(0)
    return of_scores @ keys, of_heads(of_scores.mT @ query.float()), of_heads(kept.mT @ grad), of_scores, of_sink


_ALIBI_ROWS = 1024


def _whole_pse(pse: Tensor, queries: int, keys: int, sparse_mode: int, masked: bool) -> Tensor:
    """Returns what is added to the scores of all queries.

    ``pse`` has a row for all queries, for each of them, or (compressed) for the last 1024 of as many queries as it has
    columns. Since it depends on the distance between query and key, its last row has the values of all distances; keys
    after a query are hidden.
    """
    rows, columns = pse.shape[-2:]
    if rows in (1, queries) and columns in (1, keys):
        return pse
    compressed = rows == _ALIBI_ROWS and columns >= keys == queries and masked and sparse_mode in (0, 2, 3)
    full = f"rows for {queries} queries and columns for {keys} keys"
    expect(compressed, "pse", pse, f"{full}, or the last {_ALIBI_ROWS} rows where a causal mask hides keys")
    distance = (torch.arange(queries).unsqueeze(1) - torch.arange(keys)).clamp(min=0)
    return pse[..., -1, :][..., columns - 1 - distance]


_IGNORED = ("inner_precise", "gen_mask_parallel", "sync", "numels", "softmax_in")
_IGNORED_V2 = (*_IGNORED, "q_start_idx", "kv_start_idx")
_NAMES_V2 = {"pre_tokens": "pre_tockens", "next_tokens": "next_tockens"}


class _Sequences:
    """Holds the sequences of a batch, each as [heads, length, size] or all together, and computes their scores."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: int,
        layout: str,
        ends: tuple[Sequence[int] | None, Sequence[int] | None],
        softmax_layout: str,
    ) -> None:
        expected = ("", "TND") if layout == "TND" else ("",)
        expect(softmax_layout in expected, "softmax_layout", repr(softmax_layout), " or ".join(map(repr, expected)))
        self._heads, self._layout, self._softmax_layout = heads, layout, softmax_layout
        self._lengths = [None if end is None else lengths_of(end) for end in ends]
        self.query = self.split_like_query(query)
        size = self.query[0].size(-1) if self.query else 1
        kv_heads = key.size(-1) // size if key.dim() == 3 and layout != "TND" else heads
        self.key, self.value = (self._split(x, kv_heads, self._lengths[1]) for x in (key, value))

    def _split(self, x: Tensor, heads: int, lengths: Sequence[int] | None, layout: str = "") -> list[Tensor]:
        layout = layout or self._layout
        return split(x, layout, heads, lengths) if layout == "TND" else [batch_of(x, layout, heads)]

    def scores(
        self,
        scale: float,
        mask: Tensor | None,
        sparse_mode: int,
        band: tuple[int, int],
        pse: Tensor | None,
        prefix: list[int] | None,
    ) -> list[Tensor]:
        self._check_sparse(sparse_mode, pse, prefix)
        scores = []
        for number, (query, key) in enumerate(zip(self.query, self.key, strict=True)):
            unseen = self._hidden(number, mask, sparse_mode, band, prefix)
            own = None if pse is None else self._pse(number, pse, sparse_mode, mask is not None)
            scores.append(scores_of(query, key, scale, unseen, own))
        return scores

    def _check_sparse(self, sparse_mode: int, pse: Tensor | None, prefix: list[int] | None) -> None:
        """Raises for a mode that the layout does not have, and for a prefix that does not go with the mode."""
        packed = self._layout == "TND"
        modes = [0, 1, 2, 3, 4, *([6, 7, 8] if packed else [5, 6])]
        expect(sparse_mode in modes, "sparse_mode", sparse_mode, f"one of {modes} for layout {self._layout}")
        count = len(self.query) if packed else self.query[0].size(0)
        if sparse_mode in (5, 6):
            right = prefix is not None and len(prefix) == count
            expect(right, "prefix", prefix, f"{count} numbers, one for each sequence, for sparse_mode {sparse_mode}")
        else:
            expect(prefix is None, "prefix", prefix, "None, where sparse_mode is neither 5 nor 6")
        expect(pse is None or sparse_mode < 7, "pse", pse, f"None for sparse_mode {sparse_mode}")

    def _hidden(
        self, number: int, mask: Tensor | None, sparse_mode: int, band: tuple[int, int], prefix: list[int] | None
    ) -> Tensor | None:
        """Returns what queries must not see of a sequence, or of all that are here together."""
        query, key = self.query[number], self.key[number]
        together, sizes = query.dim() == 4, (query.size(-2), key.size(-2))
        there = [i for i, queries in enumerate(self.query) if queries.size(-2)]
        # Of a long sequence that ranks share, the first or last one here is only a part: it has a band.
        parts = {5: 1, 6: 3, 7: 4 if [number] == there[-1:] else 3, 8: 4 if [number] == there[:1] else 2}
        unseen = hidden(mask, parts.get(sparse_mode, sparse_mode), None if together else number, *sizes, *band)
        if sparse_mode == 6 and unseen is not None and prefix is not None:
            ends = torch.tensor(prefix if together else prefix[number : number + 1])
            unseen = unseen & (torch.arange(sizes[1]) >= ends.view(-1, 1, 1, 1))
            unseen = unseen if together else unseen[0, 0]
        return unseen

    def dropout(self, keep_prob: float, seed: int, offset: int) -> list[Tensor | None]:
        """Returns what multiplies each sequence's weights: 0, or 1 / ``keep_prob``, by chance from the seed."""
        expect(0 < keep_prob <= 1, "keep_prob", keep_prob, "more than 0 and 1 at most")
        if keep_prob == 1:
            return [None] * len(self.query)
        shapes = [(*query.shape[:-1], key.size(-2)) for query, key in zip(self.query, self.key, strict=True)]
        generator = torch.Generator().manual_seed((seed + offset) % 2**63)
        kept = (torch.rand(self.weights, generator=generator) < keep_prob).float() / keep_prob
        parts = kept.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def weights(self) -> int:
        """How many numbers all scores together are."""
        return sum(query.shape[:-1].numel() * key.size(-2) for query, key in zip(self.query, self.key, strict=True))

    def _pse(self, number: int, pse: Tensor, sparse_mode: int, masked: bool) -> Tensor:
        query, key = self.query[number], self.key[number]
        own = pse if query.dim() == 4 else pse[min(number, len(pse) - 1)]
        return _whole_pse(own, query.size(-2), key.size(-2), sparse_mode, masked)

    def pse_gradient(self, of_scores: list[Tensor], pse: Tensor, sparse_mode: int, masked: bool) -> Tensor:
        """Returns the gradient of ``pse``, given the gradient of what was added to each sequence's scores."""

        def added(leaf: Tensor) -> Tensor:
            parts = [self._pse(i, leaf, sparse_mode, masked).expand_as(grad) for i, grad in enumerate(of_scores)]
            return torch.cat([part.reshape(-1) for part in parts])

        return differentiate(added, [pse.float()], torch.cat([grad.reshape(-1) for grad in of_scores]))[0].to(pse.dtype)

    def split_like_query(self, x: Tensor) -> list[Tensor]:
        return self._split(x, self._heads, self._lengths[0])

    def rows(self, x: Tensor) -> list[Tensor]:
        """Returns one number for each query and head of ``x``, which holds each of them eight times."""
        if self._layout != "TND":
            return [x[..., 0]]
        if self._softmax_layout == "TND":
            return [part[..., 0] for part in split(x, "TND", self._heads, self._lengths[0])]
        counts = [len(query) * query.size(1) for query in self.query]
        flat = x.reshape(-1, 8)[: sum(counts), 0].split(counts)
        return [part.view(query.shape[:2]) for part, query in zip(flat, self.query, strict=True)]

    def eight(self, rows: list[Tensor]) -> Tensor:
        """Reverses `rows`. Of TND the result has that shape, but heads come before tokens in a sequence's memory."""
        parts = [row.unsqueeze(-1).expand(*row.shape, 8) for row in rows]
        if self._layout != "TND":
            return join(parts, "BNSD")
        if self._softmax_layout == "TND":
            return join(parts, "TND")
        return torch.cat([part.reshape(-1, 8) for part in parts]).view(-1, self._heads, 8)


_Forward = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


def check_sink(name: str, sink: Tensor | None, heads: int) -> None:
    """Raises unless there is one score for each head, or none."""
    expect(sink is None or sink.shape == (heads,), name, sink, f"the shape ({heads},), a score for each head")


@operator("npu_fusion_attention", ignores=_IGNORED)
def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None,
    atten_mask: Tensor | None,
    scale: float,
    pre_tockens: int,
    next_tockens: int,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    softmax_layout: str,
    keep_prob: float,
    prefix: list[int] | None,
    seed: int,
    offset: int,
    sink: Tensor | None,
) -> _Forward:
    """Returns the result, each query's largest score and sum of exponentials (each eight times), and dropout's.

    Dropout (``keep_prob``) draws a seed from torch's generator, and returns it, an offset and the number of weights.
    The weights that it keeps are not the ones that a device keeps, but are the same in the gradient.
    With layout TND the scores lie in memory by sequence, head and token, unless ``softmax_layout`` is TND. Where a
    sequence has no keys all three are zeros. ``sink`` has for each head the score of one more key, without a value.
    """
    check_sink("sink", sink, head_num)
    batch = _Sequences(query, key, value, head_num, input_layout, (actual_seq_qlen, actual_seq_kvlen), softmax_layout)
    scores = batch.scores(scale, atten_mask, sparse_mode, (pre_tockens, next_tockens), pse, prefix)
    drops = keep_prob != 1
    if drops and not seed:
        seed = int(torch.randint(1, 2**62, ()))
    dropout = batch.dropout(keep_prob, seed, offset)
    done = [attend(*each, sink) for each in zip(scores, batch.value, dropout, strict=True)]
    result = join([attention.result for attention in done], input_layout).to(query.dtype)
    rows = [batch.eight([attention[i] for attention in done]) for i in (1, 2)]
    random = (seed, offset, batch.weights) if drops else (0, 0, 0)
    return result, rows[0], rows[1], query.new_zeros(0), *random


operator("npu_fusion_attention_v2", ignores=_IGNORED_V2)(
    renamed(fusion_attention, "Computes npu_fusion_attention where ``pse_type`` is 1.", _NAMES_V2)
)


@operator("npu_fusion_attention_grad", ignores=_IGNORED)
def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None,
    atten_mask: Tensor | None,
    softmax_max: Tensor | None,
    softmax_sum: Tensor | None,
    attention_in: Tensor | None,
    scale_value: float,
    pre_tockens: int,
    next_tockens: int,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    softmax_layout: str,
    keep_prob: float,
    prefix: list[int] | None,
    seed: int,
    offset: int,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Returns the gradients of query, key, value, pse and sink from the forward operator's outputs."""
    batch = _Sequences(query, key, value, head_num, input_layout, (actual_seq_qlen, actual_seq_kvlen), softmax_layout)
    scores = batch.scores(scale_value, atten_mask, sparse_mode, (pre_tockens, next_tockens), pse, prefix)
    dropout = batch.dropout(keep_prob, seed, offset)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        forward = [attend(*each, sink) for each in zip(scores, batch.value, dropout, strict=True)]
    else:
        outputs = batch.split_like_query(attention_in), batch.rows(softmax_max), batch.rows(softmax_sum)
        forward = [Attention(*each) for each in zip(*outputs, strict=True)]
    parts = zip(batch.query, batch.key, batch.value, batch.split_like_query(dy), scores, forward, dropout, strict=True)
    gradients = [
        attend_backward(q, k, v, grad, s, done, scale_value, drop, sink) for q, k, v, grad, s, done, drop in parts
    ]
    dq, dk, dv = (join([each[i] for each in gradients], input_layout).to(query.dtype) for i in range(3))
    dpse = None
    if pse is not None:
        dpse = batch.pse_gradient([each[3] for each in gradients], pse, sparse_mode, atten_mask is not None)
    of_sink = torch.zeros(0)
    if sink is not None:
        of_sink = torch.stack([sink_grad for *_, sink_grad in gradients if sink_grad is not None]).sum(0).to(sink.dtype)
    return dq, dk, dv, dpse, of_sink


operator("npu_fusion_attention_grad_v2", ignores=_IGNORED_V2)(
    renamed(
        fusion_attention_grad,
        "Returns the gradients of query, key, value, pse, two arguments that are not covered (None), and sink.",
        _NAMES_V2,
        lambda gradients: (*gradients[:4], None, None, gradients[4] if gradients[4].numel() else None),
    )
)
