"""Lets MindSpore's graphs run its communication primitives on CPU, where it has no kernels for most of them.

``device_op.cc`` has the kernels, which hand a primitive's memory and attributes to `rules`. They are compiled when a
graph first meets a primitive, and serve all graphs of the process from then on. In graphs that have such a primitive
the operators around an MoE's exchange run too.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import log
from mindspore._c_expression.typing import type_to_type_id

from alltoallv.errors import BackendUnavailableError
from alltoallv.mindspore import device_op
from alltoallv.mindspore.graph import DTYPES_BY_NUMBER, Array
from alltoallv.mindspore.primitives.rules import RULES, plan
from alltoallv.mindspore.tensors import DTYPES, numpy_dtype, target

# The operators around an MoE's exchange for which MindSpore has no kernels on CPU: what mindformers' dispatchers call.
# An operator of which MindSpore has a kernel keeps it; operators of WIDENED then take bfloat16 too. A kernel here gets
# the operator's inputs, None for those left out, and fills the outputs, which MindSpore has made.


Inputs = Sequence[Any]
KERNELS: dict[str, Callable[[Inputs, Sequence[Array]], None]] = {}  # by primitive
WRONG = ("ReduceAny",)  # MindSpore's own looks at the first bytes of what is not bool
WIDENED = {  # MindSpore's own, as which other dtype it takes bfloat16; one in KERNELS runs here then
    **dict.fromkeys(("ExpandDims", "Gather", "GatherD", "MaskedSelect", "Reshape", "Scatter"), mindspore.int16),
    **dict.fromkeys(("Squeeze", "StridedSlice", "Transpose"), mindspore.int16),
    **dict.fromkeys(("AddN", "MaskedSelectGrad", "UnsortedSegmentSum"), mindspore.float16),
    "NonZero": mindspore.float16,  # which has the same zeros
}


def _kernel(*primitives: str) -> Callable[[Callable[[Inputs, Sequence[Array]], None]], Any]:
    def register(run: Callable[[Inputs, Sequence[Array]], None]) -> Any:
        KERNELS.update(dict.fromkeys(primitives, run))
        return run

    return register


@_kernel("SortExt")
def _sort(inputs: Inputs, outputs: Sequence[Array]) -> None:
    x, dim, descending, _ = inputs  # always stable
    axis = int(dim)
    if descending:
        order = np.flip(x.shape[axis] - 1 - np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)
    else:
        order = np.argsort(x, axis=axis, kind="stable")
    outputs[0][...] = np.take_along_axis(x, order, axis)
    outputs[1][...] = order


@_kernel("IndexSelect")
def _index_select(inputs: Inputs, outputs: Sequence[Array]) -> None:
    x, dim, index = inputs
    outputs[0][...] = np.take(x, index, axis=int(dim))


@_kernel("IndexAddExt")
def _index_add(inputs: Inputs, outputs: Sequence[Array]) -> None:
    x, dim, index, source, alpha = inputs
    total = x.astype(np.float32 if x.dtype.itemsize == 2 else x.dtype)  # 16-bit sums are rounded once
    rows = np.moveaxis(total, int(dim), 0)
    np.add.at(rows, index, np.moveaxis(source, int(dim), 0).astype(total.dtype) * total.dtype.type(alpha))
    outputs[0][...] = total.astype(x.dtype)


@_kernel("InplaceIndexAddExt")
def _index_add_(inputs: Inputs, outputs: Sequence[Array]) -> None:
    _index_add(inputs, outputs)
    inputs[0][...] = outputs[0]


@_kernel("CumsumExt")
def _cumsum(inputs: Inputs, outputs: Sequence[Array]) -> None:
    outputs[0][...] = np.cumsum(inputs[0].astype(outputs[0].dtype), axis=int(inputs[1]))


@_kernel("OneHotExt")
def _one_hot(inputs: Inputs, outputs: Sequence[Array]) -> None:
    x, classes, on, off, axis = inputs
    hot = np.asarray(np.where(np.expand_dims(x, -1) == np.arange(int(classes)), on, off))
    outputs[0][...] = np.moveaxis(hot, -1, int(axis))


@_kernel("FmodScalar", "FmodTensor")
def _fmod(inputs: Inputs, outputs: Sequence[Array]) -> None:
    outputs[0][...] = np.fmod(inputs[0], inputs[1])


@_kernel("AddN")
def _sum(inputs: Inputs, outputs: Sequence[Array]) -> None:
    first, *rest = (each.astype(np.float32) for each in inputs)
    outputs[0][...] = sum(rest, first)  # rounded once


@_kernel("MaskedSelectGrad")
def _masked_select_grad(inputs: Inputs, outputs: Sequence[Array]) -> None:
    x, mask, dy = inputs
    shape = np.broadcast_shapes(x.shape, mask.shape)
    full_dy = np.zeros(shape, np.float32)
    full_dy[np.broadcast_to(mask, shape)] = dy
    padded = (*(1 for _ in shape[x.ndim :]), *x.shape)
    axes = tuple(k for k, n in enumerate(padded) if n != shape[k])
    outputs[0][...] = full_dy.sum(axes).reshape(x.shape)


@_kernel("UnsortedSegmentSum")
def _segment_sum(inputs: Inputs, outputs: Sequence[Array]) -> None:
    x, segments, _ = inputs
    total = np.zeros(outputs[0].shape, np.float32)
    chosen = segments >= 0
    np.add.at(total, segments[chosen], x[chosen].astype(np.float32))
    outputs[0][...] = total


@_kernel("ExpandAs")
def _expand_as(inputs: Inputs, outputs: Sequence[Array]) -> None:
    outputs[0][...] = inputs[0]


@_kernel("ReduceAny")
def _any(inputs: Inputs, outputs: Sequence[Array]) -> None:
    x, dims, keep = inputs
    axes = tuple(dims.ravel().tolist()) or None
    outputs[0][...] = np.any(x != 0, axis=axes, keepdims=bool(keep))


@_kernel("MoveTo")
def _move(inputs: Inputs, outputs: Sequence[Array]) -> None:
    outputs[0][...] = inputs[0]


@_kernel("GroupedMatmul")
def _grouped_matmul(inputs: Inputs, outputs: Sequence[Array]) -> None:
    """One matrix times each expert's; of two matrices, each expert's rows of both, as the weights' gradient."""
    x, weight = (each for each in inputs if each is not None and each.ndim > 1)
    ends = next(each for each in inputs if each is not None and each.ndim == 1).tolist()
    outputs[0][...] = 0
    for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if weight.ndim == 3:
            outputs[0][begin:end] = x[begin:end].astype(np.float32) @ weight[expert].astype(np.float32)
        else:
            outputs[0][expert] = x[:, begin:end].astype(np.float32) @ weight[begin:end].astype(np.float32)


def _halves(x: Array, dim: Any) -> tuple[Array, Array, Array]:
    """Returns the two halves of the input of a SwiGLU, and the sigmoid of the first, in float32."""
    a, b = (half.astype(np.float32) for half in np.split(x, 2, int(dim)))
    return a, b, 1 / (1 + np.exp(-a))


@_kernel("Swiglu")
def _swiglu(inputs: Inputs, outputs: Sequence[Array]) -> None:
    a, b, sigmoid = _halves(*inputs)
    outputs[0][...] = a * sigmoid * b


@_kernel("SwigluGrad")
def _swiglu_grad(inputs: Inputs, outputs: Sequence[Array]) -> None:
    dy, x, dim = inputs
    a, b, sigmoid = _halves(x, dim)
    dy = dy.astype(np.float32)
    da = dy * b * sigmoid * (1 + a * (1 - sigmoid))
    outputs[0][...] = np.concatenate([da, dy * a * sigmoid], int(dim))


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
