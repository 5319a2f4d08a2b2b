"""Attention for inference, and caches of keys and values, which are written and read by slots and blocks.

Keys and values of attention are tensors or lie in blocks of a cache, each sequence with its own length. They may be
int8, with scales. Inside, sequences are [heads, length, size], as in `attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.attention import PACKED, attend, batch_of, check_sink, hidden, join, lengths_of, scores_of, split
from alltoallv.npu_ops.layers import interleave_rope, rms_norm
from alltoallv.npu_ops.matmuls import to_int8
from alltoallv.npu_ops.microscaling import element_of, to_codes
from alltoallv.npu_ops.registry import defaults_of, expect, operator, present, renamed, takes


def write_cache(cache: Tensor, rows: Tensor, slots: Tensor, cache_mode: str | None) -> None:
    """Writes rows into a cache of shape [blocks, block size, heads, size].

    With PA_NZ the shape is [blocks, heads * size / last, block size, last].
    """
    expect(rows.dim() == 3, "key", rows, "[tokens, heads, size]")
    expect(cache_mode in (None, "Norm", "PA_NZ"), "cache_mode", cache_mode, "Norm or PA_NZ")
    nz = cache_mode == "PA_NZ"
    size = cache.size(2 if nz else 1)
    there = slots >= 0
    slots = slots.long()[there]
    block, offset = slots // size, slots % size
    if nz:
        cache[block, :, offset] = rows[there].flatten(1).unflatten(1, (-1, cache.size(-1))).to(cache.dtype)
    else:
        cache[block, offset] = rows[there].reshape(len(slots), *cache.shape[2:]).to(cache.dtype)


@operator("npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str | None
) -> None:
    """Writes token i to slot ``slot_mapping[i]`` of both caches, in place."""
    write_cache(key_cache, key, slot_mapping, cache_mode)
    write_cache(value_cache, value, slot_mapping, cache_mode)


@operator("npu_scatter_pa_kv_cache_functional")
def scatter_pa_kv_cache_functional(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str | None
) -> tuple[Tensor, Tensor]:
    caches = key_cache.clone(), value_cache.clone()
    scatter_pa_kv_cache(key, value, *caches, slot_mapping, cache_mode)
    return caches


def rows_of(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Returns a sequence's rows from a cache [blocks, block size, heads, size]; ``table`` lists its blocks.

    Rows of blocks that are not there are zeros.
    """
    used = -(-length // cache.size(1))
    table = functional.pad(table[:used].long(), (0, max(0, used - len(table))), value=-1)
    there = (table >= 0) & (table < len(cache))
    rows = cache[table.masked_fill(~there, 0)]
    return rows.masked_fill(~there.view(-1, *[1] * (cache.dim() - 1)), 0).flatten(0, 1)[:length]


@operator("npu_gather_pa_kv_cache")
def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    seq_offset: Tensor | None,
    is_seq_lens_cumsum: bool,
) -> None:
    """Copies the sequences' rows, one sequence after the other, from caches [blocks, block size, heads, size].

    The results go to ``key`` and ``value``. ``seq_lens`` holds lengths, or ends if ``is_seq_lens_cumsum``. A sequence
    begins with the block that has the row of ``seq_offset``; rows of blocks that are not there are zeros.
    """
    expect(key_cache.dim() == 4, "key_cache", key_cache, "[blocks, block size, heads, size]")
    lengths = seq_lens.diff().tolist() if is_seq_lens_cumsum else seq_lens.tolist()
    count = len(lengths)
    fits = seq_offset is None or seq_offset.shape == (count,)
    expect(fits, "seq_offset", seq_offset, f"{count} numbers, one for each sequence")
    firsts = [0] * count if seq_offset is None else (seq_offset // key_cache.size(1)).tolist()
    for cache, target in ((key_cache, key), (value_cache, value)):
        parts = [
            rows_of(cache, table[first:], length)
            for table, length, first in zip(block_tables, lengths, firsts, strict=True)
        ]
        joined = torch.cat([target[:0], *parts])
        target[: len(joined)] = joined


@operator("npu_scatter_nd_update_")
def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Sets ``input[indices[i]] = updates[i]``; the last dimension of ``indices`` has one entry per input dimension."""
    input[indices.long().unbind(-1)] = updates
    return input


@operator("npu_scatter_nd_update")
def scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return scatter_nd_update_(input.clone(), indices, updates)


def _write_paged(cache: Tensor, rows: Tensor, index: Tensor, cache_mode: str) -> None:
    """Writes rows [batch, length, size] into pages [pages, page size, 1, size] at their places in all pages together.

    ``index`` has the place of each row, or with BLK the first row's of each page's worth of them. With NZ memory
    has parts of 16 numbers, and of each part the rows of a page one after the other.
    """
    pages, page, _, size = cache.shape
    batch, length = rows.shape[:2]
    index = index.long()
    if "BLK" in cache_mode:
        starts = index.view(batch, index.numel() // max(batch, 1)).repeat_interleave(page, 1)[:, :length]
        index = (starts + torch.arange(length) % page).flatten()
    rows = rows.flatten(0, 1).to(cache.dtype)
    if cache_mode.endswith("NZ"):
        parts = cache.view(pages, size // 16, page, 16)
        parts[index // page, :, index % page] = rows.unflatten(-1, (-1, 16))
    else:
        cache.view(pages * page, size)[index] = rows


def _to_cache(name: str, cache: Tensor, values: Tensor, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """Returns values as a cache holds them: with a scale as int8 or float8, (values * scale + offset)."""
    if scale is None:
        expect(offset is None, f"{name}_offset", offset, f"None, where there is no {name}_scale")
        expect(cache.dtype == values.dtype, f"{name}_scale", None, f"a scale, for a cache of {cache.dtype}")
        return values
    fits = scale.numel() in (1, values.size(-1))
    expect(fits, f"{name}_scale", scale, f"1 or {values.size(-1)} numbers")
    scaled = values.float() * scale.float().reshape(-1) + (0.0 if offset is None else offset.float().reshape(-1))
    element = element_of(cache.dtype)
    expect(element or cache.dtype == torch.int8, f"{name}_scale", scale, f"None, for a cache of {cache.dtype}")
    return to_int8(scaled) if element is None else to_codes(scaled, element)


@operator("npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    epsilon: float,
    cache_mode: str,
    is_output_kv: bool,
    k_rope_scale: Tensor | None,
    c_kv_scale: Tensor | None,
    k_rope_offset: Tensor | None,
    c_kv_offset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalizes the first places of kv [batch, 1, length, size], rotates the others, and writes both to their caches.

    The caches are changed, and returned with the rotated and normalized values, which are NaN unless asked for. Caches
    of int8 or float8 get the values times their scale, plus their offset.
    """
    modes = "Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"
    expect(cache_mode in modes, "cache_mode", cache_mode, " or ".join(modes))
    expect(kv.dim() == 4 and kv.size(1) == 1, "kv", kv, "[batch, 1, length, size]")
    normal = rms_norm(kv[..., : len(gamma)], gamma, epsilon)[0]
    turned = interleave_rope(kv[..., len(gamma) :], cos, sin)
    scales = (k_rope_scale, k_rope_offset), (c_kv_scale, c_kv_offset)
    for name, cache, rows, of in zip(("k_rope", "c_kv"), (k_cache, ckv_cache), (turned, normal), scales, strict=True):
        values = _to_cache(name, cache, rows, *of)
        if cache_mode == "Norm":
            cache[:, 0].scatter_(1, index.long().unsqueeze(-1).expand(-1, -1, cache.size(-1)), values[:, 0])
        else:
            _write_paged(cache, values[:, 0], index, cache_mode)
    if not is_output_kv:
        turned, normal = torch.full_like(turned, torch.nan), torch.full_like(normal, torch.nan)
    return k_cache, ckv_cache, turned, normal


def from_blocks(cache: Tensor, table: Tensor, length: int, heads: int) -> Tensor:
    """Returns a sequence's rows as [heads, length, size] from a cache of shape [blocks, block size, heads * size],
    [blocks, heads, block size, size] or (NZ) [blocks, heads, size / part, block size, part].
    """
    expect(cache.dim() in (3, 4, 5), "key", cache, "a cache of 3 to 5 dimensions")
    blocks = cache.unflatten(-1, (heads, -1)).transpose(1, 2) if cache.dim() == 3 else cache
    blocks = blocks.transpose(2, 3).flatten(3) if cache.dim() == 5 else blocks
    used = table[: -(-length // blocks.size(2))].long()
    return blocks[used].transpose(0, 1).flatten(1, 2)[:, :length]


def _lengths(lengths_given: Sequence[int] | None, batch: int, default: int) -> list[int]:
    if lengths_given is None:
        return [default] * batch
    lengths = [int(length) for length in lengths_given]
    return lengths * batch if len(lengths) == 1 else lengths[:batch]


class _Codes(NamedTuple):
    """Says by which numbers int8 keys, or values, are multiplied, after others were added to them."""

    name: str  # of the tensor with the codes
    scale: Tensor | None
    offset: Tensor | None
    mode: int  # what has a number of its own

    def checked(self, codes: Tensor) -> bool:
        """Returns whether there are numbers; raises if they do not go with the codes."""
        if self.scale is None:
            expect(self.offset is None, f"{self.name}'s offset", self.offset, "None, where there is no scale")
            expect(codes.is_floating_point(), self.name, codes, "floating point numbers, where there is no scale")
        else:
            expect(codes.dtype == torch.int8, self.name, codes, "int8, where there is a scale")
            expect(self.mode in range(6), f"the quantization mode of {self.name}", self.mode, "0 to 5")
        return self.scale is not None

    def values(self, codes: Tensor, number: int, table: Tensor | None) -> Tensor:
        """Returns (codes + offset) * scale of sequence ``number``, [heads, length, size]."""
        offset = 0.0 if self.offset is None else self._spread(self.offset, codes.shape, number, table)
        return (codes.float() + offset) * self._spread(present(self.scale, "", ""), codes.shape, number, table)

    def _spread(self, scales: Tensor, shape: Sequence[int], number: int, table: Tensor | None) -> Tensor:
        heads, length, size = shape
        scales = scales.float()
        if self.mode == 0:  # of the channels of each head, or one
            fits = scales.numel() in (1, heads * size)
            expect(fits, f"{self.name}'s scale or offset", scales, f"1 or {heads} * {size} numbers for mode 0")
            return scales.reshape(1) if scales.numel() == 1 else scales.reshape(heads, 1, size)
        if self.mode == 2:  # of the heads
            expect(scales.numel() == heads, f"{self.name}'s scale or offset", scales, f"{heads} numbers for mode 2")
            return scales.reshape(heads, 1, 1)
        if self.mode in (4, 5):  # of the tokens of each block, with 5 by head
            used = present(table, "block_table", f"the blocks, for mode {self.mode}").long()
            blocks = scales[used] if self.mode == 5 else scales[used].unsqueeze(1)
            return blocks.transpose(0, 1).flatten(1)[:, :length].unsqueeze(-1)
        own = scales.reshape(-1, heads if self.mode == 3 else 1, scales.size(-1))[number]  # of tokens, with 3 by head
        expect(own.size(-1) >= length, f"{self.name}'s scale or offset", scales, f"numbers for {length} tokens")
        return own[:, :length].unsqueeze(-1)


def _prefix(name: str, prefix: Tensor | None, layout: str, heads: int, length: Sequence[int] | None) -> Tensor:
    """Returns the keys or values, [heads, length, size], that stand before every sequence's own."""
    rows = batch_of(present(prefix, f"{name}_shared_prefix", "a tensor, as for keys and values"), layout, heads)
    expect(len(rows) == 1, f"{name}_shared_prefix", prefix, "a batch of one")
    count = rows.size(2) if length is None else int(length[0])
    expect(count in range(rows.size(2) + 1), "actual_shared_prefix_len", length, f"{rows.size(2)} at most")
    return rows[0, :, :count]


_INFERENCE_LAYOUTS = (
    "BSH", "BSND", "BNSD", "TND", "NTD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "BSH_NBSD", "BSND_NBSD",
    "BNSD_NBSD", "TND_NTD",
)  # fmt: skip


def _layouts(input_layout: str) -> tuple[str, str]:
    """Returns the layouts of an inference operator's inputs and of its result."""
    expect(input_layout in _INFERENCE_LAYOUTS, "input_layout", input_layout, " or ".join(_INFERENCE_LAYOUTS))
    first, _, second = input_layout.partition("_")
    return first, second or first


@operator("_npu_fused_infer_attention_score_infer_output", ignores=("*",))
def infer_output(query: Tensor, input_layout: str, num_heads: int, softmax_lse_flag: bool) -> tuple[Tensor, Tensor]:
    """Returns zeroed tensors for the results, whose heads are as wide as the query's."""
    layout, result_layout = _layouts(input_layout)
    tokens = layout in PACKED
    queries = split(query, layout, num_heads, [query.size(PACKED[layout])] if tokens else None)
    sums = join([query_part[..., :1] for query_part in queries], "TND" if tokens else "BNSD").float()
    lse = torch.zeros_like(sums) if softmax_lse_flag else torch.zeros(0)
    return torch.zeros_like(join(queries, result_layout)), lse


@operator("npu_fused_infer_attention_score", ignores=("inner_precise", "block_size"))
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pse_shift: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    block_table: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    num_heads: int,
    scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    softmax_lse_flag: bool,
    antiquant_scale: Tensor | None,
    antiquant_offset: Tensor | None,
    antiquant_mode: int,
    key_antiquant_scale: Tensor | None,
    key_antiquant_offset: Tensor | None,
    key_antiquant_mode: int,
    value_antiquant_scale: Tensor | None,
    value_antiquant_offset: Tensor | None,
    value_antiquant_mode: int,
    learnable_sink: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the result, and the logarithm of each query's sum of exponentials, if asked for.

    Rows after a sequence's end are zeros. Keys and values of int8 are added to their offsets and multiplied by their
    scales: of their own, or the two parts of ``antiquant_scale`` and ``antiquant_offset``. The modes are 0 (of
    channels, or one), 1 (of tokens), 2 (of heads), 3 (of heads and tokens), 4 and 5 (as 1 and 3, by blocks).
    ``learnable_sink`` has for each head the score of one more key, without a value. A shared prefix stands before the
    keys and values of every sequence.
    """
    expect(query.is_floating_point(), "query", query, "floating point numbers")
    check_sink("learnable_sink", learnable_sink, num_heads)
    coded = [
        _Codes("key", key_antiquant_scale, key_antiquant_offset, key_antiquant_mode),
        _Codes("value", value_antiquant_scale, value_antiquant_offset, value_antiquant_mode),
    ]
    if antiquant_scale is not None and key_antiquant_scale is None and value_antiquant_scale is None:
        expect(antiquant_mode in (0, 1), "antiquant_mode", antiquant_mode, "0 or 1")
        for name, tensor in (("antiquant_scale", antiquant_scale), ("antiquant_offset", antiquant_offset)):
            expect(tensor is None or tensor.size(0) == 2, name, tensor, "a part for keys and one for values")
        offsets = (None, None) if antiquant_offset is None else antiquant_offset
        parts = zip(("key", "value"), antiquant_scale, offsets, strict=True)
        coded = [_Codes(*part, antiquant_mode) for part in parts]
    else:
        expect(antiquant_scale is None, "antiquant_scale", antiquant_scale, "None, where keys have their own")
        expect(antiquant_offset is None, "antiquant_offset", antiquant_offset, "None, where there is no scale")
    layout, result_layout = _layouts(input_layout)
    tokens = layout in PACKED
    kv_heads = num_key_value_heads or num_heads
    if query.numel() == 0:
        return infer_output(query, input_layout, num_heads, softmax_lse_flag)
    expect(
        not tokens or actual_seq_lengths is not None, "actual_seq_lengths", None, f"the sequences' ends, for {layout}"
    )
    missing = "query_rope" if query_rope is None else "key_rope"
    expect((query_rope is None) == (key_rope is None), missing, None, "a tensor, as for the other of query and key")
    q_lengths = lengths_of(actual_seq_lengths) if tokens and actual_seq_lengths is not None else None
    queries = split(query, layout, num_heads, q_lengths)
    ropes = None if query_rope is None else split(query_rope, layout, num_heads, q_lengths)
    if block_table is None:
        ends = lengths_of(actual_seq_lengths_kv or actual_seq_lengths or []) if tokens else None
        keys, values = (split(x, layout, kv_heads, ends) for x in (key, value))
        key_ropes = None if key_rope is None else split(key_rope, layout, kv_heads, ends)
        kv_lengths = ends or _lengths(actual_seq_lengths_kv, len(keys), keys[0].size(1) if keys else 0)
    else:
        expect(
            actual_seq_lengths_kv is not None, "actual_seq_lengths_kv", None, "lengths, where there is a block_table"
        )
        kv_lengths = _lengths(actual_seq_lengths_kv, len(queries), 0)
        rows = list(zip(block_table, kv_lengths, strict=False))
        keys, values = ([from_blocks(x, *row, kv_heads) for row in rows] for x in (key, value))
        key_ropes = None if key_rope is None else [from_blocks(key_rope, *row, kv_heads) for row in rows]
    prefixes = None
    if key_shared_prefix is not None or value_shared_prefix is not None or actual_shared_prefix_len is not None:
        plain = not tokens and block_table is None and query_rope is None and key.is_floating_point()
        fits = plain and sparse_mode != 2
        expect(fits, "key_shared_prefix", key_shared_prefix, "None for tokens, blocks, rope, int8 or sparse_mode 2")
        prefixes = [
            _prefix(name, tensor, layout, kv_heads, actual_shared_prefix_len)
            for name, tensor in (("key", key_shared_prefix), ("value", value_shared_prefix))
        ]
    quantized = [codes.checked(x) for codes, x in zip(coded, (key, value), strict=True)]
    results, sums = [], []
    for number, sequence in enumerate(queries):
        full = sequence.size(1)
        used = full if tokens or full == 1 else _lengths(actual_seq_lengths, len(queries), full)[number]
        length = kv_lengths[number]
        q, k, v = sequence[:, :used], keys[number][:, :length], values[number][:, :length]
        blocks = None if block_table is None else block_table[number]
        k, v = (
            codes.values(x, number, blocks) if there else x
            for codes, x, there in zip(coded, (k, v), quantized, strict=True)
        )
        if prefixes is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(prefixes, (k, v), strict=True))
            length = k.size(1)
        if ropes is not None and key_ropes is not None:
            q, k = torch.cat([q, ropes[number][:, :used]], -1), torch.cat([k, key_ropes[number][:, :length]], -1)
        single, mask = full == 1 and not tokens, atten_mask
        if mask is not None and single and mask.dim() == 2 and sparse_mode < 2:
            mask = mask.unsqueeze(1).unsqueeze(1)
        there = mask is not None or single or sparse_mode < 2
        expect(there, "atten_mask", None, f"a matrix of 2048 rows and columns, for sparse_mode {sparse_mode}")
        unseen = hidden(mask, sparse_mode, number, used, length, pre_tokens, next_tokens)
        if single and sparse_mode > 1 and ropes is None and unseen is not None:
            why = "one that hides no key of a single query without query_rope, for which the device ignores it"
            expect(not unseen.any(), "sparse_mode", sparse_mode, why)
        scores = scores_of(q, k, 1.0, None, None) * scale
        if pse_shift is not None:
            scores = scores + pse_shift[min(number, len(pse_shift) - 1)][..., :used, :length].float()
        done = attend(scores if unseen is None else scores.masked_fill(unseen, -torch.inf), v, sink=learnable_sink)
        padding = (0, 0, 0, full - used)
        results.append(torch.nn.functional.pad(done.result, padding))
        logarithms = (done.largest + done.total.log()).unsqueeze(-1)
        sums.append(torch.nn.functional.pad(logarithms, padding, value=torch.inf))
    if tokens and (behind := query.size(PACKED[layout]) - sum(sequence.size(1) for sequence in queries)):
        heads, width = results[0].size(0), results[0].size(2)
        results.append(torch.zeros(heads, behind, width))
        sums.append(torch.full((heads, behind, 1), torch.inf))
    lse = join(sums, "TND" if tokens else "BNSD") if softmax_lse_flag else torch.zeros(0)
    return join(results, result_layout).to(query.dtype), lse


_INFERENCE_NAMES_V2 = {
    "actual_seq_qlen": "actual_seq_lengths", "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads", "softmax_scale": "scale", "return_softmax_lse": "softmax_lse_flag",
    "dequant_scale_key": "key_antiquant_scale", "dequant_offset_key": "key_antiquant_offset",
    "key_quant_mode": "key_antiquant_mode", "dequant_scale_value": "value_antiquant_scale",
    "dequant_offset_value": "value_antiquant_offset", "value_quant_mode": "value_antiquant_mode",
}  # fmt: skip
_ONE_ANTIQUANT: dict[str, Any] = {"antiquant_scale": None, "antiquant_offset": None, "antiquant_mode": 0}
_OWN_ANTIQUANT: dict[str, Any] = {
    f"{operand}_antiquant_{what}": 0 if what == "mode" else None
    for operand in ("key", "value")
    for what in ("scale", "offset", "mode")
}
_NO_LSE: dict[str, Any] = {
    "query_rope": None, "key_rope": None, "softmax_lse_flag": False, "learnable_sink": None, **_OWN_ANTIQUANT,
}  # fmt: skip

fused_infer_attention_score_v2 = operator(
    "npu_fused_infer_attention_score_v2", ignores=("inner_precise", "block_size")
)(renamed(fused_infer_attention_score, names=_INFERENCE_NAMES_V2, **_ONE_ANTIQUANT))
operator("npu_prompt_flash_attention")(
    renamed(
        fused_infer_attention_score,
        "Returns the attention of whole sequences.",
        {"scale_value": "scale"},
        lambda results: results[0],
        block_table=None,
        **_ONE_ANTIQUANT,
        **_NO_LSE,
    )
)
operator("npu_incre_flash_attention", ignores=("inner_precise", "block_size"))(
    renamed(
        fused_infer_attention_score,
        "Returns the attention of one query per sequence; the lengths are the keys' and values' lengths.",
        {"scale_value": "scale", "actual_seq_lengths": "actual_seq_lengths_kv"},
        lambda results: results[0],
        actual_seq_lengths=None,
        pre_tokens=0,
        next_tokens=0,
        sparse_mode=0,
        antiquant_mode=0,
        **_NO_LSE,
    )
)


def _for_graphs(name: str, formula: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Registers what an inference graph calls in place of an operator, which writes into existing memory."""

    def into(out: list[Tensor], **arguments: Any) -> tuple[Tensor, Tensor]:
        for argument, target, value in zip(("out[0]", "out[1]"), out, formula(**arguments), strict=True):
            fits = target.numel() == value.numel()
            expect(fits or not value.numel(), argument, target, f"{value.numel()} numbers, for {tuple(value.shape)}")
            if fits:  # the logarithms need no memory, where nobody asks for them
                target.copy_(value.view(target.shape))
        return out[0], out[1]

    takes(into, *inspect.signature(formula).parameters, "out", optional=defaults_of(formula))
    operator(f"{name}.out", ignores=("inner_precise", "block_size", "workspace"))(into)

    @operator(f"_{name}_get_max_workspace", ignores=("*",))
    def workspace(query: Tensor) -> Tensor:
        return query.new_zeros(1)


_for_graphs("npu_fused_infer_attention_score", fused_infer_attention_score)
_for_graphs("npu_fused_infer_attention_score_v2", fused_infer_attention_score_v2)
operator("_npu_fused_infer_attention_score_v2_infer_output", ignores=("*",))(
    renamed(infer_output, names=_INFERENCE_NAMES_V2)
)
