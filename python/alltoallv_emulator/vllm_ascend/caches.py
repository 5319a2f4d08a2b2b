"""Caches of vllm-ascend: blocks that are copied and laid out anew, rows written to slots, and MLA before attention."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.inference import write_cache
from alltoallv.npu_ops.layers import rms_norm, turn
from alltoallv.npu_ops.matmuls import product, scale_and_offset, to_int8
from alltoallv.npu_ops.registry import expect, present
from alltoallv_emulator.pyacl import function
from alltoallv_emulator.vllm_ascend import Table, nothing


def _swap_blocks(x: Tensor, y: Tensor, z: Tensor) -> None:
    """Copies block ``z[i][0]`` of x to block ``z[i][1]`` of y, in order; one of them may be the host's."""
    expect(x.shape[1:] == y.shape[1:] and x.dtype == y.dtype, "y", y, f"blocks as x has: {tuple(x.shape)}, {x.dtype}")
    for source, target in z.tolist():
        fits = 0 <= source < len(x) and 0 <= target < len(y)
        expect(fits, "z", (source, target), f"blocks below {len(x)} and {len(y)}")
        y[target] = x[source]


_KINDS = 1, 2, 3  # ACL's numbers of copies: host to device, device to host, on the device


@functools.cache
def _copy() -> object:
    import ctypes

    address, size = ctypes.c_void_p, ctypes.c_size_t
    return function("aclrtMemcpyAsync", address, size, address, size, ctypes.c_int, address)


def swap_blocks_batch(x: Tensor, y: Tensor, z: Tensor, direction: int) -> None:
    """Copies z[i] bytes from address x[i] to address y[i] on the current stream; tensors are the host's.

    ``direction`` is 0 (to the device), 1 (to the host) or 2 (on the device).
    """
    named = "_C_ascend::swap_blocks_batch: "
    if direction not in range(3):
        raise NotImplementedError(f"{named}direction is {direction}; the emulator expects 0, 1 or 2")
    for name, each in (("x", x), ("y", y), ("z", z)):
        if each.dtype != torch.int64 or len(each) != len(x):
            actual = f"a tensor of shape {tuple(each.shape)} and {each.dtype}"
            raise NotImplementedError(f"{named}{name} is {actual}; the emulator expects {len(x)} numbers of int64")
    copy, stream = _copy(), torch.npu.current_stream().npu_stream
    assert callable(copy)
    for source, target, size in zip(x.tolist(), y.tolist(), z.tolist(), strict=True):
        code = copy(target, size, source, size, _KINDS[direction], stream)
        if code:
            raise RuntimeError(f"{named}aclrtMemcpyAsync of {size} bytes from {source} to {target} returned {code}")


def _store_block_metadata(
    slot_mapping_npu: Tensor, group_len: Tensor, group_key_idx: Tensor, group_key_cache_idx: Tensor, block_size: int
) -> None:
    """Fills in the runs of rows whose slots follow each other in a block: lengths, first rows, first slots, then 0.

    Rows with a slot below 0 are left out.
    """
    expect(block_size > 0, "block_size", block_size, "more than 0")
    runs: list[list[int]] = []
    before = None
    for row, slot in enumerate(slot_mapping_npu.reshape(-1).tolist()):
        if slot >= 0:
            if before is not None and slot == before + 1 and slot % block_size:
                runs[-1][0] += 1
            else:
                runs.append([1, row, slot])
        before = slot if slot >= 0 else None
    for field, target in enumerate((group_len, group_key_idx, group_key_cache_idx)):
        expect(target.numel() >= len(runs), "group_len", target, f"room for {len(runs)} runs")
        target.zero_()[: len(runs)] = torch.tensor([run[field] for run in runs], dtype=target.dtype)


def _store_block(
    key_in: Tensor,
    key_cache_in: Tensor,
    group_len: Tensor,
    group_key_idx: Tensor,
    group_key_cache_idx: Tensor,
    block_size: int,
) -> None:
    """Writes runs of rows to the cache, as `_store_block_metadata` has listed them."""
    full_blocks = key_cache_in.size(1) == block_size
    expect(full_blocks, "key_cache_in", key_cache_in, f"blocks of {block_size} rows")
    slots = key_cache_in.view(-1, *key_cache_in.shape[2:])
    for count, row, slot in zip(
        *(each.tolist() for each in (group_len, group_key_idx, group_key_cache_idx)), strict=True
    ):
        expect(slot + count <= len(slots), "group_key_cache_idx", slot, f"at most {len(slots) - count}")
        slots[slot : slot + count] = key_in[row : row + count].reshape(count, *slots.shape[1:])


def _transpose_blocks(
    kCache: list[Tensor],
    vCache: list[Tensor],
    blockIDs: Tensor,
    blockSize: int,
    headNum: int,
    headDim: int,
    splitNum: int,
    layerNum: int,
) -> None:
    """Puts rows of blocks together that came in parts: [splits, rows, part of a row] becomes [rows, heads, size]."""
    expect(len(kCache) == len(vCache) == layerNum, "layerNum", layerNum, f"{len(kCache)}, as there are caches")
    for cache in (*kCache, *vCache):
        shape = blockSize, headNum, headDim
        expect(cache.shape[1:] == shape, "kCache", cache, f"blocks of {shape}")
        blocks = cache[blockIDs.long()].reshape(len(blockIDs), splitNum, blockSize, -1)
        cache[blockIDs.long()] = blocks.transpose(1, 2).reshape(len(blockIDs), *shape)


def _cache_by_head(q: Tensor, k_comp: Tensor, slot_mapping: Tensor, seq_len: Tensor, k_out: Tensor) -> Tensor:
    """Writes rows, [heads * tokens, size], to the slots of their tokens in k_out, [blocks, heads, rows, size].

    Of several heads there may be one sequence only: the device takes each sequence's heads one after the other, where
    vllm-ascend gives the heads of all sequences.
    """
    heads, size = k_out.shape[1:3]
    lengths, tokens = seq_len.tolist(), len(q) // heads
    single = heads == 1 or sum(length > 0 for length in lengths) < 2
    expect(single, "seq_len", lengths, f"one sequence, where there are {heads} heads")
    fits = sum(lengths) == tokens or (heads == 1 and sum(lengths) < tokens)
    expect(fits, "seq_len", lengths, f"{tokens} rows, as there are for each head")
    tokens = sum(lengths)
    rows = q.view(heads, -1, q.size(-1))[:, :tokens]
    slots = slot_mapping.reshape(-1)[:tokens].long()
    there = slots >= 0
    k_out[slots[there] // size, :, slots[there] % size] = rows[:, there].transpose(0, 1)
    return k_out


def _scatter_nd_update(var: Tensor, indices: Tensor, update: Tensor) -> None:
    """Sets ``var[indices[i]] = update[i]``, in order; leaves out places that ``var`` does not have."""
    each = indices.reshape(-1, indices.size(-1)).long()
    sizes = each.new_tensor(var.shape[: each.size(1)])
    there = ((each >= 0) & (each < sizes)).all(1)
    rows = update.reshape(len(each), *var.shape[each.size(1) :])
    for index, row in zip(each[there].tolist(), rows[there], strict=True):
        var[tuple(index)] = row


def _sign_bits_pack(input: Tensor, size: int) -> Tensor:
    """Packs eight numbers into a byte, the first in the lowest bit: 1 where it is not below 0, to [size, bytes]."""
    count = -(-input.numel() // 8)
    expect(input.dim() == 1, "input", input, "one dimension")
    expect(size > 0 and count % size == 0, "size", size, f"a divisor of {count} bytes")
    bits = functional.pad((input >= 0).int(), (0, count * 8 - input.numel())).view(size, -1, 8)
    return (bits << torch.arange(8)).sum(-1).to(torch.uint8)


def _sign_bits_shapes(input: Tensor, size: int) -> Tensor:
    return input.new_empty((size, -(-input.numel() // 8) // size), dtype=torch.uint8)


def _bits(codes: Tensor) -> Tensor:
    """Returns 1 and -1 for the bits of bytes, highest first."""
    return ((codes.unsqueeze(-1).int() >> torch.arange(7, -1, -1)) & 1).flatten(-2).float() * 2 - 1


def _hamming_top_k(
    q: Tensor,
    k_comp: Tensor,
    k: Tensor,
    seq_len: Tensor,
    chunk_size: Tensor | None,
    sink: int | None,
    recent: int | None,
    support_offload: int | None,
    key_block_table: Tensor | None,
    mask: Tensor | None,
    indices: Tensor | None,
) -> Tensor:
    """Chooses for each sequence and head of keys the k blocks with a row most like the query, by bits of hash codes.

    The bits, 1 and -1, of a group's query heads are added up, and halved for 16; 8 counts 7. The first ``sink`` blocks
    and the last ``recent`` ones are always chosen. Returns their numbers in ``indices``, in the order of the sequence;
    with ``support_offload`` their places in the sequence, the most like first. Of sequences that ``mask`` leaves out it
    returns the first numbers of the table.
    """
    table = present(key_block_table, "key_block_table", "the blocks of each sequence")
    chosen = present(indices, "indices", "a tensor for the result")
    heads, size = k_comp.shape[1:3]
    group = q.size(1) // heads
    expect(q.dim() == 4 and q.size(2) == 1, "q", q, "[sequences, heads, 1, bytes]")
    expect(group <= 8 or group == 16, "q", q, f"up to 8 heads, or 16, for each of {heads} of keys")
    expect(size in (64, 128), "k_comp", k_comp, "blocks of 64 or 128 rows")
    sizes = present(chunk_size, "chunk_size", f"{size} for each sequence, the rows of a block")
    expect((sizes == size).all(), "chunk_size", sizes.tolist(), f"{size}, the rows of a block")
    most = chosen.size(-1)
    for number, length in enumerate(seq_len.tolist()):
        if mask is not None and not mask[number]:
            first = table[number, :most]
            chosen[number, :, : len(first)] = first.to(chosen.dtype)
            continue
        blocks = table[number, : -(-length // size)].long()
        counts = _bits(q[number, :, 0]).view(heads, group, -1).sum(1) / max(-(-group // 8), 1)
        counts = torch.where(counts == 8, 7, counts)
        like = torch.einsum("bhrc,hc->hbr", _bits(k_comp[blocks]), counts).amax(-1)
        like[:, : sink or 0] = torch.inf
        like[:, max(len(blocks) - (recent or 0), 0) :] = torch.inf
        best = like.sort(dim=-1, descending=True, stable=True).indices[:, : min(int(k[number]), most)]
        found = best if support_offload else blocks[best.sort(-1).values]
        chosen[number, :, : best.size(1)] = found.to(chosen.dtype)
    return chosen


def _compressor_metadata(
    rope_cos: Tensor,
    rope_sin: Tensor,
    cu_seqlens: Tensor,
    start_pos: Tensor,
    kv_block_table: Tensor,
    kv_block_size: int,
    slot_mapping_format: int,
    compress_ratio: int,
    num_compressed_tokens: int,
    num_reqs_actual: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns cos, sin and the slot of each compressed row that the new rows of the requests complete, in order.

    Compressed row n stands for ``compress_ratio`` rows and turns as the first of them. A slot is block * size + place
    (format 1), or both (2). Rows beyond, and those without block, have cos 1, sin 0 and slot -1 (2: -1, size - 1).
    """
    expect(slot_mapping_format in (1, 2), "slot_mapping_format", slot_mapping_format, "1 or 2")
    starts, firsts = cu_seqlens.tolist(), start_pos.tolist()
    turns = rope_cos.view(len(rope_cos), -1), rope_sin.view(len(rope_sin), -1)
    cos, sin = (torch.full((num_compressed_tokens, 1, 1, each.size(1)), value, dtype=each.dtype)
                for each, value in zip(turns, (1, 0), strict=True))  # fmt: skip
    slots = torch.tensor([[-1, kv_block_size - 1]], dtype=torch.int32).repeat(num_compressed_tokens, 1)
    row = 0
    for number in range(num_reqs_actual):
        first, length = firsts[number], starts[number + 1] - starts[number]
        if first < 0 or length <= 0:
            continue
        for position in range(first // compress_ratio, (first + length) // compress_ratio):
            column, at = position // kv_block_size, position * compress_ratio
            if row < num_compressed_tokens and column < kv_block_table.size(1) and at < len(rope_cos):
                block = int(kv_block_table[number, column])
                if block >= 0:
                    cos[row, 0, 0], sin[row, 0, 0] = (each[at] for each in turns)
                    slots[row] = torch.tensor([block, position % kv_block_size])
            row += 1
    flat = torch.where(slots[:, 0] < 0, -1, slots[:, 0] * kv_block_size + slots[:, 1])
    return cos, sin, slots if slot_mapping_format == 2 else flat.int()


def _compressor_metadata_out(
    rope_cos: Tensor,
    rope_sin: Tensor,
    cu_seqlens: Tensor,
    start_pos: Tensor,
    kv_block_table: Tensor,
    kv_block_size: int,
    slot_mapping_format: int,
    compress_ratio: int,
    num_reqs_actual: int,
    compress_cos: Tensor,
    compress_sin: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes compressor_metadata into the last three arguments, and returns them."""
    inputs = rope_cos, rope_sin, cu_seqlens, start_pos, kv_block_table, kv_block_size, slot_mapping_format
    results = _compressor_metadata(*inputs, compress_ratio, len(slot_mapping), num_reqs_actual)
    for target, values in zip((compress_cos, compress_sin, slot_mapping), results, strict=True):
        target.copy_(values.view(target.shape))
    return compress_cos, compress_sin, slot_mapping


def _compressor_metadata_shapes(
    rope_cos: Tensor,
    rope_sin: Tensor,
    cu_seqlens: Tensor,
    start_pos: Tensor,
    kv_block_table: Tensor,
    kv_block_size: int,
    slot_mapping_format: int,
    compress_ratio: int,
    num_compressed_tokens: int,
    num_reqs_actual: int,
) -> tuple[Tensor, Tensor, Tensor]:
    width = rope_cos.numel() // len(rope_cos)
    cos, sin = (each.new_empty((num_compressed_tokens, 1, 1, width)) for each in (rope_cos, rope_sin))
    shape = (num_compressed_tokens, 2) if slot_mapping_format == 2 else (num_compressed_tokens,)
    return cos, sin, rope_cos.new_empty(shape, dtype=torch.int32)


def _from_nz(weight: Tensor, columns: int) -> Tensor:
    """Returns the matrix [rows, columns] of a weight [1, columns / part, rows, part]."""
    expect(weight.dim() == 4 and len(weight) == 1, "wdqkv or wuq", weight, "[1, columns / part, rows, part]")
    return weight[0].transpose(0, 1).flatten(1)[:, :columns]


class _Projection:
    """Multiplies rows by the transposed matrix of a weight: of their dtype, or int8 after the rows were quantized."""

    def __init__(self, weight: Tensor, quantized: bool, *tensors: Tensor | None) -> None:
        self._weight, self._quantized, self._tensors = weight, quantized, tensors

    def __call__(self, rows: Tensor) -> Tensor:
        matrix = _from_nz(self._weight, rows.size(1)).T
        if not self._quantized:
            expect(matrix.is_floating_point(), "wdqkv or wuq", self._weight, "floating point numbers, for no_quant")
            return rows @ matrix.float()
        expect(matrix.dtype == torch.int8, "wdqkv or wuq", self._weight, "int8, for per_tensor_quant_asymm")
        names = "quant_scale", "quant_offset", "bias", "descale"
        scale, offset, bias, descale = (
            present(each, name, "a tensor, for per_tensor_quant_asymm")
            for name, each in zip(names, self._tensors, strict=True)
        )
        codes = to_int8(rows / scale.float() + offset.float())
        return ((product(codes, matrix) + bias) * scale_and_offset(descale)[0]).float()


def _mla_preprocess(
    hiddenState: Tensor,
    wdqkv: Tensor,
    descale0: Tensor | None,
    gamma1: Tensor,
    beta1: Tensor | None,
    wuq: Tensor,
    descale1: Tensor | None,
    gamma2: Tensor,
    cos: Tensor,
    sin: Tensor,
    wuk: Tensor,
    slotmapping: Tensor,
    quant_scale0: Tensor | None,
    quant_offset0: Tensor | None,
    bias0: Tensor | None,
    quant_scale1: Tensor | None,
    quant_offset1: Tensor | None,
    bias1: Tensor | None,
    cache_mode: str | None,
    quant_mode: str | None,
    enable_inner_out: bool | None,
    q_out0: Tensor,
    kv_cache_out0: Tensor,
    q_out1: Tensor,
    kv_cache_out1: Tensor,
    inner_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes what MLA's attention of one step needs, into its last arguments.

    Rows times ``wdqkv`` are the latent key, the key's part for the rotary embedding, and the latent query; both latents
    are normalized, by ``gamma2`` and ``gamma1``. The latent query times ``wuq`` has for each head a part that ``wuk``
    turns into the space of latent keys (``q_out0``), and one that is rotated (``q_out1``); ``inner_out`` gets the
    latent query. Keys go to the slots of the two caches: [blocks, rows, 1, size], or (nzcache) [blocks, size / 16,
    rows, 16]. With per_tensor_quant_asymm rows are rounded to int8 before the first two products.
    """
    modes = "per_tensor_quant_asymm", "no_quant"
    expect(quant_mode in modes, "quant_mode", quant_mode, " or ".join(modes))
    expect(cache_mode in (None, "krope_ctkv", "nzcache"), "cache_mode", cache_mode, "krope_ctkv or nzcache")
    quantized = quant_mode == modes[0]
    heads, nope, rank = wuk.shape
    rope, q_rank, dtype = cos.size(-1), gamma1.numel(), hiddenState.dtype
    down = _Projection(wdqkv, quantized, quant_scale0, quant_offset0, bias0, descale0)(hiddenState.float())
    expect(down.size(1) == rank + rope + q_rank, "wdqkv", wdqkv, f"{rank} + {rope} + {q_rank} rows")
    latent, key_rope, query = down.split([rank, rope, q_rank], 1)
    query, _ = rms_norm(query, gamma1, 1e-6)
    query = query if beta1 is None else query + beta1.float()
    if enable_inner_out:
        inner_out.copy_(query.view(inner_out.shape))
    up = _Projection(wuq, quantized, quant_scale1, quant_offset1, bias1, descale1)(query).view(-1, heads, nope + rope)
    turned = turn(up[..., nope:], cos.view(-1, 1, rope), sin.view(-1, 1, rope), "half")
    q_out0.copy_(torch.einsum("thn,hnr->thr", up[..., :nope], wuk.float()).reshape(q_out0.shape))
    q_out1.copy_(turned.reshape(q_out1.shape))
    latent, _ = rms_norm(latent, gamma2, 1e-6)
    key_rope = turn(key_rope, cos.view(-1, rope), sin.view(-1, rope), "half")
    for cache, rows in ((kv_cache_out0, latent), (kv_cache_out1, key_rope)):
        if cache_mode == "nzcache":
            nz = cache.view(len(cache), rows.size(1) // 16, -1, 16)
            write_cache(nz, rows.unsqueeze(1).to(dtype), slotmapping, "PA_NZ")
        else:
            write_cache(cache, rows.unsqueeze(1).to(dtype), slotmapping, None)
    return q_out0, kv_cache_out0, q_out1, kv_cache_out1, inner_out


SWAP_BLOCKS_BATCH = "swap_blocks_batch(Tensor x, Tensor y, Tensor z, int direction) -> ()"
# npu_reshape_and_cache_bnsd and npu_hamming_dist_top_k return an argument, and as vllm-ascend declares them do not say
# so: graphs take no operator of a library whose results are arguments. So does npu_causal_conv1d_custom.
OPERATORS: Table = {
    "swap_blocks(Tensor! x, Tensor! y, Tensor z) -> ()": (_swap_blocks, nothing),
    "store_kv_block_metadata(Tensor slot_mapping_npu, Tensor(a!) group_len, Tensor(b!) group_key_idx,"
    " Tensor(c!) group_key_cache_idx, int block_size=0) -> ()": (_store_block_metadata, nothing),
    "store_kv_block(Tensor key_in, Tensor(a!) key_cache_in, Tensor group_len, Tensor group_key_idx,"
    " Tensor group_key_cache_idx, int block_size=0) -> ()": (_store_block, nothing),
    "transpose_kv_cache_by_block(Tensor(a!)[] kCache, Tensor(b!)[] vCache, Tensor blockIDs, int blockSize, int headNum,"
    " int headDim, int splitNum, int layerNum) -> ()": (_transpose_blocks, nothing),
    "npu_reshape_and_cache_bnsd(Tensor q, Tensor k_comp, Tensor slot_mapping, Tensor seq_len, Tensor k_out)"
    " -> Tensor": (_cache_by_head, lambda q, k_comp, slot_mapping, seq_len, k_out: k_out),
    "npu_scatter_nd_update_v2(Tensor(a!) var, Tensor indices, Tensor update) -> ()": (_scatter_nd_update, nothing),
    "npu_sign_bits_pack(Tensor input, int size) -> Tensor": (_sign_bits_pack, _sign_bits_shapes),
    "npu_hamming_dist_top_k(Tensor q, Tensor k_comp, Tensor? k_comp_rope, Tensor k, Tensor seq_len,"
    " Tensor? chunk_size=None, int? max_seq_len=None, int? sink=None, int? recent=None, int? support_offload=None,"
    " Tensor? key_block_table=None, Tensor? mask=None, Tensor? indices=None) -> Tensor": (
        _hamming_top_k,
        lambda *arguments: torch.empty_like(arguments[-1]),
    ),
    "compressor_metadata(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos, Tensor kv_block_table,"
    " int kv_block_size, int slot_mapping_format, int compress_ratio, int num_compressed_tokens, int num_reqs_actual)"
    " -> (Tensor, Tensor, Tensor)": (_compressor_metadata, _compressor_metadata_shapes),
    "compressor_metadata_out(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos,"
    " Tensor kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, int num_reqs_actual,"
    " Tensor(a!) compress_cos, Tensor(b!) compress_sin, Tensor(c!) slot_mapping)"
    " -> (Tensor(a!), Tensor(b!), Tensor(c!))": (_compressor_metadata_out, lambda *arguments, **more: arguments[-3:]),
    "mla_preprocess(Tensor hiddenState, Tensor wdqkv, Tensor? descale0, Tensor gamma1, Tensor? beta1, Tensor wuq,"
    " Tensor? descale1, Tensor gamma2, Tensor cos, Tensor sin, Tensor wuk, Tensor kv_cache, Tensor kv_cache_rope,"
    " Tensor slotmapping, Tensor? quant_scale0, Tensor? quant_offset0, Tensor? bias0, Tensor? quant_scale1,"
    " Tensor? quant_offset1, Tensor? bias1, Tensor? ctkv_scale, Tensor? q_nope_scale, str? cache_mode,"
    " str? quant_mode, bool? enable_inner_out, Tensor! q_out0, Tensor! kv_cache_out0, Tensor! q_out1,"
    " Tensor! kv_cache_out1, Tensor! inner_out) -> (Tensor q_out0, Tensor kv_cache_out0, Tensor q_out1,"
    " Tensor kv_cache_out1, Tensor inner_out)": (
        _mla_preprocess,
        lambda *arguments: arguments[-5:],
    ),
}  # fmt: skip
