"""Says which reductions are defined for which dtypes, and makes plans of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alltoallv import _core
from alltoallv.errors import InvalidParamError

OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")
FLOATS = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic == "floating")
COMPLEX = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic == "complex")
OTHERS = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic in ("logical", "integer"))


def check_reduction(op: object, dtype: str, shown: object = None) -> None:
    """Raises InvalidParamError for an ``op`` that is none, or is not defined for a dtype, by the core's name.

    It is called under the guard: if the core alone refused it, the peers would wait. ``shown``: the user's dtype.
    """
    if op not in OPS:
        raise InvalidParamError(f"op is {op!r}, expected {', '.join(OPS[:-1])} or {OPS[-1]}")
    if op in ("band", "bor", "bxor"):
        defined, known = dtype in OTHERS, "bool or an integer"
    elif op == "avg":
        defined, known = dtype in FLOATS | COMPLEX, "float16, bfloat16, float32, float64, complex64 or complex128"
    else:
        defined = dtype in FLOATS | OTHERS or (op == "sum" and dtype in COMPLEX)
        known = "float16, bfloat16, float32 or float64, bool or an integer"
    if not defined:
        raise InvalidParamError(f"op '{op}' is not defined for dtype {shown or dtype}, expected {known}")


class ReductionPlan:
    """A reduction whose arguments have passed the checks."""

    __slots__ = ("_arguments", "_core", "_counts", "_more")

    def __init__(
        self,
        core: _core.Communicator,
        operator: str,
        dtype: str,
        op: str,
        counts: Sequence[int],
        shape: Sequence[int] | None,
        root: int = 0,
    ) -> None:
        """Plans ``"all_reduce"``, ``"reduce"`` to ``root``, or ``"reduce_scatter"``: rank j keeps ``counts[j]``.

        Ranks that know the ``shape`` of their input compare it.
        """
        self._core, self._arguments, self._counts = core, (operator, dtype, op), counts
        self._more: dict[str, Any] = {"root": root, "shape": shape}

    def run(self, input: int, output: int, timeout: float = -1, stream: int = 0) -> None:
        self._core.reduce(*self._arguments, input, output, self._counts, timeout, stream, **self._more)

    def submit(self, input: int, output: int, timeout: float = -1) -> _core.Work:
        return self._core.submit_reduce(*self._arguments, input, output, self._counts, timeout, **self._more)
