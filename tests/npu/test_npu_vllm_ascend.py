"""Operators of vllm-ascend's extension module, where its package was built without CANN."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from c_ascend import Calls, equal, operators
from npu_ranks import group, use_device
from on_ranks import on_ranks
from torch.utils._pytree import tree_map

from alltoallv.errors import AllToAllVError


@on_ranks(1, communicator=False, fresh=True)
def test_its_extension_module(rank: int, size: int, tmp_path: Path) -> None:
    device = use_device(rank)
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "__init__.py").touch()
    sys.path.insert(0, str(tmp_path))
    import vllm_ascend.vllm_ascend_C  # type: ignore[import-not-found]  # noqa: F401

    made = torch.Generator().manual_seed(1)
    x, residual, gamma, beta = (torch.randn(*shape, generator=made) for shape in ((5, 8), (5, 8), (8,), (8,)))
    ops = sys.modules["torch.ops"]._C_ascend
    y, rstd, total = ops.npu_add_rms_norm_bias(*(each.to(device) for each in (x, residual, gamma, beta)), 1e-5)
    wide = x.double() + residual.double()
    factors = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(y.cpu().double(), wide * factors * gamma + beta, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rstd.cpu().double(), factors, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.cpu().double(), wide, rtol=1e-6, atol=1e-6)

    scores = torch.randn(6, 4, generator=made)
    weights, experts, _ = ops.moe_gating_top_k(scores.to(device), 2, 1, 1, 0, 1, 0, False, 1.0, 1e-20, None)
    best = scores.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    assert experts.tolist() == best.indices[:, :2].tolist()
    wanted = best.values[:, :2] / best.values[:, :2].sum(-1, keepdim=True)
    torch.testing.assert_close(weights.cpu().double(), wanted, rtol=1e-5, atol=1e-5)

    ids = torch.tensor([[2, 0], [3, 2], [0, 1]], dtype=torch.int32)
    tokens = torch.arange(6.0).reshape(3, 2)
    options = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1}
    results = ops.npu_moe_init_routing_custom(
        tokens.to(device), ids.to(device), active_num=6, active_expert_range=[0, 4], **options
    )
    rows, places, counts, _ = results
    assert counts.tolist() == [2, 1, 2, 1]
    assert rows.tolist() == tokens[[0, 2, 2, 0, 1, 1]].tolist()
    assert places.tolist() == [3, 0, 5, 4, 1, 2]
    other = ops.npu_moe_init_routing_custom(
        tokens.to(device), ids.to(device), active_num=6, active_expert_range=[0, 4],
        **options | {"expert_tokens_num_flag": False},
    )  # fmt: skip
    assert [torch.equal(a, b) for a, b in zip(results, other, strict=True)] == [True, True, False, True]
    assert other[2].shape == counts.shape
    fakes = [each.to("meta") for each in (tokens, ids)]
    shapes = ops.npu_moe_init_routing_custom(*fakes, active_num=6, active_expert_range=[0, 4], **options)
    assert [(each.shape, each.dtype) for each in shapes] == [(each.shape, each.dtype) for each in results]

    # By default one scale and offset make int8 of all rows, which are sorted as before.
    options.pop("quant_mode")
    given = {"scale": torch.tensor([20.0]), "offset": torch.tensor([-3.4])}
    static, _, _, _ = ops.npu_moe_init_routing_custom(
        tokens.to(device), ids.to(device), active_num=6, active_expert_range=[0, 4], **options,
        **{name: each.to(device) for name, each in given.items()},
    )  # fmt: skip
    assert static.tolist() == [[max(min(round(20 * x - 3.4), 127), -128) for x in row] for row in rows.tolist()]
    assert static.dtype == ops.npu_moe_init_routing_custom(
        *fakes, active_num=6, active_expert_range=[0, 4], **options, scale=fakes[0], offset=fakes[0]
    )[0].dtype  # fmt: skip
    with pytest.raises(NotImplementedError, match="npu_moe_init_routing_custom: offset is None"):
        ops.npu_moe_init_routing_custom(tokens.to(device), ids.to(device), **options, scale=given["scale"].to(device))

    own = torch.tensor([1, 4, 7, 100, 103, 9])  # rows 4 to 7 of the vocabulary, one of padding, 100 to 102
    rows, hidden = ops.get_masked_input_and_mask(own.to(device), 4, 8, 1, 100, 103)
    assert rows.tolist() == [0, 0, 3, 5, 0, 0]
    assert hidden.tolist() == [True, False, False, False, True, True]
    with pytest.raises(AttributeError, match="no_such_operator"):
        _ = ops.no_such_operator


def _by_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the integers of each row from -127 to 127, and its scale."""
    scale = values.abs().amax(-1) / 127
    return values / scale.unsqueeze(-1), scale


def _check_quantized(results: Sequence[torch.Tensor], wide: torch.Tensor) -> None:
    wanted, scale = _by_rows(wide)
    assert results[0].dtype == torch.int8
    torch.testing.assert_close(results[0].cpu().double(), wanted, rtol=0, atol=0.5001)  # rounded
    torch.testing.assert_close(results[1].cpu().double(), scale, rtol=1e-5, atol=0)


@on_ranks(1, communicator=False, fresh=True)
def test_products_of_quantized_experts(rank: int, size: int, tmp_path: Path) -> None:
    device = use_device(rank)
    ops = operators()
    made = torch.Generator().manual_seed(1)
    x = torch.randint(-127, 128, (7, 32), dtype=torch.int8, generator=made)
    weight = torch.randint(-127, 128, (3, 32, 16), dtype=torch.int8, generator=made)
    of_columns, of_rows = torch.rand(3, 16, generator=made) + 0.5, (torch.rand(7, generator=made) + 0.5) / 1e4
    expert = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    total = torch.stack([row @ weight[e].double() for row, e in zip(x.double(), expert, strict=True)])
    wide = total * of_columns[expert] * of_rows.unsqueeze(-1)
    first, second = wide.chunk(2, -1)
    gated = first * first.sigmoid() * second
    low = first.clamp(max=0.25)
    within = low * low.sigmoid() * second.clamp(-0.25, 0.25)
    assert not torch.allclose(gated, within)

    ends = torch.tensor([3, 4, 7])
    single = [x, weight, of_columns, of_rows, ends]
    several = [x, list(weight), list(of_columns), of_rows, ends]
    for name, arguments in {
        "grouped_matmul_swiglu_quant": single,
        "grouped_matmul_swiglu_quant_weight_nz": single,
        "grouped_matmul_swiglu_quant_weight_nz_tensor_list": several,
    }.items():
        operator = getattr(ops, name)
        results = operator(*tree_map(lambda each: each.to(device), arguments))
        _check_quantized(results, gated)
        shapes = operator(*tree_map(lambda each: each.to("meta"), arguments))
        assert [(each.shape, each.dtype) for each in shapes] == [(each.shape, each.dtype) for each in results]
        bounded = operator(*tree_map(lambda each: each.to(device), arguments), swiglu_limit=0.25)
        _check_quantized(bounded, within)

    newest = [each.to(device) for each in (x, of_rows, torch.tensor([3, 1, 3]))]
    matrices, columns = [weight.to(device)], [of_columns.to(device)]
    operator = ops.grouped_matmul_swiglu_quant_v2
    _check_quantized(operator(newest[0], matrices, columns, *newest[1:], group_list_type=1), gated)
    with pytest.raises(NotImplementedError, match="weight_assist_matrix"):  # of weights of four bits
        operator(newest[0], matrices, columns, *newest[1:], weight_assist_matrix=columns, group_list_type=1)

    options = {"bias": None, "quant_scale": None, "quant_offset": None, "activate_left": True, "quant_mode": 1}
    tensors = {
        "x": total.int(),
        "weight_scale": of_columns,
        "activation_scale": of_rows,
        "group_index": torch.tensor([3, 1, 3]),
    }
    results = ops.npu_dequant_swiglu_quant(**{name: each.to(device) for name, each in tensors.items()}, **options)
    _check_quantized(results, gated)
    limits = {"swiglu_mode": 1, "clamp_limit": 0.25}
    bounded = ops.npu_dequant_swiglu_quant(
        **{name: each.to(device) for name, each in tensors.items()}, **options, **limits
    )
    _check_quantized(bounded, within)
    shapes = ops.npu_dequant_swiglu_quant(**{name: each.to("meta") for name, each in tensors.items()}, **options)
    assert [(each.shape, each.dtype) for each in shapes] == [(each.shape, each.dtype) for each in results]


def _in_words(values: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits, eight in an int32, the first in the lowest bits."""
    nibbles = (values.long() & 15).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return nibbles.sum(-1).to(torch.uint32).view(torch.int32)


@on_ranks(1, communicator=False)
def test_products_of_experts_with_four_bits(rank: int, size: int, tmp_path: Path) -> None:
    """With scales of columns, or of groups of rows; the device multiplies rows less 8, for which a bias makes up."""
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)
    x = torch.randint(-127, 128, (7, 32), dtype=torch.int8, generator=made)
    weight = torch.randint(-8, 8, (3, 32, 16), dtype=torch.int8, generator=made)
    of_rows, expert = (torch.rand(7, generator=made) + 0.5) / 1e3, torch.tensor([0, 0, 0, 1, 2, 2, 2])
    words = _in_words(weight)
    ends, sizes = torch.tensor([3, 4, 7]), torch.tensor([3, 1, 3])
    for groups in (1, 2):
        scale = torch.rand(3, groups, 16, generator=made) + 0.5
        whole = weight.double() * scale.double().repeat_interleave(32 // groups, 1)
        bias = 8 * whole.sum(1)
        total = torch.stack([row @ whole[e] for row, e in zip(x.double(), expert, strict=True)])
        as_words = scale.view(torch.int32).long()
        # A bias that is not what it should be adds to the product.
        for added in (bias, bias + torch.randn(3, 16, generator=made)):
            wide = (total + (added - bias)[expert]) * of_rows.unsqueeze(-1)
            first, second = wide.chunk(2, -1)
            gated = first * first.sigmoid() * second
            results, _ = call(
                "grouped_matmul_swiglu_quant_weight_nz", x, words, as_words, of_rows, ends, bias=added.float()
            )
            _check_quantized(results, gated)
            given = [x, [words], [as_words], of_rows, sizes]
            results, _ = call(
                "grouped_matmul_swiglu_quant_v2", *given, weight_assist_matrix=[added.float()], group_list_type=1
            )
            _check_quantized(results, gated)
            several = [x, list(words), list(as_words), of_rows, ends]
            results, _ = call("grouped_matmul_swiglu_quant_weight_nz_tensor_list", *several, bias=added.float())
            _check_quantized(results, gated)
    with pytest.raises(NotImplementedError, match="weight_assist_matrix is 0; the emulator expects 3 rows"):
        call("grouped_matmul_swiglu_quant_v2", *given, group_list_type=1)


@on_ranks(1, communicator=False, fresh=True)
def test_operators_of_one_npu(rank: int, size: int, tmp_path: Path) -> None:
    """Each against its formula in float64, and its shapes on meta."""
    call = Calls(use_device(rank))
    made = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    x, gamma, beta, smooth = random(5, 8), random(8), random(8), random(8)
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    results, _ = call("npu_rms_norm_dynamic_quant", x, gamma, smooth, beta, 1e-5)
    _check_quantized(results, (wide * gamma + beta) * smooth)
    results, _ = call("npu_gemma_rms_norm", x, gamma, 1e-5)
    equal(results[0], wide * (1 + gamma.double()))

    heads, cos, sin = random(4, 2, 10), random(4, 1, 6), random(4, 1, 6)
    _, given = call("inplace_partial_rotary_mul", heads, cos, sin, "interleave", [4, 10])
    pairs = heads[..., 4:].double().unflatten(-1, (3, 2))
    turned = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
    equal(given[0], torch.cat([heads[..., :4].double(), heads[..., 4:] * cos.double() + turned * sin], -1))

    cache, rows = random(3, 4, 2), random(3, 2)
    _, given = call("npu_scatter_nd_update_v2", cache, torch.tensor([[2, 1], [-1, -1], [0, 3]]), rows)
    wanted = cache.clone()
    wanted[2, 1], wanted[0, 3] = rows[0], rows[2]
    assert torch.equal(given[0], wanted)

    logs, a, b, bias = random(4), random(3, 4) * 20, random(3, 4), random(4)
    (decay, strength), _ = call("npu_fused_gdn_gating", logs, a, b, bias)
    equal(decay[0], -logs.double().exp() * (1 + (a.double() + bias).exp()).log())
    equal(strength[0], 1 / (1 + (-b.double()).exp()))

    left, right = random(3, 2, 5), random(2, 5, 4)
    _, given = call("batch_matmul_transpose", left, right, torch.zeros(3, 2, 4))
    equal(given[2], torch.stack([left[:, i].double() @ right[i].double() for i in range(2)], 1))
    for dtype in (torch.float16, torch.bfloat16):  # vllm-ascend's own test takes these bits alone
        left, right = random(10, 20, 30).to(dtype), random(20, 30, 40).to(dtype)
        _, given = call("batch_matmul_transpose", left, right, torch.zeros(10, 20, 40, dtype=dtype))
        assert torch.equal(given[2], torch.bmm(left.transpose(0, 1), right).transpose(0, 1))

    # Adapters: the first two rows have number 1, the next three none, the last number 0.
    of_rows, of_parts, lengths = torch.tensor([1, 1, -1, -1, -1, 0]), torch.tensor([1, -1, 0]), torch.tensor([2, 3, 1])
    x, down, up, y = random(6, 8), random(2, 3, 8), random(2, 4, 3), random(6, 3)
    wanted = y.double()
    for row in (0, 1, 5):
        wanted[row] = 0.5 * (down[of_rows[row]].double() @ x[row].double())
    for name, numbers in (("bgmv_shrink", [of_rows]), ("sgmv_shrink", [of_parts, lengths])):
        _, given = call(name, x, down, *numbers, y, 0.5)
        equal(given[-2], wanted)
    total = random(6, 10)
    wanted = total.double()
    for row in (0, 1, 5):
        wanted[row, 3:7] += up[of_rows[row]].double() @ y[row].double()
    for name, numbers in (("bgmv_expand", [of_rows]), ("sgmv_expand", [of_parts, lengths])):
        result, given = call(name, y, up, *numbers, total, 3, 4)
        equal(given[-3], wanted)
        assert torch.equal(result, given[-3])

    scores, table = random(4, 6), torch.tensor([[0, 1], [5, 2], [3, 4]], dtype=torch.int32)
    norms = (1 + scores.double().exp()).log().sqrt()
    options = {"routed_scaling_factor": 2.5, "norm_type": 2}
    (weights, experts, _), _ = call("moe_gating_top_k_hash", scores, 2, **options)
    assert experts.tolist() == norms.sort(-1, descending=True).indices[:, :2].tolist()
    best = norms.gather(1, experts.long())
    equal(weights, 2.5 * best / best.sum(-1, keepdim=True))
    tokens = torch.tensor([2, 0, 1, 1])
    (weights, experts, _), _ = call("moe_gating_top_k_hash", scores, 2, input_ids=tokens, tid2eid=table, **options)
    assert experts.tolist() == table[tokens].tolist()
    best = norms.gather(1, experts.long())
    equal(weights, 2.5 * best / best.sum(-1, keepdim=True))
    with pytest.raises(NotImplementedError, match="moe_gating_top_k_hash: renorm is 1"):
        call("moe_gating_top_k_hash", scores, 2, renorm=1)


def _dense(
    x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, matrices: Sequence[torch.Tensor], quantized: bool
) -> torch.Tensor:
    """Returns the weighted sum of each token's experts in float64; an expert after the last gives nothing."""
    first, second = matrices
    total = torch.zeros(x.shape, dtype=torch.float64)

    def rounded(row: torch.Tensor) -> torch.Tensor:
        codes, scale = _by_rows(row)
        return codes.round() * scale if quantized else row

    for token, place in itertools.product(range(len(x)), range(ids.size(1))):
        if (expert := int(ids[token, place])) < len(first):
            gate, up = (rounded(x[token].double()) @ first[expert]).chunk(2)
            total[token] += probs[token, place].double() * (rounded(gate * gate.sigmoid() * up) @ second[expert])
    return total


@on_ranks(2, communicator=False)
def test_experts_in_one_operator(rank: int, size: int, file: str) -> None:
    """Ranks have other numbers of tokens, some of which are not active; a choice of no expert is dropped."""
    experts, k, hidden, inner = 4, 2, 1024, 8
    made = torch.Generator().manual_seed(1)
    tokens = [torch.randn(n, hidden, generator=made).bfloat16() for n in (5, 3)]
    ids = [torch.stack([torch.randperm(experts, generator=made)[:k] for _ in each]).int() for each in tokens]
    probs = [torch.rand(len(each), k, generator=made) for each in tokens]
    codes = [torch.randint(-127, 128, shape, dtype=torch.int8, generator=made)
             for shape in ((experts, hidden, 2 * inner), (experts, inner, hidden))]  # fmt: skip
    scales = [(torch.rand(experts, each.size(2), generator=made) + 0.5) / 2000 for each in codes]
    wide = [each.double() * scale.double().unsqueeze(1) for each, scale in zip(codes, scales, strict=True)]
    plain = [each.bfloat16() for each in wide]
    mine = slice(rank * 2, rank * 2 + 2)
    chosen = [each.clone() for each in ids]
    chosen[0][1, 0] = experts
    with group(rank, size, file) as (peers, device):
        ops = operators()
        name = peers._get_backend(device).get_hccl_comm_name(rank)
        x, own_ids, own_probs = (each[rank].to(device) for each in (tokens, chosen, probs))

        def ffn(
            weights: Sequence[torch.Tensor],
            *given: list[torch.Tensor],
            most: int = 64,
            biases: Sequence[torch.Tensor] = (),
            **more: Any,
        ) -> tuple[torch.Tensor, list[int]]:
            out, counts = torch.empty_like(x), torch.zeros(1, 2, dtype=torch.int32, device=device)  # of any shape
            none = [[torch.tensor([])]] * 2  # of the host, as vllm-ascend gives it
            weight1, weight2 = ([each[mine].to(device)] for each in weights)
            results = ops.dispatch_ffn_combine(
                x,
                weight1,
                weight2,
                own_ids,
                *given,
                *([[each[mine].to(device)] for each in biases] or none),
                own_probs,
                name,
                most,
                out=out,
                expert_token_nums=counts,
                **more,
            )
            assert results[0] is out
            return out.cpu().double(), counts[0].tolist()

        used = torch.cat([each[: len(each) - 1].reshape(-1) for each in chosen]).bincount(minlength=experts)[mine]
        mask = torch.arange(len(x)) < len(x) - 1
        as_words = [[scale[mine].reshape(-1).view(torch.int32).long().to(device)] for scale in scales]
        out, counts = ffn(codes, *as_words, x_active_mask=mask.to(device))
        wanted = _dense(tokens[rank], chosen[rank], probs[rank], wide, True) * mask.unsqueeze(1)
        assert counts == used.tolist()
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)

        of_all = torch.cat([each.reshape(-1) for each in chosen]).bincount(minlength=experts)[mine]
        empty = [torch.empty(0, device=device)]
        out, counts = ffn(plain, empty, empty)
        assert counts == of_all.tolist()
        wanted = _dense(tokens[rank], chosen[rank], probs[rank], [each.double() for each in plain], False)
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)

        # Of four bits, with biases that make up for rows less 8.
        small = [torch.randint(-8, 8, each.shape, dtype=torch.int8, generator=made) for each in codes]
        factors = [scale * 16 for scale in scales]
        fours = [each.double() * scale.double().unsqueeze(1) for each, scale in zip(small, factors, strict=True)]
        words, sums = [_in_words(each) for each in small], [8 * each.sum(1).float() for each in fours]
        as_words = [[scale[mine].view(torch.int32).long().to(device)] for scale in factors]
        out, counts = ffn(words, *as_words, biases=sums)
        assert counts == of_all.tolist()
        wanted = _dense(tokens[rank], chosen[rank], probs[rank], fours, True)
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.03)

        own = [[each[mine].to(device)] for each in codes], [[each[mine].to(device)] for each in scales]
        out, counts = ops.dispatch_gmm_combine_decode(
            x, ids[rank].to(device), own[0][0], own[1][0], own[0][1], own[1][1], own_probs,
            expert_smooth_scales=torch.zeros(9, device=device),  # of any shape: the device does not use them
            group_ep=name, ep_rank_size=size, ep_rank_id=rank, moe_expert_num=experts, global_bs=10,
        )  # fmt: skip
        assert (
            counts.tolist() == torch.cat([each.reshape(-1) for each in ids]).bincount(minlength=experts)[mine].tolist()
        )
        wanted = _dense(tokens[rank], ids[rank], probs[rank], wide, True)
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=0.02, atol=0.02)

        with pytest.raises(NotImplementedError, match="max_output_size is 1; the emulator expects 9 at least"):
            ffn(plain, empty, empty, most=1)
        if rank == 0:  # the other learns why
            with pytest.raises(
                NotImplementedError, match=r"bias1 is \[\(0,\)\]; the emulator expects 16 numbers for each"
            ):
                ffn(words, *as_words)
        else:
            with pytest.raises(AllToAllVError, match="rank 0 refuses dispatch_ffn_combine"):
                ffn(plain, empty, empty)
