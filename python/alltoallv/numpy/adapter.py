"""NumPy arrays for what takes tensors of any framework."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alltoallv import memory
from alltoallv._calls.adapters import Adapter
from alltoallv._calls.regions import Region
from alltoallv.dtypes import core_name, numpy_dtype
from alltoallv.numpy.arrays import Array, as_input, region
from alltoallv.numpy.quantized import ErrorFeedback


class _Arrays(Adapter[Array]):
    kind, tensor, feedback = "a NumPy array", np.ndarray, ErrorFeedback

    def check(self, name: str, x: Array) -> None:
        core_name(x.dtype)

    def contiguous(self, x: Array) -> Array:
        return as_input("x", x)

    def writable(self, x: Array) -> bool:
        return x.flags.c_contiguous and x.flags.writeable

    def dtype(self, x: Array) -> str:
        return core_name(x.dtype)

    def region(self, x: Array) -> Region:
        return region(x)

    def allocate(self, shape: Sequence[int], dtype: str, like: Array) -> Array:
        return memory.empty(shape, like.dtype if dtype == like.dtype.name else numpy_dtype(dtype))


ADAPTER = _Arrays()
