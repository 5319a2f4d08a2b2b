"""Quantized collectives on Paddle tensors: NumPy's bits and errors, gradients of two orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from on_ranks import on_ranks
from quantized_front_ends import COUNTS, check_linear_gradients, check_quantized, slopes_and_gradient

import alltoallv.paddle as ap
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.paddle.front_end import ADAPTER
from alltoallv.testing import Ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_numpy(ranks: Ranks, size: int) -> None:
    ranks(size)(lambda comm: check_quantized(ap, ADAPTER, paddle, comm))


@pytest.mark.parametrize("op", ["sum", "avg"])
@on_ranks(2)
def test_gradients_pass_straight_through(comm: Communicator, op: str) -> None:
    """Gradients of an ordinary sum, or rows, of squares: 2 y of all ranks, and twice the ranks for the second order."""
    size, share = comm.size, 1 if op == "sum" else 1 / comm.size
    for function, counts in (
        (ap.quantized_all_reduce, ()),
        (ap.quantized_reduce_scatter, ()),
        (ap.quantized_reduce_scatter, ([3 * size, *[0] * (size - 1)],)),
    ):
        x = paddle.full([3 * size, 2], comm.rank + 1.0)
        x.stop_gradient = False
        y = function(x, *counts, op=op, group=comm)
        (slope,) = paddle.grad((y**2).sum(), x, create_graph=True)
        total, each = share * sum(range(1, size + 1)), size if function is ap.quantized_all_reduce else 1
        np.testing.assert_allclose(slope.numpy(), np.full((3 * size, 2), 2 * total * share * each), rtol=1e-2)
        (curve,) = paddle.grad(slope.sum(), x)
        curvature = 2 * share * share * size * each
        np.testing.assert_allclose(curve.numpy(), np.full((3 * size, 2), curvature), rtol=1e-2)


def test_gradients_of_a_linear_layer(ranks: Ranks) -> None:
    def gradients(loss: Any, tensors: Any, wanted: Any) -> Any:
        for x, wants in zip(tensors, wanted, strict=True):
            x.stop_gradient = not wants
        loss(*tensors).backward()
        return [x.grad.numpy() for x in tensors if not x.stop_gradient]

    ranks(2)(lambda comm: check_linear_gradients(ap.quantized_linear_all_reduce, paddle.to_tensor, gradients, comm))


@on_ranks(2)
def test_gradients_of_rows(comm: Communicator) -> None:
    """They go back where the rows came from, in the input's dtype."""
    x = paddle.arange(8, dtype="float32").reshape([4, 2]) + comm.rank
    x.stop_gradient = False
    for recvs in (None, [1, 1] if comm.rank == 0 else [3, 3]):
        y = ap.quantized_all_to_all(x, [1, 3], recvs, out_dtype=paddle.float16, group=comm)
        assert y.dtype == paddle.float16
        weights = paddle.full(y.shape, comm.rank + 1.0)
        (slope,) = paddle.grad((y.astype("float32") * weights).sum(), x)
        assert slope.dtype == paddle.float32
        np.testing.assert_array_equal(slope.numpy(), [[1, 1], [2, 2], [2, 2], [2, 2]])
    slopes, wanted = slopes_and_gradient(comm, (2,), "float16", bits=4)
    y = ap.quantized_all_to_all(
        x, COUNTS[comm.rank], bits=4, out_dtype=paddle.float16, quantize_gradient=True, group=comm
    )
    (slope,) = paddle.grad((y.astype("float32") * paddle.to_tensor(slopes)).sum(), x)
    np.testing.assert_array_equal(slope.numpy(), wanted)
    for extra in ({"out": x.detach(), "async_op": True}, {"error_feedback": ap.ErrorFeedback()}):
        with pytest.raises(InvalidParamError, match=f"expected a call without {' and '.join(extra)} \\[A2A"):
            ap.quantized_all_reduce(x, group=comm, **extra)
    with paddle.no_grad():
        assert ap.quantized_all_reduce(x, group=comm).stop_gradient
