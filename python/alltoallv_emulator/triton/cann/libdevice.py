"""The functions of ``libdevice`` that Ascend has, for float32, float16 and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.language import core

_TYPES = ("fp32", "fp16", "bf16", "fp64")
_NAMES = {
    1: "acos acosh asin asinh atan atanh ceil cos cosh erf erfinv exp exp2 expm1 fabs floor gamma ilogb lgamma log "
    "log10 log1p log2 nearbyint reciprocal relu rint round rsqrt sin sinh sqrt tan tanh trunc cyl_bessel_i0",
    2: "atan2 copysign div_rz fmod hypot nextafter pow",
    3: "fma",
}


def _function(name: str, count: int) -> Callable[..., Any]:
    table = {(core.dtype(kind),) * count: (f"alltoallv_{name}", core.dtype(kind)) for kind in _TYPES}

    if count == 1:

        @core.extern
        def function(arg0: Any, _semantic: Any = None) -> Any:
            return core.extern_elementwise("", "", [arg0], table, is_pure=True, _semantic=_semantic)

    elif count == 2:

        @core.extern
        def function(arg0: Any, arg1: Any, _semantic: Any = None) -> Any:
            return core.extern_elementwise("", "", [arg0, arg1], table, is_pure=True, _semantic=_semantic)

    else:

        @core.extern
        def function(arg0: Any, arg1: Any, arg2: Any, _semantic: Any = None) -> Any:
            return core.extern_elementwise("", "", [arg0, arg1, arg2], table, is_pure=True, _semantic=_semantic)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Computes {name} of every element."
    return function


for _count, _listed in _NAMES.items():
    for _name in _listed.split():
        globals()[_name] = _function(_name, _count)


@core.extern
def isnan(arg0: Any, _semantic: Any = None) -> Any:
    """Returns where an element is not a number."""
    return _semantic.not_equal(arg0, arg0)


@core.extern
def isinf(arg0: Any, _semantic: Any = None) -> Any:
    """Returns where an element is infinite."""
    return _semantic.equal(core.abs(arg0, _semantic=_semantic), float("inf"))
