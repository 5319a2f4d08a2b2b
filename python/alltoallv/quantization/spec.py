"""What a quantized collective computes: the arguments that all ranks share. docs/quantization.md has the rules."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import integer
from alltoallv.errors import InvalidParamError

Gather = Literal["full", "quantized"]
SumOp = Literal["sum", "avg"]
Overflow = Literal["saturate", "raise", "infinity"]

# The widest first.
FLOATS = tuple(
    sorted((name for name in _core.dtypes if _core.dtypes[name].quantizes), key=lambda name: -_core.dtypes[name].size)
)

Term = tuple[str, str, str]  # for one rank's message, for the other's, the value
_FEEDBACK = (
    "no error feedback",
    "error feedback",
    "error feedback of the gather only",
    "error feedback of both quantizations",
)


class Options(NamedTuple):
    """What a caller asks of a quantized collective beside tensors and counts: as given, unchecked, equal on all ranks.

    Scales, offset and ``gather`` are for all-reduces, ``op`` not for all-to-alls. ``group_size=None``: the row of an
    all-to-all. ``out_dtype`` is the framework's; None: the input's. See `alltoallv.numpy.quantized_all_reduce`.
    """

    scale: Any = None
    comm_quant_scale_1: Any = None
    comm_quant_scale_2: Any = None
    offset: float | None = None
    bits: int = 8
    group_size: int | None = 128
    gather: Gather = "full"
    op: SumOp = "sum"
    overflow: Overflow = "saturate"
    out_dtype: Any = None

    def dynamic(self) -> bool:
        """Whether every group has a scale of its own."""
        scaled = self.scale is not None or self.comm_quant_scale_1 is not None or self.comm_quant_scale_2 is not None
        return not scaled and self.offset is None


@dataclass(frozen=True, slots=True)
class Quantization:
    """How vectors become codes, and their sum a result; equal on all ranks.

    Attributes:
        bits: Of a code: 8, or 4 (two per byte).
        group_size: Elements per scale; groups begin at element 0 of the flat vector.
        gather: Of an all-reduce: ``"full"`` gathers the sum in the output's dtype, ``"quantized"`` quantizes it again.
        op: ``"avg"`` divides the sum by the number of ranks, before it is rounded or quantized.
        overflow: What a finite value becomes that the output's dtype cannot hold: ``"saturate"``: the largest finite
            value; ``"raise"``: an error on every rank; ``"infinity"``.
    """

    bits: int = 8
    group_size: int = 128
    gather: Gather = "full"
    op: SumOp = "sum"
    overflow: Overflow = "saturate"

    @staticmethod
    def checked(
        bits: int, group_size: int | None, gather: Gather = "full", op: SumOp = "sum", overflow: Overflow = "saturate"
    ) -> Quantization:
        """One whose values have a meaning; those of earlier calls are remembered.

        Raises:
            InvalidParamError: a value that has none.
        """
        try:
            return _remembered(bits, group_size, gather, op, overflow)
        except TypeError:  # a value that cannot be remembered has no meaning either
            return _checked(bits, group_size, gather, op, overflow)

    def groups(self, count: int) -> int:
        """Scales of ``count`` elements."""
        return -(-count // self.group_size)

    def code_bytes(self, count: int) -> int:
        """Bytes of the codes of ``count`` elements; every group begins at a byte."""
        if self.bits == 8:
            return count
        whole, rest = divmod(count, self.group_size)
        return whole * ((self.group_size + 1) // 2) + (rest + 1) // 2

    def part(self, count: int, size: int, rank: int) -> tuple[int, int]:
        """First element and length of the part of ``count`` elements that a rank reduces in an all-reduce.

        Equal shares of groups, fewer for the last ranks. The error feedback of the gather is of this part.
        """
        share = -(-self.groups(count) // size) * self.group_size
        begin = min(rank * share, count)
        return begin, min(share, count - begin)


def _checked(bits: Any, group_size: Any, *texts: Any) -> Quantization:
    if _integer(bits) not in (4, 8):
        raise InvalidParamError(f"bits is {bits!r}, expected 4 or 8")
    if not 1 <= _integer(group_size) < 2**63:
        raise InvalidParamError(f"group_size is {group_size!r}, expected an integer of at least 1, below 2**63")
    for name, value, kind in zip(("gather", "op", "overflow"), texts, (Gather, SumOp, Overflow), strict=True):
        known = get_args(kind)
        if not isinstance(value, str) or value not in known:
            raise InvalidParamError(f"{name} is {value!r}, expected {', '.join(known[:-1])} or {known[-1]}")
    return Quantization(integer(bits), integer(group_size), *texts)


_remembered = lru_cache(maxsize=256, typed=True)(_checked)


def _integer(value: Any) -> int:
    """0 for what is none."""
    try:
        return integer(value)
    except TypeError:
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedReduction:
    """A quantized reduction as every engine takes it, checked; equal on all ranks.

    Attributes:
        operator: ``"quantized_all_reduce"`` or ``"quantized_reduce_scatter"``.
        dtype: Of the input, by the core's name: float32, float16, bfloat16; int8 with a shared scale.
        out_dtype: Of the output: float32, float16 or bfloat16.
        counts: reduce_scatter: elements of every rank's part; all_reduce: one entry, all elements.
        quantization: The dynamic mode; with scales only ``overflow`` counts.
        scale: A shared scale: one value, or one per entry of the last axis. With ``scale_2`` the first of two.
        scale_2: The second of two shared scales, as many as ``scale``.
        offset: Added to every rank's codes, with a shared scale.
    """

    operator: str
    dtype: str
    out_dtype: str
    counts: tuple[int, ...]
    quantization: Quantization
    scale: npt.NDArray[np.float32] | None = None
    scale_2: npt.NDArray[np.float32] | None = None
    offset: float = 0.0

    @property
    def count(self) -> int:
        """Elements of the input."""
        return sum(self.counts)

    def terms(self, feeds_back: bool, gather_feeds_back: bool) -> tuple[Term, ...]:
        """What the ranks must agree on beside operator, dtype and counts, in the words of the core."""
        how = self.quantization
        shared = "a shared scale" if self.scale_2 is None else "two shared scales"
        mode = "dynamic scales" if self.scale is None else shared
        terms = [("", "", mode), ("an output of ", "one of ", self.out_dtype)]
        if self.scale is None:
            terms += [("bits ", "bits ", str(how.bits)), ("group_size ", "group_size ", str(how.group_size))]
            terms.append(("gather ", "", how.gather))
        terms.append(("overflow ", "", how.overflow))
        if self.scale is None:
            terms.append(("", "", _FEEDBACK[feeds_back + 2 * gather_feeds_back]))
        else:
            scales = (("scale ", self.scale), ("scale_2 ", self.scale_2))
            terms += [(name, name, _shown(values)) for name, values in scales if values is not None]
            terms.append(("offset ", "offset ", f"{self.offset:.9g}"))
        return tuple(terms)


def _shown(values: npt.NDArray[np.float32]) -> str:
    if values.size == 1:
        return f"{values.flat[0]:.9g}"
    digest = hashlib.blake2b(np.ascontiguousarray(values, np.float32).tobytes(), digest_size=8).hexdigest()
    return f"[{values.flat[0]:.9g}, ...] of {values.size} values (digest {digest})"
