"""Checks quantized collectives as users call them, for every front end; an adapter reads the tensors. Error
feedback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.adapters import A, Adapter, not_writable, wrong_dtype
from alltoallv._calls.counts import Counts, Layout, as_counts, integer, scaled, shares, split_layout
from alltoallv._calls.guard import Member
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.quantization.spec import FLOATS, Bounded, Options, Quantization, QuantizedReduction

Floats = npt.NDArray[np.float32]
SCALES = Options._fields[:3]


@dataclass(frozen=True, slots=True)
class Reduction(Generic[A]):
    """Holds a quantized reduction that has passed this rank's checks, with its tensors and its error feedback."""

    request: QuantizedReduction
    output: A
    input: A
    error: Any = None
    gather_error: Any = None
    bounds: Any = None

    @property
    def result(self) -> Any:
        """What the call returns: the output, or that with its bound."""
        return (
            self.output if self.bounds is None else Bounded(self.output, self.bounds, self.request.quantization.format)
        )


def all_reduce(
    adapter: Adapter[A],
    comm: Member,
    input: A,
    options: Options,
    out: A | None,
    feedback: Feedback[Any] | None,
    bound: bool = False,
) -> Reduction[A]:
    """Checks and returns a quantized_all_reduce; called under the guard."""
    x = adapter.read("input", input)
    shape, dtype = tuple(x.shape), adapter.dtype(x)
    quantization = Quantization.checked(
        options.format, options.group_size, options.gather, options.op, options.overflow
    )
    first, second = _scales(adapter, options, quantization, shape)
    leaves = 0 if options.leaves is None else _core.checked_leaves(options.leaves, shape, comm.size)
    has_feedback = feedback is not None
    states = has_feedback, has_feedback and options.gather == "quantized"
    _core.check_quantized_all_reduce(quantization.format, options.dynamic(), bound, *states, leaves)
    if options.scale is not None and dtype != "int8":
        raise InvalidTensorError(f"input has dtype {dtype}, expected int8 with a shared scale", 13, id=2052)
    if options.scale is None:
        check_float(dtype)
    out_dtype = output_dtype(adapter, options, dtype if options.scale is None else "float16")
    offset = 0.0 if options.offset is None else _float32("offset", options.offset)
    _float32(f"the sum of {comm.size} ranks' offset {offset:g}", comm.size * offset)
    into = shape[1:] if leaves else shape
    terms = (math.prod(into),), quantization, first, second, offset, shape, bound, leaves
    request = QuantizedReduction("quantized_all_reduce", dtype, out_dtype, *terms)
    return _reduction(adapter, comm, request, x, into, out, feedback)


def reduce_scatter(
    adapter: Adapter[A],
    comm: Member,
    input: A,
    recv_counts: Counts | None,
    options: Options,
    out: A | None,
    feedback: Feedback[Any] | None,
    bound: bool = False,
) -> Reduction[A]:
    """Checks and returns a quantized_reduce_scatter of ``recv_counts[j]`` rows for rank j, under the guard."""
    x = adapter.read("input", input)
    row, dtype = _core.row_size(x.shape), adapter.dtype(x)
    rows = shares("recv_counts", recv_counts, "input", x.shape[0], comm.size)
    quantization = Quantization.checked(options.format, options.group_size, "full", options.op, options.overflow)
    check_float(dtype)
    counts, out_dtype = tuple(scaled(rows, row)), output_dtype(adapter, options, dtype)
    request = QuantizedReduction(
        "quantized_reduce_scatter", dtype, out_dtype, counts, quantization, shape=tuple(x.shape), bound=bound
    )
    return _reduction(adapter, comm, request, x, (rows[comm.rank], *x.shape[1:]), out, feedback)


def _reduction(
    adapter: Adapter[A],
    comm: Member,
    request: QuantizedReduction,
    x: A,
    shape: tuple[int, ...],
    out: A | None,
    feedback: Feedback[Any] | None,
) -> Reduction[A]:
    if out is None:
        out = adapter.allocate(shape, request.out_dtype, x)
    else:
        _check_output(adapter, out, request.out_dtype, shape)
        target, source = adapter.region(out), adapter.region(x)
        if request.operator == "quantized_reduce_scatter" or request.leaves or target != source:
            _core.check_apart(target, source)
    error, gather_error = adapter.feedback.arrays_of(feedback, request, comm.size, comm.rank, x)
    bounds = adapter.allocate((request.bounds(comm.rank),), "float32", x) if request.bound else None
    return Reduction(request, out, x, error, gather_error, bounds)


def _check_output(adapter: Adapter[A], out: Any, dtype: str, shape: tuple[int, ...]) -> None:
    adapter.check("out", out)
    if (own_dtype := adapter.dtype(out)) != dtype:
        raise wrong_dtype("out", own_dtype, dtype)
    if not adapter.writable(out):
        raise not_writable("out")
    _core.check_shape("out", out.shape, shape)


@dataclass(frozen=True, slots=True)
class Rows(Generic[A]):
    """Holds a quantized_all_to_all that has passed this rank's checks.

    Attributes:
        input: Contiguous rows of ``length`` elements.
        dtype, out_dtype: The dtypes of the input and of the received rows, by the core's names.
        sends, recvs: Rows for every rank, and from every rank; None: the peers announce them.
        options: As the caller gave them.
        bound: Whether this rank wants to know what the rows it receives can be wrong by.
    """

    input: A
    length: int
    quantization: Quantization
    dtype: str
    out_dtype: str
    sends: list[int]
    recvs: list[int] | None
    options: Options
    bound: bool = False

    def layout(self, stride: int) -> Layout:
        """Returns the layout of rows of ``stride`` bytes; nothing is received where counts are learnt."""
        return split_layout(self.sends, self.recvs or [], stride)

    def digest(self) -> int:
        """Returns what ranks must agree on beside the bytes of a row, for `_core.Plan`."""
        quantization, by_code = self.quantization, bool(self.options.quantize_gradient)
        return _core.quantized_row_terms(
            quantization.format, quantization.group_size, self.dtype, self.out_dtype, quantization.overflow, by_code
        )

    def must_fit(self) -> bool:
        """Returns whether the sender has to look for values that do not fit the output's dtype."""
        return self.quantization.overflow == "raise" and self.out_dtype != "float32"

    def overflow_text(self) -> str:
        """Returns the text of the error for a value that does not fit."""
        return f"a row of the input holds a value that {self.out_dtype} cannot"

    def received(self) -> Quantization:
        """Returns how rows from peers are decoded: with "raise" the sender has already found values that do not fit."""
        return (
            replace(self.quantization, overflow="saturate")
            if self.quantization.overflow == "raise"
            else self.quantization
        )


def rows(
    adapter: Adapter[A],
    comm: Member,
    input: A,
    send_counts: Counts,
    recv_counts: Counts | None,
    options: Options,
    bound: bool = False,
) -> Rows[A]:
    """Checks and returns a quantized_all_to_all, under the guard. The default group is the row."""
    x = adapter.read("input", input)
    length, dtype = _core.row_size(x.shape), adapter.dtype(x)
    most = max(length, 1)
    row = _core.code_formats.get(options.format)
    fixed = row is not None and row.group_size > 0
    group_size = most if options.group_size is None and not fixed else options.group_size
    quantization = Quantization.checked(options.format, group_size, overflow=options.overflow)
    check_float(dtype)
    if quantization.group_size > most and not fixed:
        quantization = replace(quantization, group_size=most)  # gives the same codes, and the same terms on all ranks
    out_dtype = output_dtype(adapter, options, dtype)
    sends = shares("send_counts", as_counts("send_counts", send_counts, comm.size), "input", x.shape[0], comm.size)
    recvs = None if recv_counts is None else as_counts("recv_counts", recv_counts, comm.size)
    if recvs is not None:
        _core.check_signs("recv_counts", recvs)
    return Rows(x, length, quantization, dtype, out_dtype, sends, recvs, options, bound)


def plan(comm: Communicator, request: QuantizedReduction) -> _core.QuantPlan:
    """Returns a plan of the request over shared memory, which runs on addresses."""
    quantization = request.quantization
    scales = 0 if request.scale is None else request.scale.size
    return _core.QuantPlan(
        comm.core,
        request.operator,
        request.dtype,
        request.out_dtype,
        request.counts,
        quantization.format,
        quantization.group_size,
        quantization.gather == "quantized",
        quantization.op == "avg",
        quantization.overflow,
        _address(request.scale),
        scales,
        _address(request.scale_2),
        request.offset,
        request.shape,
        request.bound,
        request.leaves,
    )


def exclude(why: str, **arguments: object) -> None:
    """Raises InvalidParamError for arguments that a differentiable call cannot have; None and False do not count."""
    if names := present(arguments):
        raise InvalidParamError(f"{why}, expected a call without {' and '.join(names)}", id=1188)


def present(arguments: dict[str, object]) -> list[str]:
    """Returns the names of the arguments that are neither None nor False."""
    return [name for name, value in arguments.items() if value is not None and value is not False]


def output_dtype(adapter: Adapter[A], options: Options, default: str) -> str:
    """Returns the core's name of the output's dtype; raises if results cannot be rounded to it."""
    dtype = default if options.out_dtype is None else adapter.name(options.out_dtype)
    if dtype not in FLOATS:
        raise InvalidParamError(f"out_dtype is {dtype}, expected {', '.join(FLOATS)}", id=1189)
    return dtype


def as_scale(adapter: Adapter[A], name: str, values: Any) -> Floats | None:
    """Returns one value, or one per channel, as float32; raises unless it holds them exactly. None stays None."""
    if values is None:
        return None
    if isinstance(values, float | int):
        return np.array([_float32(name, values)], np.float32)
    is_tensor = isinstance(values, adapter.tensor)
    array = adapter.values(values) if is_tensor else np.asarray(values)
    dtype = adapter.dtype(values) if is_tensor else array.dtype.name
    if dtype not in FLOATS:
        raise wrong_dtype(name, dtype, ", ".join(FLOATS))
    if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
        raise InvalidTensorError(f"{name} has shape {array.shape}, expected one value, [n] or [1, n]", id=2055)
    return np.ascontiguousarray(array.reshape(-1), np.float32)


def _scales(
    adapter: Adapter[A], options: Options, quantization: Quantization, shape: Sequence[int]
) -> tuple[Floats | None, Floats | None]:
    """Returns the shared scale, or both, or None where there is none."""
    if options.dynamic():
        return None, None
    scales = {name: as_scale(adapter, name, value) for name, value in zip(SCALES, options, strict=False)}
    scale, first_scale, second_scale = scales.values()
    if (first_scale is None) != (second_scale is None):
        missing = "comm_quant_scale_1" if first_scale is None else "comm_quant_scale_2"
        raise InvalidParamError(f"{missing} is None while the other scale is given, expected both or neither", id=1190)
    if scale is not None and first_scale is not None:
        raise InvalidParamError("scale and comm_quant_scale_1 are both given, expected one form or the other", id=1191)
    if options.offset is not None and scale is None:
        raise InvalidParamError(
            f"offset is {options.offset} but scale is None, expected an offset only with a shared scale", id=1192
        )
    first: Any = scale if first_scale is None else first_scale
    _check_shared(quantization, first_scale is not None)
    channels = shape[-1] if len(shape) else 1
    for name, values in scales.items():
        if values is not None and values.size not in (1, channels):
            raise InvalidTensorError(
                f"{name} has {values.size} values, expected 1 or {channels}, the last dimension of the input", id=2056
            )
    if second_scale is not None:
        first, second_scale = (np.ascontiguousarray(each) for each in np.broadcast_arrays(first, second_scale))
    if math.prod(shape) == 0:  # an empty last axis has no scales
        first, second_scale = (
            None if each is None else np.append(each, np.float32(1))[:1] for each in (first, second_scale)
        )
    return first, second_scale


def _check_shared(quantization: Quantization, two: bool) -> None:
    """Raises InvalidParamError for options that shared scales exclude."""
    wanted = {"format": "int8", "op": "sum"} | ({} if two else {"gather": "full"})
    for name, expected in wanted.items():
        value = getattr(quantization, name)
        if value != expected:
            raise InvalidParamError(f"{name} is {value!r}, expected {expected!r} with a shared scale", id=1193)


def check_float(dtype: str) -> None:
    """Raises InvalidTensorError for an input that the dynamic mode does not take."""
    if dtype not in FLOATS:
        hint = ", or int8 with a scale" if dtype == "int8" else ""
        raise wrong_dtype("input", dtype, ", ".join(FLOATS) + hint)


def _address(array: Floats | None) -> int:
    return 0 if array is None else array.ctypes.data


def _float32(name: str, value: Any) -> float:
    """Returns a number as float32; raises if it would become inf or 0."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(number))
    if math.isnan(number) or math.isinf(rounded) != math.isinf(number) or (rounded == 0) != (number == 0):
        shown = repr(value) if isinstance(value, float | int | str) else f"a {type(value).__name__}"
        raise InvalidParamError(
            f"{name} is {shown}, expected a number that float32 holds: 0, or 1.4e-45 to 3.4e38", id=1195
        )
    return rounded


# A row-parallel linear layer, whose partial products travel in chunks that are computed during the exchange.


CHUNKS = 4  # the default, if a chunk has at least this number of elements:
SMALLEST = 1 << 17


def chunk_rows(rows: int, columns: int, chunks: int | None, format: Any, group_size: int | None) -> int:
    """Returns the rows of a chunk: it has whole groups, so that chunks have the scales of the undivided product.

    NVFP4's scale of all elements, and groups of all elements, cannot be divided: there is one chunk, unless asked for.
    """
    wanted = integer(chunks)
    if chunks is not None and (wanted is None or wanted < 1):
        raise InvalidParamError(f"chunks is {chunks!r}, expected an integer of at least 1, or None", id=1183)
    row = _core.code_formats.get(format) if isinstance(format, str) else None
    group = group_size if isinstance(group_size, int) and group_size > 0 else (row.group_size if row else 0) or 128
    unit = group // math.gcd(max(columns, 1), group)
    if wanted is None:
        wanted = 1 if row is not None and row.scale == "e4m3" else min(max(rows * columns // SMALLEST, 1), CHUNKS)
    units = -(-rows // unit)
    return max(-(-units // wanted) * unit, 1)


# Error feedback keeps the rounding error of a quantized reduction and adds it before the next one.


T = TypeVar("T")
_NAMES = ("error", "gather_error")


class Feedback(Generic[T]):
    """Holds the state of one vector that is reduced again and again, in a framework's arrays ``T``; the caller owns it.

    The arrays are made at the first use. ``gather_error`` belongs to one number of ranks.
    """

    _title: ClassVar[str] = "an ErrorFeedback"  # for messages

    def __init__(self) -> None:
        self._arrays: dict[str, T | None] = dict.fromkeys(_NAMES)

    def state_dict(self) -> dict[str, T | None]:
        """Returns ``error`` and ``gather_error``, the arrays themselves; None for one that does not exist yet."""
        return dict(self._arrays)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads copies of a state that `state_dict` returned on this or another rank; None starts from zero.

        Raises:
            InvalidParamError: the keys are not the keys of `state_dict`, or a value is not an array of numbers.
        """
        if not isinstance(state, dict):
            raise InvalidParamError(
                f"the state is {'a ' + type(state).__name__}, expected a dict of {', '.join(_NAMES)}", id=1178
            )
        if set(state) != set(_NAMES):
            raise InvalidParamError(
                f"the state has the keys {sorted(map(str, state))}, expected {list(_NAMES)}", id=1179
            )
        self._arrays = {name: self._taken(name, value) for name, value in state.items()}

    def reset(self) -> None:
        """Forgets all errors."""
        self._arrays = dict.fromkeys(_NAMES)

    @classmethod
    def states_of(cls, feedback: object) -> dict[str, T | None]:
        """Returns the arrays of an ``error_feedback``, which the core checks; none for what is of another kind."""
        return feedback._arrays if isinstance(feedback, cls) else {}

    @classmethod
    def arrays_of(
        cls, feedback: Feedback[T] | None, request: QuantizedReduction, size: int, rank: int, like: T
    ) -> tuple[T | None, T | None]:
        """Returns ``error`` and, if a request's sum is quantized, ``gather_error``; both are None without a state.

        Args:
            given: A caller's ``error_feedback``.
            like: The input; arrays are made on its device, or moved there.

        Raises:
            InvalidParamError: the state is of another kind, or belongs to another vector or another number of ranks.
        """
        if feedback is None:
            return None, None
        if not isinstance(feedback, cls):
            raise InvalidParamError(f"error_feedback is a {type(feedback).__name__}, expected {cls._title}", id=1180)
        error = feedback._array("error", request.count, like)
        if request.operator != "quantized_all_reduce" or request.quantization.gather != "quantized":
            return error, None
        return error, feedback._array("gather_error", request.quantization.part(request.count, size, rank)[1], like)

    def _array(self, name: str, count: int, like: T) -> T:
        array = self._arrays[name]
        if array is None:
            array = self._arrays[name] = self._zeros(count, like)
        elements = self._count(array)
        if elements != count:
            raise InvalidParamError(
                f"the error feedback's {name} has {elements} elements, expected {count}: "
                "it is of another vector or another number of ranks; reset it",
                id=1181,
            )
        array = self._arrays[name] = self._placed(array, like)
        return array

    def _taken(self, name: str, value: Any) -> T | None:
        try:
            return None if value is None else self._copy(value)
        except (TypeError, ValueError, RuntimeError):
            shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
            raise InvalidParamError(
                f"the state's {name} is {shown}, expected an array of numbers or None", id=1182
            ) from None

    def _placed(self, array: T, like: T) -> T:
        """Returns the array on the device of ``like``."""
        return array

    def _zeros(self, count: int, like: T) -> T:
        raise NotImplementedError

    def _copy(self, value: Any) -> T:
        raise NotImplementedError

    def _count(self, array: T) -> int:
        raise NotImplementedError


class ErrorFeedback(Feedback[npt.NDArray[Any]]):
    """Keeps what quantization has lost of one vector, in NumPy arrays: one class serves NumPy, MindSpore and Paddle.

    Give the same object to every reduction of that vector, one at a time. `state_dict` has ``error``, float32, one per
    element, and with ``gather="quantized"`` also ``gather_error``, one per element of the part that this rank reduces.
    Every rank has its own state: save it per rank. After a call that failed the state is undefined: `reset` it.
    """

    _title = "alltoallv.numpy.ErrorFeedback"

    def _zeros(self, count: int, like: object) -> npt.NDArray[Any]:
        return np.zeros(count, np.float32)

    def _copy(self, value: Any) -> npt.NDArray[Any]:
        return np.array(value, np.float32).reshape(-1)

    def _count(self, array: npt.NDArray[Any]) -> int:
        return array.size
