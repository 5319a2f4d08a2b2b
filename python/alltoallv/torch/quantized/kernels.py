"""The kernels of quantization on torch tensors: C++ in host memory, Triton on an accelerator, else torch operators.

All three have the functions of `CoreKernels`, with the same bits (docs/quantization.md).
"""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.kernels import providers
from alltoallv.errors import InvalidParamError
from alltoallv.quantization.spec import Overflow, Quantization
from alltoallv.torch.quantized import operators as quantized_operators

Kernels: TypeAlias = "CoreKernels | ModuleType"
_log = logging.getLogger("alltoallv")


@lru_cache(None)
def kernels_for(device: str) -> Kernels:
    """The kernels for a kind of device."""
    if device == "cpu":
        return CoreKernels()
    provided: Kernels | None = providers[device]() if device in providers else None
    if provided is not None:
        return provided
    if _has_triton(device):
        from alltoallv_triton import launch

        return launch
    _log.info("quantized collectives on %s use torch operators; Triton for it makes them faster", device)
    return quantized_operators


def check_format(how: Quantization, kernels: Kernels, pieces: bool = False) -> None:
    """Refuses what kernels do not know yet; ``pieces``: of a vector, whose scale of all would have to be found before.

    Raises:
        InvalidParamError: names the format.
    """
    known = kernels is not quantized_operators or how.format in ("int8", "int4")
    if not known or (pieces and how.format == "nvfp4"):
        raise InvalidParamError(f"format is {how.format}, which this engine does not offer; shared memory and tcp do")


def _has_triton(device: str) -> bool:
    needed = {"cuda": "triton", "npu": "triton.backends.ascend"}.get(device)  # triton-ascend takes triton's name
    try:
        return needed is not None and importlib.util.find_spec(needed) is not None
    except ModuleNotFoundError:
        return False


class CoreKernels:
    """The C++ kernels, which release the interpreter's lock.

    Flat tensors; codes and scales have one row per part or source, rows may lie apart. ``first``: the channel of the
    first element, with a scale per channel; other kernels take only 0. Where ``overflow`` is "raise" a function returns
    an int32 tensor, 1 if a value did not fit; else None.
    """

    def quantize(
        self,
        x: Tensor,
        how: Quantization,
        codes: Tensor,
        scales: Tensor,
        error: Tensor | None = None,
        part: int | None = None,
    ) -> None:
        count, dtype = x.numel(), _name(x)
        part = part or max(count, 1)
        for row, first in enumerate(range(0, count, part)):
            _core.kernel_quantize(
                how.format,
                how.group_size,
                dtype,
                x.data_ptr() + first * x.itemsize,
                min(part, count - first),
                _row(codes, row),
                _row(scales, row),
                0 if error is None else error.data_ptr() + 4 * first,
            )

    def dequantize_sum(
        self, codes: Tensor, scales: Tensor, how: Quantization, out: Tensor, *, average: bool = False
    ) -> Tensor | None:
        rows, count = range(len(codes)), out.numel()
        total = out if out.dtype is torch.float32 else torch.empty(count, dtype=torch.float32, device="cpu")
        places = [_row(codes, row) for row in rows], [_row(scales, row) for row in rows]
        _core.kernel_dequantize_sum(how.format, how.group_size, *places, count, average, total.data_ptr())
        if total is out and how.overflow == "infinity":
            return None
        fits = _core.kernel_cast(_name(out), how.overflow, total.data_ptr(), count, out.data_ptr())
        return _misfits(fits, how.overflow)

    def dequantize(
        self, codes: Tensor, scales: Tensor, how: Quantization, out: Tensor, part: int | None = None
    ) -> Tensor | None:
        count, fits = out.numel(), True
        part = part or max(count, 1)
        for row, first in enumerate(range(0, count, part)):
            fits &= _core.kernel_dequantize(
                how.format,
                how.group_size,
                _name(out),
                _row(codes, row),
                _row(scales, row),
                min(part, count - first),
                how.overflow,
                out.data_ptr() + first * out.itemsize,
            )
        return _misfits(fits, how.overflow)

    def requantize(
        self,
        codes: Tensor,
        scales: Tensor,
        how: Quantization,
        count: int,
        new_codes: Tensor,
        new_scales: Tensor,
        *,
        average: bool = False,
        error: Tensor | None = None,
    ) -> None:
        total = torch.empty(count, dtype=torch.float32, device="cpu")
        rows = range(len(codes))
        places = [_row(codes, row) for row in rows], [_row(scales, row) for row in rows]
        _core.kernel_dequantize_sum(how.format, how.group_size, *places, count, average, total.data_ptr())
        self.quantize(total, how, new_codes, new_scales, error)

    def sum_shared_scale(
        self,
        inputs: Tensor,
        scales: Tensor,
        offset: Tensor,
        out: Tensor,
        overflow: Overflow = "saturate",
        first: int = 0,
    ) -> Tensor | None:
        sources = [_row(inputs, row) for row in range(len(inputs))]
        fits = _core.kernel_sum_shared_scale(
            _name(out),
            sources,
            out.numel(),
            scales.data_ptr(),
            scales.numel(),
            first,
            float(offset),
            overflow,
            out.data_ptr(),
        )
        return _misfits(fits, overflow)

    def quantize_scaled(self, x: Tensor, scales: Tensor, codes: Tensor, first: int = 0) -> None:
        _core.kernel_quantize_scaled(
            _name(x), x.data_ptr(), x.numel(), scales.data_ptr(), scales.numel(), first, codes.data_ptr()
        )

    def requantize_sum(self, inputs: Tensor, ratios: Tensor, codes: Tensor, first: int = 0) -> None:
        sources = [_row(inputs, row) for row in range(len(inputs))]
        _core.kernel_requantize_sum(sources, codes.numel(), ratios.data_ptr(), ratios.numel(), first, codes.data_ptr())


def _row(tensor: Tensor, row: int) -> int:
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.itemsize


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _misfits(fits: bool, overflow: Overflow) -> Tensor | None:
    return torch.tensor([not fits], dtype=torch.int32, device="cpu") if overflow == "raise" else None


def record_bytes(how: Quantization, length: int) -> int:
    """Of a record: ``length`` elements as engines exchange them, float32 scales, then codes, each aligned to 16 bytes.

    So every record begins where an accelerator reads many bytes at once.
    """
    return _aligned(how.scale_bytes(length)) + _aligned(how.code_bytes(length))


def record_views(records: Tensor, how: Quantization, length: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows of ``length`` elements each, one row per row."""
    size = how.scale_bytes(length)
    begin, scales = _aligned(size), records[:, :size]
    codes = records[:, begin : begin + how.code_bytes(length)]
    return codes, scales.view(torch.float32) if how.has_floats else scales


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
