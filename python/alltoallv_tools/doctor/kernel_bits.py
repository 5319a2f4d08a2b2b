"""Runs the kernels by their aclnn interface, and prints as JSON which bits differ from the NumPy reference.

A program of its own: the loader must find CANN's libraries, or the emulator's, when it starts. Ranks are threads, one
per device, and at most four.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv.testing import quantized as reference

Array = npt.NDArray[Any]

GROUP, MOST_RANKS = 32, 4
TO_DEVICE, TO_HOST, FORMAT_ND = 1, 2, 2
ACL_TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int64": 9, "bfloat16": 27}


def check(function: str, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"{function} returned {status}")


class Device:
    """A device: memory, one stream, and calls of aclnn operators. Its thread is the one that makes it."""

    def __init__(self, index: int = 0, *, first: bool = True) -> None:
        # HCCL's functions for windows are looked up among the functions of the whole program.
        self.hccl = ctypes.CDLL("libhccl.so", mode=ctypes.RTLD_GLOBAL)
        self.acl, self.operators = (ctypes.CDLL(name) for name in ("libascendcl.so", "libcust_opapi.so"))
        self.nnopbase = ctypes.CDLL("libnnopbase.so")
        self.nnopbase.aclCreateTensor.restype = ctypes.c_void_p
        if first:
            self.acl.aclInit(None)  # repeated where something else has done it
        check("aclrtSetDevice", self.acl.aclrtSetDevice(index))
        self.stream = ctypes.c_void_p()
        check("aclrtCreateStream", self.acl.aclrtCreateStream(ctypes.byref(self.stream)))

    def count(self) -> int:
        number = ctypes.c_uint32()
        check("aclrtGetDeviceCount", self.acl.aclrtGetDeviceCount(ctypes.byref(number)))
        return number.value

    def allocate(self, size: int) -> ctypes.c_void_p:
        memory = ctypes.c_void_p()
        check("aclrtMalloc", self.acl.aclrtMalloc(ctypes.byref(memory), ctypes.c_size_t(max(size, 1)), 0))
        return memory

    def copy(self, to: Any, source: Any, size: int, kind: int) -> None:
        bytes_ = ctypes.c_size_t(size)
        check("aclrtMemcpy", self.acl.aclrtMemcpy(to, bytes_, source, bytes_, kind))

    def run(self, operator: str, *arguments: Array | int | bool | bytes | None) -> None:
        """Calls the operator. Arrays are its tensors; what it leaves in them is copied back."""
        arrays = [each for each in arguments if isinstance(each, np.ndarray)]
        memory = [self.allocate(array.nbytes) for array in arrays]
        for address, array in zip(memory, arrays, strict=True):
            self.copy(address, array.ctypes.data_as(ctypes.c_void_p), array.nbytes, TO_DEVICE)
        tensors = [self.tensor(array, address) for array, address in zip(arrays, memory, strict=True)]
        left = iter(tensors)
        converted = [next(left) if isinstance(each, np.ndarray) else as_c(each) for each in arguments]
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        first = getattr(self.operators, f"{operator}GetWorkspaceSize")
        check(f"{operator}GetWorkspaceSize", first(*converted, ctypes.byref(size), ctypes.byref(executor)))
        workspace = self.allocate(size.value)
        check(operator, getattr(self.operators, operator)(workspace, size, executor, self.stream))
        check("aclrtSynchronizeStream", self.acl.aclrtSynchronizeStream(self.stream))
        for address, array in zip(memory, arrays, strict=True):
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
        handle = self.nnopbase.aclCreateTensor(shape, rank, dtype, strides, offset, FORMAT_ND, shape, rank, address)
        return ctypes.c_void_p(handle)


def as_c(value: Any) -> Any:
    if isinstance(value, bool):
        return ctypes.c_bool(value)
    return ctypes.c_int64(value) if isinstance(value, int) else ctypes.c_char_p(value)


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
    available: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
    try:
        import ml_dtypes

        available["bfloat16"] = ml_dtypes.bfloat16
    except ModuleNotFoundError:
        pass
    return available


def compare_on_one(device: Device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs the kernels of one device; yields the name of a case and its differences."""
    for dtype, scalar in dtypes().items():
        for bits in (8, 4):
            for case, values in inputs():
                x = values.astype(scalar)
                expected = reference.quantize(x, GROUP, bits)
                codes = np.full(expected.codes.size, 0x9D, np.uint8)
                scales = np.full(x.size // GROUP, 7, np.float32)
                device.run("aclnnAlltoallvQuantize", x, bits, GROUP, codes, scales)
                name = f"int{bits}, {dtype}, {case}"
                yield f"quantize, {name}: codes", differences(codes, expected.codes)
                yield f"quantize, {name}: scales", differences(scales, expected.scales)
                records = [reference.quantize(np.roll(values, r).astype(np.float32), GROUP, bits) for r in range(3)]
                all_codes, all_scales = (np.stack([getattr(r, part) for r in records]) for part in ("codes", "scales"))
                out = np.full(x.size, 7, scalar)
                device.run("aclnnAlltoallvDequantizeSum", all_codes, all_scales, bits, GROUP, out)
                total = reference.cast(reference.dequantize_sum(records), out.dtype)
                yield f"dequantize and sum, {name}", differences(out, total)
        for case, scale, offset in shared_scales():
            x = np.stack([integers(r) for r in range(3)])
            out = np.full(x.shape[1], 7, scalar)
            device.run("aclnnAlltoallvSharedScaleSum", x, scale, offset, out)
            yield f"shared scale, {dtype}, {case}", differences(out, sum_of(x, scale, offset, dtype))
    rng = np.random.default_rng(0)
    for width in (1, 31, 32, 7000, 70_000):  # bytes of a row: less than a block, and more than a tile
        x = rng.integers(0, 256, (50, width)).astype(np.uint8)
        index = (rng.permutation(60)[:40] - 5).astype(np.int32)  # some are outside: those rows are left out
        gathered, scattered = np.full((40, width), 7, np.uint8), np.full((50, width), 7, np.uint8)
        inside = (index >= 0) & (index < 50)
        device.run("aclnnAlltoallvGatherRows", x, index, gathered)
        device.run("aclnnAlltoallvScatterRows", x[:40].copy(), index, scattered)
        there, back = np.full_like(gathered, 7), np.full_like(scattered, 7)
        there[inside], back[index[inside]] = x[index[inside]], x[:40][inside]
        yield f"gather rows, {width} bytes each", differences(gathered, there)
        yield f"scatter rows, {width} bytes each", differences(scattered, back)


def integers(rank: int) -> Array:
    """int8, each rank's own."""
    return np.random.default_rng(rank).integers(-128, 128, 20 * GROUP).astype(np.int8)


def shared_scales() -> Iterator[tuple[str, Array, Array]]:
    """Scales and offsets that all ranks have, by name."""
    for case, scale, offset in (
        ("one scale", [0.37], 2.5),
        ("channels", [0.37, -1e38, 1e-40, 3e4, 1.0], 0.0),
        ("nan and infinity", [np.nan, np.inf, 1.0, -np.inf, 0.0], 1.0),
    ):
        yield case, np.array(scale, np.float32), np.array([offset], np.float32)


def sum_of(xs: Array, scale: Array, offset: Array, dtype: str) -> Array:
    rows = [x.reshape(-1, scale.size) for x in xs]
    return reference.shared_scale_all_reduce(rows, scale, offset[0], dtype=dtype)[0].reshape(-1)


class Rank:
    """A device with a communicator to the others."""

    def __init__(self, rank: int, size: int, comm: int):
        self.rank, self.size, self.comm, self.device = rank, size, ctypes.c_void_p(comm), Device(rank, first=False)
        name = ctypes.create_string_buffer(128)
        check("HcclGetCommName", self.device.hccl.HcclGetCommName(self.comm, name))
        self.group = name.value
        lanes, lane_bytes = ctypes.c_uint32(), ctypes.c_uint64()
        windows = self.device.operators.aclnnAlltoallvGetWindows
        check("aclnnAlltoallvGetWindows", windows(self.group, ctypes.byref(lanes), ctypes.byref(lane_bytes)))
        self.method = "by one kernel" if lanes.value > 0 else "by HCCL, without windows"
        self.status = np.full((max(lanes.value, 1), 8), -1, np.int32)

    def close(self) -> None:
        self.device.operators.aclnnAlltoallvReleaseGroup(self.group)
        self.device.hccl.HcclCommDestroy(self.comm)

    def cases(self) -> Iterator[tuple[str, Array, Array]]:
        """Runs the operators that communicate, the same on all ranks; yields a name, what it has got, and what it
        should have.
        """
        where = f"{self.size} ranks {self.method}"
        for dtype, scalar in dtypes().items():
            for bits in (8, 4):
                for case, values in inputs():
                    xs = [np.roll(values, r).astype(scalar) for r in range(self.size)]
                    out = np.full(xs[0].size, 7, scalar)
                    self.reduce(xs[self.rank], None, None, bits, out)
                    expected = reference.quantized_all_reduce(xs, group_size=GROUP, bits=bits, dtype=dtype)[0]
                    yield f"quantized all-reduce of {where}, int{bits}, {dtype}, {case}", out, expected
            for case, scale, offset in shared_scales():
                rows = np.stack([integers(r) for r in range(self.size)])
                out = np.full(rows.shape[1], 7, scalar)
                self.reduce(rows[self.rank], scale, offset, 8, out)
                expected = sum_of(rows, scale, offset, dtype)
                yield f"quantized all-reduce of {where}, shared scale, {dtype}, {case}", out, expected
        for seed in range(3):
            rng = np.random.default_rng(seed)
            matrix = rng.integers(0, [2, 20, 3000][seed], (self.size, self.size))
            inputs_ = [rng.integers(0, 1 << 31, (int(m.sum()), 3)).astype(np.int32) for m in matrix]
            begins = matrix.cumsum(1) - matrix
            blocks = [inputs_[j][begins[j, self.rank] :][: matrix[j, self.rank]] for j in range(self.size)]
            expected = np.concatenate([*blocks, np.full((2, 3), -1, np.int32)])
            out, received = np.full_like(expected, -1), np.full(self.size, -1, np.int64)
            counts = matrix[self.rank].astype(np.int64)
            self.device.run(
                "aclnnAlltoallvAllToAllV",
                inputs_[self.rank], counts, None, self.group, False, out, received, self.status,
            )  # fmt: skip
            check("aclnnAlltoallvAllToAllV's status", int(self.status[0, 0]))
            yield f"all-to-all-v of {where}, counts {seed}: rows", out, expected
            yield f"all-to-all-v of {where}, counts {seed}: counts", received, matrix[:, self.rank].astype(np.int64)

    def reduce(self, x: Array, scale: Array | None, offset: Array | None, bits: int, out: Array) -> None:
        options = self.group, bits, GROUP, False, True
        self.device.run("aclnnAlltoallvQuantAllReduce", x, scale, offset, *options, out, None)


def compare_between(device: Device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs the kernels that communicate, on as many devices as there are; yields the differences of all ranks."""
    size = min(MOST_RANKS, device.count())
    comms, devices = (ctypes.c_void_p * size)(), (ctypes.c_int32 * size)(*range(size))
    check("HcclCommInitAll", device.hccl.HcclCommInitAll(ctypes.c_uint32(size), devices, comms))

    def work(rank: int) -> list[tuple[str, Array, Array]]:
        own = Rank(rank, size, int(comms[rank] or 0))
        with np.errstate(all="ignore"):
            results = list(own.cases())
        own.close()
        return results

    for of_all in zip(*in_threads(size, work), strict=True):
        got, expected = (np.concatenate([each[i].reshape(-1) for each in of_all]) for i in (1, 2))
        yield of_all[0][0], differences(got, expected)


def in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs ``work(rank)`` in a thread for each rank. Where one fails the others wait for it, so the program ends."""
    results: list[Any] = [None] * size

    def work_as(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    threads = [threading.Thread(target=work_as, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def compare(device: Device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs every case; yields its name and its differences."""
    yield from compare_on_one(device)
    yield from compare_between(device)


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        print(json.dumps(dict(compare(Device()))))
