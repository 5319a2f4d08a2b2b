"""Makes arrays in memory that the peers can write to."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv.dtypes import numpy_dtype
from alltoallv.errors import InvalidParamError, InvalidTensorError


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Returns a new array, not initialized, in this process's shared arena.

    An exchange writes into such an array with a single copy, straight from the sender. Once the domains' budget is
    used up the array is ordinary private memory, with the same results; ``Communicator.stats()`` counts those
    (``private_outputs``). The memory returns to the arena when the last view of the array dies; the array may outlive
    every communicator. ``ALLTOALLV_POOL=0`` in the environment makes every array private.

    Args:
        shape: An int or a sequence of ints, as for ``numpy.empty``.
        dtype: Any dtype of fixed size, ml_dtypes' bfloat16 and float8 included, or its name.

    Raises:
        InvalidParamError: a shape with dimensions that are no integers, negative or too large.
        InvalidTensorError: a dtype that is none or holds references, or no memory.
    """
    dtype = numpy_dtype(dtype)
    if dtype.hasobject:
        raise InvalidTensorError(f"dtype is {dtype}, expected one of fixed size", 13, id=2077)
    try:
        dims = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        raise InvalidParamError(f"shape is {shape!r}, expected an integer or several", id=1313) from None
    if min(dims, default=0) < 0 or math.prod(dims) * dtype.itemsize >= 2**63:
        raise InvalidParamError(f"shape is {dims}, expected dimensions >= 0 and less than 2**63 bytes", id=1314)
    return from_block(_core.allocate(math.prod(dims) * dtype.itemsize), dims, dtype)


def from_block(block: _core.Block, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns an array of that shape over a block, which lives as long as the array."""
    return np.ndarray(tuple(shape), dtype, buffer=block)  # type: ignore[arg-type]


def is_shared(array: npt.NDArray[Any]) -> bool:
    """Returns whether the array lies in the shared arena, where peers can reach it."""
    return _core.in_arena(array.ctypes.data, array.nbytes)
