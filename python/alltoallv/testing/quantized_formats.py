"""Formats of codes, by the published definitions, with ml_dtypes' types, and how one vector becomes codes, in NumPy.

OCP "8-bit Floating Point" and "Microscaling Formats" (conversion: section 6.3), NVIDIA's NVFP4. Groups are rows of a
matrix of float32. docs/quantization.md describes what the definitions leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from alltoallv.extras import extra
from alltoallv.testing.golden import dtype_of
from alltoallv.testing.reference import quiet_nan

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_F32 = np.float32
_LEAST_NORMAL = _F32(2.0**-126)


@dataclass(frozen=True)
class Format:
    """Describes how elements are stored.

    Attributes:
        element: the type of codes in ml_dtypes; "int8" and "int4" are integers.
        most: the largest value of a code.
        scale: the type of a group's scale: "float32", or a one-byte type of ml_dtypes.
        group_size: elements of a group; 0: any number.
        rounds_up: whether a scale that is a power of two is rounded up.
        rotated: whether groups are rotated where that makes their scale smaller.
        spikes: whether the two largest magnitudes of a group are kept apart.
    """

    element: str
    most: float
    scale: str = "float32"
    group_size: int = 0
    rounds_up: bool = False
    rotated: bool = False
    spikes: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        if self.is_integer:
            return int(self.element[3:])
        return int(extra("ml_dtypes", "testing").finfo(dtype_of(self.element)).bits)

    @property
    def mask(self) -> np.int8:
        """The mask of a code's bits in a byte."""
        return np.int8(-1 if self.bits == 8 else (1 << self.bits) - 1)

    @property
    def shaped(self) -> bool:
        """True if groups are not encoded as they are."""
        return self.rotated or self.spikes

    @property
    def is_integer(self) -> bool:
        """True if codes are integers."""
        return self.element.startswith("int")


FORMATS = {
    "int8": Format("int8", 127),
    "int4": Format("int4", 7),
    "fp8_e4m3": Format("float8_e4m3fn", 448),
    "fp8_e5m2": Format("float8_e5m2", 57344),
    "mxfp8": Format("float8_e4m3fn", 448, "float8_e8m0fnu", 32, rounds_up=True),
    "mxfp8_e5m2": Format("float8_e5m2", 57344, "float8_e8m0fnu", 32, rounds_up=True),
    "mxfp4": Format("float4_e2m1fn", 6, "float8_e8m0fnu", 32),
    "nvfp4": Format("float4_e2m1fn", 6, "float8_e4m3fn", 16),
    "mxfp8_down": Format("float8_e4m3fn", 448, "float8_e8m0fnu", 32),
    "mxfp8_e5m2_down": Format("float8_e5m2", 57344, "float8_e8m0fnu", 32),
    "mxfp4_up": Format("float4_e2m1fn", 6, "float8_e8m0fnu", 32, rounds_up=True),
    "int6": Format("int6", 31),
    "int5": Format("int5", 15),
    "int3": Format("int3", 3),
    "int2": Format("int2", 1),
    "int4_rotated": Format("int4", 7, rotated=True),
    "int4_spikes": Format("int4", 7, spikes=True),
    "int8_rotated_spikes": Format("int8", 127, rotated=True, spikes=True),
    "int6_rotated_spikes": Format("int6", 31, rotated=True, spikes=True),
    "int5_rotated_spikes": Format("int5", 15, rotated=True, spikes=True),
    "int4_rotated_spikes": Format("int4", 7, rotated=True, spikes=True),
    "int3_rotated_spikes": Format("int3", 3, rotated=True, spikes=True),
    "int2_rotated_spikes": Format("int2", 1, rotated=True, spikes=True),
    "mxfp6_e3m2": Format("float6_e3m2fn", 28, "float8_e8m0fnu", 32, rounds_up=True),
    "mxfp6_e2m3": Format("float6_e2m3fn", 7.5, "float8_e8m0fnu", 32, rounds_up=True),
}


def tensor_scale(groups: Floats) -> np.float32:
    """Returns NVFP4's scale of the tensor, by which the largest group of finite numbers has the scale 448."""
    largest = np.max(np.abs(groups), axis=1, initial=0)
    return limited_tensor_scale(np.max(largest[np.isfinite(largest)], initial=_F32(0)) / _F32(6 * 448))


def limited_tensor_scale(scale: np.float32) -> np.float32:
    """Limits NVFP4's scale: no product of scales is subnormal, and none with the largest codes is infinite."""
    return _F32(np.clip(scale, _F32(2.0**-110), _F32(float.fromhex("0x1.86186p+116"))))


def byte_scales(groups: Floats, form: Format, tensor: np.float32) -> Bytes:
    """Returns the scales of groups, as the bytes that are stored."""
    largest = np.max(np.abs(groups), axis=1)
    largest = np.where(largest < _LEAST_NORMAL, _F32(0), largest)
    if form.scale == "float8_e8m0fnu":
        down = int(np.floor(np.log2(form.most)))
        if form.rounds_up:  # in float64 the quotient's exponent is exact
            fraction, exponents = np.frexp(largest.astype(np.float64) / form.most)
            exponents = np.minimum(exponents - (fraction == 0.5), 127 - down)
        else:
            exponents = np.frexp(largest)[1] - 1 - down
        exponents = np.where(largest == 0, -127, np.maximum(exponents, -127))
        wanted = np.ldexp(1.0, exponents)
    else:
        wanted = np.minimum(largest / _F32(form.most) / tensor, _F32(448))
    finite = np.isfinite(largest)
    kept = np.where(finite, wanted, _F32(1)).astype(_F32).astype(dtype_of(form.scale)).view(np.uint8)
    return np.where(finite, kept, 0xFF if form.scale == "float8_e8m0fnu" else 0x7F).astype(np.uint8)


def scales_of(stored: Bytes, form: Format, tensor: np.float32) -> Floats:
    """Returns the values of those bytes; NVFP4's are multiplied by the scale of the tensor."""
    scales: Floats = stored.view(dtype_of(form.scale)).astype(_F32)
    return scales if form.scale == "float8_e8m0fnu" else scales * tensor


def encode(groups: Floats, scales: Floats, form: Format) -> Bytes:
    """Returns codes of x / scale, one per byte, half to even, saturated; in groups that are not finite, 0 but for inf.

    Numbers below 2^-126 count as zeros of their sign.
    """
    column = scales[:, None]
    usual = np.isfinite(column) & (column != 0)
    inverse = np.where(usual, _F32(1) / np.where(usual, column, _F32(1)), _F32(0))
    values = np.where(np.abs(groups) < _LEAST_NORMAL, np.copysign(_F32(0), groups), groups) * inverse
    values = np.where(np.isinf(column) & np.isinf(groups), np.copysign(_F32(form.most), groups), values)
    values = np.where(np.isfinite(column) | (np.isinf(column) & np.isinf(groups)), values, _F32(0))
    most = _F32(form.most)
    codes: Bytes = np.clip(values, -most, most).astype(dtype_of(form.element)).view(np.uint8)
    return codes


def decode(codes: Bytes, form: Format) -> Floats:
    """Returns the values of codes, one per byte."""
    return codes.view(dtype_of(form.element)).astype(_F32)


# Quantizes one vector by the rules of docs/quantization.md; each group is a row of a matrix. Values are float32,
# float16 or bfloat16; arithmetic is float32, one operation at a time.


Codes = npt.NDArray[np.int8]
Overflow = Literal["saturate", "raise", "infinity"]

_ZERO = _F32(0)
_LEAST_SCALE = _F32(2.0**-125)
_LARGEST_SCALE = _F32(2.0**126)
_RUN = 2048  # elements of a group whose codes lie together


@dataclass(frozen=True, eq=False)
class Quantized:
    """Holds a vector in codes.

    Attributes:
        codes: planes of bits, one byte per element in formats of 8; uint8.
        scales: one per group; float32, or uint8.
        count: number of elements.
        group_size: elements per group; the last may be shorter.
        format: a key of `FORMATS`.
        tensor: NVFP4: the scale of the whole tensor.
        spikes: of every group, in formats that have them: indices, and bfloat16. None: no spike.
    """

    codes: npt.NDArray[np.uint8]
    scales: Array
    count: int
    group_size: int
    format: str
    tensor: np.float32 = _ZERO
    spikes: Spikes | None = None

    @property
    def form(self) -> Format:
        """The format's row of `FORMATS`."""
        return FORMATS[self.format]

    def record(self) -> npt.NDArray[np.uint8]:
        """Returns the scales as they travel: after the tensor's scale, or each before its group's spikes."""
        if self.form.spikes:
            index, value = self.apart
            entries = np.stack([index.astype("<u2"), value.view("<u2")], axis=2).reshape(-1, 4)
            return np.concatenate([self.scales.view(np.uint8).reshape(-1, 4), entries.view(np.uint8)], 1).reshape(-1)
        parts = [self.tensor.tobytes()] if self.form.scale == "float8_e4m3fn" else []
        return np.frombuffer(b"".join([*parts, self.scales.tobytes()]), np.uint8)

    @property
    def apart(self) -> Spikes:
        """The spikes of every group."""
        if self.spikes is not None:
            return self.spikes
        return np.full((self.scales.size, 2), NO_SPIKE), np.zeros((self.scales.size, 2), dtype_of("bfloat16"))


def named(bits: int = 8, format: str | None = None) -> str:
    """Returns the format; if it is None, the one of ``bits``."""
    if format is None and f"int{bits}" not in FORMATS:
        widths = sorted((form.bits for name, form in FORMATS.items() if name == f"int{form.bits}"), reverse=True)
        raise ValueError(f"bits is {bits}, expected {', '.join(map(str, widths[:-1]))} or {widths[-1]}")
    return f"int{bits}" if format is None else format


def code_bytes(count: int, group_size: int = 128, bits: int = 8) -> int:
    """Returns the bytes of the codes; every plane of every group begins at a byte."""
    groups, rest = divmod(count, group_size)
    return sum(groups * -(-group_size * width // 8) + -(-rest * width // 8) for width in _planes(bits))


def _planes(bits: int) -> list[int]:
    """Returns the widths of the planes, of which the first has the lowest bits."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def scale_of(largest: npt.ArrayLike, bits: int = 8) -> Floats:
    """Returns the scales of groups whose largest magnitudes are ``largest``: float32, possibly NaN, of any shape."""
    return _scale_of(largest, FORMATS[named(bits)].most)


def _scale_of(largest: npt.ArrayLike, largest_code: float) -> Floats:
    most, magnitudes = _F32(largest_code), np.asarray(largest, _F32)
    with np.errstate(all="ignore"):
        scale = np.maximum(magnitudes / most, _LEAST_SCALE)
        scale = np.where(np.isfinite(magnitudes), np.minimum(scale, _LARGEST_SCALE), scale)
        while (too_large := np.isfinite(scale) & np.isinf(scale * most)).any():
            scale = np.where(too_large, np.nextafter(scale, _F32(0)), scale)
        return canonical_nan(np.where(magnitudes < _LEAST_NORMAL, _F32(0), scale))


def quantize(
    x: Array,
    group_size: int | None = None,
    bits: int = 8,
    error: Floats | None = None,
    *,
    format: str | None = None,
    tensor: np.float32 | None = None,
) -> Quantized:
    """Returns codes and scales of ``x`` (flattened).

    Args:
        x: float32, float16 or bfloat16.
        group_size: elements per scale; default: the format's.
        bits: 8 or 4, for the formats int8 and int4.
        error: float32, as many elements as x: added first, then replaced by what the codes do not hold.
        format: a key of `FORMATS`; default: by ``bits``.
        tensor: the scale of the whole tensor in NVFP4; default: the scale of x.
    """
    name = named(bits, format)
    form = FORMATS[name]
    if group_size is None:
        group_size = form.group_size or 128
    if group_size < 1 or group_size != (form.group_size or group_size):
        raise ValueError(f"group_size is {group_size}, expected {form.group_size or 'at least 1'}")
    values = widened(x).reshape(-1)
    with np.errstate(all="ignore"):
        if error is not None:
            values = values + error.reshape(-1)
        unshaped = groups = _rows(values, group_size)
        kept: Array
        spikes = None
        if form.shaped:
            groups, turned, apart = shaped(unshaped, values.size, form)
            spikes = apart if form.spikes else None
        if form.scale == "float32":
            kept = scales = _scale_of(np.max(np.abs(groups), axis=1), form.most)
            if form.rotated:
                kept = scales = np.where(turned, -scales, scales)
        else:
            tensor = tensor_scale(groups) if tensor is None else tensor
            kept = byte_scales(groups, form, tensor)
            scales = scales_of(kept, form, tensor)
        if form.is_integer:
            codes = _codes(groups, scales[:, None], form.bits)
            numbers = codes.astype(_F32)
        else:
            codes = encode(groups, scales, form).view(np.int8)
            numbers = decode(codes.view(np.uint8), form)
        if error is not None:
            restored = numbers * scales[:, None]
            if form.shaped:
                restored = restore(restored, values.size, scales, apart, form)
            lost = np.where(np.isfinite(scales)[:, None], unshaped - restored, _F32(0))
            error.reshape(-1)[:] = lost.reshape(-1)[: values.size]
    packed = _pack(codes, form.bits, values.size)
    return Quantized(packed, kept, values.size, group_size, name, _F32(0) if tensor is None else tensor, spikes)


def codes_of(quantized: Quantized) -> Codes:
    """Returns one int8 per element; of a code of 4 bits only the lower half counts."""
    if quantized.form.bits == 8:
        return quantized.codes.view(np.int8)
    bits, begin, chunks = quantized.form.bits, 0, [np.zeros(0, np.int64)]
    for runs, length in _runs(quantized.count, _longest(quantized)):
        size = code_bytes(length, length, bits)
        rows = quantized.codes[begin : begin + runs * size].reshape(runs, size).astype(np.int64)
        begin, at, shift, codes = begin + runs * size, 0, 0, np.zeros((runs, length), np.int64)
        for width in _planes(bits):
            plane = rows[:, at : at + -(-length * width // 8)]
            parts = plane[:, :, None] >> np.arange(0, 8, width) & (1 << width) - 1
            codes |= parts.reshape(runs, -1)[:, :length] << shift
            at, shift = at + plane.shape[1], shift + width
        chunks.append(codes.reshape(-1))
    top = 1 << bits - 1
    return ((np.concatenate(chunks) ^ top) - top).astype(np.int8)


def _runs(count: int, group_size: int) -> list[tuple[int, int]]:
    """Returns numbers of runs, and their lengths, whose codes lie together: groups, or parts of long ones."""
    if group_size <= _RUN:
        parts = [(count // group_size, group_size), (1, count % group_size)]
    else:
        groups = [group_size] * (count // group_size) + [count % group_size]
        parts = [part for group in groups for part in ((group // _RUN, _RUN), (1, group % _RUN))]
    return [(runs, length) for runs, length in parts if runs and length]


def _longest(quantized: Quantized) -> int:
    return min(quantized.group_size, max(quantized.count, 1))


def dequantize(quantized: Quantized, dtype: str | npt.DTypeLike = "float32", overflow: Overflow = "saturate") -> Array:
    """Returns the product code * scale for every element, rounded to ``dtype``."""
    form = quantized.form
    with np.errstate(all="ignore"):
        scales = quantized.scales
        if form.scale != "float32":
            scales = scales_of(scales, form, quantized.tensor)
        codes = codes_of(quantized)
        numbers = codes.astype(_F32) if form.is_integer else decode((codes & form.mask).view(np.uint8), form)
    each = np.repeat(scales, _longest(quantized))[: quantized.count]
    with np.errstate(all="ignore"):
        products = canonical_nan(numbers * each)
        if form.shaped:
            rows = _rows(products, _longest(quantized))
            products = restore(rows, quantized.count, scales, quantized.apart, form).reshape(-1)
        return cast(products[: quantized.count], dtype, overflow)


def dequantize_sum(sources: Sequence[Quantized], average: bool = False) -> Floats:
    """Returns the sum of the dequantized sources in float32, in their order; ``average`` divides it by their number."""
    with np.errstate(all="ignore"):
        total: Floats = dequantize(sources[0])
        for source in sources[1:]:
            total = total + dequantize(source)
        return canonical_nan(total / _F32(len(sources)) if average else total)


def cast(values: Floats, dtype: str | npt.DTypeLike, overflow: Overflow = "saturate") -> Array:
    """Rounds float32 to ``dtype``, half to even.

    Raises:
        OverflowError: a finite value does not fit, and ``overflow`` is "raise".
    """
    target = dtype_of(dtype)
    with np.errstate(all="ignore"):
        result = values.astype(target)
    exceeded = np.isinf(result) & np.isfinite(values)
    return canonical_nan(handle_overflow(result, values, exceeded, overflow))


def handle_overflow(result: Array, values: Floats, exceeded: npt.NDArray[np.bool_], overflow: Overflow) -> Array:
    """Returns ``result``, where values that ``exceeded`` marks become what ``overflow`` says."""
    if overflow not in ("saturate", "raise", "infinity"):
        raise ValueError(f"overflow is {overflow!r}, expected saturate, raise or infinity")
    if overflow == "infinity" or not exceeded.any():
        return result
    if overflow == "raise":
        index = tuple(map(int, np.argwhere(exceeded)[0]))
        raise OverflowError(f"{values[index]} at {index} does not fit into {result.dtype.name}")
    largest = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}
    most = largest.get(result.dtype.name, float(np.finfo(_F32).max))
    return np.where(exceeded, np.copysign(most, values).astype(result.dtype), result)


def canonical_nan(values: Array) -> Array:
    """Returns the values, where every NaN becomes the positive quiet one without payload."""
    return np.where(np.isnan(values), quiet_nan(values.dtype), values)


def widened(x: Array) -> Floats:
    """Converts to float32, exactly."""
    if x.dtype.name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype is {x.dtype.name}, expected float32, float16 or bfloat16")
    with np.errstate(all="ignore"):
        return x.astype(_F32)


def _rows(values: Array, length: int) -> Array:
    """Returns rows of ``length`` elements, or of all if there are fewer; zeros fill the last one."""
    length = min(length, max(values.size, 1))
    return np.append(values, np.zeros(-values.size % length, values.dtype)).reshape(-1, length)


def _codes(groups: Floats, scales: Floats, bits: int) -> Codes:
    most = FORMATS[named(bits)].most
    quotients = np.clip(np.rint(groups * (_F32(1) / scales)), -most, most)
    signs = np.isinf(groups) * np.sign(groups)
    wanted = np.where(np.isinf(scales), signs * _F32(most), quotients)
    return np.where(np.isnan(scales) | (scales == 0), _F32(0), wanted).astype(np.int8)


def _pack(codes: Codes, bits: int, count: int) -> npt.NDArray[np.uint8]:
    """Packs rows of codes, of which the last may be filled up."""
    flat, begin, packed = codes.reshape(-1).view(np.uint8)[:count], 0, [np.zeros(0, np.uint8)]
    if bits == 8:
        return flat
    for runs, length in _runs(count, codes.shape[1]):
        rows, shift, planes = flat[begin : begin + runs * length].reshape(runs, length), 0, []
        for width in _planes(bits):
            parts = np.pad(rows >> shift & (1 << width) - 1, ((0, 0), (0, -length % (8 // width))))
            shifted = parts.reshape(runs, -1, 8 // width) << np.arange(0, 8, width, dtype=np.uint8)
            planes.append(np.bitwise_or.reduce(shifted, axis=2))
            shift += width
        packed.append(np.concatenate(planes, axis=1).reshape(-1))
        begin += runs * length
    return np.concatenate(packed).astype(np.uint8)


# Groups that are rotated, and spikes that are kept apart.


Spikes = tuple[npt.NDArray[np.uint16], Array]  # index in the group, bfloat16; two per group

NO_SPIKE = np.uint16(0xFFFF)


def shaped(groups: Floats, count: int, form: Format) -> tuple[Floats, npt.NDArray[np.bool_], Spikes]:
    """Returns what is encoded of ``count`` elements in rows, which rows are rotated, and their spikes.

    The last row may be filled up.
    """
    result = groups.copy()
    turned = np.zeros(len(groups), bool)
    index, value = np.full((len(groups), 2), NO_SPIKE), np.zeros((len(groups), 2), dtype_of("bfloat16"))
    for rows, length in _lengths(groups, count):
        part = result[rows, :length]
        if form.spikes:
            part, index[rows], value[rows] = _without_spikes(part)
        if form.rotated:
            part, turned[rows] = _rotated(part)
        result[rows, :length] = part
    return result, turned, (index, value)


def restore(products: Floats, count: int, scales: Floats, spikes: Spikes, form: Format) -> Floats:
    """Returns the values of rows of products of codes and scales."""
    result = products.copy()
    for rows, length in _lengths(products, count):
        part = result[rows, :length]
        if form.rotated:
            back = ((scales[rows] < 0) & np.isfinite(scales[rows]))[:, None]
            part = np.where(back, rotation(part), part)
        if form.spikes:
            for index, value in zip(spikes[0][rows].T, spikes[1][rows].T, strict=True):
                part = np.where(np.arange(length) == index[:, None], value.astype(_F32)[:, None], part)
        result[rows, :length] = part
    return result


def rotation(rows: Floats) -> Floats:
    """Multiplies every row by Hadamard matrices over the root of their size, one per binary digit of the length."""
    parts, begin, length = [], 0, rows.shape[1]
    for digit in range(length.bit_length() - 1, -1, -1):
        size = 1 << digit
        if not length & size:
            continue
        block = rows[:, begin : begin + size]
        step = 1
        while step < size:
            pairs = block.reshape(len(rows), size // (2 * step), 2, step)
            block = np.concatenate([pairs[:, :, :1] + pairs[:, :, 1:], pairs[:, :, :1] - pairs[:, :, 1:]], axis=2)
            block = block.reshape(len(rows), size)
            step *= 2
        parts.append(block * _F32(size**-0.5))
        begin += size
    return np.concatenate(parts, axis=1)


def _lengths(groups: Floats, count: int) -> list[tuple[slice, int]]:
    """Returns rows and their length: of whole groups, then of a shorter last one."""
    full, rest = divmod(count, groups.shape[1])
    return [(slice(0, full), groups.shape[1])] * bool(full) + [(slice(full, full + 1), rest)] * bool(rest)


def _without_spikes(rows: Floats) -> tuple[Floats, npt.NDArray[np.uint16], Array]:
    finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(rows).all(axis=1))
    order = np.argsort(-np.where(finite[:, None], np.abs(rows), 0), axis=1, kind="stable")[:, :2]
    largest = np.take_along_axis(rows, order, axis=1)
    value = np.clip(largest, -float.fromhex("0x1.fep127"), float.fromhex("0x1.fep127")).astype(_F32)
    value = np.where(np.abs(largest) < 2.0**-126, np.copysign(_F32(0), largest), value)
    rest = rows.copy()
    np.put_along_axis(rest, order, _F32(0), axis=1)
    index, values = np.full((len(rows), 2), NO_SPIKE), np.zeros((len(rows), 2), dtype_of("bfloat16"))
    index[finite, : order.shape[1]] = order[finite]
    values[finite, : order.shape[1]] = value[finite].astype(dtype_of("bfloat16"))
    return np.where(finite[:, None], rest, rows), index, values


def _rotated(rows: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    largest = np.max(np.abs(rows), axis=1)
    may: npt.NDArray[np.bool_] = np.asarray(
        (largest >= 2.0**-60) & (largest < 2.0**117)
    )  # no sum is subnormal or infinite
    rotated = rotation(np.where((np.abs(rows) < 2.0**-100) | ~may[:, None], _F32(0), rows))
    turned: npt.NDArray[np.bool_] = np.asarray(may & (np.max(np.abs(rotated), axis=1) < largest))
    return np.where(turned[:, None], rotated, rows), turned
