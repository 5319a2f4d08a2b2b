"""Paddle tensors of NumPy's arrays and back, with the same bits: also ml_dtypes' dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from alltoallv._calls.adapters import as_bytes
from alltoallv.paddle.front_end import allocate, core_name, region
from alltoallv.testing import golden

Array = np.ndarray[Any, Any]


def to_paddle(array: Array) -> paddle.Tensor:
    if not array.dtype.name.startswith(("bfloat", "float8")):
        return paddle.to_tensor(array)
    tensor = allocate(array.shape, array.dtype.name)
    as_bytes(region(tensor))[...] = np.frombuffer(array.tobytes(), np.uint8)
    return tensor


def to_numpy(tensor: paddle.Tensor) -> Array:
    data: Array = as_bytes(region(tensor)).copy().view(golden.dtype_of(core_name(tensor.dtype)))
    return data.reshape(tensor.shape)


def filled(rows: int, dtype: str) -> paddle.Tensor:
    return to_paddle(np.ones((rows, 2), golden.dtype_of(dtype)))


def inputs_of(dtype: str, rows: list[int]) -> list[Array]:
    """What ranks give, so many rows each."""
    random = np.random.default_rng(7)
    return [random.integers(0, 3, (n, 2)).astype(golden.dtype_of(dtype)) for n in rows]


def same(tensor: paddle.Tensor, expected: Array) -> bool:
    return to_numpy(tensor).tobytes() == expected.tobytes()
