"""One dimension of a tensor for another in Paddle."""

from __future__ import annotations

from typing import Any

import paddle
from on_ranks import on_ranks
from swaps import check_swaps

import alltoallv.paddle as ap
from alltoallv import Communicator


@on_ranks(2)
def test_by_the_definition(comm: Communicator) -> None:
    def gradient(loss: Any, x: Any) -> Any:
        x.stop_gradient = False
        loss(x).backward()
        return x.grad.numpy()

    check_swaps(ap, paddle.to_tensor, gradient, comm, comm, dtypes=["float32", "int8", "float64"])
