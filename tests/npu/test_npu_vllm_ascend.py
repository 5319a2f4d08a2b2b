"""Operators of vllm-ascend's extension module, where its package was built without CANN."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from npu_ranks import use_device
from on_ranks import on_ranks


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
