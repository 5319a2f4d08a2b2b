"""Sums of leaves over emulated HCCL, which adds in an order of its own, have the CPU's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from npu_ranks import bits, emulated, group, on
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv.errors import InvalidTensorError, PeerMismatchError
from alltoallv.testing import golden, quantized, reference
from alltoallv.testing.golden import assert_bits_equal


def leaves_of(n: int, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(n, *shape)) * 2.0 ** rng.integers(-3, 4, (n, *shape))
    return (made if "float" in dtype else (10 * made).clip(-100, 100)).astype(golden.dtype_of(dtype))


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False)
def test_the_bits_are_those_of_the_cpu(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (_, device), emulated(order="ring"):
        cases = [("float32", 8, (3, 5)), ("bfloat16", 8, (40, 1001)), ("float16", 4, (9000,)), ("int32", 12, (7,))]
        for seed, (dtype, leaves, shape) in enumerate(cases):
            made = leaves_of(leaves, shape, dtype, seed)
            x = on(device, np.split(made, n)[rank])
            found = at.functional.all_reduce(x, leaves=leaves)
            assert_bits_equal(bits(found), reference.all_reduce_leaves([made])[0], f"{leaves} of {dtype} {shape}")


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False)
def test_quantized_sums_have_the_bits_of_the_cpu(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (_, device), emulated(order="ring"):
        for seed, (bits_, gather, op) in enumerate(((8, "full", "sum"), (4, "quantized", "avg"), (5, "full", "avg"))):
            made = leaves_of(8, (5, 700), "float16" if seed else "float32", seed)
            x = on(device, np.split(made, n)[rank])
            options: Any = {"bits": bits_, "gather": gather, "op": op}
            found = at.quantized_all_reduce(x, leaves=8, bound=True, **options)
            known: list[Any] = []
            wanted = quantized.quantized_all_reduce(list(made), tree=True, bounds=known, **options)[0]
            assert_bits_equal(bits(found.output), wanted, str(options))
            assert_bits_equal(bits(found.bound), known[0], str(options))
        x, w = (leaves_of(1, shape, "float32", 9)[0] for shape in ((6, 64), (40, 64)))
        own = [on(device, np.ascontiguousarray(np.split(each, n, 1)[rank])).requires_grad_() for each in (x, w)]
        y = at.quantized_linear_all_reduce(*own, leaves=8)
        parts = [a @ b.T for a, b in zip(np.split(x, 8, 1), np.split(w, 8, 1), strict=True)]
        assert y is not None
        near = quantized.quantized_all_reduce(parts, tree=True)[0]
        np.testing.assert_allclose(bits(y), near, atol=np.abs(near).max() / 100)
        y.backward(on(device, near))
        assert own[0].grad is not None
        np.testing.assert_allclose(bits(own[0].grad), n * near @ np.split(w, n, 1)[rank], rtol=1e-3, atol=1e-2)


@on_ranks(2, communicator=False)
def test_gradients_errors_and_graphs(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (_, device), emulated(order="ring"):
        made = leaves_of(8, (3000,), "float32", 5)
        wanted = reference.all_reduce_leaves([made])[0]
        x = on(device, np.split(made, n)[rank]).requires_grad_()
        at.functional.all_reduce(x, leaves=8).backward(on(device, made[rank]))
        assert x.grad is not None
        assert_bits_equal(bits(x.grad), np.broadcast_to(made[0] + made[1], (4, 3000)))
        with pytest.raises(PeerMismatchError, match=r"rank 0 .*has leaves 8, rank 1 has leaves 4"):
            at.functional.all_reduce(x[: 2 if rank else 4], leaves=4 if rank else 8)
        with pytest.raises(InvalidTensorError, match=r"input has shape \(4, 3000\), expected \(1, \.\.\.\)"):
            at.functional.all_reduce(x, leaves=2)
        x, graph = x.detach(), torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = at.functional.all_reduce(x, leaves=8)
        for _ in range(2):
            y.zero_()
            graph.replay()
            torch.npu.synchronize()
            assert_bits_equal(bits(y), wanted)
