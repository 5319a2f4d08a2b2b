"""Holds which reductions are defined for which dtypes, and makes plans of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alltoallv import _core
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.launch import variables

FLOATS = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic == "floating")
COMPLEX = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic == "complex")
OTHERS = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic in ("logical", "integer"))


def check_reduction(op: object, dtype: str, shown: object = None) -> None:
    """Raises InvalidParamError for an ``op`` that is none, or is not defined for a dtype, by the core's name.

    It is called under the guard: if the core alone refused it, the peers would wait. ``shown``: the user's dtype.
    """
    _core.check_reduction(op, dtype, shown)


def check_order(comm: Any, operator: str, order: object) -> None:
    """Raises InvalidParamError, on all ranks, for an ``order`` other than None and "rank", that of host memory."""
    with guard(comm, operator):
        variables.order("order", order)


def check_no_order(comm: Any, order: object, leaves: object) -> None:
    """Raises InvalidParamError, on all ranks, for an ``order`` beside ``leaves``, which have one of their own."""
    if order is not None:
        with guard(comm, "all_reduce"):
            raise InvalidParamError(f"order is {order!r} and leaves is {leaves!r}, expected one of them", id=1150)


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
        leaves: int = 0,
    ) -> None:
        """Plans ``"all_reduce"``, ``"reduce"`` to ``root``, or ``"reduce_scatter"``: rank j keeps ``counts[j]``.

        Ranks that know the ``shape`` of their input compare it. With ``leaves``, of all ranks, the input of an
        all_reduce holds this rank's share of them, and ``counts`` divide the result.
        """
        self._core, self._arguments, self._counts = core, (operator, dtype, op), counts
        self._more: dict[str, Any] = {"root": root, "shape": shape, "leaves": leaves}

    def run(self, input: int, output: int, timeout: float = -1, stream: int = 0) -> None:
        self._core.reduce(*self._arguments, input, output, self._counts, timeout, stream, **self._more)

    def submit(self, input: int, output: int, timeout: float = -1) -> _core.Work:
        return self._core.submit_reduce(*self._arguments, input, output, self._counts, timeout, **self._more)
