"""Datatypes: the elements of a message, and where they lie; and messages as mpi4py's programs write them."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.exchanges import contiguous
from alltoallv.dtypes import numpy_dtype
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.mpi.constants import BOTTOM, ORDER_C, ORDER_FORTRAN

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

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return self.name if globals().get(self.name) is self else super().__reduce_ex__(protocol)

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


# Messages: ``x``, ``[x, type]``, ``[x, count, type]``, ``[x, counts, displs, type]``. What a message names becomes
# blocks of memory. Calls of `alltoallv.numpy` get these packed, one after the other: as a view where they lie so, else
# as a copy, which is written back where it received.


Array = npt.NDArray[Any]
Store = Callable[[], None]


class Blocks:
    """Blocks of one object's memory: ``counts`` of a type each, which begin at these bytes."""

    def __init__(
        self, name: str, array: Array, types: Sequence[Datatype], counts: Sequence[int], begins: Sequence[int]
    ) -> None:
        self.array, self.types, self.counts, self.begins = array, types, counts, begins
        self.dtype = dtype = types[0].dtype if types else np.dtype("B")
        self.sizes: list[int] = []
        self._memory = memory = _memory_order(array)
        item, held = dtype.itemsize, array.nbytes
        first = next_begin = begins[0] if begins else 0
        follows = first % item == 0  # one block the other, all of them plain
        for j, (kind, count, begin) in enumerate(zip(types, counts, begins, strict=True)):
            if kind.dtype != dtype:
                raise InvalidParamError(f"{name} has types of {dtype} and {kind.dtype}, expected one dtype", id=1355)
            if count < 0 or begin < 0:
                raise InvalidParamError(
                    f"{name} has count {count} and displacement {begin} in block {j}, expected >= 0", id=1356
                )
            self.sizes.append(count * kind.number)
            if not count:
                continue
            end = begin + ((count - 1) * kind.elements + kind.last) * item
            if kind.last and end > held:
                raise InvalidParamError(
                    f"{name} has {held} bytes, expected at least {end}, where block {j} ends", id=1357
                )
            follows = follows and kind.plain and begin == next_begin
            next_begin = end
        self._view: Array | None = None
        if memory is not None and follows and types:
            self._view = memory[first:next_begin].view(dtype)

    def block(self, j: int) -> Blocks:
        """Returns one of the blocks."""
        return Blocks("", self.array, [self.types[j]], [self.counts[j]], [self.begins[j]])

    def packed(self) -> Array:
        """Returns the elements of all blocks, one block after the other."""
        if self._view is not None:
            return self._view
        memory = self._memory if self._memory is not None else np.ascontiguousarray(self.array).reshape(-1).view("B")
        parts = [memory[at] for at in self._places()]
        return np.concatenate([np.zeros(0, np.uint8), *parts]).view(self.dtype)

    def target(self) -> tuple[Array, Store]:
        """Returns where to receive the packed elements, and what then puts them into the blocks."""
        if not self.array.flags.writeable:
            raise InvalidTensorError("the buffer that receives is read-only, expected a writable one", id=2093)
        if self._view is not None:
            return self._view, lambda: None
        data = self.packed()  # so that what is not received keeps its value
        return data, lambda: self.store(data)

    def store(self, data: Array) -> None:
        memory = self._memory
        if memory is None:
            memory = np.ascontiguousarray(self.array).reshape(-1).view("B")
        begin, every = 0, np.ascontiguousarray(data).view("B")
        for at in self._places():
            memory[at] = every[begin : begin + at.size]
            begin += at.size
        if self._memory is None:
            self.array[...] = memory.view(self.array.dtype).reshape(self.array.shape)

    def regions(self) -> tuple[Array, list[int], list[int]] | None:
        """Returns all memory, flat, where each block begins in it, and the length and distance of its rows.

        All are in elements; zeros for a block in one piece. None if one is not in rows at one distance.
        """
        item, displs, steps = self.dtype.itemsize, [0] * len(self.types), [0, 0] * len(self.types)
        if self._memory is None or self._memory.size % item:
            return None
        for j, (kind, count, begin) in enumerate(zip(self.types, self.counts, self.begins, strict=True)):
            if not count * kind.number:
                continue
            if (rows := kind.rows) is None or begin % item:
                return None
            distance, number = rows.distance, rows.number * count
            if count > 1 and rows.number == 1:
                distance = kind.elements
            elif count > 1 and rows.distance * rows.number != kind.elements:
                return None
            if distance < rows.length:
                return None
            displs[j] = begin // item + rows.first
            if number > 1 and distance > rows.length:
                steps[2 * j : 2 * j + 2] = rows.length, distance
        return self._memory.view(self.dtype), displs, steps

    def _places(self) -> list[npt.NDArray[np.int64]]:
        """Returns the bytes of each block."""
        item = self.dtype.itemsize
        places = []
        for kind, count, begin in zip(self.types, self.counts, self.begins, strict=True):
            elements = np.add.outer(np.arange(count) * kind.elements, kind.offsets).ravel()
            places.append(np.add.outer(begin + elements * item, np.arange(item)).ravel())
        return places


def _memory_order(array: Array) -> Array | None:
    """Returns the bytes of an array without gaps, as they lie in memory; None if there are gaps between them."""
    if not array.flags.c_contiguous:
        array = array.T
    return array.reshape(-1).view("B") if array.flags.c_contiguous else None


def array_of(name: str, value: Any) -> Array:
    """Returns the array over the memory of ``value``: an array, what has the buffer protocol, or another host array.

    Others have `__array_interface__` or DLPack, such as JAX's, torch's tensors and CuPy's in pinned memory.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, (str, list, tuple, int, float, complex, dict)) or value is None:
        raise InvalidTensorError(
            f"{name} is {value!r}, expected an array or another object with memory of its own", id=2094
        )
    try:
        view = memoryview(value)
    except TypeError:
        pass
    else:
        return np.asarray(view) if view.format != "c" else np.frombuffer(value, "S1")
    if hasattr(value, "__cuda_array_interface__"):
        raise InvalidTensorError(
            f"{name} is a {type(value).__name__} in a GPU's memory, expected one in host memory", id=2095
        )
    if hasattr(value, "__array_interface__"):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except Exception as error:  # whose classes are the exporter's
            raise InvalidTensorError(
                f"{name} is a {type(value).__name__} that cannot be read in host memory ({error})", id=2096
            ) from error
    raise InvalidTensorError(
        f"{name} is a {type(value).__name__}, expected an array or an object with a buffer", id=2097
    )


def _is_type(value: Any) -> bool:
    return isinstance(value, (Datatype, str, np.dtype, type))


def _unpack(name: str, message: Any, pairs: type[Any] | tuple[type[Any], ...]) -> tuple[Any, Any, Any, Any]:
    """Returns the object, the count or counts, the displacements and the type of a message.

    In place of the counts may stand a pair of counts and displacements, of one of these kinds of sequence.
    """
    if not isinstance(message, (list, tuple)):
        return message, None, None, None
    if not 2 <= len(message) <= 4:
        raise InvalidParamError(
            f"{name} has {len(message)} items, expected [object, counts, displacements, type] or some of them", id=1358
        )
    value, *layout = message
    kind = layout.pop() if len(layout) > 1 or _is_type(layout[0]) else None
    if kind is not None and not _is_type(kind):
        raise InvalidParamError(f"{name} ends with {kind!r}, expected a datatype: [object, counts, type]", id=1359)
    counts: Any
    counts, displs = (layout if len(layout) == 2 else [*layout, None]) if layout else (None, None)
    if len(layout) == 1 and isinstance(counts, pairs):
        if len(counts) != 2:
            raise InvalidParamError(
                f"{name} has {counts!r} in place of counts, expected (counts, displacements)", id=1360
            )
        counts, displs = counts
    return value, counts, displs, kind


def _integer(name: str, what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidParamError(f"{name} has {what} {value!r}, expected an integer", id=1361) from None


def check_number(name: str, what: str, values: Sized, size: int) -> None:
    """Raises InvalidParamError unless there is one of ``what`` for each rank."""
    if len(values) != size:
        raise InvalidParamError(f"{name} has {len(values)} {what}, expected {size}, one for each rank", id=1362)


def _integers(name: str, what: str, values: Any, size: int) -> list[int]:
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        values = values.tolist()
    if not hasattr(values, "__len__"):
        raise InvalidParamError(f"{name} has {what} {values!r}, expected {size}, one for each rank", id=1362)
    check_number(name, what, values, size)
    return [_integer(name, what, value) for value in values]


def _array_and_type(name: str, value: Any, kind: Any) -> tuple[Array, Datatype]:
    if value is BOTTOM or value is None:
        if value is None:
            return np.zeros(0, "B"), BYTE if kind is None else of(kind)
        raise NotImplementedError(
            f"{name} is MPI.BOTTOM: absolute addresses are not in alltoallv.mpi, expected an array"
        )
    array = array_of(name, value)
    return array, of(array.dtype if kind is None else kind)


def simple(name: str, message: Any, parts: int = 1) -> Blocks:
    """Returns the blocks of a message of equal parts; its count is that of one part."""
    value, count, displ, kind = _unpack(name, message, (tuple, list))
    array, datatype = _array_and_type(name, value, kind)
    begin = 0 if displ is None else _integer(name, "displacement", displ) * datatype.extent
    if count is None:
        room, extent = array.nbytes - begin, datatype.extent * parts
        if extent == 0 or room % extent:
            raise InvalidParamError(
                f"{name} has {room} bytes, expected a multiple of {extent}: {parts} part(s) of {datatype!r}", id=1363
            )
        count = room // extent
    count = _integer(name, "count", count)
    begins = [begin + j * count * datatype.extent for j in range(parts)]
    return Blocks(name, array, [datatype] * parts, [count] * parts, begins)


def vector(name: str, message: Any, size: int) -> Blocks:
    """Returns the blocks of a message with a count, and perhaps a displacement, for every rank."""
    value, counts, displs, kind = _unpack(name, message, tuple)
    array, datatype = _array_and_type(name, value, kind)
    if counts is None:
        elements, rest = divmod(array.nbytes, datatype.extent)
        if rest:
            raise InvalidParamError(
                f"{name} has {array.nbytes} bytes, expected a multiple of {datatype.extent}", id=1364
            )
        counts = [elements // size + (elements % size > j) for j in range(size)]
    if not hasattr(counts, "__len__") or np.ndim(counts) == 0:
        counts = [_integer(name, "count", counts)] * size
    counts = _integers(name, "counts", counts, size)
    if displs is None:
        displs = [0, *itertools.accumulate(counts[:-1])]
    elif not hasattr(displs, "__len__") or np.ndim(displs) == 0:
        displs = [_integer(name, "displacement", displs) * j for j in range(size)]
    displs = _integers(name, "displacements", displs, size)
    return Blocks(name, array, [datatype] * size, counts, [displ * datatype.extent for displ in displs])


def typed(name: str, message: Any, size: int) -> Blocks:
    """Returns the blocks of a message with a count, a displacement in bytes and a type for every rank, as bytes."""
    if not isinstance(message, (list, tuple)) or not 2 <= len(message) <= 4:
        raise InvalidParamError(f"{name} is {message!r}, expected [object, counts, displacements, types]", id=1365)
    value, *layout, types = message
    counts, displs = layout[0] if len(layout) == 1 else (layout if layout else (None, None))
    array, _ = _array_and_type(name, value, None)
    check_number(name, "types", types, size)
    counts = _integers(name, "counts", [1] * size if counts is None else counts, size)
    displs = _integers(name, "displacements", [0] * size if displs is None else displs, size)
    as_bytes = [_in_bytes(of(each)) for each in types]
    return Blocks(name, array, as_bytes, counts, displs)


def _in_bytes(kind: Datatype) -> Datatype:
    item = kind.dtype.itemsize
    if kind.rows is not None:
        return Datatype("B", "", kind.rows.times(item), kind.elements * item)
    return Datatype("B", "", np.add.outer(kind.offsets * item, np.arange(item)).ravel(), kind.elements * item)
