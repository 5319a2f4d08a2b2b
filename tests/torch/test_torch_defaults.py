"""Programs that set torch's default device or dtype get the same results: nothing of ours is made by default."""

from __future__ import annotations

import pytest
import torch
from every_function import NO_GRADIENT, functions_of, input_of
from on_ranks import on_ranks
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator


@pytest.mark.parametrize("what", ["device", "dtype"])
@on_ranks(2, timeout=120)
def test_defaults(comm: Communicator, what: str) -> None:
    """All functions, twice each, with gradients where there are some; a device without data would show at once."""
    dispatcher = at.nn.MoEDispatcher(3, comm)

    def experts(x: Tensor) -> Tensor:
        ids = torch.tensor([[0, 2], [1, 0], [2, 2], [0, 1]], device="cpu")
        rows, _, state = dispatcher.dispatch(x, ids, torch.ones((4, 2), dtype=torch.float32, device="cpu"))
        return dispatcher.combine(rows * 2, state)

    functions = functions_of(comm) | {"experts": experts}
    x = input_of(comm)

    def results(function: str) -> list[Tensor]:
        found = []
        for wants_grad in (False, False, True):
            leaf = x.clone().requires_grad_(wants_grad and function not in NO_GRADIENT)
            y = functions[function](leaf)
            found.append(y.detach())
            if y.requires_grad:
                y.backward(torch.arange(y.numel(), dtype=y.dtype, device="cpu").view(y.shape))
                found.append(leaf.grad)
        return found

    for name in functions:
        expected = results(name)
        torch.set_default_device("meta" if what == "device" else None)
        torch.set_default_dtype(torch.bfloat16 if what == "dtype" else torch.float32)
        try:
            found = results(name)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        assert [(y.dtype, y.device.type) for y in found] == [(y.dtype, "cpu") for y in expected], name
        assert all(map(torch.equal, found, expected)), name
