"""Lets MindSpore's graphs run its communication primitives on CPU, where it has no kernels for most of them.

``device_op.cc`` has the kernels, which hand a primitive's memory and attributes to `rules`. They are compiled when a
graph first meets a primitive, and serve all graphs of the process from then on.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from mindspore import log
from mindspore._c_expression.typing import type_to_type_id

from alltoallv.errors import BackendUnavailableError
from alltoallv.mindspore import device_op
from alltoallv.mindspore.graph_exchange import DTYPES_BY_NUMBER, Array
from alltoallv.mindspore.primitives.around import KERNELS, WIDENED, WRONG
from alltoallv.mindspore.primitives.rules import RULES, plan
from alltoallv.mindspore.tensors import DTYPES, numpy_dtype, target

_NUMBER = ctypes.c_int64


class Place(ctypes.Structure):
    """A tensor that a kernel reads or writes."""

    _fields_ = (("data", ctypes.c_void_p), ("dtype", _NUMBER), ("rank", _NUMBER), ("shape", ctypes.POINTER(_NUMBER)))

    def array(self) -> Array:
        """Returns the tensor's memory as an array."""
        shape, dtype = tuple(self.shape[: self.rank]), numpy_dtype(DTYPES_BY_NUMBER[self.dtype])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        memory: Any = (ctypes.c_char * nbytes).from_address(self.data)
        return np.frombuffer(memory, dtype).reshape(shape)

    def optional_array(self) -> Array | None:
        """Returns the same, or None for an argument that was left out."""
        return self.array() if self.dtype in DTYPES_BY_NUMBER else None


class Launch(ctypes.Structure):
    """A primitive whose turn has come."""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("primitive", "attributes")),
        *((name, ctypes.POINTER(Place)) for name in ("inputs", "outputs")),
        *((name, _NUMBER) for name in ("input_count", "output_count")),
    )


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch), ctypes.c_void_p, ctypes.c_uint64)
def _run(launch: Any, message: int, capacity: int) -> int:
    """Runs a primitive on MindSpore's thread; the kernel calls it."""
    try:
        call = launch.contents
        attributes = dict(line.split("=", 1) for line in call.attributes.decode().split("\n") if line)
        name, outputs = call.primitive.decode(), [call.outputs[k].array() for k in range(call.output_count)]
        if name in KERNELS:
            KERNELS[name]([call.inputs[k].optional_array() for k in range(call.input_count)], outputs)
        else:
            inputs = [call.inputs[k].array() for k in range(call.input_count)]
            plan(name, attributes, inputs).run(outputs)
    except Exception as error:
        return device_op.tell(error, message, capacity)
    return 0


@functools.lru_cache
def load() -> None:
    """Compiles the kernels and makes them MindSpore's; without a compiler, it says so and MindSpore refuses graphs."""
    for dtype in DTYPES:
        numpy_dtype(dtype)  # asks MindSpore, which the thread of a launch cannot wait for
    try:
        module = device_op.build(target())
    except BackendUnavailableError as error:
        log.error(f"alltoallv: primitives run outside of graphs only: {error}")
        return
    widened = {name: type_to_type_id(dtype) for name, dtype in WIDENED.items()}
    entry = ctypes.cast(_run, ctypes.c_void_p).value or 0
    module.serve_primitives([*RULES, *WRONG], set(KERNELS), widened, entry)
