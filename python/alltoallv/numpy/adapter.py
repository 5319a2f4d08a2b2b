"""NumPy arrays for what takes tensors of any framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alltoallv import memory
from alltoallv._calls.adapters import Adapter
from alltoallv.dtypes import core_name, numpy_dtype
from alltoallv.errors import InvalidTensorError
from alltoallv.numpy.arrays import Array, as_input, region
from alltoallv.numpy.work import Work
from alltoallv.quantization.feedback import ErrorFeedback


class _Arrays(Adapter[Array]):
    kind, tensor, feedback, handle = "a NumPy array", np.ndarray, ErrorFeedback, Work

    def check(self, name: str, x: Array) -> None:
        if not isinstance(x, np.ndarray):
            raise InvalidTensorError(f"{name} is a {type(x).__name__}, expected a NumPy array", 5)
        core_name(x.dtype)

    read = staticmethod(as_input)  # a list too

    def contiguous(self, x: Array) -> Array:
        return as_input("x", x)

    def writable(self, x: Array) -> bool:
        return x.flags.c_contiguous and x.flags.writeable

    def name(self, dtype: Any) -> str:
        return core_name(numpy_dtype(dtype))

    def dtype(self, x: Array) -> str:
        return core_name(x.dtype)

    region = staticmethod(region)

    def allocate(self, shape: Sequence[int], dtype: str, like: Array) -> Array:
        return memory.empty(shape, numpy_dtype(dtype))

    def values(self, x: Array) -> Array:
        return x


ADAPTER: Adapter[Any] = _Arrays()
