"""Sums of leaves in Paddle."""

from __future__ import annotations

from typing import Any

import paddle
from leaf_front_ends import check_leaves
from on_ranks import on_ranks

import alltoallv.paddle as ap
from alltoallv import Communicator


@on_ranks(2)
def test_leaves(comm: Communicator) -> None:
    def gradients(loss: Any, tensors: Any) -> Any:
        for x in tensors:
            x.stop_gradient = False
        loss(*tensors).backward()
        return [x.grad.numpy() for x in tensors]

    check_leaves(ap, paddle.to_tensor, gradients, comm)
