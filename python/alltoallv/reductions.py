"""Which reductions are defined for which dtypes: what the kernels know."""

from __future__ import annotations

from alltoallv.errors import InvalidParamError

OPS = ("sum", "avg", "min", "max", "prod")
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
OTHERS = frozenset({"bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"})


def check_reduction(op: object, dtype: str) -> None:
    """To be called under the guard: an operation that the core alone refuses would leave the peers waiting.

    Args:
        op: What the user gave.
        dtype: The core's name of a dtype.

    Raises:
        InvalidParamError: no such operation, or not for this dtype.
    """
    if op not in OPS:
        raise InvalidParamError(f"op is {op!r}, expected {', '.join(OPS[:-1])} or {OPS[-1]}")
    if dtype not in FLOATS and (dtype not in OTHERS or op == "avg"):
        known = "float16, bfloat16, float32 or float64" + ("" if op == "avg" else ", bool or an integer")
        raise InvalidParamError(f"op '{op}' is not defined for dtype {dtype}, expected {known}")
