"""Operators of vllm-ascend's extension module, where its package was built without CANN."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from npu_ranks import use_device
from on_ranks import on_ranks
from torch.utils._pytree import tree_map


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
    fakes = [each.to("meta") for each in (tokens, ids)]
    shapes = ops.npu_moe_init_routing_custom(*fakes, active_num=6, active_expert_range=[0, 4], **options)
    assert [(each.shape, each.dtype) for each in shapes] == [(each.shape, each.dtype) for each in results]

    own = torch.tensor([1, 4, 7, 100, 103, 9])  # rows 4 to 7 of the vocabulary, one of padding, 100 to 102
    rows, hidden = ops.get_masked_input_and_mask(own.to(device), 4, 8, 1, 100, 103)
    assert rows.tolist() == [0, 0, 3, 5, 0, 0]
    assert hidden.tolist() == [True, False, False, False, True, True]
    with pytest.raises(AttributeError, match="mla_preprocess"):
        _ = ops.mla_preprocess


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
    importlib.import_module("alltoallv_emulator.vllm_ascend_c")
    ops = sys.modules["torch.ops"]._C_ascend
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
