"""Datatypes: the elements of a message, and where they lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.dimensions import contiguous
from alltoallv.dtypes import numpy_dtype
from alltoallv.errors import InvalidParamError
from alltoallv.mpi.constants import ORDER_C, ORDER_FORTRAN

Offsets = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Where elements lie: in ``number`` rows of ``length``, ``distance`` apart, from ``first`` on."""

    first: int
    length: int
    distance: int
    number: int

    @property
    def end(self) -> int:
        return self.first + (self.number - 1) * self.distance + self.length

    def times(self, factor: int) -> Rows:
        """Returns the rows in units of which each element has ``factor``."""
        return Rows(factor * self.first, factor * self.length, factor * self.distance, self.number)

    def offsets(self) -> Offsets:
        """Returns the place of each element."""
        return np.add.outer(self.first + np.arange(self.number) * self.distance, np.arange(self.length)).ravel()


_ONE = Rows(0, 1, 1, 1)


class Datatype:
    """Elements of one NumPy dtype, at ``places`` (in elements) within ``extent`` elements, where the next begins.

    Derived types are made of one dtype: MPI's structs are NumPy's record dtypes here.
    """

    def __init__(self, dtype: npt.DTypeLike, name: str = "", places: Rows | Offsets = _ONE, extent: int = 1) -> None:
        self.dtype = np.dtype(dtype)
        self.elements = extent  # from one to the next
        self.name = name
        if isinstance(places, Rows):
            self.rows: Rows | None = places
            self.number = places.length * places.number
            self.last = places.end  # where its elements end
        else:
            self.offsets = places
            self.number = len(places)
            self.last = int(places.max(initial=-1)) + 1
            in_one = self.number > 0 and bool((np.diff(places) == 1).all())
            self.rows = Rows(int(places[0]), self.number, self.number, 1) if in_one else None
        # Whether what it describes is just its elements, one after the other.
        self.plain = self.number == extent and (extent == 0 or self.rows == Rows(0, extent, extent, 1))

    @functools.cached_property
    def offsets(self) -> Offsets:
        """Where its elements are."""
        assert self.rows is not None
        return self.rows.offsets()

    size = property(lambda self: self.dtype.itemsize * self.number, doc="Bytes of the elements.")
    extent = property(lambda self: self.dtype.itemsize * self.elements, doc="Bytes from one to the next.")
    typechar = property(lambda self: self.dtype.char, doc="NumPy's character.")
    is_predefined = property(lambda self: bool(self.name), doc="Whether MPI has it under a name.")

    def Get_size(self) -> int:
        return int(self.size)

    def Get_extent(self) -> tuple[int, int]:
        return 0, int(self.extent)

    def Get_name(self) -> str:
        return f"MPI_{self.name}" if self.name else ""

    def Commit(self) -> Datatype:
        return self

    def Free(self) -> None:
        """Holds nothing."""

    def Dup(self) -> Datatype:
        return Datatype(self.dtype, self.name, self.rows or self.offsets, self.elements)

    def tocode(self) -> str:
        return self.dtype.str[1:]

    def todtype(self) -> np.dtype[Any]:
        return self.dtype

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        return cls(numpy_dtype(code))

    def Create_contiguous(self, count: int) -> Datatype:
        return self._of(Rows(0, count, count, 1) if count > 0 else np.arange(count), self.elements * count)

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Datatype:
        if min(count, blocklength) > 0 and (stride >= blocklength or count == 1):
            return self._of(_rows(0, blocklength, stride, count), None)
        return self._of(np.add.outer(np.arange(count) * stride, np.arange(blocklength)).ravel(), None)

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Datatype:
        if len(blocklengths) != len(displacements):
            raise InvalidParamError(
                f"displacements has {len(displacements)} entries, expected {len(blocklengths)} as blocklengths",
                id=1379,
            )
        blocks = [begin + np.arange(n) for n, begin in zip(blocklengths, displacements, strict=True)]
        return self._of(np.concatenate([np.zeros(0, np.int64), *blocks]), None)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Datatype:
        return self.Create_indexed([blocklength] * len(displacements), displacements)

    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int = ORDER_C
    ) -> Datatype:
        if order not in (ORDER_C, ORDER_FORTRAN):
            raise InvalidParamError(f"order is {order!r}, expected ORDER_C or ORDER_FORTRAN", id=1380)
        if not len(sizes) == len(subsizes) == len(starts):
            raise InvalidParamError(
                f"sizes, subsizes and starts have {len(sizes)}, {len(subsizes)} and {len(starts)} entries, expected "
                "one for each dimension",
                id=1381,
            )
        for name, ends in (("subsizes", subsizes), ("starts", [a + b for a, b in zip(starts, subsizes, strict=True)])):
            if any(not 0 <= end <= size for end, size in zip(ends, sizes, strict=True)):
                raise InvalidParamError(f"{name} reaches outside of sizes, {list(sizes)}, in some dimension", id=1382)
        if order == ORDER_FORTRAN:
            sizes, subsizes, starts = sizes[::-1], subsizes[::-1], starts[::-1]
        number, strides = math.prod(subsizes), contiguous(sizes)
        rows = _core.in_rows(subsizes, strides) if number else None
        if rows is not None:
            first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
            length, distance = rows if rows[0] else (number, number)
            return self._of(_rows(first, length, distance, number // length), self.elements * math.prod(sizes))
        indices = np.arange(math.prod(sizes)).reshape(sizes)
        part = indices[tuple(slice(a, a + n) for a, n in zip(starts, subsizes, strict=True))]
        return self._of(part.ravel(), self.elements * indices.size)

    def Create_resized(self, lb: int, extent: int) -> Datatype:
        if lb != 0 or extent <= 0 or extent % self.dtype.itemsize:
            raise InvalidParamError(
                f"lb is {lb} and extent is {extent}, expected 0 and a multiple of {self.dtype.itemsize} bytes", id=1383
            )
        return Datatype(self.dtype, "", self.rows or self.offsets, extent // self.dtype.itemsize)

    def _of(self, places: Rows | npt.NDArray[Any], extent: int | None) -> Datatype:
        """Returns the type that has this one at each of the ``places``, in extents of this one."""
        if isinstance(places, Rows):
            if self.plain and self.elements:
                rows = places.times(self.elements)
                return Datatype(self.dtype, "", rows, rows.end if extent is None else extent)
            places = places.offsets()
        offsets = np.add.outer(places.astype(np.int64) * self.elements, self.offsets).ravel()
        if offsets.size and offsets.min() < 0:
            raise InvalidParamError("the type begins before its first element, expected displacements >= 0", id=1384)
        return Datatype(self.dtype, "", offsets, int(offsets.max(initial=-1)) + 1 if extent is None else extent)

    def __repr__(self) -> str:
        return f"MPI.{self.name}" if self.name else f"<Datatype of {self.number} {self.dtype}>"


def _rows(first: int, length: int, distance: int, number: int) -> Rows:
    """Returns rows, as one if there are no gaps between them."""
    total = length * number
    return Rows(first, total, total, 1) if number == 1 or distance == length else Rows(first, length, distance, number)


def of(value: Any) -> Datatype:
    """Returns the datatype that a message names: a `Datatype`, or a dtype or its name."""
    return value if isinstance(value, Datatype) else _plain(numpy_dtype(value))


@functools.lru_cache(maxsize=256)
def _plain(dtype: np.dtype[Any]) -> Datatype:
    return Datatype(dtype)


def _pair(code: str) -> np.dtype[Any]:
    return np.dtype([("value", code), ("index", "i")], align=True)


BYTE, CHAR, PACKED = Datatype("B", "BYTE"), Datatype("S1", "CHAR"), Datatype("B", "PACKED")
SIGNED_CHAR, SHORT, INT = Datatype("b", "SIGNED_CHAR"), Datatype("h", "SHORT"), Datatype("i", "INT")
LONG, LONG_LONG = Datatype("l", "LONG"), Datatype("q", "LONG_LONG")
UNSIGNED_CHAR, UNSIGNED_SHORT = Datatype("B", "UNSIGNED_CHAR"), Datatype("H", "UNSIGNED_SHORT")
UNSIGNED, UNSIGNED_LONG = Datatype("I", "UNSIGNED"), Datatype("L", "UNSIGNED_LONG")
UNSIGNED_LONG_LONG = Datatype("Q", "UNSIGNED_LONG_LONG")
FLOAT, DOUBLE, LONG_DOUBLE = Datatype("f", "FLOAT"), Datatype("d", "DOUBLE"), Datatype("g", "LONG_DOUBLE")
C_BOOL, C_FLOAT_COMPLEX = Datatype("?", "C_BOOL"), Datatype("F", "C_FLOAT_COMPLEX")
C_DOUBLE_COMPLEX, C_LONG_DOUBLE_COMPLEX = Datatype("D", "C_DOUBLE_COMPLEX"), Datatype("G", "C_LONG_DOUBLE_COMPLEX")
INT8_T, INT16_T = Datatype("i1", "INT8_T"), Datatype("i2", "INT16_T")
INT32_T, INT64_T = Datatype("i4", "INT32_T"), Datatype("i8", "INT64_T")
UINT8_T, UINT16_T = Datatype("u1", "UINT8_T"), Datatype("u2", "UINT16_T")
UINT32_T, UINT64_T = Datatype("u4", "UINT32_T"), Datatype("u8", "UINT64_T")
FLOAT_INT, DOUBLE_INT = Datatype(_pair("f"), "FLOAT_INT"), Datatype(_pair("d"), "DOUBLE_INT")
SHORT_INT, LONG_INT, INT_INT = (
    Datatype(_pair("h"), "SHORT_INT"),
    Datatype(_pair("l"), "LONG_INT"),
    Datatype(_pair("i"), "2INT"),
)
DATATYPE_NULL = Datatype("V1", "DATATYPE_NULL")
