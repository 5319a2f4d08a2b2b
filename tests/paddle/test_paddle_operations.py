"""ATB's operations on Paddle tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest
from atb_front_ends import Array, check_operations

import alltoallv.numpy as an
import alltoallv.paddle as ap
from alltoallv import Communicator
from alltoallv.testing import Ranks


def tensor(array: Array) -> paddle.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return paddle.to_tensor(array.astype(np.float32)).astype("bfloat16")
    return paddle.to_tensor(array)


def array(tensor: paddle.Tensor) -> Array:
    if tensor.dtype == paddle.bfloat16:
        return tensor.astype("float32").numpy().astype(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.mark.parametrize("size", [1, 2])
def test_operations(ranks: Ranks, size: int) -> None:
    def check(comm: Communicator) -> None:
        check_operations(comm, ap, tensor, array, an.ErrorFeedback())

    ranks(size)(check)
