"""Compares the Triton kernels of quantization on a GPU with a plain copy and with torch.compile.

The torch.compile form is the package's own fallback of torch operators (`alltoallv.torch.engines.torch_kernels`),
compiled. Triton must give the bits that these operators give uncompiled; a compiler may round otherwise.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alltoallv.quantization.spec import Quantization
from alltoallv.torch.engines import torch_kernels
from alltoallv_tools.bench import report
from alltoallv_tools.tables import Table

GROUP = 128
SOURCES = 4
ROUNDS = 15
KERNELS = 8
_FLUSH = 256 << 20  # bytes written between calls, more than a GPU's cache holds


@dataclass
class Kernel:
    """A kernel with its tensors ready.

    Attributes:
        name: As the table shows it.
        run: Takes the module that has the kernels.
        outputs: What it writes, to be compared.
        moved: Bytes read and written.
    """

    name: str
    run: Callable[[Any], Any]
    outputs: tuple[Tensor, ...]
    moved: int


def kernels_of(nbytes: int, device: str) -> list[Kernel]:
    """Returns the kernels for a float32 vector of ``nbytes``, with groups of 128 and the codes of 4 ranks."""
    count = max(GROUP, nbytes // 4 // GROUP * GROUP)
    x = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(device)
    kernels = []
    for bits in (8, 4):
        quantization = Quantization(f"int{bits}", GROUP)
        size, groups = quantization.code_bytes(count), quantization.groups(count)
        codes = torch.zeros((SOURCES, size), dtype=torch.uint8, device=device)
        scales = torch.zeros((SOURCES, groups), device=device)
        for row in range(SOURCES):
            torch_kernels.quantize(x * (row + 1), quantization, codes[row : row + 1], scales[row : row + 1])
        record, half = size + 4 * groups, torch.zeros(count, dtype=torch.float16, device=device)
        kernels += _dynamic(f"int{bits}", x, quantization, codes, scales, record, half)
    integers = torch.randint(-128, 128, (SOURCES, count), dtype=torch.int8).to(device)
    scale, nothing = torch.full((1,), 0.01, device=device), torch.zeros(1, device=device)
    half, code = torch.zeros(count, dtype=torch.float16, device=device), torch.zeros_like(integers[0])
    return [
        *kernels,
        Kernel(
            "shared scale: sum",
            lambda of: of.sum_shared_scale(integers, scale, nothing, half),
            (half,),
            (SOURCES + 2) * count,
        ),
        Kernel("shared scale: quantize", lambda of: of.quantize_scaled(x, scale, code), (code,), 5 * count),
    ]


def _dynamic(
    what: str, x: Tensor, quantization: Quantization, codes: Tensor, scales: Tensor, record: int, half: Tensor
) -> list[Kernel]:
    count = x.numel()
    new_codes, new_scales = torch.zeros_like(codes[:1]), torch.zeros_like(scales[:1])
    return [
        Kernel(
            f"{what}: quantize",
            lambda of: of.quantize(x, quantization, new_codes, new_scales),
            (new_codes, new_scales),
            4 * count + record,
        ),
        Kernel(
            f"{what}: sum",
            lambda of: of.dequantize_sum(codes, scales, quantization, half),
            (half,),
            SOURCES * record + 2 * count,
        ),
        Kernel(
            f"{what}: sum, quantize",
            lambda of: of.requantize(codes, scales, quantization, count, new_codes, new_scales),
            (new_codes, new_scales),
            (SOURCES + 1) * record,
        ),
    ]


def measure(kernel: Kernel, nbytes: int, device: str = "cuda", backend: str = "inductor") -> report.Row:
    """Measures Triton, the compiled torch operators, and a copy that moves as many bytes, in turns; in microseconds.

    Args:
        backend: the backend of torch.compile.

    Raises:
        ModuleNotFoundError: triton is not installed.
    """
    from alltoallv_triton import launch

    compiled = torch.compile(lambda: kernel.run(torch_kernels), dynamic=False, backend=backend)
    source = torch.ones(max(kernel.moved // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {
        "triton": lambda: kernel.run(launch),
        "compiled": compiled,
        "copy": lambda: target.copy_(source),
    }
    results = {}
    for name, call in {"eager": lambda: kernel.run(torch_kernels), **calls}.items():
        for output in kernel.outputs:
            output.view(torch.uint8).fill_(0xA5)
        call()
        results[name] = [output.view(torch.uint8).clone() for output in kernel.outputs]
    wrong, off = (
        sum(int((a != b).sum()) for a, b in zip(results["eager"], results[name], strict=True))
        for name in ("triton", "compiled")
    )
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device=device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(_microseconds(call, flush))
    times = {name: report.kernel_times(us, kernel.moved) for name, us in samples.items()}
    row = {"kernel": kernel.name, "nbytes": nbytes, "moved": kernel.moved}
    return row | {"wrong": wrong, "compiled_off": off, "times": times}


def _microseconds(call: Callable[[], Any], flush: Tensor) -> float:
    """Times one call whose data are in no cache, by the device's clock; returns microseconds."""
    flush.zero_()  # takes long enough for the host to queue what follows
    if not flush.is_cuda:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def reason_against() -> str | None:
    """Returns why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def run(sizes: list[int], rows: list[report.Row]) -> None:
    """Prints the table and adds its rows to ``rows``; their form is as for the CPU kernels with other competitors."""
    print(f"# {torch.cuda.get_device_name()}; float32 input, group {GROUP}, {SOURCES} ranks' codes; µs (GB/s moved)")
    table = Table("kernel >24", "size(B) >10", "#wrong >6", "triton >18", "compiled >18", "copy >18", "of copy >8.0%")
    print(table.head())
    for nbytes in sizes:
        for kernel in kernels_of(nbytes, "cuda"):
            row = measure(kernel, nbytes)
            rows.append(row)
            times = row["times"]
            cells = (f"{t['median_us']:.2f} ({t['GB/s']:.1f})" for t in times.values())
            share = times["copy"]["median_us"] / times["triton"]["median_us"]
            print(table.row(kernel.name, nbytes, row["wrong"], *cells, share), flush=True)
