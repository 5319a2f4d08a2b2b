"""Describes what a quantized collective computes, and what it can be wrong by; see docs/quantization.md."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import integer
from alltoallv.errors import InvalidParamError, PeerMismatchError

Format = Literal[
    "int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4",
    "mxfp8_down", "mxfp8_e5m2_down", "mxfp4_up", "int6", "int5", "int3", "int2", "int4_rotated", "int4_spikes",
    "int8_rotated_spikes", "int6_rotated_spikes", "int5_rotated_spikes", "int4_rotated_spikes", "int3_rotated_spikes",
    "int2_rotated_spikes", "mxfp6_e3m2", "mxfp6_e2m3",
]  # fmt: skip
GroupSize = int | Literal["token", "tensor"]
Gather = Literal["full", "quantized"]
SumOp = Literal["sum", "avg"]
Overflow = Literal["saturate", "raise", "infinity"]

# the widest first
FLOATS = tuple(
    sorted((name for name in _core.dtypes if _core.dtypes[name].quantizes), key=lambda name: -_core.dtypes[name].size)
)


class Options(NamedTuple):
    """Holds a caller's options of a quantized collective: as given, unchecked, equal on all ranks.

    Scales, offset, ``gather`` and ``leaves`` are for all-reduces, ``op`` not for all-to-alls, ``quantize_gradient`` for
    these. ``group_size=None``: the format's usual one, or the row of an all-to-all. ``out_dtype`` is the framework's;
    None: the input's. See `alltoallv.numpy.quantized_all_reduce`.
    """

    scale: Any = None
    comm_quant_scale_1: Any = None
    comm_quant_scale_2: Any = None
    offset: float | None = None
    format: str = "int8"
    group_size: int | None = None
    gather: Gather = "full"
    op: SumOp = "sum"
    overflow: Overflow = "saturate"
    out_dtype: Any = None
    quantize_gradient: bool = False
    leaves: int | None = None

    def dynamic(self) -> bool:
        """True if every group has a scale of its own."""
        return self.scale is self.comm_quant_scale_1 is self.comm_quant_scale_2 is self.offset is None


@dataclass(frozen=True, slots=True)
class Quantization:
    """Describes how vectors become codes, and their sum a result; equal on all ranks.

    Attributes:
        format: The format of codes and scales, a key of `_core.code_formats`; docs/quantization.md has the table.
        group_size: Elements per scale; groups begin at element 0 of the flat vector.
        gather: For an all-reduce: ``"full"`` gathers the sum in the output's dtype, ``"quantized"`` quantizes it again.
        op: ``"avg"`` divides the sum by the number of its terms, before it is rounded or quantized.
        overflow: What a finite value becomes that the output's dtype cannot hold: ``"saturate"``: the largest finite
            value; ``"raise"``: an error on every rank; ``"infinity"``.
    """

    format: str = "int8"
    group_size: int = 128
    gather: Gather = "full"
    op: SumOp = "sum"
    overflow: Overflow = "saturate"

    @staticmethod
    def checked(
        format: str, group_size: int | None, gather: Gather = "full", op: SumOp = "sum", overflow: Overflow = "saturate"
    ) -> Quantization:
        """Returns a checked instance; instances of earlier calls are reused."""
        try:
            return _remembered(format, group_size, gather, op, overflow)
        except TypeError:  # an unhashable value is not valid, either
            return _checked(format, group_size, gather, op, overflow)

    @property
    def row(self) -> _core.CodeFormatInfo:
        """The format's row of the table."""
        row: _core.CodeFormatInfo = _core.code_formats[self.format]
        return row

    @property
    def bits(self) -> int:
        """Bits of a code; fewer than 8 lie in planes whose widths are the binary digits of their number."""
        return self.row.bits

    @property
    def has_floats(self) -> bool:
        """True if a record of scales consists of float32 numbers."""
        return self.row.has_floats

    @property
    def has_tensor_scale(self) -> bool:
        """True if the scales of groups are multiples of one float32 scale of the whole tensor."""
        return self.row.scale == "e4m3"

    def scale_bytes(self, count: int) -> int:
        """Returns the bytes of the scales of ``count`` elements."""
        return self.row.scale_bytes(self.groups(count))

    def groups(self, count: int) -> int:
        """Returns the number of scales of ``count`` elements."""
        return -(-count // self.group_size)

    def code_bytes(self, count: int) -> int:
        """Returns the bytes of the codes of ``count`` elements; every plane of every group begins at a byte."""
        return self.row.code_bytes(count, self.group_size)

    def part(self, count: int, size: int, rank: int) -> tuple[int, int]:
        """Returns first element and length of the part of ``count`` elements that a rank reduces in an all-reduce.

        Parts are equal shares of groups, fewer for the last ranks. The gather's error feedback belongs to this part.
        """
        share = -(-self.groups(count) // size) * self.group_size
        begin = min(rank * share, count)
        return begin, min(share, count - begin)


def coding(bits: Any, format: Any) -> Any:
    """Returns the format for `Quantization.checked`: ``format`` or, where that is None, the one of ``bits``."""
    if format is not None:
        return format
    return f"int{bits}" if type(bits) is int else f"int{integer(bits) or repr(bits)}"


def traveling(format: Any, group_size: Any) -> Quantization | None:
    """Returns how tensors travel that only move: as they are, where there is no format."""
    if format is None and group_size is not None:
        raise InvalidParamError(f"group_size is {group_size!r} without a format, expected None", id=1196)
    return None if format is None else Quantization.checked(format, group_size)


def grouping(group_size: Any, input: Any, leaves: Any = None) -> Any:
    """Returns the elements of a ``"token"`` (the input's last axis) or of the whole ``"tensor"``; else as given."""
    if not isinstance(group_size, str) or group_size not in ("token", "tensor"):
        return group_size
    shape = tuple(getattr(input, "shape", ()))[leaves is not None :] or (1,)
    return max(shape[-1], 1) if group_size == "token" else math.prod(max(n, 1) for n in shape)  # also without rows


def grouping_of(group_size: Any, rows: int, columns: int) -> Any:
    """Does `grouping` for a matrix that does not exist yet."""
    return {"token": max(columns, 1), "tensor": max(rows, 1) * max(columns, 1)}.get(group_size, group_size)


def _checked(format: Any, group_size: Any, *texts: Any) -> Quantization:
    row = _core.code_formats.get(format) if isinstance(format, str) else None
    if row is None:
        if isinstance(format, str) and format.startswith("int") and "_" not in format:
            widths = (each.bits for name, each in _core.code_formats.items() if name == f"int{each.bits}")
            *larger, least = map(str, sorted(widths, reverse=True))
            raise InvalidParamError(f"bits is {format[3:]}, expected {', '.join(larger)} or {least}", id=1197)
        raise InvalidParamError(f"format is {format!r}, expected one of {', '.join(_core.code_formats)}", id=1198)
    if group_size is None:
        group_size = row.group_size or 128
    number = integer(group_size)
    if row.group_size and number != row.group_size:
        raise InvalidParamError(f"group_size is {group_size!r}, expected {row.group_size} in format {format}", id=1199)
    if row.longest_group and not (number is not None and 1 <= number <= row.longest_group):
        raise InvalidParamError(
            f"group_size is {group_size!r}, expected 1 to {row.longest_group} in format {format}", id=1200
        )
    if number is None or not 1 <= number < 2**63:
        raise InvalidParamError(
            f"group_size is {group_size!r}, expected an integer of at least 1, below 2**63", id=1201
        )
    for name, value, kind in zip(("gather", "op", "overflow"), texts, (Gather, SumOp, Overflow), strict=True):
        choices = get_args(kind)
        if not isinstance(value, str) or value not in choices:
            raise InvalidParamError(
                f"{name} is {value!r}, expected {', '.join(choices[:-1])} or {choices[-1]}", id=1202
            )
    return Quantization(format, number, *texts)


_remembered = lru_cache(maxsize=256, typed=True)(_checked)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedReduction:
    """Holds a checked quantized reduction as every engine takes it; equal on all ranks.

    Attributes:
        operator: ``"quantized_all_reduce"`` or ``"quantized_reduce_scatter"``.
        dtype: The input's dtype, by the core's name: float32, float16, bfloat16; int8 with a shared scale.
        out_dtype: The output's dtype: float32, float16 or bfloat16.
        counts: reduce_scatter: elements of every rank's part; all_reduce: one entry, all elements.
        quantization: The dynamic mode; with scales only ``overflow`` counts.
        scale: A shared scale: one value, or one per entry of the last axis. With ``scale_2`` the first of two.
        scale_2: The second of two shared scales, as many as ``scale``.
        offset: Added to every rank's codes, with a shared scale.
        shape: That of the input; None if only the number of elements must be equal on all ranks.
        bound: Whether it also tells what the output can be wrong by.
        leaves: If not 0, the input holds this rank's share of so many vectors of ``count`` elements, added in a tree.
    """

    operator: str
    dtype: str
    out_dtype: str
    counts: tuple[int, ...]
    quantization: Quantization
    scale: npt.NDArray[np.float32] | None = None
    scale_2: npt.NDArray[np.float32] | None = None
    offset: float = 0.0
    shape: tuple[int, ...] | None = None
    bound: bool = False
    leaves: int = 0

    def bounds(self, rank: int) -> int:
        """Returns the number of groups of a rank's output, each of which has a bound."""
        return self.quantization.groups(self.counts[rank if len(self.counts) > 1 else 0])

    @property
    def count(self) -> int:
        """Elements of a vector."""
        return sum(self.counts)


# Another package registers its quantization kernels for a kind of device here.


# Providers by device type. A provider returns None if it has no kernels after all.
providers: dict[str, Callable[[], Any]] = {}


# Bounds on what a quantized collective can be wrong by, and the choice of a format by one.


_INFINITY_BITS = 0x7F800000
#: Of the output's dtypes: half a unit in the last place, relative; the least error; the largest value.
_ROUNDING = {
    "float32": (0.0, 0.0, math.inf),
    "float16": (2.0**-11, 2.0**-25, 65504.0),
    "bfloat16": (2.0**-8, 2.0**-126, float.fromhex("0x1.fep127")),
}


class Bounded(NamedTuple):
    """Holds the result of a quantized collective that was asked for a bound.

    Attributes:
        output: What the call returns without a bound.
        bound: float32, one value per group: no element of the group is further from the exact result. inf where a
            group holds inf or NaN. ``[groups]``; of a quantized_all_to_all ``[rows, groups of a row]``.
        format: The format that was taken, such as ``"int8"``.
    """

    output: Any
    bound: Any
    format: str


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Holds what a caller wants to know or to keep, unchecked: ``bound`` and ``max_error``."""

    bound: Any
    max_error: Any = None
    chosen: str | None = None  # the format that the caller has given beside max_error, as the argument

    @staticmethod
    def asked(bound: Any, max_error: Any, bits: Any, format: Any) -> Accuracy | None:
        """Returns None where the caller asks for neither."""
        if max_error is None:
            return Accuracy(bound) if bound else None
        conflict = f"format is {format!r}" if format is not None else None if bits == 8 else f"bits is {bits!r}"
        return Accuracy(bound, max_error, conflict)

    def check(self, options: Options, feedback: Any) -> None:
        """Raises InvalidParamError for a ``max_error`` that is not one, or that other arguments exclude."""
        if isinstance(self.max_error, bool | str) or not _is_positive(self.max_error):
            raise InvalidParamError(f"max_error is {self.max_error!r}, expected a number from 1e-37 to 3e38", id=1172)
        if self.chosen is not None:
            raise InvalidParamError(f"max_error is given and {self.chosen}, expected one or the other", id=1173)
        if not options.dynamic():
            raise InvalidParamError("max_error is given with a shared scale, expected the dynamic mode", id=1174)
        if feedback is not None or options.leaves is not None:
            excluded = "leaves" if feedback is None else "error_feedback"
            raise InvalidParamError(f"max_error is given with {excluded}, expected a call without it", id=1175)

    def word(self, magnitude: int) -> int:
        """Returns what a rank tells its peers: the bits of ``max_error`` and of its input's largest magnitude."""
        return magnitude << 32 | int.from_bytes(struct.pack("<f", self.max_error), "little")


def accuracy_argument(accuracy: Accuracy | None) -> dict[str, Any]:
    """Returns the argument by which a caller asks for a bound, for `exclude`."""
    if accuracy is None:
        return {}
    return {"bound": accuracy.bound} if accuracy.max_error is None else {"max_error": accuracy.max_error}


def _is_positive(value: Any) -> bool:
    try:
        return 1e-37 <= float(value) <= 3e38
    except (TypeError, ValueError, OverflowError):
        return False


def chosen_format(
    words: Sequence[int],
    options: Options,
    count: int,
    out_dtype: str,
    row: bool = False,
    offers: Callable[[Quantization], bool] = lambda spec: True,
) -> Options:
    """Returns the options with the format of the fewest bytes that keeps every rank's ``max_error``, the same on all.

    Args:
        words: Every rank's `Accuracy.word`.
        options: The caller's; ``gather`` and ``op`` count. A ``group_size`` leaves the formats that take it.
        count: Elements of the vector, or of a row.
        out_dtype: The output's, by the core's name.
        row: An all-to-all of rows: no sum, and a row is a group where nothing is said.
        offers: Returns whether the engine has a format.

    Raises:
        PeerMismatchError: the ranks have different errors to keep.
        InvalidParamError: no format keeps it, on all ranks alike.
    """
    wanted = [struct.unpack("<f", (word & 0xFFFFFFFF).to_bytes(4, "little"))[0] for word in words]
    magnitudes = [word >> 32 for word in words]
    for rank, each in enumerate(wanted):
        if each != wanted[0]:
            raise PeerMismatchError(f"rank 0 has max_error {wanted[0]:g}, rank {rank} has max_error {each:g}", id=3020)
    for rank, magnitude in enumerate(magnitudes):
        if magnitude >= _INFINITY_BITS:
            raise InvalidParamError(
                f"max_error is {wanted[0]:g}, but the input of rank {rank} holds inf or NaN, which have no bound",
                id=1176,
            )
    largest = [float(np.uint32(magnitude).view(np.float32)) for magnitude in magnitudes]
    candidates = []
    for name, form in _core.code_formats.items():
        group_size = options.group_size
        if group_size is None and row and not form.group_size:
            group_size = max(count, 1)
        fits = group_size is None or form.group_size in (0, group_size)
        if not fits or form.rotated or form.spikes:  # by the largest magnitude alone they promise no less than others
            continue
        spec = Quantization.checked(name, group_size, options.gather, options.op, options.overflow)
        if not offers(spec):
            continue
        ranks = [max(largest)] if row else largest
        candidates.append((spec.code_bytes(count) + spec.scale_bytes(count), worst_error(spec, ranks, out_dtype), spec))
    kept = [each for each in candidates if each[1] <= wanted[0]]
    if not kept:
        _, best, spec = min(candidates, key=lambda each: each[1])
        raise InvalidParamError(
            f"max_error is {wanted[0]:g}, but the best bound of a format is {best:.6g}, "
            f"of {spec.format} in groups of {spec.group_size}",
            id=1177,
        )
    spec = min(kept, key=lambda each: each[:2])[2]
    return options._replace(format=spec.format, group_size=spec.group_size)


def worst_error(spec: Quantization, largest: Sequence[float], out_dtype: str) -> float:
    """Returns what no bound of a sum exceeds if ``largest`` are the largest magnitudes of the ranks, all finite."""
    size, name = len(largest), spec.format
    codes = max(error for error in _core.code_errors(name, size) if math.isfinite(error))
    errors, values, tensors = 0.0, 0.0, 0.0
    for magnitude in largest:
        scale, tensor = _largest_scale(name, magnitude)
        errors, values, tensors = errors + codes * scale, values + magnitude + codes * scale, tensors + tensor
    if spec.op == "avg":
        errors, values, tensors = errors / size, values / size, tensors / size
    values *= 1 + 2.0**-20
    if spec.gather == "quantized":
        scale = 448 * tensors if tensors else _largest_scale(name, values)[0]
        errors, values = errors + codes * scale, values + codes * scale
    unit, least, most = _ROUNDING[out_dtype]
    if values * (1 + 2.0**-20) > float(np.finfo(np.float32).max) or (spec.overflow == "infinity" and values > most):
        return math.inf
    errors += values * unit + least + max(values - most, 0.0)
    return errors * (1 + (size + 20) * 2.0**-22) + (size + 2) * 2.0**-122


def _largest_scale(name: str, magnitude: float) -> tuple[float, float]:
    """Returns the largest scale by which errors count in a group up to this magnitude, and NVFP4's of the tensor."""
    form, above = _core.code_formats[name], 1 + 2.0**-20
    if form.scale == "float32":
        scale = max(magnitude / form.most, 2.0**-125) * above
        return (math.inf if form.bits < 4 and scale >= 2.0**126 else scale), 0.0
    if form.scale == "e8m0":
        (part, power), (most, its_power) = math.frexp(magnitude), math.frexp(form.most)
        power += form.rounds_up and part > most
        byte = 127 + power - its_power if magnitude else 0
        return float(_core.scale_errors(name)[min(max(byte, 0), 255 - its_power)]), 0.0
    tensor = max(magnitude / (448 * form.most), 2.0**-110) * above
    return 448 * tensor, tensor
