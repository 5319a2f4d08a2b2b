"""Passes Paddle tensors to the core and to the shared calls, as contiguous host memory of a known dtype; the handle of
a call.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from alltoallv import _core, memory
from alltoallv._calls.adapters import Adapter, Region
from alltoallv._calls.guard import Ended, Handle, Member, Pending
from alltoallv.errors import BackendUnavailableError, InvalidTensorError
from alltoallv.quantization.requests import ErrorFeedback


class Task(Handle):
    """An operator under way or done, with the methods of Paddle's task.

    The tensors that it uses stay alive until it is done, even if the handle is dropped.
    """

    def __init__(self, communicator: Member, core: Pending, keep: tuple[Any, ...], finish: Callable[[], Any]) -> None:
        self.communicator: Member = communicator
        super().__init__(communicator, core, keep, finish)

    def is_sync(self) -> bool:
        """True if the call had ended when it returned this handle."""
        return False

    def synchronize(self) -> None:
        """Waits like `wait`: the memory is the host's."""
        self.wait()

    def _seconds(self, timeout: Any) -> float | None:
        """Converts Paddle's timedelta, in which 0, its default, means no limit."""
        if isinstance(timeout, datetime.timedelta):
            return timeout.total_seconds() or None
        return super()._seconds(timeout)


class Done(Ended, Task):
    """The handle of a call with ``sync_op=True``."""

    def is_sync(self) -> bool:
        """Returns True."""
        return True


_NAMES: dict[Any, str] = {
    dtype: name for name in _core.dtypes if isinstance(dtype := getattr(paddle, name, None), paddle.dtype)
}


def core_name(dtype: Any) -> str:
    """Returns the core's name of a dtype; raises if it has none."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise InvalidTensorError(
            f"dtype is {dtype}, expected one of {', '.join(_NAMES.values())}", 13, id=2092
        ) from None


def check_tensor(name: str, x: object) -> None:
    """Refuses everything but dense tensors in host memory that hold values."""
    if not paddle.in_dynamic_mode():
        raise BackendUnavailableError(
            "alltoallv.paddle is only supported in dygraph mode: call paddle.disable_static() first, and use "
            "paddle.jit.to_static with full_graph=False",
            id=5070,
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a paddle.Tensor")
    if not x.is_dense():
        raise InvalidTensorError(f"{name} is a sparse tensor, expected a dense one", 7, id=2101)
    if not x.place.is_cpu_place():
        raise BackendUnavailableError(
            f"{name} lies on {x.place}, which this release does not serve for Paddle tensors: "
            "use paddle.set_device('cpu')",
            id=5047,
        )


def region(tensor: Tensor) -> Region:
    """Returns the address and size of a contiguous tensor."""
    return (tensor.data_ptr(), tensor.size * tensor.element_size()) if tensor.size else (0, 0)


def from_block(block: _core.Block, shape: Sequence[int], dtype: Any) -> Tensor:
    """Returns a tensor of that shape over a block, which lives as long as the tensor and its views."""
    if math.prod(shape) == 0:
        return paddle.empty(list(shape), dtype)
    # DLPack carries bytes, which Paddle then reads as any dtype: NumPy has no bfloat16 to hand over.
    array = memory.from_block(block, (math.prod(shape) * _itemsize(dtype),), np.dtype(np.uint8))
    return paddle.utils.dlpack.from_dlpack(array).view(dtype).view(list(shape))


def empty(shape: int | Sequence[int], dtype: Any = None) -> Tensor:
    """Returns a new, uninitialized CPU tensor in this process's shared arena; see `alltoallv.empty`.

    ``dtype`` is a ``paddle.dtype`` or its name; the default is Paddle's.
    """
    return allocate((shape,) if isinstance(shape, int) else tuple(shape), dtype or paddle.get_default_dtype())


def allocate(shape: Sequence[int], dtype: Any) -> Tensor:
    """Returns a new tensor like `empty`."""
    if isinstance(dtype, str):
        dtype = getattr(paddle, dtype)
    return from_block(_core.allocate(math.prod(shape) * _itemsize(dtype)), shape, dtype)


def _itemsize(dtype: Any) -> int:
    return _core.dtypes[core_name(dtype)].size


class _Tensors(Adapter[Tensor]):
    kind, tensor, feedback, handle = "a Paddle tensor", Tensor, ErrorFeedback, Task
    done, tracks_writes = Done, True

    def contiguous(self, x: Tensor) -> Tensor:
        return x if x.stop_gradient and x.is_contiguous() else x.detach().contiguous()

    def address(self, x: Tensor) -> int:
        return x.data_ptr()

    check, name, region = staticmethod(check_tensor), staticmethod(core_name), staticmethod(region)

    def allocate(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        return allocate(shape, dtype)

    def from_block(self, block: _core.Block, shape: Sequence[int], like: Tensor) -> Tensor:
        return from_block(block, shape, like.dtype)

    def writes(self, x: Tensor) -> None:
        x._bump_inplace_version()  # a backward pass that needs the old values then raises an error

    def values(self, x: Tensor) -> Any:
        return x.astype("float32").numpy()


ADAPTER = _Tensors()
