"""What the operators of Triton's IR compute, with NumPy.

A value is an array, or a NumPy scalar. Integers are signed; an operator of unsigned ones views them so. bfloat16 and
float8 are kept as float32 with values that the type has: every operator rounds what it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from alltoallv_emulator.triton.ir import Type

__all__ = [
    "BINARY",
    "COMPARISONS",
    "CONVERSIONS",
    "DTYPES",
    "FUNCTIONS",
    "ROUNDED",
    "UNARY",
    "bits_of",
    "dtype_of",
    "from_bits",
    "rounded",
    "width_of",
]

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "index": np.int64,
    "ptr": np.int64, "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.float32,
    "f8E5M2": np.float32, "f8E4M3FN": np.float32, "f8E5M2FNUZ": np.float32, "f8E4M3FNUZ": np.float32,
}  # fmt: skip
_FLOAT8 = {
    "f8E5M2": torch.float8_e5m2, "f8E4M3FN": torch.float8_e4m3fn,
    "f8E5M2FNUZ": torch.float8_e5m2fnuz, "f8E4M3FNUZ": torch.float8_e4m3fnuz,
}  # fmt: skip
ROUNDED = {"bf16", *_FLOAT8}  # kept as float32
_BITS: dict[str, Any] = {"bf16": np.int16, **dict.fromkeys(_FLOAT8, np.int8)}


def dtype_of(kind: Type) -> Any:
    """Returns NumPy's dtype of a type's elements."""
    try:
        return DTYPES[kind.element]
    except KeyError:
        raise NotImplementedError(f"Triton's type {kind.element} is not among what the emulator has") from None


def width_of(kind: Type) -> int:
    """Returns the bytes of an element in memory."""
    return int(np.dtype(_BITS.get(kind.element, dtype_of(kind))).itemsize)


def rounded(values: Any, element: str) -> Any:
    """Rounds float32 values to the nearest of the type, to even if two are."""
    if element == "bf16":
        bits = np.asarray(values, np.float32).view(np.uint32)
        lost = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(values), np.float32(np.nan), lost.view(np.float32))
    if element in _FLOAT8:
        return _tensor(np.asarray(values, np.float32)).to(_FLOAT8[element]).float().numpy()
    return values


def bits_of(values: Any, element: str) -> Any:
    """Returns what memory holds for the values."""
    if element == "bf16":
        return (np.asarray(values, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.int16)
    if element in _FLOAT8:
        return _tensor(np.asarray(values, np.float32)).to(_FLOAT8[element]).view(torch.int8).numpy()
    return values


def from_bits(bits: Any, element: str) -> Any:
    """Returns the values of what memory holds."""
    if element == "bf16":
        return (np.asarray(bits).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if element in _FLOAT8:
        return _tensor(np.asarray(bits, np.int8)).view(_FLOAT8[element]).float().numpy()
    return np.asarray(bits).view(DTYPES[element])


def _tensor(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _by_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda x: function(_tensor(np.asarray(x))).numpy()


def unsigned(value: Any) -> Any:
    """Returns the same bits as unsigned integers."""
    value = np.asarray(value)
    return value if value.dtype == np.bool_ else value.view(f"u{value.dtype.itemsize}")


def _signed(value: Any) -> Any:
    value = np.asarray(value)
    return value if value.dtype.kind != "u" else value.view(f"i{value.dtype.itemsize}")


def _on_unsigned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: _signed(function(*map(unsigned, values)))


def _compared_unsigned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(unsigned(a), unsigned(b))


def _quotient(a: Any, b: Any) -> Any:
    safe = np.where(b == 0, np.ones_like(b), b)  # a device gives some value for a division by zero
    return (a - np.fmod(a, safe)) // safe


def _high(a: Any, b: Any) -> Any:
    """Returns the upper half of unsigned products."""
    a, b = unsigned(a), unsigned(b)
    if a.dtype.itemsize < 8:
        bits = np.uint64(8 * a.dtype.itemsize)
        return _signed(((a.astype(np.uint64) * b.astype(np.uint64)) >> bits).astype(a.dtype))
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    (a0, a1), (b0, b1) = (a & low, a >> half), (b & low, b >> half)
    middle = a1 * b0 + (a0 * b0 >> half)
    return _signed(a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half))


def _fma(a: Any, b: Any, c: Any) -> Any:
    return (np.asarray(a, np.float64) * b + c).astype(np.asarray(c).dtype)


def _clamp(x: Any, low: Any, high: Any) -> Any:
    return np.fmin(np.fmax(x, low), high)


# By the names of Triton's IR.
BINARY: dict[str, Callable[..., Any]] = {
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide,
    "tt.precise_divf": np.divide, "arith.remf": np.fmod, "arith.maxnumf": np.fmax, "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum, "arith.minimumf": np.minimum,
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply, "arith.divsi": _quotient,
    "arith.divui": _on_unsigned(_quotient), "arith.remsi": np.fmod, "arith.remui": _on_unsigned(np.fmod),
    "arith.floordivsi": np.floor_divide, "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift, "arith.shrsi": np.right_shift, "arith.shrui": _on_unsigned(np.right_shift),
    "arith.maxsi": np.maximum, "arith.minsi": np.minimum, "arith.maxui": _on_unsigned(np.maximum),
    "arith.minui": _on_unsigned(np.minimum), "tt.mulhiui": _high, "math.powf": np.power, "math.atan2": np.arctan2,
    "math.fma": _fma, "tt.clampf": _clamp, "math.copysign": np.copysign,
}  # fmt: skip
UNARY: dict[str, Callable[..., Any]] = {
    "arith.negf": np.negative, "math.absf": np.abs, "math.absi": np.abs, "math.exp": np.exp, "math.exp2": np.exp2,
    "math.expm1": np.expm1, "math.log": np.log, "math.log2": np.log2, "math.log1p": np.log1p, "math.log10": np.log10,
    "math.sqrt": np.sqrt, "tt.precise_sqrt": np.sqrt, "math.rsqrt": lambda x: 1 / np.sqrt(x), "math.sin": np.sin,
    "math.cos": np.cos, "math.tan": np.tan, "math.tanh": np.tanh, "math.sinh": np.sinh, "math.cosh": np.cosh,
    "math.asin": np.arcsin, "math.acos": np.arccos, "math.atan": np.arctan, "math.floor": np.floor,
    "math.ceil": np.ceil, "math.trunc": np.trunc, "math.roundeven": np.rint, "math.erf": _by_torch(torch.erf),
    "math.round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), "math.isnan": np.isnan, "math.isinf": np.isinf,
}  # fmt: skip
COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "slt": np.less, "sle": np.less_equal, "sgt": np.greater,
    "sge": np.greater_equal, "ult": _compared_unsigned(np.less), "ule": _compared_unsigned(np.less_equal),
    "ugt": _compared_unsigned(np.greater), "uge": _compared_unsigned(np.greater_equal),
    "oeq": np.equal, "one": lambda a, b: (a < b) | (a > b), "olt": np.less, "ole": np.less_equal, "ogt": np.greater,
    "oge": np.greater_equal, "ord": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "ueq": lambda a, b: ~((a < b) | (a > b)), "une": np.not_equal, "uno": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
# By names that comparisons of floats and of integers share.
for _name, _ordered in (("ult", "oge"), ("ule", "ogt"), ("ugt", "ole"), ("uge", "olt")):
    COMPARISONS[f"cmpf {_name}"] = lambda a, b, f=COMPARISONS[_ordered]: ~f(a, b)


def _to_integer(x: Any, dtype: Any) -> Any:
    return np.trunc(x).astype(dtype)


def _widened(x: Any, dtype: Any) -> Any:
    return -x.astype(dtype) if x.dtype == np.bool_ else x.astype(dtype)


CONVERSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "arith.truncf": lambda x, dtype: x.astype(dtype), "arith.extf": lambda x, dtype: x.astype(dtype),
    "tt.fp_to_fp": lambda x, dtype: x.astype(dtype), "arith.sitofp": _widened,
    "arith.uitofp": lambda x, dtype: unsigned(x).astype(dtype), "arith.fptosi": _to_integer,
    "arith.fptoui": lambda x, dtype: np.trunc(x).astype(f"u{np.dtype(dtype).itemsize}").view(dtype),
    "arith.trunci": lambda x, dtype: (x & 1 != 0) if dtype is np.bool_ else x.astype(dtype),
    "arith.extsi": _widened, "arith.extui": lambda x, dtype: unsigned(x).astype(dtype),
    "arith.index_cast": _widened, "tt.int_to_ptr": _widened, "tt.ptr_to_int": lambda x, dtype: x.astype(dtype),
}  # fmt: skip

# By their names in libdevice; the functions of `UNARY` and `BINARY` are there too.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name.removeprefix("math."): function for name, function in UNARY.items() if name.startswith("math.")},
    "reciprocal": lambda x: 1 / x, "relu": lambda x: np.maximum(x, 0), "acosh": np.arccosh, "asinh": np.arcsinh,
    "atanh": np.arctanh, "fabs": np.abs, "nearbyint": np.rint, "rint": np.rint, "erfinv": _by_torch(torch.erfinv),
    "lgamma": _by_torch(torch.lgamma), "gamma": _by_torch(lambda x: torch.exp(torch.lgamma(x))),
    "cyl_bessel_i0": _by_torch(torch.i0), "ilogb": lambda x: np.frexp(x)[1] - 1, "atan2": np.arctan2,
    "copysign": np.copysign, "fmod": np.fmod, "hypot": np.hypot, "nextafter": np.nextafter, "pow": np.power,
    "fma": _fma, "div_rz": lambda a, b: _toward_zero(np.asarray(a, np.float64) / b, np.asarray(a).dtype),
}  # fmt: skip


def _toward_zero(exact: Any, dtype: Any) -> Any:
    near = exact.astype(dtype)
    return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, dtype.type(0)), near)
