"""Quantized collectives on torch tensors: the reference's bits, gradients, graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compiled import BACKENDS, OPTIONS, compiled, value_and_gradient
from on_ranks import on_ranks
from quantized_front_ends import COUNTS, check_quantized, slopes_and_gradient
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.quantization.spec import Quantization, QuantizedReduction
from alltoallv.testing import Ranks
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal
from alltoallv.torch.quantized.adapter import ADAPTER


def vectors(size: int, count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(count) * (r + 1) for r in range(size)]


@on_ranks(2)
def test_feedback(comm: Communicator) -> None:
    xs = vectors(comm.size, 5000)
    states, arrays = at.ErrorFeedback(), [np.zeros(5000, np.float32) for _ in xs]
    gather_error = np.zeros(5000, np.float32)
    for step in range(3):
        how: dict[str, Any] = {"bits": 4, "gather": "quantized", "op": "avg"}
        wanted = reference.quantized_all_reduce(
            [x.numpy() for x in xs], errors=arrays, gather_error=gather_error, **how
        )[0]
        result = at.quantized_all_reduce(xs[comm.rank], error_feedback=states, group=comm, **how)
        assert_bits_equal(result.numpy(), wanted, f"step {step}")
        loaded = at.ErrorFeedback()
        loaded.load_state_dict(states.state_dict())
        states = loaded
    for n in (0, 5):  # the part of one rank, or of both, is empty
        at.quantized_all_reduce(xs[0][:n], gather="quantized", error_feedback=at.ErrorFeedback(), group=comm)
    with pytest.raises((InvalidParamError, InvalidTensorError)):
        at.quantized_all_reduce(xs[0], error_feedback={}, group=comm)
    leaf = xs[0].clone().requires_grad_()
    with pytest.raises(InvalidParamError, match=r"requires grad.*A2A-1188"):
        at.quantized_all_reduce(leaf, error_feedback=states, group=comm)
    states.load_state_dict({"error": xs[0].double(), "gather_error": None})
    request = QuantizedReduction("quantized_all_reduce", "float32", "float32", (5000,), Quantization())
    error, _ = at.ErrorFeedback.arrays_of(states, request, 2, 0, xs[0])
    assert error.dtype is torch.float32
    assert torch.equal(error, xs[0])
    error, _ = at.ErrorFeedback.arrays_of(states, request, 2, 0, xs[0].to("meta"))
    assert error.device.type == "meta"  # where the vector is


@pytest.mark.parametrize("size", [1, 3])
def test_as_numpy(ranks: Ranks, size: int) -> None:
    ranks(size)(lambda comm: check_quantized(at, ADAPTER, torch, comm))


@on_ranks(2)
def test_refusals_with_and_without_gradients(comm: Communicator) -> None:
    """Errors name what does not fit, arguments without a meaning, and what excludes a gradient."""
    [x, _] = vectors(comm.size, 700)
    with pytest.raises(InvalidTensorError, match=r"scale has dtype float64, expected float32.*A2A-2036"):
        at.quantized_all_reduce(x.to(torch.int8), scale=torch.ones(700).double(), group=comm)
    strided = torch.stack([x, -x], dim=-1)[..., 0]
    assert torch.equal(at.quantized_all_reduce(strided, group=comm), at.quantized_all_reduce(x, group=comm))
    rows, one = x.view(2, 350), torch.ones(2, dtype=torch.int64)
    told = at.quantized_all_to_all(rows, one, one, group=comm)
    assert torch.equal(told, at.quantized_all_to_all(rows, [1, 1], group=comm))
    leaf, out = x.clone().requires_grad_(), torch.empty(700)
    for wrong in ({"bits": 7}, {"group_size": 0}, {"gather": "none"}):
        with pytest.raises(InvalidParamError, match=f"{next(iter(wrong))} is"):
            at.quantized_all_reduce(leaf, group=comm, **wrong)
    for extra, names in (({"out": out, "async_op": True}, "out and async_op"), ({"out": out}, "out")):
        for function in (at.quantized_all_reduce, at.quantized_reduce_scatter):
            with pytest.raises(InvalidParamError, match=f"requires grad, expected a call without {names} \\[A2A"):
                function(leaf, group=comm, **extra)


@on_ranks(2)
def test_gradients_pass_straight_through(comm: Communicator) -> None:
    """As if nothing were rounded: sums of what all ranks want."""
    r, size = comm.rank, comm.size
    weights = [torch.arange(6.0).view(3, 2) + j for j in range(size)]
    total = torch.stack(weights).sum(0)
    for op, wanted in (("sum", total), ("avg", total / size)):
        x = torch.randn(3, 2).requires_grad_()
        (at.quantized_all_reduce(x, op=op, group=comm) * weights[r]).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, wanted)
    x = torch.randn(3, 2, requires_grad=True)
    part = at.quantized_reduce_scatter(x, [1, 2], group=comm)
    (part * (r + 1)).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0, 1], [2, 2], [2, 2]]))
    for told in ([1 + r, 2 - r], None):
        x = torch.randn(3, 2, requires_grad=True)
        sends = [[1, 2], [2, 1]][r]
        rows = at.quantized_all_to_all(x, sends, [[1, 2], [2, 1]][r] if told else None, group=comm)
        (rows * (r + 1)).sum().backward()
        scale = torch.tensor([1.0] * sends[0] + [2.0] * sends[1]).view(-1, 1)
        assert torch.equal(x.grad, scale.expand(3, 2))
    y = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    at.quantized_all_reduce(y, out_dtype=torch.float32, group=comm).sum().backward()
    assert torch.equal(y.grad, torch.full((4,), float(size), dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", [{}, {"bits": 4, "group_size": 3}, {"format": "mxfp8"}, {"format": "fp8_e5m2"}])
@on_ranks(2)
def test_gradients_of_rows_travel_as_codes(comm: Communicator, how: dict[str, Any], dtype: str) -> None:
    slopes, wanted = slopes_and_gradient(comm, (5, 7), dtype, **how)
    for recvs in (None, [row[comm.rank] for row in COUNTS]):
        x = torch.randn(4, 5, 7, requires_grad=True)
        options: Any = {"out_dtype": getattr(torch, dtype), "quantize_gradient": True, "group": comm, **how}
        rows = at.quantized_all_to_all(x, COUNTS[comm.rank], recvs, **options)
        (grad,) = torch.autograd.grad((rows * torch.from_numpy(slopes)).sum(), x, create_graph=True)
        assert_bits_equal(grad.numpy(force=True), wanted)
    ones = torch.autograd.grad(rows, x, torch.ones_like(rows).requires_grad_(), create_graph=True)[0]
    assert ones.requires_grad


@BACKENDS
@on_ranks(2, **OPTIONS)
def test_compile(comm: Communicator, backend: str) -> None:
    def function(x: Tensor, sends: list[int], recvs: list[int]) -> Tensor:
        a = at.quantized_all_reduce(x * 2, gather="quantized", group=comm)
        b = at.quantized_reduce_scatter(a.abs(), [1, 3], bits=4, group=comm)
        c = at.quantized_all_to_all(a * 3, sends, recvs, group=comm)
        d = at.quantized_all_to_all(a * 5, sends, recvs, format="mxfp8", quantize_gradient=True, group=comm)
        return torch.cat([b.view(-1), c.view(-1), d.view(-1)])

    made = compiled(function, backend)
    sends = [[1, 3], [2, 2]]
    recvs = [row[comm.rank] for row in sends]
    for seed in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        (y, gradient), (z, other) = (value_and_gradient(f, x, sends[comm.rank], recvs) for f in (function, made))
        assert torch.equal(y, z)
        torch.testing.assert_close(gradient, other, rtol=1e-6, atol=0)  # may be fused


@on_ranks(2)
def test_gradients_without_elements(comm: Communicator) -> None:
    x = torch.ones(3, 0, requires_grad=True)
    for recvs in ([1 + comm.rank] * 2, None):
        rows = at.quantized_all_to_all(x, [1, 2], recvs, group=comm)
        assert rows.shape == (2 + 2 * comm.rank, 0)
        rows.sum().backward()
    for features, outputs in ((0, 4), (3, 0)):
        x, w = torch.ones(3, features, requires_grad=True), torch.ones(outputs, features, requires_grad=True)
        at.quantized_linear_all_reduce(x, w, group=comm).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)
