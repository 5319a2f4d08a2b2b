"""Floats of 8 and 4 bits with scales of several kinds, in NumPy, by the published definitions, with ml_dtypes' types.

OCP "8-bit Floating Point" and "Microscaling Formats" (conversion: section 6.3), NVIDIA's NVFP4. Groups are rows of a
matrix of float32. docs/quantization.md describes what the definitions leave open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv.extras import extra
from alltoallv.testing.golden import dtype_of

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
