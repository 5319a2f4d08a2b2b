"""Sparse attention of vllm-ascend's extension module: indexers and attention, against loops over queries in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from c_ascend import Calls, equal
from npu_ranks import use_device
from on_ranks import on_ranks

_BLOCK = 4
_TABLE = torch.tensor([[2, 0, 5], [1, 4, 3]], dtype=torch.int32)  # the blocks of two sequences


def _in_blocks(sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of sequences in blocks of a cache, which else has 9."""
    cache = torch.full((6, _BLOCK, *sequences[0].shape[1:]), 9, dtype=sequences[0].dtype)
    for sequence, rows in enumerate(sequences):
        for at, row in enumerate(rows):
            cache[_TABLE[sequence, at // _BLOCK], at % _BLOCK] = row
    return cache


def _lengths(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


def _each(queries: Sequence[torch.Tensor], keys: Sequence[int], masked: bool) -> Iterator[tuple[int, int, int]]:
    """Sequence, query, and how many keys the query may see."""
    for sequence, rows in enumerate(queries):
        for query in range(len(rows)):
            yield sequence, query, keys[sequence] - len(rows) + query + 1 if masked else keys[sequence]


def _best(scores: torch.Tensor, count: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda at: -float(scores[at]))[:count]
    return order + [-1] * (count - len(order))


@on_ranks(1, communicator=False)
def test_indexers(rank: int, size: int, tmp_path: Path) -> None:
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)
    heads, width, count = 4, 8, 5
    queries = [torch.randn(rows, heads, width, generator=made) for rows in (2, 3)]
    keys = [torch.randn(rows, 1, width, generator=made) for rows in (9, 6)]
    weights = [torch.randn(rows, heads, generator=made) for rows in (2, 3)]

    def wanted(masked: bool) -> list[list[list[int]]]:
        chosen: list[list[list[int]]] = [[], []]
        for sequence, at, seen in _each(queries, (9, 6), masked):
            products = (queries[sequence][at].double() @ keys[sequence][:seen, 0].double().T).relu()
            chosen[sequence].append(_best(weights[sequence][at].double() @ products, count))
        return chosen

    packed = torch.cat(queries), torch.cat(keys), torch.cat(weights)
    ends = {"actual_seq_lengths_query": _lengths(2, 5), "actual_seq_lengths_key": _lengths(9, 15)}
    layouts = {"layout_query": "TND", "layout_key": "TND", "sparse_count": count}
    for mode in (0, 3):
        results, _ = call("npu_lightning_indexer", *packed, **ends, **layouts, sparse_mode=mode)
        assert results[0].squeeze(1).tolist() == [*wanted(mode == 3)[0], *wanted(mode == 3)[1]]
    # In a batch, whose rows beyond a sequence's length get -1, with keys in blocks.
    batch = torch.full((2, 3, heads, width), 9.0), torch.full((2, 3, heads), 9.0)
    for sequence in range(2):
        batch[0][sequence, : len(queries[sequence])] = queries[sequence]
        batch[1][sequence, : len(queries[sequence])] = weights[sequence]
    of_batch = {"actual_seq_lengths_query": _lengths(2, 3), "actual_seq_lengths_key": _lengths(9, 6)}
    paged = of_batch | {"block_table": _TABLE, "layout_key": "PA_BSND", "sparse_count": count}
    results, _ = call("npu_lightning_indexer", batch[0], _in_blocks(keys), batch[1], **paged)
    assert results[0].squeeze(2).tolist() == [[*wanted(True)[0], [-1] * count], wanted(True)[1]]
    for argument, value in {"return_value": True, "pre_tokens": 3, "sparse_mode": 1}.items():
        with pytest.raises(NotImplementedError, match=f"npu_lightning_indexer: {argument} is {value}"):
            call("npu_lightning_indexer", *packed, **ends, **layouts | {argument: value})

    # Integers with scales; a key may stand for two rows, in which lengths are given.
    codes = [[(each * 30).round().clamp(-127, 127).to(torch.int8) for each in part] for part in (queries, keys)]
    scales = [[torch.rand(each.shape[:-1], generator=made) + 0.5 for each in part] for part in (queries, keys)]
    for ratio in (1, 2):
        rows = [len(each) * ratio + (ratio > 1) for each in keys]
        chosen = []
        for sequence, at, seen in _each(queries, rows, True):
            seen = min(seen // ratio, len(keys[sequence]))
            own = codes[0][sequence][at].double() * scales[0][sequence][at].unsqueeze(-1)
            others = codes[1][sequence][:seen, 0].double() * scales[1][sequence][:seen]
            chosen.append(_best(weights[sequence][at].double() @ (own @ others.T).relu(), count))
        arguments = [torch.cat(codes[0]), _in_blocks(codes[1]), packed[2], torch.cat(scales[0]), _in_blocks(scales[1])]
        options = {
            "actual_seq_lengths_query": _lengths(2, 5), "actual_seq_lengths_key": _lengths(*rows),
            "block_table": _TABLE, "layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": count,
        }  # fmt: skip
        metadata = torch.zeros(1024, dtype=torch.int32)
        results, _ = call("npu_vllm_quant_lightning_indexer", *arguments, **options, cmp_ratio=ratio, metadata=metadata)
        assert results[0].squeeze(1).tolist() == chosen
        if ratio == 1:
            result, _ = call("npu_lightning_indexer_quant", *arguments, **options)
            assert result.squeeze(1).tolist() == chosen
    with pytest.raises(NotImplementedError, match="npu_lightning_indexer_quant: key_quant_mode is 1"):
        call("npu_lightning_indexer_quant", *arguments, **options, key_quant_mode=1)


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one row with several heads: the result, and each head's largest score and sum of exponentials."""
    scores = query.double() @ keys.double().T * scale
    largest = scores.max(-1).values
    total = (scores - largest.unsqueeze(-1)).exp().sum(-1)
    weights = scores.exp()
    below = weights.sum(-1) + (0 if sinks is None else sinks.double().exp())
    return weights / below.unsqueeze(-1) @ values.double(), largest, total


@on_ranks(1, communicator=False)
def test_attention_over_chosen_keys(rank: int, size: int, tmp_path: Path) -> None:
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)
    heads, width, rope, scale = 4, 8, 2, 0.3

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    queries, ropes = [random(rows, heads, width) for rows in (2, 3)], [random(rows, heads, rope) for rows in (2, 3)]
    keys, values = ([random(rows, 1, width) for rows in (9, 6)] for _ in range(2))
    of_keys = [random(rows, 1, rope) for rows in (9, 6)]

    # Sequences one after the other, keys in blocks; lists of single keys that end with -1.
    listed = torch.full((5, 1, 6), -1, dtype=torch.int32)
    wanted = []
    for row, (sequence, at, seen) in enumerate(_each(queries, (9, 6), True)):
        chosen = torch.randperm(seen, generator=made)[:4]
        listed[row, 0, : len(chosen)] = chosen
        own = torch.cat([queries[sequence][at], ropes[sequence][at]], -1)
        there = torch.cat([keys[sequence][:, 0], of_keys[sequence][:, 0]], -1)[chosen]
        wanted.append(_attention(own, there, values[sequence][:, 0][chosen], scale))
    arguments = [torch.cat(queries), _in_blocks(keys), _in_blocks(values), listed, scale]
    options = {
        "block_table": _TABLE, "actual_seq_lengths_query": _lengths(2, 5), "actual_seq_lengths_kv": _lengths(9, 6),
        "query_rope": torch.cat(ropes), "key_rope": _in_blocks(of_keys), "layout_query": "TND", "layout_kv": "PA_BSND",
    }  # fmt: skip
    results, _ = call("npu_sparse_flash_attention", *arguments, **options, return_softmax_lse=True)
    equal(results[0], torch.stack([each[0] for each in wanted]))
    for at in (1, 2):
        equal(results[at], torch.stack([each[at] for each in wanted]).unsqueeze(0))
    alone, _ = call("npu_sparse_flash_attention", *arguments, **options)
    assert torch.equal(alone[0], results[0])
    assert [each.numel() for each in alone[1:]] == [0, 0]
    with pytest.raises(NotImplementedError, match="npu_sparse_flash_attention: attention_mode is 0"):
        call("npu_sparse_flash_attention", *arguments, **options, attention_mode=0)

    # A batch, lists of pairs of keys, all of which queries may see.
    query, key, value = random(2, 3, heads, width), random(2, 7, 1, width), random(2, 7, 1, width)
    pairs = torch.tensor([[0, 3], [2, -1], [-1, 1]], dtype=torch.int32).view(1, 3, 1, 2).repeat(2, 1, 1, 1)
    total = torch.zeros(2, 3, heads, width, dtype=torch.float64)
    for entry in range(2):
        for row, chosen in enumerate(([0, 1, 6], [4, 5], [])):
            if chosen:
                total[entry, row] = _attention(query[entry, row], key[entry, chosen, 0], value[entry, chosen, 0], 1)[0]
    options = {"sparse_block_size": 2, "sparse_mode": 0}
    results, _ = call("npu_sparse_flash_attention", query, key, value, pairs, 1.0, **options, return_softmax_lse=True)
    equal(results[0], total)
    assert results[1].shape == (2, 1, 3, heads)

    # Keys as codes of int8, bfloat16 of the rotary embedding and a scale for each 4 codes in one row; values are the
    # same codes.
    codes = [torch.randint(-127, 128, (rows, 1, width), dtype=torch.int8, generator=made) for rows in (9, 6)]
    scales = [torch.rand(rows, 1, 2, generator=made) / 50 for rows in (9, 6)]
    turned = [each.bfloat16() for each in of_keys]
    packed = [
        torch.cat([code, numbers.view(torch.int8), factors.view(torch.int8)], -1)
        for code, numbers, factors in zip(codes, turned, scales, strict=True)
    ]
    own = torch.cat([torch.cat(queries), torch.cat(ropes)], -1).bfloat16()
    wanted = []
    for row, (sequence, _, _) in enumerate(_each(queries, (9, 6), True)):
        chosen = listed[row, 0][listed[row, 0] >= 0]
        there = (codes[sequence][:, 0] * scales[sequence][:, 0].repeat_interleave(4, -1)).bfloat16()[chosen]
        both = torch.cat([there, turned[sequence][:, 0][chosen]], -1)
        wanted.append(_attention(own[row], both, there, scale)[0])
    arguments = [own, _in_blocks(packed), _in_blocks(codes), listed, scale]
    options = {
        "block_table": _TABLE, "actual_seq_lengths_query": _lengths(2, 5), "actual_seq_lengths_kv": _lengths(9, 6),
        "layout_query": "TND", "layout_kv": "PA_BSND", "tile_size": 4, "rope_head_dim": rope, "key_quant_mode": 2,
        "value_quant_mode": 2,
    }  # fmt: skip
    results, _ = call("npu_kv_quant_sparse_flash_attention", *arguments, **options)
    equal(results[0], torch.stack(wanted), 1e-2)
    with pytest.raises(NotImplementedError, match="npu_kv_quant_sparse_flash_attention: value_quant_mode is 1"):
        call("npu_kv_quant_sparse_flash_attention", *arguments, **options | {"value_quant_mode": 1})


@on_ranks(1, communicator=False)
def test_attention_over_a_window_and_compressed_rows(rank: int, size: int, tmp_path: Path) -> None:
    device = use_device(rank)
    call = Calls(device)
    made = torch.Generator().manual_seed(1)
    heads, width, scale, ratio, left = 2, 8, 0.3, 4, 2
    queries, rows = [torch.randn(n, heads, width, generator=made) for n in (2, 3)], (11, 9)
    original = [torch.randn(n, 1, width, generator=made) for n in rows]
    compressed = [torch.randn(n // ratio, 1, width, generator=made) for n in rows]
    sinks = torch.randn(heads, generator=made)
    listed = torch.tensor([[1, -1], [0, 1], [1, -1], [1, 0], [0, -1]], dtype=torch.int32).unsqueeze(1)
    options = {
        "ori_kv": _in_blocks(original), "ori_block_table": _TABLE, "cu_seqlens_q": _lengths(0, 2, 5),
        "seqused_kv": _lengths(*rows), "seqused_q": torch.tensor([]), "sinks": sinks, "softmax_scale": scale,
        "ori_win_left": left, "layout_q": "TND", "metadata": torch.zeros(1024, dtype=torch.int32),
    }  # fmt: skip
    of_compressed = {"cmp_kv": _in_blocks(compressed), "cmp_block_table": _TABLE, "cmp_ratio": ratio}
    for more in ({}, of_compressed, of_compressed | {"cmp_sparse_indices": listed}):
        wanted = []
        for row, (sequence, at, seen) in enumerate(_each(queries, rows, True)):
            own = [original[sequence][max(seen - 1 - left, 0) : seen, 0]]
            if more:
                chosen = list(range(seen // ratio))
                if "cmp_sparse_indices" in more:
                    chosen = [each for each in listed[row, 0].tolist() if each in chosen]
                own.append(compressed[sequence][chosen, 0])
            there = torch.cat(own)
            wanted.append(_attention(queries[sequence][at], there, there, scale, sinks)[0])
        results, _ = call("npu_sparse_attn_sharedkv", torch.cat(queries), **options, **more)
        equal(results[0], torch.stack(wanted))
        assert results[1].numel() == 0
    for argument, value in {"ori_mask_mode": 3, "return_softmax_lse": True, "softmax_scale": 0.0}.items():
        with pytest.raises(NotImplementedError, match=f"npu_sparse_attn_sharedkv: {argument} is {value}"):
            call("npu_sparse_attn_sharedkv", torch.cat(queries), **options | {argument: value})

    # How cores share the work: nothing reads it here.
    for name, arguments in {
        "npu_sparse_attn_sharedkv_metadata": (64, 1, 512),
        "npu_vllm_quant_lightning_indexer_metadata": (64, 1, 128, 0, 0),
    }.items():
        shares = getattr(call.operators, name)(*arguments, batch_size=2)
        assert (shares.device, shares.shape, shares.dtype) == (device, (1024,), torch.int32)
