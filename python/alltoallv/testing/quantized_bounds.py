"""What sums of codes can be wrong by, in NumPy, by the definition in docs/quantization.md; one float32 per group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from alltoallv.testing import quantized_formats as formats
from alltoallv.testing.golden import dtype_of
from alltoallv.testing.quantized_codes import Array, Floats, Overflow, Quantized, codes_of
from alltoallv.testing.quantized_formats import FORMATS, Format

_F32 = np.float32
_INF = _F32(np.inf)
_UNIT = {"float16": (2.0**-11, 2.0**-25, 65504.0, 65520.0)}
_UNIT["bfloat16"] = (2.0**-8, 2.0**-126, float.fromhex("0x1.fep127"), float.fromhex("0x1.ffp127"))


def bounds(
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
