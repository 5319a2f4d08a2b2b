"""Sparse attention of vllm-ascend: indexers choose the keys that each query looks at, and attention is over those.

Sequences lie in a batch (BSND), one after the other (TND), or, keys, in blocks of a cache (PA_BSND, PA_ND).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from alltoallv.npu_ops.attention import attend
from alltoallv.npu_ops.inference import rows_of
from alltoallv.npu_ops.registry import expect, present, renamed
from alltoallv_emulator.vllm_ascend import Table

_ALL = 2**63 - 1


class _Queries:
    """Holds where the sequences of queries are, and how long."""

    def __init__(self, x: Tensor, layout: str, lengths: Tensor | None, starts: Tensor | None = None) -> None:
        expect(layout in ("BSND", "TND"), "layout_query", repr(layout), "BSND or TND")
        self._packed = layout == "TND"
        dimensions = 3 if self._packed else 4
        expect(x.dim() == dimensions, "query", x, f"{dimensions} dimensions, for layout {layout}")
        if self._packed:
            ends = starts.tolist()[1:] if starts is not None else None
            self._ends = ends or present(lengths, "actual_seq_lengths_query", "the sequences' ends, for TND").tolist()
            self.lengths = [end - start for start, end in pairwise([0, *self._ends])]
        else:
            self.lengths = [x.size(1)] * len(x) if lengths is None else lengths.tolist()

    def of(self, x: Tensor, number: int) -> Tensor:
        """Returns a sequence's rows of a tensor with this layout."""
        if self._packed:
            end = self._ends[number]
            return x[end - self.lengths[number] : end]
        return x[number, : self.lengths[number]]


class _Keys:
    """Holds where the sequences of keys are, and how long."""

    def __init__(self, x: Tensor, layout: str, lengths: Tensor | None, table: Tensor | None, count: int) -> None:
        paged = layout in ("PA_BSND", "PA_ND")
        expect(paged or layout in ("BSND", "TND"), "layout_key", repr(layout), "BSND, TND or blocks (PA_BSND)")
        self._layout = layout
        self._table = present(table, "block_table", "the blocks of each sequence") if paged else None
        numbers = None if lengths is None else lengths.tolist()
        if layout == "TND":
            ends = present(numbers, "actual_seq_lengths_key", "the sequences' ends, for TND")
            self._starts, self.lengths = [0, *ends], [end - start for start, end in pairwise([0, *ends])]
        elif paged:
            self.lengths = present(numbers, "actual_seq_lengths_key", "the sequences' lengths, for blocks")
        else:
            self.lengths = [x.size(1)] * len(x) if numbers is None else numbers
        expect(len(self.lengths) >= count, "actual_seq_lengths_key", lengths, f"{count} numbers")

    def of(self, x: Tensor, number: int, length: int | None = None) -> Tensor:
        """Returns a sequence's rows, or so many of them, of a tensor with this layout."""
        length = self.lengths[number] if length is None else length
        if self._table is not None:
            return rows_of(x, self._table[number], length)
        if self._layout == "TND":
            return x[self._starts[number] : self._starts[number] + length]
        return x[number, :length]


def _check_mask(sparse_mode: int, pre_tokens: int = _ALL, next_tokens: int = _ALL) -> None:
    expect(sparse_mode in (0, 3), "sparse_mode", sparse_mode, "0 (all keys) or 3 (those up to the query)")
    expect(pre_tokens == _ALL, "pre_tokens", pre_tokens, f"{_ALL}")
    expect(next_tokens == _ALL, "next_tokens", next_tokens, f"{_ALL}")


def _seen(queries: int, keys: int, ratio: int, sparse_mode: int) -> Tensor:
    """Returns how many keys each query may look at, where ``keys`` rows make one key for each ``ratio`` of them."""
    if sparse_mode == 0:
        return torch.full((queries,), keys // ratio)
    return (keys - queries + 1 + torch.arange(queries)).clamp(min=0) // ratio


def _best(
    queries: _Queries,
    keys: _Keys,
    scores: Callable[[int, int], Tensor],
    result: Tensor,
    sparse_mode: int,
    ratio: int = 1,
) -> Tensor:
    """Fills the result with the keys of the largest scores, largest first, then -1.

    ``scores`` gives the scores of a sequence's queries and so many keys, [queries, heads of keys, keys].
    """
    count = result.size(-1)
    result.fill_(-1)
    for number, length in enumerate(queries.lengths):
        there = keys.lengths[number] // ratio
        if not length or not there:
            continue
        of_pairs = scores(number, there)
        seen = _seen(length, keys.lengths[number], ratio, sparse_mode).view(-1, 1, 1)
        hidden = torch.arange(there) >= seen
        order = of_pairs.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :count]
        order = order.masked_fill(torch.arange(order.size(-1)) >= seen, -1)
        queries.of(result, number)[..., : order.size(-1)] = order.int()
    return result


def _weighted(products: Tensor, weights: Tensor, heads: int) -> Tensor:
    """Adds up weights * relu(products), [queries, heads, keys], over each key head's group of query heads."""
    terms = products.relu() * weights.float().unsqueeze(-1)
    return terms.unflatten(1, (heads, -1)).sum(2)


def _grouped_products(query: Tensor, key: Tensor) -> Tensor:
    """Returns the products of [queries, heads, size] with [keys, fewer heads, size], [queries, heads, keys]."""
    keys = key.float().repeat_interleave(query.size(1) // key.size(1), 1)
    return torch.einsum("qhd,khd->qhk", query.float(), keys)


def _indexer_result(query: Tensor, key: Tensor, layout_key: str, count: int) -> Tensor:
    heads = key.size(1 if layout_key == "TND" else 2)
    return query.new_empty((*query.shape[:-2], heads, count), dtype=torch.int32)


def _lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Chooses the keys with the largest sum over heads of weight * relu(query * key); the second result is empty."""
    _check_mask(sparse_mode, pre_tokens, next_tokens)
    queries = _Queries(query, layout_query, actual_seq_lengths_query)
    keys = _Keys(key, layout_key, actual_seq_lengths_key, block_table, len(queries.lengths))
    result = _indexer_result(query, key, layout_key, sparse_count)

    def scores(number: int, there: int) -> Tensor:
        own = keys.of(key, number, there)
        products = _grouped_products(queries.of(query, number), own)
        return _weighted(products, queries.of(weights, number), own.size(1))

    return _best(queries, keys, scores, result, sparse_mode), query.new_empty(0)


def _quantized_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    query_quant_mode: int,
    key_quant_mode: int,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int = _ALL,
    next_tokens: int = _ALL,
    cmp_ratio: int = 1,
) -> Tensor:
    """Chooses keys as npu_lightning_indexer, of int8, each row and head with a scale.

    With ``cmp_ratio`` a key stands for so many rows, in which the lengths are given.
    """
    _check_mask(sparse_mode, pre_tokens, next_tokens)
    for name, mode in (("query_quant_mode", query_quant_mode), ("key_quant_mode", key_quant_mode)):
        expect(mode == 0, name, mode, "0 (a scale of each row and head)")
    for name, codes in (("query", query), ("key", key)):
        expect(codes.dtype == torch.int8, name, codes, "int8")
    expect(cmp_ratio > 0, "cmp_ratio", cmp_ratio, "more than 0")
    expect(cmp_ratio == 1 or layout_key == "PA_BSND", "layout_key", layout_key, "PA_BSND, where cmp_ratio is not 1")
    queries = _Queries(query, layout_query, actual_seq_lengths_query)
    keys = _Keys(key, layout_key, actual_seq_lengths_key, block_table, len(queries.lengths))
    of_keys = key_dequant_scale.reshape(key.shape[:-1])
    result = _indexer_result(query, key, layout_key, sparse_count)

    def scores(number: int, there: int) -> Tensor:
        own = keys.of(key, number, there)
        of_rows = queries.of(query_dequant_scale, number).float().unsqueeze(-1)
        products = _grouped_products(queries.of(query, number), own) * of_rows
        groups = query.size(-2) // own.size(1)
        products = products * keys.of(of_keys, number, there).float().T.repeat_interleave(groups, 0)
        return _weighted(products, queries.of(weights, number), own.size(1))

    return _best(queries, keys, scores, result, sparse_mode, cmp_ratio)


def _chosen(indices: Tensor, size: int, keys: int, seen: Tensor) -> Tensor:
    """Returns which keys each query looks at, of blocks of so many keys that are listed before the first -1.

    No more entries count than there are blocks to see.
    """
    several = [1] * (indices.dim() - 1)
    beyond = torch.arange(indices.size(-1)) >= -(-seen.view(-1, *several) // size)
    listed = indices.long().masked_fill(beyond | ((indices < 0).int().cumsum(-1) > 0), -1)
    there = torch.zeros((*indices.shape[:-1], -(-keys // size) + 1), dtype=torch.bool)
    within = (listed >= 0) & (listed * size < keys)
    there.scatter_(-1, listed.masked_fill(~within, there.size(-1) - 1), True)
    mask = there[..., :-1].repeat_interleave(size, -1)[..., :keys]
    return mask & (torch.arange(keys) < seen.view(-1, *several))


class _Results:
    """Holds the results of attention over a batch: rows, and largest scores and sums, [heads of keys, .., group]."""

    def __init__(self, query: Tensor, layout: str, width: int, heads: int, wanted: bool) -> None:
        self.rows = query.new_zeros((*query.shape[:-1], width))
        self._packed = layout == "TND"
        shape = *query.shape[:-2], heads, query.size(-2) // heads
        self._numbers = [query.new_zeros(shape if wanted else 0, dtype=torch.float32) for _ in range(2)]
        self._wanted = wanted

    def fill(self, queries: _Queries, number: int, scores: Tensor, value: Tensor) -> None:
        """Computes a sequence: scores [heads, queries, keys], values [heads of keys, keys, size]."""
        done = attend(scores, value)
        queries.of(self.rows, number).copy_(done.result.transpose(0, 1))
        for target, values in zip(self._numbers, (done.largest, done.total), strict=True):
            if self._wanted:
                own = queries.of(target, number)
                own.copy_(values.T.reshape(own.shape))

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows, largest scores and sums; heads of keys come before the rows of a sequence, or of all (TND)."""
        first, second = (each.transpose(-3, -2).contiguous() if self._wanted else each for each in self._numbers)
        return self.rows, first, second


def _sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes attention over the blocks of keys that ``sparse_indices`` lists for each query, up to the first -1.

    The second and third results are each query's largest score and sum of exponentials, or empty.
    """
    missing = "query_rope" if query_rope is None else "key_rope"
    expect((query_rope is None) == (key_rope is None), missing, None, "a tensor, as for the other of query and key")
    keys_and_values = _Plain(key, value, key_rope)
    if query_rope is not None:
        query = torch.cat([query, query_rope], -1)
    return _attention_over(
        query, keys_and_values, value.size(-1), key, sparse_indices, scale_value, block_table,
        actual_seq_lengths_query, actual_seq_lengths_kv, sparse_block_size, layout_query, layout_kv, sparse_mode,
        pre_tokens, next_tokens, attention_mode, return_softmax_lse,
    )  # fmt: skip


class _Plain:
    """Gives a sequence's keys, with the keys of the rotary embedding, and its values."""

    def __init__(self, key: Tensor, value: Tensor, rope: Tensor | None) -> None:
        self._key, self._value, self._rope = key, value, rope

    def __call__(self, keys: _Keys, number: int) -> tuple[Tensor, Tensor]:
        key = keys.of(self._key, number)
        key = key if self._rope is None else torch.cat([key, keys.of(self._rope, number)], -1)
        return key.float(), keys.of(self._value, number).float()


class _Packed:
    """Gives a sequence's keys and values of rows of int8 codes, numbers of the rotary embedding, and float32 scales."""

    def __init__(self, rows: Tensor, size: int, rope: int, tile: int, dtype: torch.dtype) -> None:
        needed = size + rope * dtype.itemsize + size // tile * 4
        expect(rows.dtype == torch.int8, "key", rows, "int8")
        expect(rows.size(-1) == needed, "key", rows, f"{needed} bytes in a row")
        self._rows, self._sizes, self._tile, self._dtype = (
            rows,
            (size, rope * dtype.itemsize, size // tile * 4),
            tile,
            dtype,
        )

    def __call__(self, keys: _Keys, number: int) -> tuple[Tensor, Tensor]:
        codes, rope, scales = keys.of(self._rows, number).split(self._sizes, -1)
        factors = scales.contiguous().view(torch.float32).repeat_interleave(self._tile, -1)
        values = (codes.float() * factors).to(self._dtype).float()
        return torch.cat([values, rope.contiguous().view(self._dtype).float()], -1), values


def _attention_over(
    query: Tensor,
    keys_and_values: _Plain | _Packed,
    width: int,
    key: Tensor,
    sparse_indices: Tensor,
    scale: float,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_mask(sparse_mode, pre_tokens, next_tokens)
    expect(attention_mode == 2, "attention_mode", attention_mode, "2 (MLA with one latent head)")
    expect(sparse_block_size > 0, "sparse_block_size", sparse_block_size, "more than 0")
    queries = _Queries(query, layout_query, actual_seq_lengths_query)
    keys = _Keys(key, layout_kv, actual_seq_lengths_kv, block_table, len(queries.lengths))
    heads = key.size(1 if layout_kv == "TND" else 2)
    results = _Results(query, layout_query, width, heads, return_softmax_lse)
    for number, length in enumerate(queries.lengths):
        there = keys.lengths[number]
        if not length or not there:
            continue
        own_keys, own_values = keys_and_values(keys, number)
        seen = _seen(length, there, 1, sparse_mode)
        looks = _chosen(queries.of(sparse_indices, number), sparse_block_size, there, seen)
        looks = looks.repeat_interleave(query.size(-2) // heads, 1)
        scores = _grouped_products(queries.of(query, number), own_keys) * scale
        scores = scores.masked_fill(~looks, -torch.inf).transpose(0, 1)
        results.fill(queries, number, scores, own_values.transpose(0, 1))
    return results.all()


def _packed_sparse_attention(
    query: Tensor,
    key: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    attention_mode: int,
    quant_scale_repo_mode: int,
    tile_size: int,
    rope_head_dim: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes npu_sparse_flash_attention of keys whose rows have int8 codes, the part for the rotary embedding in the
    query's dtype, and a float32 scale for each ``tile_size`` codes. Values are the same codes and scales; both are
    rounded to the query's dtype.
    """
    for name, mode in (("key_quant_mode", key_quant_mode), ("value_quant_mode", value_quant_mode)):
        expect(mode == 2, name, mode, "2 (scales of tiles)")
    expect(quant_scale_repo_mode == 1, "quant_scale_repo_mode", quant_scale_repo_mode, "1 (scales in the rows)")
    size = query.size(-1) - rope_head_dim
    expect(tile_size > 0 and size % tile_size == 0, "tile_size", tile_size, f"a divisor of {size}")
    rows = _Packed(key, size, rope_head_dim, tile_size, query.dtype)
    return _attention_over(
        query, rows, size, key, sparse_indices, scale_value, block_table, actual_seq_lengths_query,
        actual_seq_lengths_kv, sparse_block_size, layout_query, layout_kv, sparse_mode, pre_tokens, next_tokens,
        attention_mode, return_softmax_lse,
    )  # fmt: skip


def _attention_shapes(width: Callable[..., int]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def shapes(query: Tensor, key: Tensor, *others: Tensor, **more: object) -> tuple[Tensor, Tensor, Tensor]:
        heads = key.size(1 if more.get("layout_kv") == "TND" else 2)
        wanted, packed = bool(more.get("return_softmax_lse")), query.dim() == 3
        shape: Sequence[int] = (0,)
        if wanted:
            rows, group = query.shape[:-2], query.size(-2) // heads
            shape = (heads, *rows, group) if packed else (rows[0], heads, rows[1], group)
        numbers = query.new_empty(shape, dtype=torch.float32)
        rows_made = query.new_empty((*query.shape[:-1], width(query, *others, **more)))
        return rows_made, numbers, torch.empty_like(numbers)

    return shapes


def _shared_attention(
    q: Tensor,
    ori_kv: Tensor | None,
    cmp_kv: Tensor | None,
    cmp_sparse_indices: Tensor | None,
    ori_block_table: Tensor | None,
    cmp_block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    seqused_kv: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float,
    cmp_ratio: int,
    ori_mask_mode: int,
    cmp_mask_mode: int,
    ori_win_left: int,
    ori_win_right: int,
    layout_q: str,
    layout_kv: str,
) -> tuple[Tensor, Tensor]:
    """Computes attention over a window of rows and, of compressed rows, all that are complete or those that are listed.

    Rows are keys and values at once. A query at row p looks at rows p - ``ori_win_left`` to p + ``ori_win_right``, and
    at the first (p + 1) // ``cmp_ratio`` compressed ones. ``sinks`` has for each head the score of one more key,
    without a value. The second result is empty.
    """
    for name, mode, wanted in (("ori_mask_mode", ori_mask_mode, 4), ("cmp_mask_mode", cmp_mask_mode, 3)):
        expect(mode == wanted, name, mode, f"{wanted}")
    rows = present(ori_kv, "ori_kv", "rows")
    expect(softmax_scale > 0, "softmax_scale", softmax_scale, "more than 0")
    expect(cmp_kv is not None or cmp_sparse_indices is None, "cmp_sparse_indices", cmp_sparse_indices, "None")
    expect(layout_kv in ("PA_ND", "BSND"), "layout_kv", layout_kv, "PA_ND or BSND")
    queries = _Queries(q, layout_q, None, cu_seqlens_q)
    keys = _Keys(rows, layout_kv, seqused_kv, ori_block_table, len(queries.lengths))
    of_compressed = None
    if cmp_kv is not None:
        expect(cmp_ratio > 0, "cmp_ratio", cmp_ratio, "more than 0")
        lengths = torch.tensor(keys.lengths) // cmp_ratio
        of_compressed = _Keys(cmp_kv, layout_kv, lengths, cmp_block_table, len(queries.lengths))
    result = q.new_zeros(q.shape)
    for number, length in enumerate(queries.lengths):
        there = keys.lengths[number]
        own = queries.of(q, number)
        places = there - length + torch.arange(length).unsqueeze(1)
        behind = torch.arange(there) - places
        looks = ((behind >= -ori_win_left) & (behind <= ori_win_right)).unsqueeze(1)
        parts = [keys.of(rows, number)]
        if of_compressed is not None and cmp_kv is not None:
            seen = (places.squeeze(1) + 1).clamp(min=0) // cmp_ratio
            count = of_compressed.lengths[number]
            if cmp_sparse_indices is None:
                more = (torch.arange(count) < seen.unsqueeze(1)).unsqueeze(1)
            else:
                more = _chosen(queries.of(cmp_sparse_indices, number), 1, count, seen)
            looks = torch.cat([looks, more], -1)
            parts.append(of_compressed.of(cmp_kv, number))
        values = torch.cat(parts)
        expect(values.size(1) == 1, "ori_kv", rows, "one head")
        scores = (_grouped_products(own, values) * softmax_scale).masked_fill(~looks, -torch.inf)
        done = attend(scores.transpose(0, 1), values.transpose(0, 1), sink=sinks)
        own_result = queries.of(result, number)
        own_result.copy_(done.result.transpose(0, 1))
    return result, q.new_empty(0, dtype=torch.float32)


def metadata(*arguments: object, device: str = "npu", **more: object) -> Tensor:
    """Returns zeros in place of how a device's cores share the work: operators here do not read it."""
    tensors = [each for each in (*arguments, *more.values()) if isinstance(each, Tensor)]
    return torch.zeros(1024, dtype=torch.int32, device=tensors[0].device if tensors else device)


_WINDOW = f"int pre_tokens={_ALL}, int next_tokens={_ALL}"
_LENGTHS = "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None"
_SCALES = "Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, Tensor key_dequant_scale"
_CU_SEQLENS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None,"
    " Tensor? seqused_q=None, Tensor? seqused_kv=None"
)


def _indexer_shapes(
    query: Tensor,
    key: Tensor,
    *others: Tensor,
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    **more: object,
) -> Tensor:
    return _indexer_result(query, key, layout_key, sparse_count)


def _compressed_indexer_shapes(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    metadata: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    *others: object,
) -> tuple[Tensor, Tensor]:
    return _indexer_result(query, key, layout_key, sparse_count), query.new_empty(0, dtype=torch.float32)


OPERATORS: Table = {
    f"npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, {_LENGTHS}, str layout_query='BSND',"
    f" str layout_key='BSND', int sparse_count=2048, int sparse_mode=3, {_WINDOW}, bool return_value=False)"
    " -> (Tensor sparse_indices, Tensor sparse_values)": (
        _lightning_indexer,
        lambda query, *others, **more: (_indexer_shapes(query, *others, **more), query.new_empty(0)),
    ),
    f"npu_lightning_indexer_quant({_SCALES}, *, {_LENGTHS}, int query_quant_mode=0, int key_quant_mode=0,"
    " str layout_query='BSND', str layout_key='BSND', int sparse_count=2048, int sparse_mode=3) -> Tensor": (
        _quantized_indexer,
        _indexer_shapes,
    ),
    f"npu_vllm_quant_lightning_indexer({_SCALES}, int query_quant_mode=0, int key_quant_mode=0, {_LENGTHS},"
    " Tensor? metadata=None, str layout_query='BSND', str layout_key='BSND', int sparse_count=2048, int sparse_mode=3,"
    f" {_WINDOW}, int cmp_ratio=1, bool return_value=False) -> (Tensor sparse_indices, Tensor sparse_values)": (
        renamed(_quantized_indexer, results=lambda result: (result, result.new_empty(0, dtype=torch.float32))),
        _compressed_indexer_shapes,
    ),
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *,"
    " Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None,"
    " Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND',"
    f" str layout_kv='BSND', int sparse_mode=3, {_WINDOW}, int attention_mode=2, bool return_softmax_lse=False)"
    " -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)": (
        _sparse_attention,
        _attention_shapes(lambda query, value, *others, **more: value.size(-1)),
    ),
    "npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,"
    " float scale_value, *, int key_quant_mode=1, int value_quant_mode=1, Tensor? key_dequant_scale=None,"
    " Tensor? value_dequant_scale=None, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None,"
    " Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND',"
    f" int sparse_mode=3, {_WINDOW}, int attention_mode=2, int quant_scale_repo_mode=1, int tile_size=128,"
    " int rope_head_dim=64, bool return_softmax_lse=False)"
    " -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)": (
        _packed_sparse_attention,
        _attention_shapes(lambda query, *others, **more: query.size(-1) - more.get("rope_head_dim", 64)),
    ),
    "npu_sparse_attn_sharedkv(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, Tensor? ori_sparse_indices=None,"
    " Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, Tensor? cmp_block_table=None,"
    f" {_CU_SEQLENS}, Tensor? sinks=None, Tensor? metadata=None, float softmax_scale=0, int cmp_ratio=0,"
    " int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128, int ori_win_right=0, str layout_q='BSND',"
    " str layout_kv='PA_ND', bool return_softmax_lse=False) -> (Tensor out, Tensor softmax_lse)": (
        _shared_attention,
        lambda q, **more: (torch.empty_like(q), q.new_empty(0, dtype=torch.float32)),
    ),
}  # fmt: skip
_MASKS = (
    "int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128, int ori_win_right=0, str layout_q='BSND',"
    " str layout_kv='PA_ND', bool has_ori_kv=True, bool has_cmp_kv=True, str device='npu'"
)
METADATA = (
    f"npu_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, {_CU_SEQLENS},"
    " int batch_size=0, int max_seqlen_q=0, int max_seqlen_kv=0, int ori_topk=0, int cmp_topk=0, int cmp_ratio=4,"
    f" {_MASKS}) -> (Tensor metadata)",
    "npu_vllm_quant_lightning_indexer_metadata(int num_heads_q, int num_heads_k, int head_dim, int query_quant_mode,"
    " int key_quant_mode, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, int batch_size=0,"
    " int max_seqlen_q=0, int max_seqlen_k=0, str layout_query='BSND', str layout_key='BSND', int sparse_count=2048,"
    f" int sparse_mode=3, {_WINDOW}, int cmp_ratio=1, str device='npu') -> (Tensor metadata)",
)
