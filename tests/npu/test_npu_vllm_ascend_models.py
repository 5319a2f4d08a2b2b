"""Operators of vllm-ascend's extension module for models with states and for speculation, each as it is defined."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch
from c_ascend import Calls, equal
from npu_ranks import group, use_device
from on_ranks import on_ranks


@on_ranks(1, communicator=False)
def test_hyper_connections(rank: int, size: int, tmp_path: Path) -> None:
    """Several rows stand for each place: a layer gets one of them, and its result goes back to all."""
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)
    streams, width, rounds, small = 3, 8, 4, 1e-3
    x = torch.randn(2, 5, streams, width, generator=made)
    matrix = torch.randn((2 + streams) * streams, streams * width, generator=made) / 4
    scale, base = torch.randn(3, generator=made), torch.randn((2 + streams) * streams, generator=made)
    flat = x.double().flatten(2)
    inverse = 1 / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    result, _ = call("npu_hc_pre_inv_rms", x, 1e-6)
    equal(result, inverse)

    mixes = flat @ matrix.double().T * inverse
    before = 1 / (1 + (-(mixes[..., :streams] * scale[0] + base[:streams])).exp()) + small
    after = 2 / (1 + (-(mixes[..., streams : 2 * streams] * scale[1] + base[streams : 2 * streams])).exp())
    shares = mixes[..., 2 * streams :] * scale[2] + base[2 * streams :]
    shares = shares.unflatten(-1, (streams, streams)).softmax(-1) + small
    for round_ in range(rounds):  # rows are 1 by softmax before the first
        if round_:
            shares = shares / (shares.sum(-1, keepdim=True) + small)
        shares = shares / (shares.sum(-2, keepdim=True) + small)
    wanted = torch.einsum("bsi,bsid->bsd", before, x.double()), after, shares
    products = (flat @ matrix.double().T).float()
    by_parts, _ = call("npu_hc_pre_sinkhorn", products, inverse.float(), scale, base, x, streams, rounds, small)
    given = [matrix, scale, base, streams, rounds, 1e-6, small]
    for results in (by_parts, *(call(name, x, *given)[0] for name in ("npu_hc_pre", "npu_hc_pre_v2"))):
        equal(results[0], wanted[0], 1e-2)  # bfloat16
        equal(results[1], wanted[1])
        equal(results[2], wanted[2])
    rows, _ = call("npu_hc_pre", x[0], *given)
    for one, whole in zip(rows, by_parts, strict=True):
        equal(one, whole[0], 1e-2)

    y = torch.randn(2, 5, width, generator=made)
    result, _ = call("npu_hc_post", y, x, after.float(), shares.float())
    total = torch.stack([
        after[..., at].unsqueeze(-1) * y + sum(shares[..., i, at].unsqueeze(-1) * x[..., i, :] for i in range(streams))
        for at in range(streams)
    ], -2)  # fmt: skip
    equal(result, total)
    with pytest.raises(NotImplementedError, match="npu_hc_pre: hc_mult is 2; the emulator expects 3, as x has rows"):
        call.operators.npu_hc_pre(*(each.npu() for each in (x, *given[:3])), 2, *given[4:])


@on_ranks(1, communicator=False)
def test_causal_convolutions(rank: int, size: int, tmp_path: Path) -> None:
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)
    width, dim, pad = 4, 3, -1
    weight, bias = torch.randn(width, dim, generator=made), torch.randn(dim, generator=made)
    states = torch.randn(5, 5, dim, generator=made)

    def convolved(history: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([history, rows]).double()
        y = torch.stack([
            sum(weight[i].double() * joined[row + i] for i in range(width)) + bias for row in range(len(rows))
        ])  # fmt: skip
        return y / (1 + (-y).exp())

    # Prompts of 4, 2 and 3 rows: the second begins with zeros, the third has no line.
    x, starts = torch.randn(9, dim, generator=made), torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    lines, known = torch.tensor([3, 0, pad], dtype=torch.int32), torch.tensor([1, 0, 1], dtype=torch.int32)
    wanted, kept = torch.full((9, dim), 7.0).double(), states.clone()
    wanted[:4], wanted[4:6] = convolved(states[3, :3], x[:4]), convolved(torch.zeros(3, dim), x[4:6])
    kept[3, :3], kept[0, :3] = x[1:4], torch.cat([torch.zeros(1, dim), x[4:6]])
    arguments = [x, weight, states, bias, starts, lines, known, None, 1, pad, 0]
    result, given = call("npu_causal_conv1d_custom", torch.full((9, dim), 7.0), *arguments)
    equal(result, wanted)
    assert torch.equal(given[3], kept)
    of_310 = [x, weight, bias, states, starts, lines, known, None, 1, pad, 0]
    result, given = call("npu_causal_conv1d_310", *of_310)
    equal(result[:6], wanted[:6])
    assert torch.equal(given[3], kept)
    with pytest.raises(NotImplementedError, match="npu_causal_conv1d_310: num_accepted_tokens is a tensor"):
        call("npu_causal_conv1d_310", *of_310[:7], lines, *of_310[8:])

    # Steps of one row each.
    x, lines = torch.randn(2, dim, generator=made), torch.tensor([4, 1], dtype=torch.int32)
    result, given = call("npu_causal_conv1d_custom", x, x, weight, states, bias, None, lines, None, None, 1, pad, 1)
    equal(result, torch.cat([convolved(states[line, :3], x[at : at + 1]) for at, line in enumerate((4, 1))]))
    assert torch.equal(given[3][[4, 1], :3], torch.cat([states[[4, 1], 1:3], x.unsqueeze(1)], 1))

    # Steps of 2 and 3 rows, of whose last ones 2 and 1 were accepted: the state begins behind those. All rows are kept.
    x, starts, accepted = torch.randn(5, dim, generator=made), torch.tensor([0, 2, 5]), torch.tensor([2, 1])
    arguments = [x, weight, states, bias, starts, lines, None, accepted, 1, pad, 1]
    result, given = call("npu_causal_conv1d_custom", torch.zeros(5, dim), *arguments)
    equal(result, torch.cat([convolved(states[4, 1:4], x[:2]), convolved(states[1, :3], x[2:])]))
    kept = states.clone()
    kept[4, :4], kept[1, :5] = torch.cat([states[4, 2:4], x[:2]]), torch.cat([states[1, 1:3], x[2:]])
    assert torch.equal(given[3], kept)


@on_ranks(1, communicator=False)
def test_gated_delta_rule(rank: int, size: int, tmp_path: Path) -> None:
    """Row by row, and in chunks, whose own part is solved here: both are the same recurrence."""
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)
    lengths, groups, heads, of_keys, of_values, scale = (6, 3), 1, 2, 4, 3, 0.5
    rows = sum(lengths)
    q, k = (torch.nn.functional.normalize(torch.randn(rows, groups, of_keys, generator=made), dim=-1) for _ in range(2))
    v, beta = torch.randn(rows, heads, of_values, generator=made), torch.rand(rows, heads, generator=made)
    g = -torch.rand(rows, heads, generator=made)

    def recurrence(states: torch.Tensor, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Results and the state after each row."""
        y, after = torch.zeros(rows, heads, of_values).double(), torch.zeros(rows, heads, of_values, of_keys).double()
        for sequence, (first, length) in enumerate(zip(starts, lengths, strict=True)):
            for head in range(heads):
                state = states[sequence, head].double()
                for row in range(first, first + length):
                    state = state * g[row, head].double().exp()
                    change = beta[row, head] * (v[row, head].double() - state @ k[row, 0].double())
                    state = state + torch.outer(change, k[row, 0].double())
                    y[row, head], after[row, head] = scale * state @ q[row, 0].double(), state
        return y, after

    slots = torch.tensor([2, 3, 4, 5, 6, 7, 8, 1, 0], dtype=torch.int32)
    states, accepted = torch.randn(9, heads, of_values, of_keys, generator=made), torch.tensor([2, 1])
    for number in (None, accepted):
        first = [slots[0], slots[6]] if number is None else [slots[1], slots[6]]
        y, after = recurrence(states[torch.stack(first).long()], [0, 6])
        wanted = torch.zeros_like(states).double()
        wanted[slots.long()] = after
        options = {"beta": beta, "scale": scale, "ssm_state_indices": slots, "num_accepted_tokens": number, "g": g}
        own = torch.tensor([0, *lengths], dtype=torch.int32)
        result, given = call("npu_recurrent_gated_delta_rule", q, k, v, states, **options, actual_seq_lengths=own)
        equal(result, y, 1e-2)  # bfloat16
        equal(given[3], wanted)
        arguments = [q, k, v, beta, states, own[1:], slots, g, None, number, scale]
        result, given = call("npu_recurrent_gated_delta_rule_310", *arguments)
        equal(result, y)
        equal(given[4], wanted)
    with pytest.raises(NotImplementedError, match="npu_recurrent_gated_delta_rule_310: gk is a tensor"):
        call("npu_recurrent_gated_delta_rule_310", *arguments[:8], g, *arguments[9:])
    with pytest.raises(NotImplementedError, match="num_accepted_tokens is 4; the emulator expects 1 to 3"):
        call("npu_recurrent_gated_delta_rule_310", *arguments[:9], torch.tensor([1, 4]), scale)

    # In chunks of 4: with sums of g in a chunk, w and u solve (1 + strictly lower part of beta k k^T exp(g_i - g_j)).
    initial = torch.randn(2, heads, of_values, of_keys, generator=made)
    y, after = recurrence(initial, [0, 6])
    size, starts = 4, [0, 4, 6]
    ends = [4, 6, 9]
    sums, w, u = torch.zeros(heads, rows), torch.zeros(heads, rows, of_keys), torch.zeros(heads, rows, of_values)
    for start, end in zip(starts, ends, strict=True):
        part = slice(start, end)
        for head in range(heads):
            total = g[part, head].double().cumsum(0)
            own, strength = k[part, 0].double(), beta[part, head].double().unsqueeze(-1)
            lower = (strength * (own @ own.T) * (total.unsqueeze(1) - total).exp()).tril(-1)
            inverse = torch.linalg.inv(torch.eye(end - start).double() + lower)
            sums[head, part] = total.float()
            w[head, part] = (inverse @ (strength * total.exp().unsqueeze(-1) * own)).float()
            u[head, part] = (inverse @ (strength * v[part, head])).float()
    by_heads = [each.transpose(0, 1).unsqueeze(0) for each in (q, k)]
    options = {"chunk_size": size, "cu_seqlens": [0, 6, 9], "chunk_indices": [0, 0, 0, 1, 1, 0]}
    results, _ = call(
        "chunk_gated_delta_rule_fwd_h", by_heads[1], w.unsqueeze(0), u.unsqueeze(0), sums.unsqueeze(0),
        initial_state=initial.mT.contiguous(), output_final_state=True, **options,
    )  # fmt: skip
    h, new, final = results
    equal(h[0, :, 0], initial[0].mT)
    equal(h[0, :, 1], after[3].mT)  # after the first chunk's last row
    equal(h[0, :, 2], initial[1].mT)
    equal(final, after[[5, 8]].mT)
    for at, part in enumerate((slice(0, 4), slice(4, 6), slice(6, 9))):
        equal(new[0, :, part], u[:, part].double() - w[:, part].double() @ h[0, :, at].double())
    for form in (h, h.flatten(2, 3)):
        result, _ = call("chunk_fwd_o", *by_heads, new, form, scale, g=sums.unsqueeze(0), **options)
        equal(result[0].transpose(0, 1), y, 1e-4)
    # A batch of two, whose chunks are counted in each.
    batch = [each.repeat(2, 1, 1, 1) for each in (by_heads[1], w.unsqueeze(0), u.unsqueeze(0))]
    results, _ = call("chunk_gated_delta_rule_fwd_h", *batch, chunk_size=size)
    assert results[0].shape == (2, heads, 3, of_keys, of_values)
    assert torch.equal(results[0][0], results[0][1])
    assert results[2] is None
    with pytest.raises(NotImplementedError, match="chunk_gated_delta_rule_fwd_h: use_exp2 is True"):
        call("chunk_gated_delta_rule_fwd_h", *batch, chunk_size=size, use_exp2=True)
    with pytest.raises(NotImplementedError, match="chunk_fwd_o: g_gamma is a tensor"):
        call("chunk_fwd_o", *by_heads, new, h, scale, g_gamma=sums, **options)


@on_ranks(1, communicator=False)
def test_speculation(rank: int, size: int, tmp_path: Path) -> None:
    call = Calls(use_device(rank))
    # Of the suffix 2 3 the first place counts, and the shortest suffix that has one; -1, large tokens and discarded
    # requests do not count; a row may have no room.
    tokens = torch.tensor([
        [1, 2, 3, 9, 1, 2, 0, 0], [4, 5, 4, 5, 4, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1],
    ], dtype=torch.int32)  # fmt: skip
    sampled = torch.tensor([[3, -1], [5, 100], [7, 8], [1, 1]], dtype=torch.int32)
    known, discarded = torch.tensor([6, 5, 4, 8]), torch.tensor([0, 0, 1, 0])
    results, given = call("npu_ngram_spec_decode", tokens, known, sampled, discarded, 100, 2, 3, 3)
    after = tokens.clone()
    after[0, 6], after[1, 5] = 3, 5
    assert torch.equal(results[0], after)
    assert torch.equal(given[0], after)
    assert results[1].tolist() == [3, 5, 4, 1]
    assert results[2].tolist() == [[9, 1, 2], [4, 5, 4], [-1, -1, -1], [-1, -1, -1]]
    assert results[3].tolist() == [3, 3, 0, 0]

    # Requests with rows 0 to 3 and 4 to 6; of the first the last one is rejected.
    ids, places = torch.tensor([10, 11, 12, 13, 20, 21, 22]), torch.tensor([5, 6, 7, 8, 0, 1, 2])
    given = [ids, places, torch.tensor([19, 29]), torch.tensor([0, 4, 7]), torch.tensor([2, 6]), 0, 100, 2]
    results, _ = call("npu_copy_and_expand_eagle_inputs", *given, False, 12)
    assert results[0].tolist() == [10, 11, 12, 19, 100, 0, 20, 21, 22, 29, 100, 0]
    assert results[1].tolist() == [5, 6, 7, 8, 9, 0, 0, 1, 2, 3, 4, 0]
    assert results[2].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert results[3].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    assert results[4].tolist() == [3, 4, 9, 10]
    assert results[5].tolist() == [0] * 7
    results, _ = call("npu_copy_and_expand_eagle_inputs", *given, True, 9)
    assert results[0].tolist() == [11, 12, 19, 100, 0, 21, 22, 29, 100]
    assert results[1].tolist() == [5, 6, 7, 8, 0, 0, 1, 2, 3]
    assert results[2].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert results[3].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert results[4].tolist() == [2, 3, 7, 8]
    assert results[5].tolist() == [0, 1, 2, 3, 5, 6, 7]
    # Ends behind the requests' own rows: the next request's rows go over the rows of the one before.
    results, _ = call("npu_copy_and_expand_eagle_inputs", *given[:4], torch.tensor([4, 7]), *given[5:], True, 10)
    assert results[0].tolist() == [11, 12, 13, 20, 19, 21, 22, 22, 29, 100]
    assert results[1].tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert [each.tolist() for each in results[2:4]] == [[0] * 10, [0] * 9 + [1]]
    assert results[4].tolist() == [4, 5, 8, 9]
    with pytest.raises(NotImplementedError, match="total_draft_tokens is 8; the emulator expects 9 at least"):
        call("npu_copy_and_expand_eagle_inputs", *given, True, 8)


@on_ranks(1, communicator=False)
def test_prints_and_refusals(rank: int, size: int, tmp_path: Path) -> None:
    device = use_device(rank)
    own = Calls(device).operators
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        own.device_print("here")
        own.device_print_tensor(torch.arange(3, device=device) * 2)
    assert printed.getvalue() == "here\ntensor([0, 2, 4])\n"
    assert own.get_npu_storage_shape(torch.zeros(2, 3, device=device)) == [2, 3]
    with pytest.raises(NotImplementedError, match="get_npu_storage_shape: tensor is of shape"):
        own.get_npu_storage_shape(torch.zeros(2, 3, device=device)[:, :2])

    # Graphs take no operator of a library that says that its results are arguments.
    for name in ("npu_reshape_and_cache_bnsd", "npu_hamming_dist_top_k", "npu_causal_conv1d_custom"):
        assert not any(result.alias_info for result in getattr(own, name).default._schema.returns)

    x = torch.zeros(2, 4, device=device)
    with pytest.raises(NotImplementedError, match=r"npu_swiglu_group_quant has no formula .* for Ascend 950 only"):
        own.npu_swiglu_group_quant(x, None, None)
    with pytest.raises(NotImplementedError, match=r"moe_grouped_matmul has no formula .* what group_list means"):
        own.moe_grouped_matmul(x, x, x, 0, 0, 0)
    with pytest.raises(NotImplementedError, match="npu_kv_quant_sparse_attn_sharedkv_metadata has no formula"):
        own.npu_kv_quant_sparse_attn_sharedkv_metadata(64, 1, 512, 1)


@on_ranks(2, communicator=False, env={"ALLTOALLV_NPU_PRODUCT": "A2"})
def test_product_sum_and_norm(rank: int, size: int, file: str) -> None:
    """Each rank's product, added up over both, with the residual, which is normalized."""
    made = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 3, 8, generator=made).half(), torch.randn(2, 4, 8, generator=made).half()
    residual, gamma = torch.randn(3, 4, generator=made).half(), torch.randn(4, generator=made).half()
    total = torch.einsum("rtk,rnk->tn", x.double(), weight.double()) + residual
    wanted = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma
    with group(rank, size, file) as (peers, device):
        call = Calls(device)
        name = peers._get_backend(device).get_hccl_comm_name(rank)
        given = [x[rank], weight[rank], residual, gamma, name, size, rank, 1e-5]
        for matrix, transposed in ((weight[rank], True), (weight[rank].T.contiguous(), False)):
            results, _ = call("matmul_allreduce_add_rmsnorm", given[0], matrix, *given[2:], transposed, True)
            equal(results[0], wanted, 1e-2)
            equal(results[1], total, 1e-2)
        with pytest.raises(NotImplementedError, match="isGatherAddOut is False; the emulator expects True"):
            call("matmul_allreduce_add_rmsnorm", *given, True, False)
