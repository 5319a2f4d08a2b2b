"""Compares every instruction set of the CPU quantization kernels with NumPy and with a plain copy, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from alltoallv import _core
from alltoallv_tools.bench import report
from alltoallv_tools.bench.competitors import Array
from alltoallv_tools.tables import Table

GROUP = 128
SOURCES = 4
ROUNDS = 15
KERNELS = 4


@dataclass
class Kernel:
    """A kernel with its memory ready.

    Attributes:
        name: as the table shows it.
        run: runs the kernel with the given instruction set.
        numpy: computes the same in NumPy; returns what `output` must hold.
        output: what `run` writes, to be compared.
        moved: bytes read and written.
    """

    name: str
    run: Callable[[str], Any]
    numpy: Callable[[], Array]
    output: Array
    moved: int


def kernels_of(nbytes: int) -> list[Kernel]:
    """Returns the kernels for a float32 vector of ``nbytes``, with groups of 128 and the codes of 4 ranks."""
    count = max(GROUP, nbytes // 4 // GROUP * GROUP)
    x = np.random.default_rng(1).standard_normal(count, np.float32)
    codes = np.zeros((SOURCES, count), np.int8)
    scales = np.zeros((SOURCES, count // GROUP), np.float32)
    total, half = np.zeros(count, np.float32), np.zeros(count, np.float16)
    shared = np.array([0.01], np.float32)
    # Look the addresses up once: NumPy takes a microsecond for each.
    at_x, at_total, at_half, at_shared = (array.ctypes.data for array in (x, total, half, shared))
    at_codes, at_scales = [code.ctypes.data for code in codes], [code.ctypes.data for code in scales]
    for code, scale in zip(at_codes, at_scales, strict=True):
        _core.kernel_quantize(8, GROUP, "float32", at_x, count, code, scale)

    def quantize(isa: str) -> None:
        _core.kernel_quantize(8, GROUP, "float32", at_x, count, at_codes[0], at_scales[0], 0, isa)

    def numpy_quantize() -> Array:
        groups = x.reshape(-1, GROUP)
        scale = np.abs(groups).max(1, keepdims=True) / np.float32(127)
        return np.asarray(np.rint(groups / scale).astype(np.int8).ravel())

    def sum_groups(isa: str) -> None:
        _core.kernel_dequantize_sum(8, GROUP, at_codes, at_scales, count, False, at_total, isa)

    def numpy_sum_groups() -> Array:
        result = codes[0].reshape(-1, GROUP) * scales[0][:, None]
        for code, scale in zip(codes[1:], scales[1:], strict=True):
            result += code.reshape(-1, GROUP) * scale[:, None]
        return np.asarray(result.ravel())

    def sum_shared(isa: str) -> None:
        _core.kernel_sum_shared_scale("float16", at_codes, count, at_shared, 1, 0, 0.0, "saturate", at_half, isa)

    def numpy_sum_shared() -> Array:
        return np.asarray((codes.sum(0, dtype=np.int32).astype(np.float32) * shared[0]).astype(np.float16))

    def cast(isa: str) -> None:
        _core.kernel_cast("float16", "saturate", at_x, count, at_half, isa)

    return [
        Kernel("quantize", quantize, numpy_quantize, codes[0], 5 * count),
        Kernel("dequantize_sum", sum_groups, numpy_sum_groups, total, (SOURCES + 4) * count),
        Kernel("sum_shared", sum_shared, numpy_sum_shared, half, (SOURCES + 2) * count),
        Kernel("cast_float16", cast, lambda: x.astype(np.float16), half, 6 * count),
    ]


def measure(kernel: Kernel, nbytes: int, seconds: float) -> report.Row:
    """Measures each instruction set, NumPy, and a copy that moves as many bytes."""
    isas = _core.kernel_isas()
    source = np.ones(max(kernel.moved // 2, 1), np.uint8)
    target = np.ones_like(source)
    calls: dict[str, Callable[[], Any]] = {isa: partial(kernel.run, isa) for isa in isas}
    calls |= {"numpy": kernel.numpy, "copy": lambda: np.copyto(target, source)}
    expected = kernel.numpy().copy()
    wrong = 0
    for isa in isas:
        kernel.output.view(np.uint8).fill(0xA5)
        kernel.run(isa)
        # NumPy rounds in another order when it divides and adds: codes may differ by one, sums in the last bits.
        loose = 1.0 if kernel.output.dtype == np.int8 else 1e-2
        apart = np.abs(kernel.output.astype(np.float32) - expected.astype(np.float32))
        wrong += int((apart > loose).sum())
    repeats = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        once = max(time.perf_counter() - start, 1e-7)
        repeats[name] = max(1, min(2000, int(seconds / len(calls) / ROUNDS / once)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            samples[name].append((time.perf_counter() - start) / repeats[name] * 1e6)
    times = {name: report.kernel_times(us, kernel.moved) for name, us in samples.items()}
    return {"kernel": kernel.name, "nbytes": nbytes, "moved": kernel.moved, "wrong": wrong, "times": times}


def run(sizes: list[int], seconds: float, rows: list[report.Row]) -> None:
    """Prints the table and adds its rows, which docs/bench.md describes, to ``rows``."""
    names = [*_core.kernel_isas(), "numpy", "copy"]
    print(f"# float32 input, group {GROUP}, {SOURCES} ranks' codes; µs (GB/s of bytes read and written)")
    table = Table("kernel >15", "size(B) >10", "#wrong >6", *(f"{name} >18" for name in names))
    print(table.head())
    bar = report.Progress(KERNELS * len(sizes))
    for nbytes in sizes:
        for kernel in kernels_of(nbytes):
            row = measure(kernel, nbytes, seconds)
            rows.append(row)
            bar.clear()
            cells = (f"{t['median_us']:.2f} ({t['GB/s']:.1f})" for t in (row["times"][name] for name in names))
            print(table.row(kernel.name, nbytes, row["wrong"], *cells), flush=True)
            bar.step(kernel.name)
    bar.clear()
