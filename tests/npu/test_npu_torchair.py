"""torchair and npugraph_ex, torch_npu's backends for torch.compile, on emulated NPUs."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from npu_ranks import caught, use_device
from on_ranks import on_ranks


def _layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) + x.sum()


def _compiled(module: Any, mode: str) -> Any:
    torch._dynamo.reset()
    config = module.CompilerConfig()
    config.mode = mode
    return torch.compile(_layer, backend=module.get_npu_backend(compiler_config=config), dynamic=False)


def _check_graphs(module: Any, mode: str, device: torch.device) -> None:
    """Of two shapes, whose graphs share the memory of a pool, one after the other and in turns."""
    weight, run = torch.randn(8, 8, device=device), _compiled(module, mode)
    for rows in (4, 4, 6, 4, 6):
        x = torch.randn(rows, 8, device=device)
        assert torch.equal(run(x, weight), _layer(x, weight))


@on_ranks(1, communicator=False)
def test_torchair_compiles_to_npu_graphs(rank: int, size: int) -> None:
    device = use_device(rank)
    torchair = importlib.import_module("torchair")
    _check_graphs(torchair, "reduce-overhead", device)
    x = torch.ones(8, 8, device=device)
    error = str(caught(lambda: _compiled(torchair, "max-autotune")(x, x)))
    assert "is of CANN's graph engine, which the emulator has not" in error


@on_ranks(1, communicator=False)
def test_npugraph_ex_compiles_to_npu_graphs(rank: int, size: int) -> None:
    device = use_device(rank)
    _check_graphs(importlib.import_module("npugraph_ex"), "npugraph_ex", device)
