"""ATB's operations on MindSpore tensors."""

from __future__ import annotations

import mindspore as ms
import ml_dtypes
import numpy as np
from atb_front_ends import Array, check_operations
from mindspore import Tensor

import alltoallv.mindspore as am
from alltoallv import Communicator


def tensor(array: Array) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return Tensor(array.astype(np.float32)).astype(ms.bfloat16)
    return Tensor(array)


def array(tensor: Tensor) -> Array:
    if tensor.dtype == ms.bfloat16:
        return tensor.astype(ms.float32).asnumpy().astype(ml_dtypes.bfloat16)
    return tensor.asnumpy()


def check_operations_of_atb(comm: Communicator) -> None:
    check_operations(comm, am, tensor, array, am.ErrorFeedback())
