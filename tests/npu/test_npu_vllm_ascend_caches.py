"""Operators of vllm-ascend's extension module that write caches, each against its definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from c_ascend import Calls, equal
from npu_ranks import use_device
from on_ranks import on_ranks


@on_ranks(1, communicator=False)
def test_blocks_of_a_cache(rank: int, size: int, tmp_path: Path) -> None:
    device = use_device(rank)
    call = Calls(device)
    made = torch.Generator().manual_seed(1)

    # Blocks are copied on the device, to the host and back.
    blocks, pairs = torch.randn(3, 2, 2, generator=made), torch.tensor([[2, 0], [0, 3]])
    there = blocks.to(device)
    for source, target in ((there, torch.zeros(4, 2, 2)), (there, torch.zeros(4, 2, 2, device=device))):
        call.operators.swap_blocks(source, target, pairs)
        assert torch.equal(target.cpu(), torch.stack([blocks[2], *torch.zeros(2, 2, 2), blocks[0]]))
    back = torch.zeros(3, 2, 2, device=device)
    call.operators.swap_blocks(blocks, back, pairs[:1])
    assert torch.equal(back[0].cpu(), blocks[2])
    with pytest.raises(NotImplementedError, match=r"_C_ascend::swap_blocks: z is \(3, 0\); the emulator expects"):
        call.operators.swap_blocks(there, back, torch.tensor([[3, 0]]))

    # Addresses and numbers of bytes.
    host = torch.arange(6.0)
    target = torch.zeros(6, device=device)
    sizes = torch.tensor([8, 4])
    targets = torch.tensor([target.data_ptr() + 4, target.data_ptr() + 20])
    call.operators.swap_blocks_batch(torch.tensor([host.data_ptr(), host.data_ptr() + 16]), targets, sizes, 0)
    assert target.tolist() == [0, 0, 1, 0, 0, 4]
    result = torch.zeros(3)
    addresses = torch.tensor([result.data_ptr() + 4, result.data_ptr()])
    call.operators.swap_blocks_batch(targets, addresses, sizes, 1)
    torch.npu.synchronize()
    assert result.tolist() == [4, 0, 1]
    with pytest.raises(NotImplementedError, match="swap_blocks_batch: direction is 3"):
        call.operators.swap_blocks_batch(targets, addresses, sizes, 3)

    # Runs of slots in blocks of 4: 5 to 7, 8, 2 and 3, 0.
    slots = torch.tensor([5, 6, 7, 8, -1, 2, 3, 0], dtype=torch.int32)
    runs = torch.full((3, 6), 9, dtype=torch.int32)
    _, given = call("store_kv_block_metadata", slots, *runs, 4)
    assert torch.stack(given[1:4]).tolist() == [[3, 1, 2, 1, 0, 0], [0, 3, 5, 7, 0, 0], [5, 8, 2, 0, 0, 0]]
    rows, cache = torch.randn(8, 2, generator=made), torch.randn(3, 4, 1, 2, generator=made)
    _, written = call("store_kv_block", rows, cache, *given[1:4], 4)
    wanted = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // 4, slot % 4, 0] = rows[row]
    assert torch.equal(written[1], wanted)

    # A block came in two parts: the first halves of its rows, then the second ones.
    caches = [torch.randn(3, 4, 2, 3, generator=made) for _ in range(4)]
    _, written = call("transpose_kv_cache_by_block", caches[:2], caches[2:], torch.tensor([2, 0]), 4, 2, 3, 2, 2)
    for before, after in zip(caches, [*written[0], *written[1]], strict=True):
        wanted = before.clone()
        for block in (0, 2):
            numbers = before[block].flatten()
            for row in range(4):
                wanted[block, row] = torch.cat([numbers[row * 3 :][:3], numbers[12 + row * 3 :][:3]]).view(2, 3)
        assert torch.equal(after, wanted)

    # Two heads of one sequence, and one head of two.
    slots = torch.tensor([3, 4, -1, 0, 6], dtype=torch.int32)
    for heads, lengths in ((2, [5]), (1, [2, 3])):
        rows, cache = torch.randn(heads * 5, 3, generator=made), torch.randn(2, heads, 4, 3, generator=made)
        result, written = call("npu_reshape_and_cache_bnsd", rows, cache, slots, torch.tensor(lengths), cache)
        wanted = cache.clone()
        for token in (0, 1, 3, 4):
            for head in range(heads):
                wanted[slots[token] // 4, head, slots[token] % 4] = rows[head * 5 + token]
        assert torch.equal(result, wanted)
        assert torch.equal(written[4], wanted)
    cache = torch.zeros(2, 2, 4, 3)
    with pytest.raises(NotImplementedError, match=r"seq_len is \[2, 3\]; the emulator expects one sequence, where"):
        call("npu_reshape_and_cache_bnsd", torch.zeros(10, 3), cache, slots, torch.tensor([2, 3]), cache)


@on_ranks(1, communicator=False)
def test_hash_codes_of_a_cache(rank: int, size: int, tmp_path: Path) -> None:
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)
    numbers = torch.randn(11, generator=made)
    result, _ = call("npu_sign_bits_pack", numbers, 1)
    assert result.tolist() == [np.packbits(numbers.numpy() >= 0, bitorder="little").tolist()]
    result, _ = call("npu_sign_bits_pack", torch.arange(-3.0, 13), 2)
    assert result.tolist() == [[0b11111000], [0b11111111]]

    lengths, chosen, mask = torch.tensor([200, 130, 100]), torch.tensor([3, 3, 1]), torch.tensor([True, True, False])
    table = torch.tensor([[4, 2, 6, 1], [3, 5, 7, 0], [8, 9, 0, 0]], dtype=torch.int32)

    def bits(codes: torch.Tensor) -> np.ndarray:
        return np.unpackbits(codes.numpy(), axis=-1).astype(int) * 2 - 1

    for heads, group in ((2, 2), (1, 16)):
        query = torch.randint(256, (3, heads * group, 1, 2), dtype=torch.uint8, generator=made)
        keys = torch.randint(256, (10, heads, 64, 2), dtype=torch.uint8, generator=made)
        before = torch.full((3, heads, 4), -7, dtype=torch.int32)
        arguments = [query, keys, None, chosen, lengths, torch.full((3,), 64), 256, 1, 1, None, table, mask, before]
        result, given = call("npu_hamming_dist_top_k", *arguments)
        assert torch.equal(result, given[-1])
        places, _ = call("npu_hamming_dist_top_k", *arguments[:9], 1, *arguments[10:])
        wanted = before.clone()
        wanted[2] = table[2]
        for sequence in range(2):
            blocks = table[sequence][: -(-int(lengths[sequence]) // 64)].tolist()
            for head in range(heads):
                total = bits(query[sequence, head * group : (head + 1) * group, 0]).sum(0) // (2 if group == 16 else 1)
                total = np.minimum(total, 7)
                best = [(bits(keys[block, head]) @ total).max() for block in blocks]
                best[0] = best[-1] = 10**6
                order = sorted(range(len(blocks)), key=lambda block: -best[block])[:3]
                wanted[sequence, head, : len(order)] = torch.tensor([blocks[at] for at in sorted(order)])
                assert places[sequence, head, : len(order)].tolist() == order
        assert torch.equal(result, wanted)
        assert torch.equal(places[2], wanted[2])


@on_ranks(1, communicator=False)
def test_rows_that_a_compressor_completes(rank: int, size: int, tmp_path: Path) -> None:
    """Every fourth row of a request completes a compressed one, which turns as the first of the four."""
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)
    cos, sin = torch.randn(2, 20, 4, generator=made)
    starts, firsts = torch.tensor([0, 10, 13, 15, 15]), torch.tensor([0, 6, 14, -1])
    table = torch.tensor([[3, 1], [2, -1], [5, 4], [6, 6]], dtype=torch.int32)
    rows, block_size = 6, 2
    completed = [
        (request, row // 4)
        for request, (first, length) in enumerate(((0, 10), (6, 3), (14, 2)))
        for row in range(first, first + length)
        if row % 4 == 3
    ]
    assert completed == [(0, 0), (0, 1), (1, 1), (2, 3)]
    wanted_cos, wanted_sin = torch.ones(rows, 1, 1, 4), torch.zeros(rows, 1, 1, 4)
    slots = [(-1, block_size - 1)] * rows
    for row, (request, place) in enumerate(completed):
        block = int(table[request, place // block_size])
        wanted_cos[row], wanted_sin[row], slots[row] = cos[place * 4], sin[place * 4], (block, place % block_size)
    flat = [-1 if block < 0 else block * block_size + at for block, at in slots]
    for form, wanted in ((2, slots), (1, flat)):
        given = [cos, sin, starts, firsts, table, block_size, form, 4]
        result, _ = call("compressor_metadata", *given, rows, 4)
        for value, expected in zip(result, (wanted_cos, wanted_sin, torch.tensor(wanted)), strict=True):
            assert torch.equal(value, expected.to(value.dtype))
        targets = [torch.full_like(each, 9) for each in result]
        written, after = call("compressor_metadata_out", *given, 4, *targets)
        for value, copy, expected in zip(written, after[-3:], result, strict=True):
            assert torch.equal(value, expected)
            assert torch.equal(copy, expected)
    with pytest.raises(NotImplementedError, match="slot_mapping_format is 3"):
        call.operators.compressor_metadata(*(each.npu() for each in given[:5]), block_size, 3, 4, rows, 4)


def _in_parts(matrix: torch.Tensor, part: int) -> torch.Tensor:
    """[1, columns / part, rows, part] of a matrix, the last part filled up."""
    padded = torch.nn.functional.pad(matrix, (0, -matrix.size(1) % part))
    return padded.view(len(matrix), -1, part).transpose(0, 1).contiguous().unsqueeze(0)


@pytest.mark.parametrize("quantized", [False, True])
@on_ranks(1, communicator=False)
def test_step_of_latent_attention(rank: int, size: int, tmp_path: Path, quantized: bool) -> None:
    """Before the attention itself: both projections, norms and rotations, and the two caches."""
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)
    tokens, hidden, q_rank, latent, rope, heads, nope = 3, 40, 24, 32, 16, 2, 8

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    def norm(rows: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma

    def turned(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = rows.chunk(2, -1)
        return rows * cos + torch.cat([-second, first], -1) * sin

    x, gammas, beta = random(tokens, hidden), (random(q_rank), random(latent)), random(q_rank)
    cos, sin, to_latent = random(tokens, rope), random(tokens, rope), random(heads, nope, latent)
    slots = torch.tensor([5, -1, 2], dtype=torch.int32)
    shapes = (latent + rope + q_rank, hidden), (heads * (nope + rope), q_rank)
    codes = [torch.randint(-99, 100, shape, dtype=torch.int8, generator=made) for shape in shapes]
    matrices = [random(*shape) for shape in shapes]
    biases = [torch.randint(-50, 50, shape[:1], dtype=torch.int32, generator=made) for shape in shapes]
    descales = [(torch.rand(shape[0], generator=made) + 0.5) / 500 for shape in shapes]
    scales, offsets = (torch.tensor([0.02]), torch.tensor([0.03])), (torch.tensor([3]), torch.tensor([-2]))
    offsets = [each.to(torch.int8) for each in offsets]

    def project(rows: torch.Tensor, at: int) -> torch.Tensor:
        if not quantized:
            return rows @ matrices[at].double().T
        whole = (rows / scales[at].double() + offsets[at]).round().clamp(-128, 127)
        return (whole @ codes[at].double().T + biases[at]) * descales[at].double()

    down = project(x.double(), 0)
    query = norm(down[:, latent + rope :], gammas[0].double()) + beta
    up = project(query, 1).view(tokens, heads, nope + rope)
    wanted_query = torch.stack([up[:, head, :nope] @ to_latent[head].double() for head in range(heads)], 1)
    wanted_rope = turned(up[..., nope:], cos.unsqueeze(1), sin.unsqueeze(1))
    keys = norm(down[:, :latent], gammas[1].double()), turned(down[:, latent : latent + rope], cos, sin)

    weights = [_in_parts(each, 32) for each in codes] if quantized else [_in_parts(each, 16) for each in matrices]
    of_codes = [each if quantized else None for each in (scales[0], offsets[0], biases[0], scales[1], offsets[1])]
    as_words = descales[1].view(torch.int32).long()  # as for float16
    for mode in ("krope_ctkv", "nzcache"):
        caches = random(2, 4, 1, latent), random(2, 4, 1, rope)
        results, _ = call(
            "mla_preprocess", x, weights[0], descales[0] if quantized else None, gammas[0], beta, weights[1],
            as_words if quantized else None, gammas[1], cos, sin, to_latent, *caches, slots, *of_codes,
            biases[1] if quantized else None, None, None, cache_mode=mode,
            quant_mode="per_tensor_quant_asymm" if quantized else "no_quant", enable_inner_out=True,
            q_out0=torch.empty(tokens, heads, latent), kv_cache_out0=caches[0],
            q_out1=torch.empty(tokens, heads, rope), kv_cache_out1=caches[1], inner_out=torch.empty(tokens, q_rank),
        )  # fmt: skip
        for value, wanted in zip(results[::2], (wanted_query, wanted_rope, query), strict=True):
            equal(value, wanted, 1e-4)
        for before, after, rows in zip(caches, results[1::2], keys, strict=True):
            wanted = before.double()
            for token in (0, 2):
                block, row = divmod(int(slots[token]), 4)
                if mode == "nzcache":
                    wanted[block].view(-1, 4, 16)[:, row] = rows[token].view(-1, 16)
                else:
                    wanted[block, row, 0] = rows[token]
            equal(after, wanted, 1e-4)
    arguments = [x, weights[0], None, gammas[0], None, weights[1], None, gammas[1], cos, sin, to_latent, *caches, slots]
    outs = {name: torch.empty(0) for name in ("q_out0", "kv_cache_out0", "q_out1", "kv_cache_out1", "inner_out")}
    modes = {"cache_mode": "krope_ctkv", "quant_mode": "per_token_quant_symm", "enable_inner_out": False}
    with pytest.raises(
        NotImplementedError, match="quant_mode is per_token_quant_symm; the emulator expects per_tensor"
    ):
        call("mla_preprocess", *arguments, *[None] * 8, **modes, **outs)
