"""Quantizes by scales that are given, or by the largest value of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.activations import swish_of_first
from alltoallv.npu_ops.matmuls import dequantize, ends_of, product, to_int8
from alltoallv.npu_ops.packing import pack
from alltoallv.npu_ops.registry import dtype_of, expect, operator, present

_LARGEST = {torch.int8: 127.0, torch.quint4x2: 7.0}


def _to_integers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to the nearest number of the dtype, halves to even; four-bit numbers are packed."""
    if dtype == torch.quint4x2:
        return pack(values.round().clamp(-8, 7))
    limits = torch.iinfo(dtype)
    return values.double().round().clamp(limits.min, limits.max).to(dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype, dim: int | None = -1) -> tuple[Tensor, Tensor]:
    """Quantizes float32 values symmetrically, with the scale by which each row's largest fits.

    With ``dim`` None there is one scale for all rows.
    """
    expect(dtype in _LARGEST, "dst_type", dtype, "int8 or quint4x2")
    x = x.detach()  # the integers have no gradient, and that of the scales alone would not be the rows'
    sizes, axis = (x.abs().view(-1), -1) if dim is None else (x.abs(), dim)
    largest = sizes.amax(axis, keepdim=True) if sizes.size(axis) else sizes.sum(axis, keepdim=True)
    scale = largest / _LARGEST[dtype]
    values = torch.where(scale == 0, torch.zeros_like(x), x / scale)
    return _to_integers(values, dtype), scale if dim is None else scale.squeeze(dim)


def _smooth(x: Tensor, smooth_scales: Tensor | None, group_index: Tensor | None) -> Tensor:
    """Multiplies rows by their smooth scales: one for all, or one per group of rows, whose ends are given."""
    if smooth_scales is None:
        return x.float()
    if group_index is None:
        return x.float() * smooth_scales.float()
    rows = x.float().reshape(-1, x.size(-1)).clone()
    ends = ends_of(group_index, 0)
    for start, end, scales in zip([0, *ends], ends, smooth_scales.float(), strict=False):
        rows[start:end] *= scales
    return rows.view(x.shape)


@operator("npu_dynamic_quant")
def dynamic_quant(
    input: Tensor, smooth_scales: Tensor | None, group_index: Tensor | None, dst_type: int | None, quant_mode: str
) -> tuple[Tensor, Tensor]:
    dims = {"pertoken": -1, "perchannel": -2, "pertensor": None}
    expect(quant_mode in dims, "quant_mode", quant_mode, " or ".join(dims))
    dtype = dtype_of(dst_type, torch.int8, "dst_type")
    return quantize_rows(_smooth(input, smooth_scales, group_index), dtype, dims[quant_mode])


@operator("npu_dynamic_quant_asymmetric")
def dynamic_quant_asymmetric(
    input: Tensor, smooth_scales: Tensor | None, group_index: Tensor | None, dst_type: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes each row's range to int8 or four bits; returns the result with scale and offset of each row."""
    dtype = dtype_of(dst_type, torch.int8, "dst_type")
    expect(dtype in _LARGEST, "dst_type", dtype, "int8 or quint4x2")
    top, steps = _LARGEST[dtype], 2 * _LARGEST[dtype] + 1
    x = _smooth(input, smooth_scales, group_index)
    high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    scale = (high - low) / steps
    offset = top - high / scale
    return _to_integers(x / scale + offset, dtype), scale.squeeze(-1), offset.squeeze(-1)


@operator("npu_quantize")
def quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int, div_mode: bool
) -> Tensor:
    """Returns input / scales + zero_points, or input * scales + zero_points; 1-D scales lie along ``axis``."""
    axis = axis if div_mode else (-2 if axis == -2 else -1)

    def along_axis(values: Tensor) -> Tensor:
        if values.dim() != 1 or values.numel() == 1:
            return values.float()
        shape = [1] * input.dim()
        shape[axis] = -1
        return values.float().view(shape)

    scaled = input.float() / along_axis(scales) if div_mode else input.float() * along_axis(scales)
    if zero_points is not None:
        scaled = scaled + along_axis(zero_points)
    return _to_integers(scaled, dtype_of(dtype, torch.int8, "dtype"))


@operator("npu_anti_quant")
def anti_quant(x: Tensor, scale: Tensor, offset: Tensor | None, dst_dtype: int | None) -> Tensor:
    expect(x.dtype == torch.int8, "x", x, "int8")
    shifted = x.float() if offset is None else x.float() + offset.float()
    return (shifted * scale.float()).to(dtype_of(dst_dtype, torch.float16, "dst_dtype"))


@operator("npu_dequant_swiglu_quant")
def dequant_swiglu_quant(
    x: Tensor,
    weight_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    group_index: Tensor | None,
    activate_left: bool,
    quant_mode: int,
) -> tuple[Tensor, Tensor]:
    """Multiplies x by its scales, applies SwiGLU, and returns int8 by a given scale (``quant_mode`` 0) or per row (1).

    ``group_index`` has the number of rows of each group; scales then have one row per group.
    """
    flat = x.reshape(-1, x.size(-1))
    counts = torch.tensor([len(flat)]) if group_index is None else group_index
    behind = len(flat) - int(counts.sum())

    def of_rows(values: Tensor) -> Tensor:
        each = values.float().reshape(len(counts), -1).repeat_interleave(counts, 0)
        return torch.cat([each, each.new_ones(behind, each.size(1))])

    values = flat.float()
    if bias is not None and bias.dtype == torch.int32:
        values, bias = values + of_rows(bias), None
    if weight_scale is not None:
        values = values * of_rows(weight_scale)
    if activation_scale is not None:
        values = values * activation_scale.float().reshape(-1, 1)
    if bias is not None:
        values = values + of_rows(bias)
    if not activate_left:
        values = torch.cat(values.chunk(2, -1)[::-1], -1)
    values = swish_of_first(values, -1)
    if quant_mode == 1:
        if quant_scale is not None:
            values = values * of_rows(quant_scale)
        y, scale = quantize_rows(values, torch.int8)
    else:
        expect(quant_mode == 0, "quant_mode", quant_mode, "0 or 1")
        given = of_rows(present(quant_scale, "quant_scale", "a scale, where quant_mode is 0"))
        shift = 0.0 if quant_offset is None else of_rows(quant_offset)
        y, scale = to_int8(values / given + shift), values.new_zeros(len(flat))
    return y.view(*x.shape[:-1], y.size(-1)), scale.view(x.shape[:-1])


@operator("npu_grouped_matmul_swiglu_quant_v2", ignores=("tuning_config",))
def grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    dequant_mode: int | None,
    quant_mode: int | None,
    group_list_type: int | None,
) -> tuple[Tensor, Tensor]:
    """Multiplies groups of int8 rows by their weights, applies scales and SwiGLU, and quantizes each row to int8.

    Scales are those of the rows and of the weights' columns. Rows after the last group give zeros.
    """
    for name, mode in (("dequant_mode", dequant_mode), ("quant_mode", quant_mode)):
        expect(not mode, name, mode, "0: a scale for each row, and for each column of the weights")
    expect(x.dtype == torch.int8, "x", x, "int8")
    ends = ends_of(group_list, group_list_type or 0)
    each = [one for part in weight for one in (part if part.dim() == 3 else [part])]
    scales = [one for part in weight_scale for one in (part if part.dim() == 2 else [part])]
    expect(len(each) == len(scales) == len(ends), "weight", len(each), f"one for each of {len(ends)} groups")
    values = torch.zeros(len(x), each[0].size(1))
    for start, end, matrix, scale in zip([0, *ends], ends, each, scales, strict=False):
        total = product(x[start:end], matrix)
        values[start:end] = dequantize(total, scale, None, x_scale[start:end], None, torch.float32)
    return quantize_rows(swish_of_first(values, -1), torch.int8)
