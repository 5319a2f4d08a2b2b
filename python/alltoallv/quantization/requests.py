"""Quantized collectives as users ask for them: the checks that need no tensor's memory, the same in every front end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import Counts, as_counts, packed, scaled, shares
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.quantization.spec import FLOATS, Gather, Overflow, Quantization, QuantizedReduction, SumOp

Floats = npt.NDArray[np.float32]


def exclude(why: str, out: object, async_op: bool, error_feedback: object) -> None:
    """Refuses what a differentiable call cannot have.

    Raises:
        InvalidParamError: names what was given.
    """
    given = {"out": out is not None, "async_op": async_op, "error_feedback": error_feedback is not None}
    names = [name for name, present in given.items() if present]
    if names:
        raise InvalidParamError(f"{why}, expected a call without {' and '.join(names)}")


def all_reduce_request(
    shape: Sequence[int],
    dtype: str,
    *,
    scale: Floats | None,
    offset: float | None,
    comm_quant_scale_1: Floats | None,
    comm_quant_scale_2: Floats | None,
    bits: int,
    group_size: int,
    gather: Gather,
    op: SumOp,
    out_dtype: str | None,
    overflow: Overflow,
    has_feedback: bool,
) -> QuantizedReduction:
    """The request of a quantized_all_reduce of an input of that shape and dtype; scales have been read by `as_scale`.

    Raises:
        InvalidParamError, InvalidTensorError: an argument, or two that do not go together.
    """
    quantization = Quantization.checked(bits, group_size, gather, op, overflow)
    two = (comm_quant_scale_1, comm_quant_scale_2)
    if (two[0] is None) != (two[1] is None):
        missing = "comm_quant_scale_1" if two[0] is None else "comm_quant_scale_2"
        raise InvalidParamError(f"{missing} is None while the other scale is given, expected both or neither")
    if scale is not None and two[0] is not None:
        raise InvalidParamError("scale and comm_quant_scale_1 are both given, expected one form or the other")
    if offset is not None and scale is None:
        raise InvalidParamError(f"offset is {offset} but scale is None, expected an offset only with a shared scale")
    first = scale if scale is not None else two[0]
    if first is not None:
        _check_shared(quantization, has_feedback, two[0] is not None)
        channels = shape[-1] if len(shape) else 1
        for name, values in (("scale", scale), ("comm_quant_scale_1", two[0]), ("comm_quant_scale_2", two[1])):
            if values is not None and values.size not in (1, channels):
                raise InvalidTensorError(
                    f"{name} has {values.size} values, expected 1 or {channels}, the last dimension of the input"
                )
    if scale is not None and dtype != "int8":
        raise InvalidTensorError(f"input has dtype {dtype}, expected int8 with a shared scale", 13)
    if scale is None:
        _check_float(dtype)
    second = None
    if two[0] is not None and two[1] is not None:
        first, second = (np.ascontiguousarray(one) for one in np.broadcast_arrays(two[0], two[1]))
    if first is not None and math.prod(shape) == 0:
        first, second = first[:1], None if second is None else second[:1]
        if not first.size:  # an empty last axis has no scales
            first, second = np.ones(1, np.float32), None if second is None else np.ones(1, np.float32)
    out = out_dtype or ("float16" if scale is not None else dtype)
    check_output_dtype(out)
    counts = (math.prod(shape),)
    offset = 0.0 if offset is None else _float32("offset", offset)
    return QuantizedReduction("quantized_all_reduce", dtype, out, counts, quantization, first, second, offset)


def reduce_scatter_request(
    counts: Sequence[int],
    dtype: str,
    *,
    bits: int,
    group_size: int,
    op: SumOp,
    out_dtype: str | None,
    overflow: Overflow,
) -> QuantizedReduction:
    """The request of a quantized_reduce_scatter of ``counts[j]`` elements for rank j."""
    quantization = Quantization.checked(bits, group_size, "full", op, overflow)
    _check_float(dtype)
    out = out_dtype or dtype
    check_output_dtype(out)
    return QuantizedReduction("quantized_reduce_scatter", dtype, out, tuple(counts), quantization)


def row_quantization(bits: int, group_size: int | None, overflow: Overflow, length: int, dtype: str) -> Quantization:
    """How rows of ``length`` elements become codes; the default group is the row."""
    length = max(length, 1)
    quantization = Quantization.checked(bits, length if group_size is None else group_size, overflow=overflow)
    _check_float(dtype)
    if quantization.group_size > length:  # the same codes, and the same terms on all ranks
        quantization = replace(quantization, group_size=length)
    return quantization


def row_counts(
    send_counts: Counts, recv_counts: Counts | None, rows: int, size: int
) -> tuple[list[int], list[int] | None]:
    """Rows for every rank, and from every rank if the caller says; ``rows`` are dimension 0 of the input."""
    sends = shares("send_counts", as_counts("send_counts", send_counts, size), "input", rows, size)
    recvs = None if recv_counts is None else as_counts("recv_counts", recv_counts, size)
    if recvs is not None and min(recvs) < 0:
        raise InvalidParamError(f"recv_counts is {recvs}, expected entries >= 0")
    return sends, recvs


def as_scale(name: str, values: npt.ArrayLike | None, dtype: str | None = None) -> Floats | None:
    """One value, or one per channel, as float32 (exact for the dtypes allowed); None stays None.

    Args:
        dtype: The core's name of the dtype that the values had in the caller's tensor, if they came from one.

    Raises:
        InvalidParamError: a number that float32 cannot hold.
        InvalidTensorError: not a scalar, ``[n]`` or ``[1, n]`` of float16, bfloat16 or float32.
    """
    if values is None:
        return None
    if isinstance(values, float | int):
        return np.array([_float32(name, values)], np.float32)
    array = np.asarray(values)
    dtype = dtype or array.dtype.name
    if dtype not in FLOATS:
        raise InvalidTensorError(f"{name} has dtype {dtype}, expected {', '.join(FLOATS)}", 13)
    if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
        raise InvalidTensorError(f"{name} has shape {array.shape}, expected one value, [n] or [1, n]")
    return np.ascontiguousarray(array.reshape(-1), np.float32)


def plan(comm: Communicator, request: QuantizedReduction) -> _core.QuantPlan:
    """The request over shared memory, ready to run on addresses."""
    how = request.quantization
    scales = 0 if request.scale is None else request.scale.size
    return _core.QuantPlan(
        comm.core,
        request.operator,
        request.dtype,
        request.out_dtype,
        request.counts,
        how.bits,
        how.group_size,
        how.gather == "quantized",
        how.op == "avg",
        how.overflow,
        _address(request.scale),
        scales,
        _address(request.scale_2),
        request.offset,
    )


def encode_rows(how: Quantization, dtype: str, input: int, rows: int, length: int, out: int) -> None:
    """Rows of ``length`` elements at an address to rows of bytes: float32 scales, codes, padding."""
    _core.quantize_rows(how.bits, how.group_size, dtype, input, rows, length, out)


def decode_rows(how: Quantization, dtype: str, input: int, rows: int, length: int, out: int) -> bool:
    """Undoes `encode_rows`. False: a value does not fit ``dtype`` and ``how.overflow`` is "raise"."""
    return _core.dequantize_rows(how.bits, how.group_size, dtype, input, rows, length, how.overflow, out)


def row_exchange(
    comm: Communicator, how: Quantization, stride: int, sends: list[int], recvs: list[int] | None
) -> _core.Plan:
    """The exchange of rows of ``stride`` bytes; without ``recvs`` they are learnt."""
    send = scaled(sends, stride)
    recv = [] if recvs is None else scaled(recvs, stride)
    terms = _core.quantized_row_terms(how.bits, how.group_size)
    return _core.Plan(comm.core, "quantized_all_to_all", "uint8", send, packed(send), recv, packed(recv), terms, stride)


def _address(values: Floats | None) -> int:
    return 0 if values is None else values.ctypes.data


def _float32(name: str, value: Any) -> float:
    """A number as float32, which neither makes inf of it nor 0."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(number))
    if math.isnan(number) or math.isinf(rounded) != math.isinf(number) or (rounded == 0) != (number == 0):
        shown = repr(value) if isinstance(value, float | int | str) else f"a {type(value).__name__}"
        raise InvalidParamError(f"{name} is {shown}, expected a number that float32 holds: 0, or 1.4e-45 to 3.4e38")
    return rounded


def _check_float(dtype: Any) -> None:
    if dtype not in FLOATS:
        hint = ", or int8 with a scale" if dtype == "int8" else ""
        raise InvalidTensorError(f"input has dtype {dtype}, expected {', '.join(FLOATS)}{hint}", 13)


def check_output_dtype(dtype: str) -> None:
    """Refuses what results cannot be rounded to."""
    if dtype not in FLOATS:
        raise InvalidParamError(f"out_dtype is {dtype}, expected {', '.join(FLOATS)}")


def _check_shared(quantization: Quantization, has_feedback: bool, two: bool) -> None:
    """With shared scales the rest is not free."""
    wanted: tuple[tuple[str, object, object], ...] = (("bits", quantization.bits, 8), ("op", quantization.op, "sum"))
    if not two:
        wanted += (("gather", quantization.gather, "full"),)
    for name, value, expected in wanted:
        if value != expected:
            raise InvalidParamError(f"{name} is {value!r}, expected {expected!r} with a shared scale")
    if has_feedback:
        raise InvalidParamError("error_feedback is given with a shared scale, expected the dynamic mode")
