"""Computes the quantized operators for all ranks at once, in NumPy, by the rules of docs/quantization.md.

Entry r of a list belongs to rank r. Results are new arrays, one per rank; only error-feedback state is updated in
place. Values are float32, float16 or bfloat16 (ml_dtypes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from alltoallv.testing import quantized_formats as formats
from alltoallv.testing.golden import dtype_of
from alltoallv.testing.quantized_formats import (
    FORMATS,
    Array,
    Codes,
    Floats,
    Format,
    Overflow,
    Quantized,
    canonical_nan,
    cast,
    code_bytes,
    codes_of,
    dequantize,
    dequantize_sum,
    handle_overflow,
    limited_tensor_scale,
    named,
    quantize,
    scale_of,
    widened,
)
from alltoallv.testing.reference import all_reduce_leaves, all_to_all_v, equal_part

__all__ = [
    "FORMATS",
    "Quantized",
    "cast",
    "code_bytes",
    "codes_of",
    "dequantize",
    "dequantize_sum",
    "quantize",
    "quantized_all_reduce",
    "quantized_all_to_all",
    "quantized_reduce_scatter",
    "scale_of",
    "shared_scale_all_reduce",
    "two_scale_all_reduce",
]


_F32 = np.float32


def quantized_all_reduce(
    inputs: Sequence[Array],
    *,
    group_size: int | None = None,
    bits: int = 8,
    format: str | None = None,
    gather: Literal["full", "quantized"] = "full",
    op: Literal["sum", "avg"] = "sum",
    dtype: str | npt.DTypeLike | None = None,
    overflow: Overflow = "saturate",
    errors: Sequence[Floats] | None = None,
    gather_error: Floats | None = None,
    bounds: list[Floats] | None = None,
    tree: bool = False,
) -> list[Array]:
    """Returns every rank's result of the dynamic mode; it has the same bits on all ranks.

    Args:
        inputs: W arrays of one shape and dtype.
        group_size: elements per scale; groups begin at element 0 of the flattened array.
        bits: 8 or 4, for int8 and int4.
        format: a key of `FORMATS`; default: by ``bits``.
        gather: "full" rounds the reduced values to ``dtype``; "quantized" quantizes them again, in the same groups,
            before.
        op: avg divides the sum by W, before it is rounded or quantized.
        dtype: the results' dtype; default: the inputs'.
        overflow: what becomes of values that do not fit.
        errors: error feedback: W float32 arrays in the inputs' shape, replaced.
        gather_error: error feedback of the second quantization: one float32 array in the inputs' shape, of which
            every rank holds its part; replaced.
        bounds: a list to which every rank's bound is appended, one value per group.
        tree: add in the tree of `all_reduce_leaves`; then ``inputs`` are the leaves.

    Raises:
        OverflowError: a finite value does not fit, and ``overflow`` is "raise".
    """
    if gather not in ("full", "quantized") or op not in ("sum", "avg"):
        raise ValueError(f"gather is {gather!r}, op is {op!r}, expected full or quantized, sum or avg")
    size = len(inputs)
    states = [None] * size if errors is None else errors
    codes = [quantize(x, group_size, bits, states[r], format=format) for r, x in enumerate(inputs)]
    total, again = dequantize_sum(codes, op == "avg"), None
    if tree:
        total = all_reduce_leaves([np.stack([dequantize(each) for each in codes])], op)[0]
    if gather == "quantized":
        tensor = _F32(0)
        for each in codes:  # NVFP4's is known to all who see the codes
            tensor = tensor + each.tensor
        tensor = limited_tensor_scale(tensor / _F32(size) if op == "avg" else tensor)
        again = quantize(total, group_size, bits, gather_error, format=format, tensor=tensor)
        total = dequantize(again)
    target = inputs[0].dtype if dtype is None else dtype
    result = cast(total, target, overflow).reshape(inputs[0].shape)
    if bounds is not None:
        own_bounds = bounds_of(codes, total, op == "avg", again, target, overflow)
        bounds.extend(own_bounds.copy() for _ in range(size))
    return [result.copy() for _ in range(size)]


def quantized_reduce_scatter(
    inputs: Sequence[Array],
    counts: Sequence[int] | None = None,
    *,
    group_size: int | None = None,
    bits: int = 8,
    format: str | None = None,
    op: Literal["sum", "avg"] = "sum",
    dtype: str | npt.DTypeLike | None = None,
    overflow: Overflow = "saturate",
    errors: Sequence[Floats] | None = None,
    bounds: list[Floats] | None = None,
) -> list[Array]:
    """Returns for each rank r part r of the sum.

    Every part is quantized by itself: groups begin at its first element. Parts are ``counts[r]`` entries of axis 0,
    by default equal. The other arguments are as for :func:`quantized_all_reduce`.
    """
    size, length = len(inputs), len(inputs[0])
    if counts is None:
        counts = [equal_part(inputs[0], size)] * size
    if sum(counts) != length or len(counts) != size:
        raise ValueError(f"counts are {list(counts)}, expected {size} of sum {length}")
    options: Any = {"group_size": group_size, "bits": bits, "format": format, "op": op, "dtype": dtype}
    results = []
    for r in range(size):
        part = slice(sum(counts[:r]), sum(counts[: r + 1]))
        part_errors = None if errors is None else [error[part] for error in errors]
        parts = [x[part] for x in inputs]
        worst: list[Floats] = []
        results.append(quantized_all_reduce(parts, errors=part_errors, overflow=overflow, bounds=worst, **options)[r])
        if bounds is not None:
            bounds.append(worst[r])
    return results


def quantized_all_to_all(
    inputs: Sequence[Array],
    send_counts: Sequence[Sequence[int]],
    *,
    group_size: int | None = None,
    bits: int = 8,
    format: str | None = None,
    dtype: str | npt.DTypeLike | None = None,
    overflow: Overflow = "saturate",
    bounds: list[Floats] | None = None,
) -> list[Array]:
    """Returns for each rank the rows that it receives, in rank order; they travel as codes with their scales.

    Args:
        inputs: W arrays of rows, [T_r, H].
        send_counts: W x W, in rows; row r belongs to rank r.
        group_size: elements per scale; groups begin anew with every row. Default: one scale per row.
        bits: 8 or 4, for int8 and int4.
        format: a key of `FORMATS`; default: by ``bits``.
        dtype: the results' dtype; default: the inputs'.
        overflow: what becomes of values that do not fit.
        bounds: a list to which every rank's bound is appended, [rows, groups of a row].
    """
    restored, sent_bounds = [], []
    for x in inputs:
        fixed = FORMATS[named(bits, format)].group_size
        group = max(1, (fixed or math.prod(x.shape[1:])) if group_size is None else group_size)
        target = dtype_of(x.dtype if dtype is None else dtype)
        rows, row_bounds = np.zeros(x.shape, target), np.zeros((len(x), -(-math.prod(x.shape[1:]) // group)), _F32)
        for t in range(len(x)):
            coded = quantize(x[t], group, bits, format=format)
            rows[t] = dequantize(coded, target, overflow).reshape(x.shape[1:])
            row_bounds[t] = bounds_of([coded], dequantize(coded), dtype=target, overflow=overflow)
        restored.append(rows)
        sent_bounds.append(row_bounds)
    if bounds is not None:
        bounds.extend(all_to_all_v(sent_bounds, send_counts))
    return all_to_all_v(restored, send_counts)


def shared_scale_all_reduce(
    inputs: Sequence[Codes],
    scale: Array,
    offset: float = 0.0,
    *,
    dtype: str | npt.DTypeLike = "float16",
    overflow: Overflow = "saturate",
) -> list[Array]:
    """Returns (Σ x + W·offset)·scale: an exact sum, float32 arithmetic, one rounding; the same bits on all ranks.

    Args:
        inputs: W int8 arrays of one shape.
        scale: float16, bfloat16 or float32; one value, or one per entry of the last axis.
        offset: a float16 (as in ATB), bfloat16 or float32 value.
        dtype: the results' dtype.
        overflow: finite scales and offsets never give inf unless this is "infinity".

    Raises:
        OverflowError: a value does not fit, and ``overflow`` is "raise".
    """
    size = len(inputs)
    scales = _channels(scale, inputs[0])
    with np.errstate(all="ignore"):
        total = np.sum([x.astype(np.int64) for x in inputs], axis=0).astype(_F32)
        offsets = _F32(size) * _F32(offset)
        values = (total + offsets) * scales
        result = values.astype(dtype_of(dtype))
    exceeded = np.isinf(result) & np.isfinite(scales) & np.isfinite(offsets)
    result = canonical_nan(handle_overflow(result, values, exceeded, overflow))
    return [result.copy() for _ in range(size)]


def two_scale_all_reduce(
    inputs: Sequence[Array], scale_1: Array, scale_2: Array, *, overflow: Overflow = "saturate"
) -> list[Array]:
    """Computes ``npu_mm_all_reduce_base`` with ``comm_quant_scale_1`` and ``_2``; results have the inputs' dtype.

    q1 = x · (1 / scale_1), sums exactly, q2 = Σ q1 · (scale_1 / scale_2), result = q2 · scale_2.

    Args:
        inputs: W float32, float16 or bfloat16 arrays of one shape.
        scale_1: one value, or one per entry of the last axis, equal on all ranks.
        scale_2: one value, or one per entry of the last axis, equal on all ranks.
        overflow: what becomes of values that do not fit.
    """
    first, second = widened(np.asarray(scale_1)), widened(np.asarray(scale_2))
    with np.errstate(all="ignore"):
        inverse = _F32(1) / _channels(first, inputs[0])
        codes = [_saturated_codes(widened(x) * inverse) for x in inputs]
        total = np.sum([code.astype(np.int64) for code in codes], axis=0).astype(_F32)
        reduced = _saturated_codes(total * _channels(first / second, inputs[0]))
    result = shared_scale_all_reduce([reduced], second, dtype=inputs[0].dtype, overflow=overflow)[0]
    return [result.copy() for _ in inputs]


def _saturated_codes(values: Floats) -> Codes:
    numbers: Floats = np.where(np.isnan(values), _F32(0), values)
    return np.rint(np.clip(numbers, _F32(-127), _F32(127))).astype(np.int8)


def _channels(scale: Array, x: Array) -> Floats:
    flat = widened(np.asarray(scale)).reshape(-1)
    channels = x.shape[-1] if x.ndim else 1
    if flat.size not in (1, channels):
        raise ValueError(f"scale has {flat.size} values, expected 1 or the last dimension, {channels}")
    return np.broadcast_to(flat, x.shape) if x.ndim else flat.reshape(())


# What sums of codes can be wrong by, one float32 per group.


_INF = _F32(np.inf)
_UNIT = {"float16": (2.0**-11, 2.0**-25, 65504.0, 65520.0)}
_UNIT["bfloat16"] = (2.0**-8, 2.0**-126, float.fromhex("0x1.fep127"), float.fromhex("0x1.ffp127"))


def bounds_of(
    sources: Sequence[Quantized],
    values: Floats,
    average: bool = False,
    again: Quantized | None = None,
    dtype: str | npt.DTypeLike = "float32",
    overflow: Overflow = "saturate",
) -> Floats:
    """Returns for every group what no element of a result exceeds.

    Args:
        sources: every rank's codes.
        values: float32, what is rounded to the results' dtype.
        average: the sum was divided by the number of ranks.
        again: the codes of the sum, if it was quantized.
        dtype: the results'.
        overflow: what becomes of values that do not fit.
    """
    size, group = len(sources), sources[0].group_size
    with np.errstate(all="ignore"):
        total = np.zeros(sources[0].count, _F32)
        for source in sources:
            total = total + _errors(source, size)
        if average:
            total = total / _F32(size)
        if again is not None:
            total = total + _errors(again, size)
        starts = np.arange(0, total.size, group)
        if not starts.size:
            return np.zeros(0, _F32)
        most = np.maximum.reduceat(np.abs(values.reshape(-1)), starts)
        error = np.maximum.reduceat(total, starts) + _rounding(most, dtype_of(dtype).name, overflow)
        bound = error * _up(1 + (size + 16) * 2.0**-23) + _up((size + 2) * 2.0**-123)
    result: Floats = np.where(np.isfinite(most), bound, _INF).astype(_F32)
    return result


def code_errors(name: str, ranks: int) -> Floats:
    """Returns what each code can be wrong by in a sum, in units of its group's scale, for every pattern of its bits."""
    form, arithmetic = FORMATS[name], (ranks + 8) * 2.0**-24
    if form.is_integer:
        return np.full(2**form.bits, _up(0.5 + form.most * arithmetic))
    values = np.abs(formats.decode(np.arange(2**form.bits, dtype=np.uint8), form).astype(np.float64))
    magnitudes = np.unique(values[values <= form.most])
    gaps = np.maximum(np.diff(magnitudes, prepend=0), np.diff(magnitudes, append=magnitudes[-1]))
    if form.scale == "float8_e8m0fnu" and not form.rounds_up:
        gaps[-1] = max(gaps[-1], 2 * (2.0 ** np.ceil(np.log2(form.most)) - form.most))
    errors = np.array([_up(error) for error in gaps / 2 + magnitudes * arithmetic])
    return np.where(values <= form.most, errors[np.searchsorted(magnitudes, np.fmin(values, form.most))], _INF)


def turned_errors(name: str, ranks: int) -> Floats:
    """Returns the same for elements of rotated groups, by the binary logarithm of the group's largest block."""
    form, arithmetic = FORMATS[name], (ranks + 8) * 2.0**-24
    passes = np.arange(11)  # groups have up to 1,024 elements
    errors = 0.5 + form.most * arithmetic + 2 * (passes + 3) * 2.0**-24 * (form.most + 1)
    return np.array([_up(error) for error in np.sqrt(2.0**passes) * errors])


def scale_errors(name: str) -> Floats:
    """Returns the scale by which errors count, for every byte that stands for a scale."""
    form = FORMATS[name]
    values = np.arange(256, dtype=np.uint8).view(dtype_of(form.scale)).astype(np.float64)
    if form.scale == "float8_e8m0fnu":
        if form.rounds_up:  # above the largest scale that is made, the largest numbers saturate
            power = np.floor(np.log2(form.most))
            values[int(254 - power)] *= (2.0 ** (power + 1) - form.most) / _half_gap(form, -1)
        return np.where(np.isnan(values), np.inf, np.maximum(values, 2.0**-126)).astype(_F32)
    # Up to the middle of the gap above a byte's value, quotients have this byte: there codes saturate.
    gaps = np.diff(values, append=np.nan)
    excess = np.where(values == 448.0, 0.0, form.most * gaps / 2)
    half_gaps = np.where(values == 0, _half_gap(form, 0), _half_gap(form, -1))
    errors = np.where(np.isnan(values) | np.signbit(values), np.inf, np.maximum(values, excess / half_gaps))
    return np.array([_up(x) if np.isfinite(x) else _INF for x in errors])


def _half_gap(form: Format, at: int) -> float:
    values = formats.decode(np.arange(2 ** (form.bits - 1), dtype=np.uint8), form).astype(np.float64)
    return float(np.diff(values)[at] if at == 0 else np.diff(values[values <= form.most])[-1]) / 2


def _errors(source: Quantized, ranks: int) -> Floats:
    """Returns what every element's code can be wrong by."""
    table = code_errors(source.format, ranks)
    scales = source.scales
    if source.form.shaped:
        return _shaped_errors(source, ranks)
    if source.form.scale != "float32":
        tensor = source.tensor if source.form.scale == "float8_e4m3fn" else _F32(1)
        scales = scale_errors(source.format)[scales] * tensor
    elif source.form.bits < 4:  # by the largest scale codes may have been saturated
        scales = np.where(scales == _F32(2.0**126), _INF, scales)
    codes: Array = codes_of(source).view(np.uint8) & (2**source.form.bits - 1)
    spread: Floats = np.repeat(scales, min(source.group_size, max(source.count, 1)))[: source.count]
    errors: Floats = table[codes[: source.count]] * spread
    return errors


def _shaped_errors(source: Quantized, ranks: int) -> Floats:
    """Returns the same where groups are rotated or have spikes: of every element its group's."""
    group = min(source.group_size, max(source.count, 1))
    lengths = np.diff(np.append(np.arange(0, source.count, group), source.count))
    scales, turned = np.abs(source.scales), turned_errors(source.format, ranks)
    if source.form.bits < 4:
        scales = np.where(scales == _F32(2.0**126), _INF, scales)
    blocks = np.array([turned[int(length).bit_length() - 1] for length in lengths], _F32)
    errors = np.where(source.scales < 0, blocks, code_errors(source.format, ranks)[0]) * scales
    if source.spikes is not None:
        for index, value in zip(source.spikes[0].T, source.spikes[1].T, strict=True):
            magnitude = np.abs(value.astype(_F32))
            unit = (magnitude.view(np.uint32) & 0x7F800000).view(_F32) * _F32(2.0**-8)
            unit = np.where(magnitude == _F32(float.fromhex("0x1.fep127")), 2 * unit, unit)
            error = unit + magnitude * _up((ranks + 8) * 2.0**-24)
            errors = np.where(index < lengths, np.maximum(errors, error), errors)
    by_element: Floats = np.repeat(errors.astype(_F32), lengths)
    return by_element


def _rounding(most: Floats, dtype: str, overflow: Overflow) -> Floats:
    if dtype == "float32":
        return np.zeros_like(most)
    unit, least, largest, too_large = map(_F32, _UNIT[dtype])
    error: Floats = most * unit + least + np.maximum(most - largest, _F32(0))
    return np.where(most >= too_large, _INF, error) if overflow == "infinity" else error


def _up(value: float) -> np.float32:
    nearest = _F32(value)
    return np.nextafter(nearest, _INF) if float(nearest) < value else nearest
