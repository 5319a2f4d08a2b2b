"""paddle.jit.to_static: our functions run between the graphs, on the data of every call; in one they are refused."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import pytest
from on_ranks import on_ranks
from paddle import Tensor

import alltoallv.paddle as ap
from alltoallv import Communicator


def _functions(comm: Communicator) -> dict[str, Callable[[Tensor], Tensor]]:
    """Calls on four rows."""
    counts = [2, 2]

    def at_once(x: Tensor) -> Tensor:
        return ap.all_to_all_v(x, counts, counts, group=comm) + 1

    def named(x: Tensor) -> Tensor:
        y = ap.all_to_all_v(x * 2, counts, counts, group=comm)
        return y + 1

    def out(x: Tensor) -> Tensor:
        y = paddle.zeros([4, 2])
        ap.all_to_all_v(x * 2, counts, counts, out=y, group=comm)
        return y + 1

    def handle(x: Tensor) -> Tensor:
        y, task = ap.all_to_all_v(x * 2, counts, async_op=True, group=comm)
        assert y is None
        return task.result() + 1

    def single(x: Tensor) -> Tensor:
        y = paddle.zeros([4, 2])
        ap.alltoall_single(in_tensor=x, out_tensor=y, group=comm)
        return y + 1

    def experts(x: Tensor) -> Tensor:
        each = paddle.to_tensor([1, 1, 1, 1])
        y = ap.global_scatter(x * 2, each, each, group=comm)
        return ap.global_gather(y + 1, each, each, group=comm) * 2

    return {function.__name__: function for function in (at_once, named, out, handle, single, experts)}


@on_ranks(2, timeout=120)
def test_between_graphs(comm: Communicator) -> None:
    x = paddle.arange(8, dtype="float32").reshape([4, 2]) + 100 * comm.rank
    for name, function in _functions(comm).items():
        static = paddle.jit.to_static(function, full_graph=False)
        for n in range(3):
            expected = function(x + n)
            assert static(x + n).numpy().tolist() == expected.numpy().tolist(), name


@on_ranks(2, timeout=120)
def test_gradients_between_graphs(comm: Communicator) -> None:
    gradients = []
    for wrap in (lambda function: function, lambda function: paddle.jit.to_static(function, full_graph=False)):
        x = paddle.arange(8, dtype="float32").reshape([4, 2])
        x.stop_gradient = False
        y = wrap(_functions(comm)["experts"])(x)
        (y * y).sum().backward()
        gradients.append(x.grad.numpy().tolist())
    assert gradients[0] == gradients[1]


@on_ranks(2, timeout=120)
def test_no_graph(comm: Communicator) -> None:
    x = paddle.arange(8, dtype="float32").reshape([4, 2])
    for function in _functions(comm).values():
        with pytest.raises(RuntimeError, match="only supported in dygraph mode"):
            paddle.jit.to_static(function, full_graph=True)(x)
    assert _functions(comm)["named"](x).shape == [4, 2]
