"""Checks NumPy arrays before they reach the core, and shows them to the shared calls; the handle of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core, communicator, memory
from alltoallv._calls.adapters import Adapter, Region, not_writable, wrong_dtype
from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import Ended, Handle
from alltoallv._calls.subgroups import of_host
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name, numpy_dtype
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.quantization.requests import ErrorFeedback


class Work(Handle):
    """An operator under way. The arrays that it uses stay alive until it is done, even if the handle is dropped."""


class Done(Ended, Work):
    """The handle of a call that had nothing to wait for."""


Array = npt.NDArray[Any]


def resolve(group: Communicator | None) -> Communicator:
    """Returns the communicator that ``group`` means."""
    if group is None:
        return communicator.default()
    if not isinstance(group, Communicator):
        raise InvalidParamError(f"group is a {type(group).__name__}, expected a Communicator or None", id=1222)
    return group if group.host_core is not None else of_host(group)  # of_host raises then


def as_input(name: str, array: npt.ArrayLike | Counts) -> Array:
    """Returns a C-contiguous array with the values of ``array``, which is copied only if necessary."""
    try:
        return np.asarray(array, order="C")
    except (TypeError, ValueError) as error:
        raise InvalidTensorError(
            f"{name} is a {type(array).__name__}, expected values that NumPy converts to an array ({error})", id=2042
        ) from error


def check_array(name: str, array: object) -> Array:
    """Returns ``array``, or raises InvalidTensorError if it is none."""
    if not isinstance(array, np.ndarray):
        raise InvalidTensorError(f"{name} is a {type(array).__name__}, expected a NumPy array", 5, id=2061)
    return array


def check_output(name: str, given: object, dtype: np.dtype[Any] | None = None, size: int | None = None) -> Array:
    """Returns ``given``, or raises an error if the operator cannot write into it."""
    array = check_array(name, given)
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise not_writable(name)
    if dtype is not None and array.dtype != dtype:
        raise wrong_dtype(name, array.dtype, dtype)
    if size is not None:
        _core.check_count(name, array.size, size)
    return array


def address(array: Array) -> int:
    """Returns the address of the first element."""
    try:
        return _core.buffer_address(array)
    except (TypeError, ValueError, BufferError):  # dtypes without a buffer format, such as bfloat16
        return array.ctypes.data


def region(array: Array) -> Region:
    """Returns the address and size of a contiguous array."""
    return address(array), array.nbytes


class _Arrays(Adapter[Array]):
    kind, tensor, feedback, handle = "a NumPy array", np.ndarray, ErrorFeedback, Work
    done, direct = Done, True

    def check(self, name: str, x: Array) -> None:
        check_array(name, x)
        core_name(x.dtype)

    read = staticmethod(as_input)  # also accepts a list

    def contiguous(self, x: Array) -> Array:
        return as_input("x", x)

    def strides(self, x: Array) -> Sequence[int] | None:
        return None if any(n % x.itemsize for n in x.strides) else [n // x.itemsize for n in x.strides]

    def writable(self, x: Array) -> bool:
        return x.flags.c_contiguous and x.flags.writeable

    def name(self, dtype: Any) -> str:
        return core_name(numpy_dtype(dtype))

    def dtype(self, x: Array) -> str:
        return core_name(x.dtype)

    address, region = staticmethod(address), staticmethod(region)

    def listed(self, name: str, tensors: Any) -> Sequence[Array]:
        arrays: Sequence[Array] = tensors  # any kind of sequence: its length is checked
        return arrays

    def new(self, shape: Sequence[int], like: Array, *, zero: bool = False) -> Array:
        out = memory.empty(shape, like.dtype)
        if zero:
            out.view(np.uint8)[...] = 0
        return out

    def from_block(self, block: _core.Block, shape: Sequence[int], like: Array) -> Array:
        return memory.from_block(block, shape, like.dtype)

    def check_output(self, name: str, x: Array, like: Array | None = None) -> str:
        return core_name(check_output(name, x, None if like is None else like.dtype).dtype)

    def allocate(self, shape: Sequence[int], dtype: str, like: Array) -> Array:
        return memory.empty(shape, numpy_dtype(dtype))

    def values(self, x: Array) -> Array:
        return x


ADAPTER: Adapter[Any] = _Arrays()


def later(comm: Communicator, call: tuple[Any, Any, Any]) -> tuple[Any, Work]:
    """Returns the result of an asynchronous call of the core, and its work."""
    result, pending, used = call
    return result, Work(comm, pending, (used,), lambda: result)
