"""Functions compiled into one graph, and what comes of a function with and without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
OPTIONS: dict[str, Any] = {"timeout": 200, "comm_timeout": 150}  # of `Ranks`: they compile, each at its pace


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def value_and_gradient(function: Callable[..., Tensor], x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The function of ``x``, and the gradient of its elements' sum, weighted by 1, 2, 3, ..."""
    leaf = x.clone().requires_grad_()
    y = function(leaf, *rest)
    (y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad
