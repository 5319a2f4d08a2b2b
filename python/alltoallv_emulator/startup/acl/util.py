"""Addresses of arrays and bytes in host memory, and arrays and bytes at addresses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from alltoallv_emulator.pyacl import missing

if TYPE_CHECKING:
    import numpy as np

__getattr__ = missing("acl.util")


def numpy_to_ptr(array: np.ndarray[Any, Any]) -> int:
    """Returns the address of the array's data, which must live as long as it is used."""
    return int(array.ctypes.data)


def ptr_to_numpy(ptr: int, shape: Sequence[int], number: int) -> np.ndarray[Any, Any]:
    """Returns an array of that memory, of the dtype with this number in NumPy."""
    import numpy as np

    dtype = next((np.dtype(code) for code in "?bBhHiIlLqQefdgFDG" if np.dtype(code).num == number), None)
    if dtype is None:
        raise ValueError(f"number is {number}, expected the number of a dtype of numbers in NumPy")
    shape = tuple(shape)
    memory: Any = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(ptr)
    array: np.ndarray[Any, Any] = np.frombuffer(memory, dtype).reshape(shape)
    return array


def bytes_to_ptr(data: bytes) -> int:
    """Returns the address of the bytes, which must live as long as it is used, and not be written."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def ptr_to_bytes(ptr: int, size: int) -> bytes:
    """Returns a copy of that memory."""
    return ctypes.string_at(ptr, size)
