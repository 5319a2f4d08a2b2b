"""Reductions: MPI's operators, and those that programs make of their own functions.

The core reduces what it has kernels for; everything else is gathered and combined here, on every rank in the order of
ranks, so that all ranks get the same bits either way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv.dtypes import core_name
from alltoallv.errors import AllToAllVError, InvalidParamError
from alltoallv.mpi.datatypes import Datatype

Array = npt.NDArray[Any]
Function = Callable[..., Any]


class Op:
    """A reduction operator; called with two objects, it returns what it makes of them.

    Attributes:
        core: The core's name of it, if it has one for numbers.
    """

    def __init__(self, name: str = "", core: str = "", objects: Function | None = None, arrays: Function | None = None):
        self.name, self.core = name, core
        self._objects, self._arrays = objects, arrays
        self._function: Function | None = None
        self._commute = True

    @classmethod
    def Create(cls, function: Function, commute: bool = False) -> Op:
        """Makes an operator of ``function(in_memory, inout_memory, datatype)``, which leaves its result in the second.

        Both are writable memory of bytes. In calls for objects it is called with two objects and None, and returns the
        result. Operands come in the order of ranks whether it commutes or not.
        """
        if not callable(function):
            raise InvalidParamError(f"function is {function!r}, expected a function", id=1387)
        op = cls()
        op._function, op._commute = function, bool(commute)
        return op

    def Free(self) -> None:
        """Holds nothing."""

    def Is_commutative(self) -> bool:
        return self._commute

    is_commutative = property(Is_commutative)
    is_predefined = property(lambda self: bool(self.name))

    def __call__(self, x: Any, y: Any) -> Any:
        if self._function is not None:
            return self._function(x, y, None)
        if self._objects is None:
            raise InvalidParamError(f"op is {self!r}, which combines no objects", id=1388)
        return self._objects(x, y)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return self.name or super().__reduce_ex__(protocol)  # MPI's own are the same object on every rank

    def __repr__(self) -> str:
        return f"MPI.{self.name}" if self.name else "<Op of a function>"

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Combines two arrays of this rank, and leaves the result in the second."""
        from alltoallv.mpi.datatypes import simple

        x, y = simple("inbuf", inbuf), simple("inoutbuf", inoutbuf)
        if x.dtype != y.dtype or x.sizes != y.sizes:
            raise InvalidParamError(
                f"inoutbuf has {y.sizes[0]} {y.dtype}, expected {x.sizes[0]} {x.dtype} as inbuf", id=1389
            )
        target, store = y.target()
        target[...] = self.combine(x.packed(), target, y.types[0])
        store()

    def reduces(self, dtype: np.dtype[Any]) -> bool:
        """Returns whether the core does it for arrays of a dtype, with this meaning."""
        if not self.core:
            return False
        try:
            _core.check_reduction(self.core, core_name(dtype), dtype)
        except AllToAllVError:
            return False
        return True

    def combine(self, x: Array, y: Array, kind: Datatype) -> Array:
        """Returns x op y, for flat arrays of one dtype."""
        if self._function is not None:
            result = y.copy()
            self._function(x.copy().view("B").data, result.view("B").data, kind)
            return result
        if self._arrays is None:
            raise InvalidParamError(f"op is {self!r}, which is not defined for {x.dtype}", id=1390)
        try:
            combined: Array = np.asarray(self._arrays(x, y)).astype(x.dtype, copy=False)
        except (TypeError, ValueError, IndexError) as error:
            raise InvalidParamError(f"op is {self!r}, which is not defined for {x.dtype} ({error})", id=1391) from error
        return combined

    def fold(self, parts: Sequence[Array], kind: Datatype) -> Array:
        result = parts[0]
        for part in parts[1:]:
            result = self.combine(result, part, kind)
        return result

    def check(self, kind: Datatype) -> None:
        """Raises InvalidParamError if it is not defined for elements of a type."""
        if self._function is None:
            self.combine(np.zeros(1, kind.dtype), np.zeros(1, kind.dtype), kind)


def as_op(value: Any) -> Op:
    if not isinstance(value, Op):
        raise InvalidParamError(f"op is {value!r}, expected one of MPI's operators or an Op", id=1392)
    return value


def _located(better: Function) -> tuple[Function, Function]:
    """Returns what chooses one of two pairs of a value and its index: of objects, of arrays; of equals the lower."""

    def objects(x: Any, y: Any) -> Any:
        (u, i), (v, j) = x, y
        if better(u, v):
            return x
        return y if better(v, u) else (u, min(i, j))

    def arrays(x: Array, y: Array) -> Array:
        if x.dtype.names is None or len(x.dtype.names) != 2:
            raise TypeError("expected pairs of a value and an index, such as MPI.DOUBLE_INT")
        value, index = x.dtype.names
        first = better(x[value], y[value]) | ((x[value] == y[value]) & (x[index] <= y[index]))
        return np.where(first, x, y)

    return objects, arrays


def _logical(function: Function) -> tuple[Function, Function]:
    return lambda x, y: bool(function(bool(x), bool(y))), lambda x, y: function(x != 0, y != 0)


_not_logical = (operator.and_, np.bitwise_and), (operator.or_, np.bitwise_or), (operator.xor, np.bitwise_xor)
SUM = Op("SUM", "sum", operator.add, np.add)
PROD = Op("PROD", "prod", operator.mul, np.multiply)
MAX = Op("MAX", "max", lambda x, y: y if y > x else x, np.maximum)
MIN = Op("MIN", "min", lambda x, y: y if y < x else x, np.minimum)
BAND, BOR, BXOR = (Op(f"B{n}", f"b{n.lower()}", *f) for n, f in zip(("AND", "OR", "XOR"), _not_logical, strict=True))
LAND, LOR = Op("LAND", "", *_logical(operator.and_)), Op("LOR", "", *_logical(operator.or_))
LXOR = Op("LXOR", "", *_logical(operator.xor))
MAXLOC, MINLOC = Op("MAXLOC", "", *_located(operator.gt)), Op("MINLOC", "", *_located(operator.lt))
REPLACE = Op("REPLACE", "", lambda x, y: y, lambda x, y: y)
NO_OP = Op("NO_OP", "", lambda x, y: x, lambda x, y: x)
OP_NULL = Op("OP_NULL")
