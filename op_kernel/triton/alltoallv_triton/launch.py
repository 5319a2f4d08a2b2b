"""Runs the kernels on tensors: chooses tiles and grids, and offers what every implementation of quantization offers.

Codes are uint8 or int8 tensors, scales float32. On an accelerator every function returns at once. Callers are within
the package and have checked the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from alltoallv import _core
from alltoallv.quantization.spec import Overflow, Quantization
from alltoallv_triton import dequantize as _dequantize
from alltoallv_triton import numbers as _numbers
from alltoallv_triton import quantize as _quantize
from alltoallv_triton import shared_scale as _shared

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
OVERFLOWS: dict[Overflow, int] = {"saturate": 0, "raise": 1, "infinity": 2}


@dataclass(frozen=True)
class Tiling:
    """Tile sizes that fit a device.

    Attributes:
        elements: Size of a tile, a power of two; longer groups are taken piece by piece.
        packed_elements: Size of a tile with codes of 4 bits, which need more room.
        ragged: True if tiles may have rows that are not full, or few rows. Otherwise such groups go piece by piece.
        least_row: A row of a tile takes room for at least this many elements, however short it is.
        programs: Most programs in a launch; each takes several tiles if there are more tiles.
        warps: Warps per program, on a GPU.
    """

    elements: int
    packed_elements: int
    programs: int
    ragged: bool = True
    least_row: int = 1
    warps: int = 4


TILINGS = {
    "cuda": Tiling(4096, 4096, 1 << 30, warps=8),
    "npu": Tiling(4096, 2048, 48, ragged=False, least_row=16),  # an Ascend 910B has 48 vector cores of 192 KiB
    "cpu": Tiling(1 << 15, 1 << 15, 1 << 30),  # interpreted: fewer programs are faster
}


def tiling(device: torch.device) -> Tiling:
    return TILINGS.get(device.type, TILINGS["cuda"])


def tile_for(spec: Quantization, part: int, fit: Tiling) -> tuple[int, int]:
    """Returns rows and width of a tile; 0 rows mean that groups go piece by piece, ``width`` elements at a time."""
    elements = fit.elements if spec.bits == 8 else fit.packed_elements
    width = triton.next_power_of_2(max(spec.group_size, 2))
    rows = elements // max(width, fit.least_row)
    if fit.ragged:  # no more rows than a part has groups
        return (min(rows, triton.next_power_of_2(spec.groups(part))), width) if rows else (0, elements)
    if width == spec.group_size and rows >= 16:
        return rows, width
    return 0, min(max(width, fit.least_row), elements)


def _launch(kernel: Any, tiles: int, tiles_of: Tiling, *arguments: Any, **constants: Any) -> None:
    """Launches a kernel on the device of the first of ``arguments``, a tensor."""
    grid = (min(tiles, tiles_of.programs),)
    with torch.cuda.device_of(arguments[0]):  # has no effect unless that is a GPU
        kernel[grid](*arguments, **constants, num_warps=tiles_of.warps, enable_fp_fusion=False)


def quantize(
    x: Tensor,
    spec: Quantization,
    codes: Tensor,
    scales: Tensor,
    error: Tensor | None = None,
    part: int | None = None,
    tensor: Tensor | None = None,
) -> None:
    """Quantizes a flat vector in parts.

    Args:
        x: float32, float16 or bfloat16.
        codes: Bytes, ``[parts, >= code bytes of a part]``; rows may lie apart.
        scales: ``[parts, >= groups of a part]``; rows may lie apart. Bytes where scales are not float32.
        error: Error feedback, float32 like x: added first, then replaced by the rounding errors of the codes.
        part: Elements of a part; the last may have fewer. Default: all.
        tensor: NVFP4's scale of all groups; default: computed for every part.
    """
    count = x.numel()
    if count == 0:
        return
    part = part or count
    fit = tiling(x.device)
    rows, width = tile_for(spec, part, fit)
    feedback = error is not None
    parts = triton.cdiv(count, part)
    kept, tensors = _scales(scales, spec)
    if spec.format == "nvfp4":
        tensors[:parts, 0] = _tensor_scale(x, error, part, spec.group_size) if tensor is None else tensor
    pointers = (x, x if error is None else error, codes.view(torch.int8), kept)
    strides = (codes.stride(0), scales.stride(0))
    if rows:
        _launch(
            _quantize.quantize_groups, triton.cdiv(part, rows * spec.group_size) * parts, fit, *pointers, tensors,
            count, part, *strides, GROUP=spec.group_size, ROWS=rows, WIDTH=width, **_coded(spec), FEEDBACK=feedback,
        )  # fmt: skip
    else:
        _launch(
            _quantize.quantize_pieces, spec.groups(part) * parts, fit, *pointers, count, part,
            min(spec.group_size, part), *strides, WIDTH=width, **_coded(spec), FEEDBACK=feedback,
        )  # fmt: skip


def dequantize_sum(
    codes: Tensor, scales: Tensor, spec: Quantization, out: Tensor, *, average: bool = False
) -> Tensor | None:
    """Adds sources in their order in float32 and rounds the sum to the dtype of ``out``.

    Args:
        codes, scales: One row per source.
        out: Flat; float32, float16 or bfloat16.

    Returns:
        With ``overflow="raise"`` an int32 tensor that is 1 if a value did not fit, else 0; None otherwise.
    """
    return _sums(codes, scales, spec, out, len(codes), out.numel(), average)


def dequantize(
    codes: Tensor, scales: Tensor, spec: Quantization, out: Tensor, part: int | None = None
) -> Tensor | None:
    """Dequantizes a vector from its parts, one per row, of ``part`` elements (the last may have fewer)."""
    return _sums(codes, scales, spec, out, 1, part or out.numel(), False)


def _sums(
    codes: Tensor, scales: Tensor, spec: Quantization, out: Tensor, sources: int, part: int, average: bool
) -> Tensor | None:
    count = out.numel()
    flag = _overflow_flag(spec.overflow, out)
    if count == 0:
        return flag
    fit = tiling(out.device)
    rows, width = tile_for(spec, part, fit)
    parts = triton.cdiv(count, part)
    code_stride, scale_stride = codes.stride(0), scales.stride(0)
    kept, tensors = _scales(scales, spec)
    pointers = (
        codes.view(torch.int8),
        kept,
        tensors,
        _bits(out),
        _bits(out) if flag is None else flag,
    )
    constants = {
        **_coded(spec),
        "AVERAGE": average,
        "DTYPE": DTYPES[out.dtype],
        "OVERFLOW": OVERFLOWS[spec.overflow],
    }
    places = (code_stride, scale_stride, sources, code_stride, scale_stride)
    if rows:
        _launch(
            _dequantize.dequantize_groups, triton.cdiv(part, rows * spec.group_size) * parts, fit, *pointers, count,
            part, *places, GROUP=spec.group_size, ROWS=rows, WIDTH=width, **constants,
        )  # fmt: skip
    else:
        group = min(spec.group_size, part)
        pieces = triton.cdiv(group, width)
        _launch(
            _dequantize.dequantize_pieces, spec.groups(part) * pieces * parts, fit, *pointers[:2], *pointers[3:],
            count, part, group,
            *places, WIDTH=width, **constants,
        )  # fmt: skip
    return flag


def requantize(
    codes: Tensor,
    scales: Tensor,
    spec: Quantization,
    count: int,
    new_codes: Tensor,
    new_scales: Tensor,
    *,
    average: bool = False,
    error: Tensor | None = None,
) -> None:
    """Adds sources of ``count`` elements and quantizes the sum in the same groups.

    Args:
        codes, scales: One row per source.
        new_codes, new_scales: One row.
        error: Error feedback of this quantization.
    """
    if count == 0:
        return
    fit = tiling(codes.device)
    rows, width = tile_for(spec, count, fit)
    if not rows:
        total = torch.empty(count, dtype=torch.float32, device=codes.device)
        _sums(
            codes,
            scales,
            Quantization(spec.format, spec.group_size, overflow="infinity"),
            total,
            len(codes),
            count,
            average,
        )
        quantize(total, spec, new_codes, new_scales, error)
        return
    (kept, tensors), (new_kept, new_tensors) = _scales(scales, spec), _scales(new_scales, spec)
    if spec.format == "nvfp4":
        total = tensors[0, 0].clone()
        for tensor in tensors[1:, 0]:
            total += tensor
        new_tensors[0, 0] = _limited(total / len(codes) if average else total)
    _launch(
        _dequantize.requantize_groups, triton.cdiv(count, rows * spec.group_size), fit, codes.view(torch.int8), kept,
        tensors, len(codes), codes.stride(0), scales.stride(0), kept if error is None else error,
        new_codes.view(torch.int8), new_kept, new_tensors, count, GROUP=spec.group_size, ROWS=rows, WIDTH=width,
        **_coded(spec), AVERAGE=average, FEEDBACK=error is not None,
    )  # fmt: skip


def sum_shared_scale(
    inputs: Tensor, scales: Tensor, offset: Tensor, out: Tensor, overflow: Overflow = "saturate"
) -> Tensor | None:
    """Computes (sum of the int8 rows of ``inputs`` + rows * offset) * scale, rounded to the dtype of ``out``.

    Args:
        inputs: int8, ``[sources, count]``.
        scales: float32: one, or one per channel; ``out`` then consists of whole rows of channels.
        offset: float32, one element.
        out: Flat, ``count`` elements.

    Returns:
        The result of `dequantize_sum`.
    """
    flag = _overflow_flag(overflow, out)
    if out.numel():
        _launch_channels(
            _shared.sum_shared_scale, out.numel(), scales,
            (inputs, len(inputs), inputs.stride(0), scales, offset, _bits(out), out if flag is None else flag),
            DTYPE=DTYPES[out.dtype], OVERFLOW=OVERFLOWS[overflow],
        )  # fmt: skip
    return flag


def quantize_scaled(x: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Writes the int8 codes of x * (1 / scale); scales as in `sum_shared_scale`."""
    if x.numel():
        _launch_channels(_shared.quantize_scaled, x.numel(), scales, (x, scales, codes))


def requantize_sum(inputs: Tensor, ratios: Tensor, codes: Tensor) -> None:
    """Writes the codes of (sum of the int8 rows of ``inputs``) * ratio; ratios have the shape of `sum_shared_scale`'s
    scales.
    """
    if codes.numel():
        sources = (inputs, len(inputs), inputs.stride(0), ratios, codes)
        _launch_channels(_shared.requantize_sum, codes.numel(), ratios, sources)


def _launch_channels(kernel: Any, count: int, scales: Tensor, arguments: tuple[Any, ...], **constants: Any) -> None:
    fit = tiling(scales.device)
    uniform = scales.numel() == 1
    channels = count if uniform else scales.numel()
    lines = count // channels
    width = fit.elements if uniform else min(triton.next_power_of_2(max(channels, 2)), fit.elements // 16)
    rows = fit.elements // max(width, fit.least_row)
    tiles = triton.cdiv(lines, rows) * triton.cdiv(channels, width)
    _launch(kernel, tiles, fit, *arguments, lines, channels, ROWS=rows, WIDTH=width, UNIFORM=uniform, **constants)


def _coded(spec: Quantization) -> dict[str, int]:
    """Returns what a kernel needs to know about a format."""
    row = _core.code_formats[spec.format]
    alike = [(other.bits, other.mantissa, other.scale) for other in _core.code_formats.values()]
    first = alike.index((row.bits, row.mantissa, row.scale))
    return {"BITS": spec.bits, "FORMAT": first + _numbers.ROUNDS_UP * row.rounds_up}


def _scales(scales: Tensor, spec: Quantization) -> tuple[Tensor, Tensor]:
    """Returns the scales of groups and NVFP4's scale of all groups, which lies before them; otherwise the second is
    unused.
    """
    if spec.has_floats:
        return scales, scales
    if spec.format != "nvfp4":
        return scales.view(torch.int8), scales
    return scales[:, 4:].view(torch.int8), scales[:, :4].view(torch.float32)


def _tensor_scale(x: Tensor, error: Tensor | None, part: int, group: int) -> Tensor:
    """Computes NVFP4's scale of all groups for every part."""
    values = x.float() if error is None else x.float() + error
    whole = torch.nn.functional.pad(values, (0, -len(values) % part)).view(-1, part)
    groups = torch.nn.functional.pad(whole, (0, -part % group)).view(len(whole), -1, group)
    largest = (groups.view(torch.int32) & 0x7FFFFFFF).amax(2)
    finite = torch.where(largest < 0x7F800000, largest, 0).amax(1)
    return _limited(finite.view(torch.float32) / (6 * 448))


def _limited(scale: Tensor) -> Tensor:
    return scale.clamp(2.0**-110, float.fromhex("0x1.86186p+116"))


def _overflow_flag(overflow: Overflow, out: Tensor) -> Tensor | None:
    return torch.zeros(1, dtype=torch.int32, device=out.device) if overflow == "raise" else None


def _bits(out: Tensor) -> Tensor:
    return out.view(torch.int32 if out.dtype == torch.float32 else torch.int16)
