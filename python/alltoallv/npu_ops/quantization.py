"""Quantization of rows, alone or after SwiGLU: by scales that are given, by their largest value, or of mx in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.layers import swish_of_first
from alltoallv.npu_ops.matmuls import dequantize, ends_of, pack, product, product_of_four_bits, to_int8
from alltoallv.npu_ops.microscaling import (
    E2M1,
    Blocks,
    Element,
    element_of,
    is_scale,
    packed,
    product_of_blocks,
    quantize_blocks,
    to_codes,
)
from alltoallv.npu_ops.registry import dtype_of, expect, operator, present

_LARGEST = {torch.int8: 127.0, torch.quint4x2: 7.0}


def _to_integers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to the nearest number of the dtype, halves to even; four-bit numbers are packed."""
    if dtype == torch.quint4x2:
        return pack(values.round().clamp(-8, 7))
    limits = torch.iinfo(dtype)
    return values.double().round().clamp(limits.min, limits.max).to(dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype | Element, dim: int | None = -1) -> tuple[Tensor, Tensor]:
    """Quantizes float32 values symmetrically, with the scale by which each row's largest fits.

    With ``dim`` None there is one scale for all rows.
    """
    supported = not dtype.values if isinstance(dtype, Element) else dtype in _LARGEST
    expect(supported, "dst_type", dtype, "int8, quint4x2, float8_e4m3fn or float8_e5m2")
    x = x.detach()  # the integers have no gradient, and the gradient of the scales alone would not be the rows'
    sizes, axis = (x.abs().view(-1), -1) if dim is None else (x.abs(), dim)
    largest = sizes.amax(axis, keepdim=True) if sizes.size(axis) else sizes.sum(axis, keepdim=True)
    scale = largest / (dtype.largest if isinstance(dtype, Element) else _LARGEST[dtype])
    values = torch.where(scale == 0, torch.zeros_like(x), x / scale)
    codes = to_codes(values, dtype) if isinstance(dtype, Element) else _to_integers(values, dtype)
    return codes, scale if dim is None else scale.squeeze(dim)


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
    dtype = element_of(dst_type) or dtype_of(dst_type, torch.int8, "dst_type")
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


@operator("npu_kronecker_quant")
def kronecker_quant(
    x: Tensor,
    kronecker_p1: Tensor,
    kronecker_p2: Tensor,
    clip_ratio: float | None,
    dst_dtype: int | None,
    dst_type_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiplies each matrix of x [k, m, n] by p1 [m, m] from the left and by p2 [n, n] from the right, and quantizes.

    To four bits, eight in an int32, with a scale for each matrix: its largest size is 7 / ``clip_ratio`` of them, and
    what is beyond becomes 7 or -8. Or to float4_e2m1fn_x2 in blocks of 32 of each flat matrix, where the formula has no
    ``clip_ratio``, and where a p2 of no elements is left out.
    """
    halves = (torch.float16, torch.bfloat16)
    expect(x.dim() == 3 and x.numel() > 0 and x.dtype in halves, "x", x, "float16 or bfloat16 in the shape (k, m, n)")
    ratio = 1.0 if clip_ratio is None else clip_ratio
    expect(0 < ratio <= 1, "clip_ratio", clip_ratio, "above 0 to 1")
    expect(not dst_type_max, "dst_type_max", dst_type_max, "0 or None")
    mx = element_of(dst_dtype) is E2M1
    expect(mx or dst_dtype in (None, 3), "dst_dtype", dst_dtype, "int32 or float4_e2m1fn_x2")
    values = x.detach().float()
    for name, matrix, size in (("kronecker_p1", kronecker_p1, x.size(1)), ("kronecker_p2", kronecker_p2, x.size(2))):
        right = name == "kronecker_p2"
        if right and mx and matrix.numel() == 0:
            continue
        fits = matrix.shape == (size, size) and matrix.dtype == x.dtype
        expect(fits, name, matrix, f"the shape ({size}, {size}) and {x.dtype}, as x has")
        values = values @ matrix.float() if right else matrix.float() @ values
    if mx:
        expect(x.size(2) % 2 == 0, "x", x, "a last dimension that is even, for four bits")
        codes, scale = quantize_blocks(values.flatten(1), E2M1)
        return packed(codes, E2M1), scale
    scales = values.abs().amax((1, 2)) / (7 / ratio)
    divisor = scales.view(-1, 1, 1)
    return _to_integers(torch.where(divisor == 0, 0.0, values / divisor), torch.quint4x2), scales


@operator("npu_anti_quant")
def anti_quant(x: Tensor, scale: Tensor, offset: Tensor | None, dst_dtype: int | None) -> Tensor:
    expect(x.dtype == torch.int8, "x", x, "int8")
    shifted = x.float() if offset is None else x.float() + offset.float()
    return (shifted * scale.float()).to(dtype_of(dst_dtype, torch.float16, "dst_dtype"))


@operator("npu_sign_bits_unpack")
def sign_bits_unpack(input: Tensor, size: int, dtype: int) -> Tensor:
    """Returns 1 and -1 for the bits 1 and 0 of bytes, the lowest bit first, as [size, numbers]."""
    count = input.numel() * 8
    expect(input.dim() == 1 and input.dtype == torch.uint8, "input", input, "uint8 of one dimension")
    expect(size > 0 and count % size == 0, "size", size, f"a divisor of {count} bits")
    kind = dtype_of(dtype, torch.float32, "dtype")
    expect(kind in (torch.float32, torch.float16), "dtype", kind, "float32 or float16")
    bits = (input.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return (bits.to(kind) * 2 - 1).view(size, -1)


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
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
    halves: bool = False,
) -> tuple[Tensor, Tensor]:
    """Multiplies x by its scales, applies SwiGLU, and returns int8 by a given scale (``quant_mode`` 0) or per row (1).

    ``group_index`` has the number of rows of each group; scales then have one row per group. With ``swiglu_mode`` 1
    gate and other part are the columns of even and odd numbers, unless ``halves``; the gate g is bounded above and the
    other part u on both sides by ``clamp_limit``, and the result is g * sigmoid(alpha * g) * (u + bias).
    """
    expect(swiglu_mode in (0, 1), "swiglu_mode", swiglu_mode, "0 or 1")
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
    if swiglu_mode == 1 and not halves:
        values = torch.cat([values[..., ::2], values[..., 1::2]], -1)
    elif not activate_left:
        values = torch.cat(values.chunk(2, -1)[::-1], -1)
    if swiglu_mode == 1:
        gate, other = bounded(values, clamp_limit).chunk(2, -1)
        values = gate * torch.sigmoid(glu_alpha * gate) * (other + glu_bias)
    else:
        values = swish_of_first(values, -1)
    if quant_mode == 1:
        expect(quant_offset is None, "quant_offset", quant_offset, "None, where quant_mode is 1")
        if quant_scale is not None:
            values = values * of_rows(quant_scale)
        y, scale = quantize_rows(values, torch.int8)
    else:
        expect(quant_mode == 0, "quant_mode", quant_mode, "0 or 1")
        divisor = of_rows(present(quant_scale, "quant_scale", "a scale, where quant_mode is 0"))
        shift = 0.0 if quant_offset is None else of_rows(quant_offset)
        y, scale = to_int8(values / divisor + shift), values.new_zeros(len(flat))
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
    quant_dtype: int | None = 1,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    weight_scale_dtype: int | None = None,
    x_scale_dtype: int | None = None,
    limit: float = 0.0,
    weight_assist_matrix: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiplies groups of rows by their weights, applies scales and SwiGLU, and quantizes the rows.

    Modes 0: rows of int8 or float8, with scales of rows and of the weights' columns, and a scale for each row of the
    result. Modes 2: numbers of mx, and again numbers of mx. Rows after the last group give zeros. A ``limit`` bounds
    what SwiGLU gets: the first half from above, the second from both sides. Weights of four bits, in int32, have int64
    scales, and in ``weight_assist_matrix`` what `product_of_four_bits` adds.
    """
    mx = is_scale("x_scale", x_scale, x_scale_dtype)
    both = mx == is_scale("weight_scale", weight_scale[0], weight_scale_dtype)
    expect(both, "weight_scale_dtype", weight_scale_dtype, "float8_e8m0fnu exactly where x_scale_dtype is it")
    for name, mode in (("dequant_mode", dequant_mode), ("quant_mode", quant_mode)):
        expected = "2 for numbers of mx, and otherwise 0: a scale for each row, and for each column of the weights"
        expect((mode or 0) == (2 if mx else 0), name, mode, expected)
    element = element_of(quant_dtype)
    supported = not element.values if element is not None else quant_dtype in (None, 1, 258) and not mx
    expect(supported, "quant_dtype", quant_dtype, "float8_e4m3fn or float8_e5m2, or int8 where there is no mx")
    for name, element_type in (("x_dtype", x_dtype), ("weight_dtype", weight_dtype)):
        expect(mx or element_type is None, name, element_type, "None, where there are no scales of float8_e8m0fnu")
    eights = (torch.float8_e4m3fn, torch.float8_e5m2)
    expect(mx or x.dtype in (torch.int8, *eights), "x", x, "int8 or float8")
    ends = ends_of(group_list, group_list_type or 0)
    each = [plane for part in weight for plane in (part if part.dim() == 3 else [part])]
    fours = each[0].dtype == torch.int32 and x.dtype == torch.int8
    stacked = weight[0].dim() == 3 if fours else weight_scale[0].dim() == (4 if mx else 2)
    scales = [plane for part in weight_scale for plane in (part if stacked else [part])]
    added = [plane for part in weight_assist_matrix or [] for plane in (part if part.dim() == 2 else [part])]
    expect(len(each) == len(scales) == len(ends), "weight", len(each), f"one for each of {len(ends)} groups")
    need = len(ends) if fours else 0
    expect(len(added) == need, "weight_assist_matrix", len(added), f"{need} rows: one for each group of four bits")
    values = torch.zeros(len(x), scales[0].size(-2 if mx else -1))
    for number, (start, end, matrix, scale) in enumerate(zip([0, *ends], ends, each, scales, strict=False)):
        rows, tokens = x[start:end], x_scale[start:end]
        if mx:
            blocks = Blocks("x", rows, x_dtype, "x_scale", tokens)
            values[start:end] = product_of_blocks(blocks, Blocks("weight", matrix, weight_dtype, "weight_scale", scale))
        elif fours:
            four_bits = product_of_four_bits(rows, matrix, scale, added[number], "weight_assist_matrix")
            values[start:end] = four_bits * tokens.float().unsqueeze(-1)
        else:
            values[start:end] = dequantize(product(rows, matrix), scale, None, tokens, None, torch.float32)
    values = swish_of_first(bounded(values, limit), -1)
    if not mx:
        return quantize_rows(values, element or torch.int8)
    assert element is not None
    codes, bytes_of_scales = quantize_blocks(values, element)
    return packed(codes, element), bytes_of_scales


def bounded(values: Tensor, limit: float) -> Tensor:
    """Returns both halves of the last dimension within a limit, if there is one: the first is bounded above only."""
    if limit <= 0:
        return values
    first, second = values.chunk(2, -1)
    return torch.cat([first.clamp(max=limit), second.clamp(-limit, limit)], -1)
