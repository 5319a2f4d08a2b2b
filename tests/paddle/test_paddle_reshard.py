"""Paddle's tensors move between layouts."""

from __future__ import annotations

import paddle
from layouts import check_layouts
from on_ranks import on_ranks

import alltoallv.paddle as ap
from alltoallv import Communicator


@on_ranks(4)
def test_random_layouts(comm: Communicator) -> None:
    check_layouts(ap, paddle.to_tensor, lambda x: x.numpy(), comm, comm, 40)
