"""Runs the kernels by their aclnn interface, and prints as JSON which bits differ from the NumPy reference.

A program of its own: the loader must find CANN's libraries, or the emulator's, when it starts.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv.testing import quantized as reference

Array = npt.NDArray[Any]

GROUP = 32
TO_DEVICE, TO_HOST, FORMAT_ND = 1, 2, 2
ACL_TYPES = {"float32": 0, "float16": 1, "int8": 2, "bfloat16": 27}


class Device:
    """Device 0: memory, one stream, and calls of aclnn operators."""

    def __init__(self) -> None:
        self.acl, self.operators = (ctypes.CDLL(name) for name in ("libascendcl.so", "libcust_opapi.so"))
        self.nnopbase = ctypes.CDLL("libnnopbase.so")
        self.nnopbase.aclCreateTensor.restype = ctypes.c_void_p
        self.acl.aclInit(None)  # repeated where something else has done it
        self.check("aclrtSetDevice", self.acl.aclrtSetDevice(0))
        self.stream = ctypes.c_void_p()
        self.check("aclrtCreateStream", self.acl.aclrtCreateStream(ctypes.byref(self.stream)))

    @staticmethod
    def check(function: str, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{function} returned {status}")

    def allocate(self, size: int) -> ctypes.c_void_p:
        memory = ctypes.c_void_p()
        self.check("aclrtMalloc", self.acl.aclrtMalloc(ctypes.byref(memory), ctypes.c_size_t(max(size, 1)), 0))
        return memory

    def copy(self, to: Any, source: Any, size: int, kind: int) -> None:
        bytes_ = ctypes.c_size_t(size)
        self.check("aclrtMemcpy", self.acl.aclrtMemcpy(to, bytes_, source, bytes_, kind))

    def run(self, operator: str, inputs: list[Array], group: int, outputs: list[Array]) -> None:
        """Calls ``operator(inputs, group, outputs)`` and fills the outputs."""
        memory = [self.allocate(array.nbytes) for array in (*inputs, *outputs)]
        for address, array in zip(memory, (*inputs, *outputs), strict=True):
            self.copy(address, array.ctypes.data_as(ctypes.c_void_p), array.nbytes, TO_DEVICE)
        tensors = [self.tensor(a, m) for a, m in zip((*inputs, *outputs), memory, strict=True)]
        arguments = [*tensors[: len(inputs)], ctypes.c_int64(group), *tensors[len(inputs) :]]
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        first = getattr(self.operators, f"{operator}GetWorkspaceSize")
        self.check(f"{operator}GetWorkspaceSize", first(*arguments, ctypes.byref(size), ctypes.byref(executor)))
        workspace = self.allocate(size.value)
        self.check(operator, getattr(self.operators, operator)(workspace, size, executor, self.stream))
        self.check("aclrtSynchronizeStream", self.acl.aclrtSynchronizeStream(self.stream))
        for address, array in zip(memory[len(inputs) :], outputs, strict=True):
            self.copy(array.ctypes.data_as(ctypes.c_void_p), address, array.nbytes, TO_HOST)
        for tensor in tensors:
            self.nnopbase.aclDestroyTensor(tensor)
        for address in (*memory, workspace):
            self.acl.aclrtFree(address)

    def tensor(self, array: Array, address: ctypes.c_void_p) -> ctypes.c_void_p:
        rank = ctypes.c_uint64(array.ndim)
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
        dtype, offset = ACL_TYPES[array.dtype.name], ctypes.c_int64(0)
        made = self.nnopbase.aclCreateTensor(shape, rank, dtype, strides, offset, FORMAT_ND, shape, rank, address)
        return ctypes.c_void_p(made)


def inputs() -> Iterator[tuple[str, Array]]:
    """What a first run on a device must look at, by name: 20 groups of float32 each."""
    rng = np.random.default_rng(0)
    count = 20 * GROUP
    normal = rng.standard_normal(count).astype(np.float32)
    yield "division", normal * np.exp(20 * rng.standard_normal(count)).astype(np.float32)
    yield "ties", (rng.integers(-254, 255, count) / 2).astype(np.float32)
    subnormal = normal * np.float32(1e-40)
    yield "subnormals", subnormal
    yield "zeros", np.where(rng.random(count) < 0.5, np.float32(0), np.float32(-0.0)).astype(np.float32)
    for name, value in (("nan", np.nan), ("infinity", np.inf), ("minus infinity", -np.inf)):
        some = normal.copy()
        some[rng.integers(0, count, 5)] = value
        yield name, some
    yield "largest", np.where(normal > 0, 1, -1).astype(np.float32) * np.finfo(np.float32).max


def differences(got: Array, expected: Array) -> dict[str, Any]:
    """Counts the elements whose bits differ; shows the first."""
    width = f"u{got.itemsize}"
    a, b = got.reshape(-1).view(width), expected.reshape(-1).view(width)
    different = np.flatnonzero(a != b)
    result: dict[str, Any] = {"elements": int(a.size), "different": int(different.size)}
    if different.size:
        i = int(different[0])
        bits = 2 * got.itemsize
        result["first"] = {"index": i, "got": f"{int(a[i]):0{bits}x}", "expected": f"{int(b[i]):0{bits}x}"}
    return result


def dtypes() -> Mapping[str, Any]:
    """The types that NumPy has here."""
    found: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
    try:
        import ml_dtypes

        found["bfloat16"] = ml_dtypes.bfloat16
    except ModuleNotFoundError:
        pass
    return found


def compare(device: Device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs every case; yields its name and its differences."""
    for dtype, scalar in dtypes().items():
        for case, values in inputs():
            with np.errstate(all="ignore"):
                x = values.astype(scalar)
                expected = reference.quantize(x, GROUP)
            codes, scales = np.full(x.size, -99, np.int8), np.full(x.size // GROUP, 7, np.float32)
            device.run("aclnnAlltoallvQuantize", [x], GROUP, [codes, scales])
            yield f"quantize, {dtype}, {case}: codes", differences(codes, expected.codes)
            yield f"quantize, {dtype}, {case}: scales", differences(scales, expected.scales)
            records = [reference.quantize(np.roll(values, r).astype(np.float32), GROUP) for r in range(3)]
            all_codes, all_scales = (np.stack([getattr(r, part) for r in records]) for part in ("codes", "scales"))
            out = np.full(x.size, 7, scalar)
            device.run("aclnnAlltoallvDequantizeSum", [all_codes.view(np.int8), all_scales], GROUP, [out])
            with np.errstate(all="ignore"):
                total = reference.cast(reference.dequantize_sum(records), out.dtype)
            yield f"dequantize and sum, {dtype}, {case}", differences(out, total)


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        print(json.dumps(dict(compare(Device()))))
