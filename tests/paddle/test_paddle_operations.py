"""ATB's operations on Paddle tensors."""

from __future__ import annotations

import pytest
from atb_front_ends import check_operations
from on_ranks import on_ranks
from paddle_arrays import to_numpy, to_paddle

import alltoallv.numpy as an
import alltoallv.paddle as ap
from alltoallv import Communicator


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_operations(comm: Communicator) -> None:
    check_operations(comm, ap, to_paddle, to_numpy, an.ErrorFeedback())
