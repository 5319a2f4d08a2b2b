"""Implements the tensor interface of the shared calls for NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alltoallv import _core, memory
from alltoallv._calls.adapters import Adapter
from alltoallv.dtypes import core_name, numpy_dtype
from alltoallv.errors import InvalidTensorError
from alltoallv.numpy.arrays import Array, address, as_input, check_output, new_output, region
from alltoallv.numpy.work import Work
from alltoallv.quantization.feedback import ErrorFeedback


class _Arrays(Adapter[Array]):
    kind, tensor, feedback, handle = "a NumPy array", np.ndarray, ErrorFeedback, Work

    def check(self, name: str, x: Array) -> None:
        if not isinstance(x, np.ndarray):
            raise InvalidTensorError(f"{name} is a {type(x).__name__}, expected a NumPy array", 5)
        core_name(x.dtype)

    read = staticmethod(as_input)  # accepts a list, too

    def contiguous(self, x: Array) -> Array:
        return as_input("x", x)

    def writable(self, x: Array) -> bool:
        return x.flags.c_contiguous and x.flags.writeable

    def name(self, dtype: Any) -> str:
        return core_name(numpy_dtype(dtype))

    def dtype(self, x: Array) -> str:
        return core_name(x.dtype)

    address, region = staticmethod(address), staticmethod(region)

    def listed(self, name: str, tensors: Any) -> Sequence[Array]:
        given: Sequence[Array] = tensors  # any kind of sequence: its length is checked
        return given

    def new(self, shape: Sequence[int], like: Array, *, zero: bool = False) -> Array:
        return new_output(tuple(shape), like.dtype, zero)

    def from_block(self, block: _core.Block, shape: Sequence[int], like: Array) -> Array:
        return memory.from_block(block, shape, like.dtype)

    def check_output(self, name: str, x: Array, like: Array | None = None) -> str:
        return core_name(check_output(name, x, None if like is None else like.dtype).dtype)

    def allocate(self, shape: Sequence[int], dtype: str, like: Array) -> Array:
        return memory.empty(shape, numpy_dtype(dtype))

    def values(self, x: Array) -> Array:
        return x


ADAPTER: Adapter[Any] = _Arrays()
