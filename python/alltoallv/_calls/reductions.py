"""Reductions: which are defined for which dtypes, and plans of them."""

from __future__ import annotations

from collections.abc import Sequence

from alltoallv import _core
from alltoallv.errors import InvalidParamError

OPS = ("sum", "avg", "min", "max", "prod")
FLOATS = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic == "floating")
OTHERS = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic in ("logical", "integer"))


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


class ReductionPlan:
    """A reduction that has passed its checks."""

    __slots__ = ("_arguments", "_core", "_counts")

    def __init__(self, core: _core.Communicator, operator: str, dtype: str, op: str, counts: Sequence[int]) -> None:
        """``"all_reduce"``, or ``"reduce_scatter"`` whose rank j keeps ``counts[j]`` elements."""
        self._core, self._arguments, self._counts = core, (operator, dtype, op), counts

    def run(self, input: int, output: int, timeout: float = -1) -> None:
        self._core.reduce(*self._arguments, input, output, self._counts, timeout)

    def submit(self, input: int, output: int, timeout: float = -1) -> _core.Work:
        return self._core.submit_reduce(*self._arguments, input, output, self._counts, timeout)

    def on_arrays(self, arrays: _core.Arrays) -> _core.ArrayCall:
        return self._core.reduce_on_arrays(*self._arguments, self._counts, arrays)
