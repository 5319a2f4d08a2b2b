"""Bounds on what a quantized collective can be wrong by, and the choice of a format by one; docs/quantization.md."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from alltoallv import _core
from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.quantization.spec import Options, Quantization

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


def argument(accuracy: Accuracy | None) -> dict[str, Any]:
    """Returns the argument by which a caller asks for a bound, for `exclude`."""
    if accuracy is None:
        return {}
    return {"bound": accuracy.bound} if accuracy.max_error is None else {"max_error": accuracy.max_error}


def _is_positive(value: Any) -> bool:
    try:
        return 1e-37 <= float(value) <= 3e38
    except (TypeError, ValueError, OverflowError):
        return False


def chosen(
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
        candidates.append((spec.code_bytes(count) + spec.scale_bytes(count), worst(spec, ranks, out_dtype), spec))
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


def worst(spec: Quantization, largest: Sequence[float], out_dtype: str) -> float:
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
