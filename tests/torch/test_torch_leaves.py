"""Sums of leaves, and the linear layer over them: the bits of any number of ranks, gradients, one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compiled import compiled
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import Ranks, reference
from alltoallv.testing.golden import assert_bits_equal

LEAVES, ROWS, K, N = 8, 5, 64, 48


def drawn(*shape: int) -> torch.Tensor:
    """The same on all ranks, of many magnitudes."""
    rng = np.random.default_rng([3, *shape])
    return torch.tensor(rng.normal(size=shape) * 2.0 ** rng.integers(-6, 7, shape), dtype=torch.float32)


def share(x: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    return x.chunk(comm.size, dim)[comm.rank].detach().clone().requires_grad_()


def as_bits(x: Any) -> bytes:
    made: bytes = x.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return made


def layer(comm: Communicator) -> tuple[bytes, ...]:
    """A linear layer and its gradients, of all ranks' shares, for a loss of which every rank has an equal part."""
    torch.set_num_threads(1)
    x, w, bias = share(drawn(ROWS, K), comm, 1), share(drawn(N, K), comm, 1), drawn(N).requires_grad_()
    y = at.row_parallel_linear(x, w, bias, leaves=LEAVES, group=comm)
    assert y is not None
    y.backward(drawn(ROWS, N) / comm.size)
    gathered = [at.functional.all_gather(each.grad.t().contiguous(), comm) for each in (x, w) if each.grad is not None]
    return as_bits(y), *map(as_bits, gathered)


def test_a_layer_has_the_bits_of_one_rank(ranks: Ranks) -> None:
    """In its gradients too, where the ranks' parts of the loss are equal."""
    one = ranks(1, threads=True)(layer)[0]
    for size in (2, 4, 8):
        assert ranks(size, threads=True)(layer) == [one] * size


@on_ranks(2, threads=True)
def test_a_layer_is_near_its_product(comm: Communicator) -> None:
    x, w, bias = share(drawn(ROWS, K), comm, 1), share(drawn(N, K), comm, 1), drawn(N)
    y = at.row_parallel_linear(x.view(ROWS, 1, -1), w, bias, leaves=16, group=comm)
    assert y is not None
    expected = drawn(ROWS, K).double() @ drawn(N, K).double().t() + bias.double()
    torch.testing.assert_close(y.view(ROWS, N).double(), expected, rtol=1e-4, atol=1e-2)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * w.detach().sum(0).expand(ROWS, -1), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@on_ranks(2)
def test_a_sum_has_the_bits_of_its_definition(comm: Communicator, dtype: str) -> None:
    x = (drawn(LEAVES, 30_000) * (1 if "float" in dtype else 100)).to(getattr(torch, dtype))
    total = at.functional.all_reduce(x.chunk(comm.size)[comm.rank], comm, leaves=LEAVES)
    if dtype == "bfloat16":
        wanted = torch.tensor(reference.all_reduce_leaves([x.float().numpy()])[0]).bfloat16()
        assert torch.equal(total, wanted)
    else:
        assert_bits_equal(total.numpy(), reference.all_reduce_leaves([x.numpy()])[0])


@on_ranks(3, threads=True)
def test_gradients(comm: Communicator) -> None:
    """Of both orders, against finite differences: that of a leaf is the sum of the ranks' gradients."""
    x = drawn(6, 4)[2 * comm.rank : 2 * comm.rank + 2].double().requires_grad_()
    y = at.functional.all_reduce(x, comm, leaves=6)
    weight = torch.arange(4.0, dtype=torch.float64) + comm.rank
    (grad,) = torch.autograd.grad((y**2 * weight).sum(), x, create_graph=True)
    total = drawn(6, 4).double().sum(0)
    torch.testing.assert_close(grad, (2 * total * (3 * torch.arange(4.0) + 3)).expand(2, -1))
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, (6.0 * 2 * (3 * torch.arange(4.0) + 3)).double().expand(2, -1))


@on_ranks(2)
def test_one_graph(comm: Communicator) -> None:
    torch.set_num_threads(1)
    x, w = share(drawn(ROWS, K), comm, 1), share(drawn(N, K), comm, 1)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = at.row_parallel_linear(x, w, leaves=LEAVES, group=comm)
        assert y is not None
        return at.functional.all_reduce(y.view(1, ROWS, -1), comm, leaves=2) * 2

    plain = run(x, w)
    plain.sum().backward()
    grads = x.grad, w.grad
    x.grad = w.grad = None
    made = compiled(run, backend="aot_eager")(x, w)
    made.sum().backward()
    for found, expected in ((made, plain), (x.grad, grads[0]), (w.grad, grads[1])):
        assert as_bits(found) == as_bits(expected)


def quantized(comm: Communicator, gather: str) -> tuple[bytes, ...]:
    """The same layer with a sum of codes."""
    torch.set_num_threads(1)
    x, w, bias = share(drawn(ROWS, K), comm, 1), share(drawn(N, K), comm, 1), drawn(N).requires_grad_()
    options: Any = {"leaves": LEAVES, "gather": gather, "group_size": 32, "chunks": 2, "group": comm}
    y = at.quantized_linear_all_reduce(x, w, bias, **options)
    assert y is not None
    y.backward(drawn(ROWS, N) / comm.size)
    gathered = [at.functional.all_gather(each.grad.t().contiguous(), comm) for each in (x, w) if each.grad is not None]
    plain = at.quantized_linear_all_reduce(x.detach(), w.detach(), bias.detach(), **options)
    assert plain is not None
    assert as_bits(plain) == as_bits(y)
    return as_bits(y), *map(as_bits, gathered)


@pytest.mark.parametrize("gather", ["full", "quantized"])
def test_a_quantized_layer_has_the_bits_of_one_rank(ranks: Ranks, gather: str) -> None:
    """As the unquantized layer: the gradient passes straight through the rounding."""
    one = ranks(1, threads=True)(quantized, gather)[0]
    exact = ranks(1, threads=True)(layer)[0]
    assert one[1:] == exact[1:]
    for size in (2, 4, 8):
        assert ranks(size, threads=True)(quantized, gather) == [one] * size


@pytest.mark.parametrize("op", ["sum", "avg"])
@on_ranks(2)
def test_a_quantized_sum_in_a_graph(comm: Communicator, op: str) -> None:
    x = share(drawn(LEAVES, 3000), comm, 0)

    def run(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = at.quantized_all_reduce(x, leaves=LEAVES, op=op, bits=4, group=comm)
        return total * 2

    plain, slope = run(x), drawn(3000)
    plain.backward(slope)
    grad, x.grad = x.grad, None
    made = compiled(run, backend="aot_eager")(x)
    made.backward(slope)
    assert as_bits(made) == as_bits(plain) == as_bits(run(x.detach()))
    assert grad is not None
    assert as_bits(x.grad) == as_bits(grad)
    of_leaf = 4 * slope / (LEAVES if op == "avg" else 1)
    assert torch.equal(grad, of_leaf.expand(LEAVES // 2, -1))


@on_ranks(2)
def test_wrong_arguments(comm: Communicator) -> None:
    x, w = torch.ones(3, 8), torch.ones(5, 8)
    with pytest.raises(
        InvalidTensorError, match=r"input has 8 features, expected a multiple of 3: leaves is 6 on 2.*A2A-2043"
    ):
        at.row_parallel_linear(x, w, leaves=6, group=comm)
    with pytest.raises(InvalidTensorError, match=r"weight has shape.*A2A-2045"):
        at.row_parallel_linear(x, w[:, 1:] if comm.rank else w, leaves=4, group=comm)
    for leaves in (3, 0, None, "8"):
        with pytest.raises(InvalidParamError, match=r"leaves is .*, expected a multiple of the 2 ranks.*A2A-1045"):
            at.row_parallel_linear(x, w, leaves=leaves, group=comm)  # type: ignore[arg-type]
    with pytest.raises(PeerMismatchError, match=r"rank 0 has leaves 4, rank 1 has leaves 8.*A2A-3009"):
        at.row_parallel_linear(x, w, leaves=8 if comm.rank else 4, group=comm)
    with pytest.raises(InvalidParamError, match=r"order is 'rank' and leaves is 2, expected one of them.*A2A-1150"):
        at.functional.all_reduce(x[:1], comm, order="rank", leaves=2)
    y = at.row_parallel_linear(x, w, leaves=4, group=comm)
    assert y is not None
    assert y.tolist() == [[16.0] * 5] * 3
