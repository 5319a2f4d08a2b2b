"""What a quantized collective computes: the arguments that all ranks share. docs/quantization.md has the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from alltoallv.errors import InvalidParamError

Gather = Literal["full", "quantized"]
SumOp = Literal["sum", "avg"]
Overflow = Literal["saturate", "raise", "infinity"]

FLOATS = ("float32", "float16", "bfloat16")


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

    def check(self) -> None:
        """Raises InvalidParamError for a value that has no meaning."""
        if self.bits not in (4, 8):
            raise InvalidParamError(f"bits is {self.bits!r}, expected 4 or 8")
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise InvalidParamError(f"group_size is {self.group_size!r}, expected an integer of at least 1")
        for name, kind in (("gather", Gather), ("op", SumOp), ("overflow", Overflow)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise InvalidParamError(f"{name} is {value!r}, expected {', '.join(known[:-1])} or {known[-1]}")

    def groups(self, count: int) -> int:
        """Scales of ``count`` elements."""
        return -(-count // self.group_size)

    def code_bytes(self, count: int) -> int:
        """Bytes of the codes of ``count`` elements; every group begins at a byte."""
        if self.bits == 8:
            return count
        whole, rest = divmod(count, self.group_size)
        return whole * ((self.group_size + 1) // 2) + (rest + 1) // 2
