"""Passes MindSpore tensors to the core as contiguous host memory of a known dtype; what calls return beside tensors."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore._c_expression import CommHandle as Native
from mindspore._c_expression import MSContext, ms_ctx_param
from mindspore.communication import comm_func
from mindspore.ops.composite import base
from mindspore.ops.function import comm_func as functions

from alltoallv import _core, memory
from alltoallv._calls.adapters import Region
from alltoallv._calls.guard import Ended, Handle, raise_for
from alltoallv.errors import BackendUnavailableError, InvalidTensorError

try:  # settle() waits for its executor; the public call refuses CPU
    from mindspore.graph.api import _pynative_executor as _executor
except ImportError:  # before 2.9
    from mindspore.common.api import _pynative_executor as _executor

Place = Callable[[Tensor], Region]  # returns the address and size of a tensor

executor: Any = _executor
_context: Any = MSContext.get_instance()  # the same values as get_context, in a thousandth of the time
_TARGET = ms_ctx_param.device_target

DTYPES: dict[Any, str] = {
    getattr(mindspore, name if name != "bool" else "bool_"): name
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
}


# What MindSpore runs a function or a cell in to differentiate it.
_RECORDING = {
    function.__code__
    for owner, name in (
        *((base, f"_pynative_func_grad_{pass_}") for pass_ in ("forward", "backward")),
        (nn.Cell, "_complex_call"),
    )
    if isinstance(function := getattr(owner, name, None), FunctionType)
}


def settle() -> None:
    """Waits until MindSpore has computed all operators that Python has called.

    Call it before memory is read, because MindSpore may not have written it yet, and before memory is written, because
    MindSpore may not have read or initialized it yet.
    """
    if queued or target() != "CPU":
        raise BackendUnavailableError(
            f"device_target is {target()!r}, where this call takes no tensors (docs/mint-distributed.md has those that "
            "do): use mindspore.set_device('CPU')",
            id=5044,
        )
    executor.sync()


def target() -> str:
    """Returns where MindSpore computes: "CPU", "Ascend", "GPU"."""
    return str(_context.get_param(_TARGET))


queued = False  # tests set it to queue on CPU as well


def in_queue() -> bool:
    """True if exchanges run in MindSpore's queue, on its stream, and not when Python calls them."""
    return queued or target() == "Ascend"


def tracks(*tensors: Any) -> bool:
    """True if a gradient with respect to one of these tensors may be needed: inside a gradient function, of all.

    A tensor's own flag stays set after one, and a Parameter's always is.
    """
    return records() and bool(executor.enable_grad())


def records() -> bool:
    """Returns whether MindSpore records for a gradient; ends what an exception in a gradient function has left.

    After one, MindSpore's flag stays set: it goes on recording, and differentiates every graph that is called, which
    fails where a graph is a gradient already. So where the flag is set, the stack shows whether there is a gradient.
    """
    if not executor.grad_flag():
        return False
    if not _RECORDING or _differentiates(sys._getframe(1)):
        return True
    if not any(map(_differentiates, sys._current_frames().values())):
        executor.clear_res()
    return False


def _differentiates(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _RECORDING:
        frame = frame.f_back
    return frame is not None


def wants_gradient(*tensors: Any) -> bool:
    """True inside a gradient function if one of these tensors is computed from what it differentiates."""
    return tracks() and any(getattr(x, "_requires_grad", False) for x in tensors)


def core_name(dtype: Any) -> str:
    """Returns the core's name of a dtype; raises if MindSpore's CPU backend or the core does not know it."""
    try:
        return DTYPES[dtype]
    except KeyError:
        raise InvalidTensorError(
            f"dtype is {dtype}, expected one of {', '.join(DTYPES.values())}", 13, id=2092
        ) from None


@functools.cache
def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns NumPy's dtype of a tensor's; MindSpore's own function for it prints a warning at each call."""
    return Tensor([0], dtype).asnumpy().dtype


def as_input(tensor: Any) -> Tensor:
    """Returns a contiguous tensor of these values, computed unless calls queue; copies only if it must."""
    check_tensor("input", tensor)
    core_name(tensor.dtype)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if not in_queue():
        settle()
    return tensor


def check_tensor(name: str, tensor: Any) -> None:
    """Refuses values that are not tensors, with MindSpore's error text."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Expected tensor, but got {type(tensor)}: {name}")


def region(tensor: Tensor) -> Region:
    """Returns the address and size of a contiguous tensor."""
    return (tensor.data_ptr(), tensor.nbytes) if tensor.size else (0, 0)


def from_block(block: _core.Block, shape: Sequence[int], dtype: Any) -> Tensor:
    """Returns a tensor over a block, which lives as long as the tensor and what MindSpore computes from it."""
    return Tensor.from_numpy(memory.from_block(block, shape, numpy_dtype(dtype)))


def empty(shape: int | Sequence[int], dtype: Any = mindspore.float32) -> Tensor:
    """Returns a new, uninitialized tensor in this process's shared arena; see `alltoallv.empty`."""
    core_name(dtype)
    dims, kind = (shape,) if isinstance(shape, int) else tuple(shape), numpy_dtype(dtype)
    return Tensor.from_numpy(memory.from_block(_core.allocate(math.prod(dims) * kind.itemsize), dims, kind))


def _at_once() -> bool:
    return not queued and _context.get_param(_TARGET) == "CPU"


_core.add_mindspore(Tensor, executor._executor, DTYPES, _at_once, from_block)


class CommHandle(Handle, functions.CommHandle, comm_func.CommHandle):
    """A running operator: MindSpore's ``CommHandle``, with a few methods more.

    The tensors that it uses stay alive until it is done, even if the handle is dropped.
    """

    def __new__(cls, *_arguments: Any) -> CommHandle:
        handle: CommHandle = super().__new__(cls)
        Native.__init__(handle)
        return handle

    def wait(self, timeout: float | None = None) -> None:  # type: ignore[override]
        """Blocks until the operator is done, at most ``timeout`` seconds.

        Raises:
            CommTimeoutError: not done in time; it is still under way and may be waited for again.
            AllToAllVError: whatever the operator raised.
        """
        Handle.wait(self, timeout)


class Done(Ended, CommHandle):
    """The handle of a call that ended before it returned."""

    def wait(self, timeout: Any = None) -> None:  # type: ignore[override]
        """Returns at once."""


class Received(NamedTuple):
    """The result of an exchange with a capacity: three tensors, filled when MindSpore's queue reaches the call.

    Attributes:
        output: The input's dtype: ``capacity`` rows, or elements, of which the first are what was received, packed in
            the order of the ranks; zeros behind. That of `AllToAllVOperation` has the shape ``[1, capacity]``.
        recv_counts: int64, shape ``[W]``: how many came from each rank.
        status: int32; its column 0 is zeros, or describes what went wrong, the same on all ranks; `check` reads it.
    """

    output: Tensor
    recv_counts: Tensor
    status: Tensor

    def check(self) -> Received:
        """Waits for the device, and returns this result if the exchange was done.

        Raises:
            InvalidParamError, PeerMismatchError, CommTimeoutError: On every rank, as `alltoallv.torch.Received.check`.
        """
        raise_for(self.status.asnumpy().tolist())
        return self
