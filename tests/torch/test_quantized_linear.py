"""The row-parallel linear layer with a quantized sum: the bits of its parts, gradients, one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compiled import compiled
from on_ranks import on_ranks
from quantized_front_ends import check_linear_gradients

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidTensorError
from alltoallv.testing import Ranks
from alltoallv.testing.golden import assert_bits_equal
from alltoallv.testing.quantized_formats import FORMATS


def parts(comm: Communicator, rows: int = 96, k: int = 24, n: int = 40) -> Any:
    """Input and weight of this rank, the bias, and the layer's product in float64."""
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(rows, k * comm.size)), rng.normal(size=(n, k * comm.size))
    mine = slice(comm.rank * k, comm.rank * k + k)
    return *(torch.tensor(each[:, mine], dtype=torch.float32) for each in (x, w)), torch.arange(n) * 0.5, x @ w.T


@on_ranks(2, threads=True)
def test_formats_and_chunks(comm: Communicator) -> None:
    """Near the product; as the all-reduce of the whole product, however many chunks."""
    x, w, bias, exact = parts(comm)
    for name, how in FORMATS.items():
        kind: Any = {"format": name, "gather": "quantized", "group": comm}
        limit = {8: 0.08, 6: 0.12, 5: 0.2, 4: 0.3, 3: 0.6, 2: 1.5}[how.bits]
        whole = at.quantized_all_reduce(x @ w.t(), **kind)
        for chunks in (None, 1, 3):
            y = at.quantized_linear_all_reduce(x, w, chunks=chunks, **kind)
            error = np.linalg.norm(y.numpy() - exact) / np.linalg.norm(exact)
            assert error < limit, (name, error)
            if name != "nvfp4" and how.bits >= 4:
                torch.testing.assert_close(y, whole, rtol=0, atol=float(whole.abs().max()) / 4)
            other = av.quantized_linear_all_reduce(x.numpy(), w.numpy(), chunks=chunks, **kind)
            assert np.linalg.norm(other - exact) / np.linalg.norm(exact) < limit
            everyone = at.functional.all_gather(y.view(torch.int32), group=comm)
            for each in everyone.view(comm.size, -1):
                assert_bits_equal(each.numpy(), y.view(torch.int32).numpy().ravel(), name)
    y = at.quantized_linear_all_reduce(x.view(8, 12, -1), w, bias, group_size="token", op="avg", group=comm)
    assert y.shape == (8, 12, 40)
    np.testing.assert_allclose(y.view(96, 40).numpy(), exact / comm.size + bias.numpy(), atol=0.5)
    assert at.quantized_linear_all_reduce(x[:0], w, group=comm).shape == (0, 40)
    with pytest.raises(
        InvalidTensorError, match=r"weight has shape \(40, 23\), expected \[out_features, 24\].*A2A-2045"
    ):
        at.quantized_linear_all_reduce(x, w[:, :23], group=comm)


def loss_of(comm: Communicator, function: Any, x: Any, w: Any, bias: Any) -> Any:
    given = [each.clone().requires_grad_() for each in (x, w, bias)]
    function(*given).square().sum().backward()
    return [each.grad for each in given]


def test_gradients_of_whatever_wants_one(ranks: Ranks) -> None:
    def gradients(loss: Any, tensors: Any, wanted: Any) -> Any:
        for x, wants in zip(tensors, wanted, strict=True):
            x.requires_grad_(wants)
        loss(*tensors).backward()
        return [x.grad.numpy() for x in tensors if x.requires_grad]

    def check(comm: Communicator) -> None:
        check_linear_gradients(at.quantized_linear_all_reduce, torch.from_numpy, gradients, comm)

    ranks(2, threads=True)(check)


@on_ranks(2)
def test_one_graph(comm: Communicator) -> None:
    x, w, bias, _ = parts(comm)

    def layer(x: Any, w: Any, bias: Any) -> Any:
        return at.quantized_linear_all_reduce(x, w, bias, chunks=2, format="mxfp8", group=comm)

    made = compiled(layer)
    torch.testing.assert_close(made(x, w, bias), layer(x, w, bias))
    for got, wanted in zip(loss_of(comm, made, x, w, bias), loss_of(comm, layer, x, w, bias), strict=True):
        torch.testing.assert_close(got, wanted)
