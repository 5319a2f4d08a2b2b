"""Checks of sums of leaves that are the same in MindSpore and Paddle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import quantized, reference
from alltoallv.testing.golden import assert_bits_equal

LEAVES = 8


def terms(numel: int, dtype: str, seed: int = 1) -> Any:
    """Of many magnitudes, so that sums in another order are other sums; the same on all ranks."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(LEAVES, numel)) * 2.0 ** rng.integers(-5, 6, (LEAVES, numel))
    return (made if "float" in dtype else (10 * made).clip(-100, 100)).astype(dtype)


def share(x: Any, comm: Communicator, axis: int = 0) -> Any:
    return np.ascontiguousarray(np.split(x, comm.size, axis)[comm.rank])


def array_of(x: Any) -> Any:
    return x.asnumpy() if hasattr(x, "asnumpy") else x.numpy()


def check_leaves(
    front_end: Any,
    tensor: Callable[[Any], Any],
    gradients: Callable[[Callable[..., Any], Sequence[Any]], Sequence[Any]],
    comm: Communicator,
) -> None:
    """Bits, the linear layer, gradients by ``gradients(loss, tensors)``, and errors."""
    for dtype in ("float32", "float16", "int32", "int8"):
        for numel in (7, 20_000):
            made = terms(numel, dtype)
            total = front_end.all_reduce_leaves(tensor(share(made, comm)), LEAVES, comm)
            assert_bits_equal(array_of(total), reference.all_reduce_leaves([made])[0], f"{numel} {dtype}")

    rng = np.random.default_rng(2)
    x, w = rng.integers(-9, 10, (5, 3, 32)).astype("float32"), rng.integers(-9, 10, (6, 32)).astype("float32")
    bias, slopes = np.arange(6, dtype="float32"), rng.integers(-9, 10, (comm.size, 5, 3, 6)).astype("float32")
    own = [share(x, comm, 2), share(w, comm, 1), bias]

    def loss(x: Any, w: Any, bias: Any) -> Any:
        return (front_end.row_parallel_linear(x, w, bias, leaves=LEAVES, group=comm) * tensor(slopes[comm.rank])).sum()

    y = front_end.row_parallel_linear(*map(tensor, own), leaves=LEAVES, group=comm)
    assert_bits_equal(array_of(y), x @ w.T + bias)  # of small integers
    back = slopes.sum(0)  # of all ranks, but for the bias, which is each rank's own
    expected = back @ own[1], np.einsum("abo,abi->oi", back, own[0]), slopes[comm.rank].sum((0, 1))
    for found, wanted in zip(gradients(loss, list(map(tensor, own))), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found), wanted)

    made = terms(5000, "float32")
    x = tensor(share(made, comm))
    for options in ({"bits": 4, "op": "avg"}, {"gather": "quantized"}):
        coded = front_end.quantized_all_reduce(x, leaves=LEAVES, group=comm, **options)
        wanted = quantized.quantized_all_reduce(list(made), tree=True, **options)[0]
        assert_bits_equal(array_of(coded), wanted, str(options))
    slope = terms(5000, "float32", 3)

    def coded_loss(x: Any) -> Any:
        total = front_end.quantized_all_reduce(x, leaves=LEAVES, op="avg", group=comm)
        return (total * tensor(slope[comm.rank])).sum()

    of_leaf = reference.all_reduce_leaves([slope[: comm.size]])[0] / np.float32(LEAVES)
    assert_bits_equal(np.asarray(gradients(coded_loss, [x])[0]), np.broadcast_to(of_leaf, x.shape))
    x, w = terms(64, "float32", 4), terms(64, "float32", 5)
    factors = [tensor(share(each, comm, 1)) for each in (x, w)]
    y = array_of(front_end.quantized_linear_all_reduce(*factors, leaves=LEAVES, group=comm))
    parts = [a @ b.T for a, b in zip(np.split(x, LEAVES, 1), np.split(w, LEAVES, 1), strict=True)]
    near = quantized.quantized_all_reduce(parts, tree=True)[0]
    np.testing.assert_allclose(y, near, atol=np.abs(near).max() / 100)

    ones = tensor(np.ones((LEAVES // comm.size, 2), "float32"))
    with pytest.raises(PeerMismatchError, match="rank 0 has leaves 8, rank 1 has leaves 4"):
        front_end.all_reduce_leaves(ones[: 4 if comm.rank == 0 else 2], 8 if comm.rank == 0 else 4, comm)
    with pytest.raises(InvalidParamError, match="leaves is 9, expected a multiple of the 2 ranks of at most 4096"):
        front_end.all_reduce_leaves(ones, 9 if comm.rank else 8, comm)
    with pytest.raises(InvalidTensorError, match="input has 16 features, expected a multiple of 3"):
        front_end.row_parallel_linear(*map(tensor, own), leaves=6, group=comm)
    assert array_of(front_end.all_reduce_leaves(ones, 8, comm)).tolist() == [8.0, 8.0]
