"""Paddle's tensors move between layouts."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from layouts import check_formats, check_gradients, check_layouts, check_states
from on_ranks import on_ranks

import alltoallv.paddle as ap
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, PeerMismatchError


@on_ranks(4)
def test_random_layouts(comm: Communicator) -> None:
    check_layouts(ap, paddle.to_tensor, lambda x: x.numpy(), comm, comm, 40)
    check_states(ap, paddle.to_tensor, lambda x: x.numpy(), comm, comm)
    check_formats(ap, paddle.to_tensor, lambda x: x.numpy(), comm, comm, 12)


def wanting(x: Any) -> paddle.Tensor:
    x = x.clone().detach()
    x.stop_gradient = False
    return x


@on_ranks(4)
def test_gradients(comm: Communicator) -> None:
    def gradient(loss: Any, x: paddle.Tensor) -> Any:
        return paddle.grad(loss(z := wanting(x)), z)[0].numpy()

    def twice(loss: Any, x: paddle.Tensor, v: paddle.Tensor) -> Any:
        (first,) = paddle.grad(loss(z := wanting(x)), z, create_graph=True)
        return paddle.grad((first * v).sum(), z)[0].numpy()

    check_gradients(ap, paddle.to_tensor, lambda x: x.numpy(), gradient, twice, comm, comm, 40)


@on_ranks(2)
def test_gradients_that_cannot_be(comm: Communicator) -> None:
    x = wanting(paddle.ones([4, 4]))
    everybody = [0, 1]
    with pytest.raises(InvalidParamError, match="x wants a gradient, expected all 2 ranks in both meshes then"):
        ap.reshard(x, (everybody, [None]), ([0], [0]), group=comm)
    with pytest.raises(InvalidParamError, match="source has terms of 'max' for what wants a gradient"):
        ap.reshard(x, (everybody, ["max"]), (everybody, [0]), group=comm)
    with pytest.raises(InvalidParamError, match="async_op is True for a tensor that wants a gradient"):
        ap.reshard(x, (everybody, [None]), (everybody, [0]), group=comm, async_op=True)
    with pytest.raises(PeerMismatchError, match="x: rank 1 wants a gradient, rank 0 wants none"):
        ap.reshard(x if comm.rank else x.detach(), (everybody, [None]), (everybody, [0]), group=comm)
    plan = ap.ReshardPlan((4, 4), paddle.float32, (everybody, [0]), (everybody, [None]), group=comm)
    half = wanting(paddle.ones([2, 4]))
    assert (paddle.grad(plan(half).sum(), half)[0].numpy() == 2).all()
    with pytest.raises(InvalidParamError, match="async_op is True for a tensor that wants a gradient"):
        plan(half, async_op=True)
