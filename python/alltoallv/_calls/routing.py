"""The options of the dispatchers of all front ends. The core routes by them: see op_host/moe/routing.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from alltoallv import _core
from alltoallv._calls.counts import packed
from alltoallv.errors import InvalidParamError, InvalidTensorError

Drop = Literal["last", "lightest"]
MOST = 2**20  # experts, rows of an alignment, chunks: every rank keeps lists of them
CODES = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # dtypes of codes for experts


class RoutingOptions(TypedDict, total=False):
    """The options of a dispatcher; they are equal on all ranks.

    Attributes:
        capacity: Rows that one rank may send to one expert in a call: an integer of at least 1, or as a float the
            factor by which it exceeds an even share, ``ceil(capacity * tokens * k / num_experts)``. None: any number.
        drop: Which pairs are dropped beyond the capacity: ``"last"``, the last tokens' pairs, or ``"lightest"``,
            those with the smallest gate weights, of equal ones the last.
        alignment: The rows of every expert are filled up with zeros to a multiple of this.
        payload, combine_payload: How rows travel to the experts and back: None as they are, or as codes of a format,
            ``"int8"``, ``"fp8_e4m3"``, ``"mxfp8"`` and others. A row has one scale, or one per group of the format.
        codes: With ``payload`` int8, fp8_e4m3 or fp8_e5m2: give the experts the codes, and their scales in the state,
            not their values.
        placement: Which experts each rank has. None: neighbouring ones, ``num_experts // W`` each and one more on the
            first ``num_experts % W`` ranks. Experts that no rank has are lost: pairs that choose them are dropped.
        active_ranks: An array, tensor or list of a bool for each rank, which every dispatch reads anew: while a rank's
            is False, pairs that choose its experts are dropped, and the token gets the sum over its other choices,
            whose weights are not divided anew. The rank takes part in all calls, and its own tokens travel. None: all
            are active. ``survivors()`` sets lost ranks' to False.
    """

    capacity: float | None
    drop: Drop
    alignment: int
    payload: str | None
    combine_payload: str | None
    placement: tuple[tuple[int, ...], ...] | None
    codes: bool
    active_ranks: Any


class Load(NamedTuple):
    """Describes how much work the experts have over all ranks, in two int64 arrays of shape ``[num_experts]``."""

    chosen: Any  # how often an expert was chosen
    kept: Any  # rows that it got: fewer where a capacity was reached, or the expert is lost


@dataclass(frozen=True)
class Routing:
    """The number of experts on all ranks together, at most 2**20, and a dispatcher's `RoutingOptions`."""

    num_experts: int
    capacity: float | None = None
    drop: Drop = "last"
    alignment: int = 1
    payload: str | None = None
    combine_payload: str | None = None
    placement: tuple[tuple[int, ...], ...] | None = None
    codes: bool = False
    active_ranks: tuple[bool, ...] | None = None  # as the present call has read them

    def __post_init__(self) -> None:
        for name in ("num_experts", "alignment"):
            _core.checked_integer(name, getattr(self, name), 1, MOST)
        room = self.capacity
        is_number = isinstance(room, int | float) and not isinstance(room, bool)
        if room is not None and not (is_number and 0 < room < math.inf):
            raise InvalidParamError(f"capacity is {room!r}, expected an integer >= 1, a factor > 0, or None", id=1159)
        if self.drop not in get_args(Drop):
            raise InvalidParamError(f"drop is {self.drop!r}, expected 'last' or 'lightest'", id=1160)
        for name in ("payload", "combine_payload"):
            value = getattr(self, name)
            if value is not None and value not in _core.code_formats:
                raise InvalidParamError(
                    f"{name} is {value!r}, expected None or one of {', '.join(_core.code_formats)}", id=1161
                )
        if self.codes and self.payload not in CODES:
            raise InvalidParamError(
                f"codes is True with payload {self.payload!r}, expected one of {', '.join(CODES)}", id=1162
            )
        placed = [expert for part in self.placement or () for expert in part]
        if len(set(placed)) < len(placed) or not set(placed) <= set(range(self.num_experts)):
            raise InvalidParamError(
                f"placement is {self.placement}, expected distinct numbers from 0 to {self.num_experts - 1}", id=1163
            )

    def placed(self, size: int) -> Sequence[Sequence[int]]:
        """Returns the experts of every rank of a group of ``size`` ranks."""
        if self.placement is None:
            each, more = divmod(self.num_experts, size)
            begins = [*packed([each + (rank < more) for rank in range(size)]), self.num_experts]
            return [range(begin, end) for begin, end in pairwise(begins)]
        if len(self.placement) != size:
            raise InvalidParamError(f"placement has experts of {len(self.placement)} ranks, expected {size}", id=1164)
        return self.placement

    @property
    def code_dtype(self) -> str | None:
        """Returns the dtype of the rows that experts get as codes; None: they get values."""
        return CODES[str(self.payload)] if self.codes else None

    @property
    def uses_weights(self) -> bool:
        """Returns whether weights decide which pairs are dropped."""
        return self.capacity is not None and self.drop == "lightest"

    def serving(self, active_ranks: Any, ranks: Sequence[int] | None = None) -> Routing:
        """Returns these options with the present values of ``active_ranks``, or of ``ranks`` among them."""
        values = active_ranks.tolist() if hasattr(active_ranks, "tolist") else active_ranks
        if not isinstance(values, list | tuple) or any(value not in (False, True) for value in values):
            raise InvalidParamError(
                f"active_ranks is {values!r}, expected an array or a list of a bool for each rank", id=1165
            )
        chosen = values if ranks is None else [values[rank] for rank in ranks if rank < len(values)]
        now = tuple(map(bool, chosen))
        return self if now == self.active_ranks else replace(self, active_ranks=now)

    def core(self, size: int) -> _core.MoeOptions:
        """Returns the options for the core, for a group of ``size`` ranks."""
        return _core_options(self, repr(self.capacity), size)


@lru_cache(maxsize=256)  # also by the capacity's text: 1 and 1.0 are equal
def _core_options(routing: Routing, capacity: str, size: int) -> _core.MoeOptions:
    placed = routing.placed(size)
    active = [True] * size if routing.active_ranks is None else [*routing.active_ranks]
    if len(active) != size:
        raise InvalidParamError(f"active_ranks has {len(active)} entries, expected {size}, one per rank", id=1166)
    text = f"{routing.num_experts} {placed} {routing.alignment} {routing.payload} {routing.combine_payload} "
    text += f"{capacity} {routing.drop} {routing.codes} {routing.active_ranks}"
    room = min(routing.capacity, 2**62) if isinstance(routing.capacity, int) else routing.capacity
    options = room, routing.uses_weights, routing.alignment, routing.payload or "", routing.codes, text
    return _core.MoeOptions(routing.num_experts, [list(part) for part in placed], active, *options)


def group_of(payload: str, length: int) -> int:
    """Returns how many elements of a row of ``length`` share a scale: all, unless the format states how many."""
    return int(_core.code_formats[payload].group_size) or max(length, 1)


def check_coded(name: str, dtype: object) -> None:
    """Raises InvalidTensorError if rows of a dtype of that name cannot travel as codes."""
    if name not in ("float32", "float16", "bfloat16"):
        raise InvalidTensorError(
            f"rows have dtype {dtype}, expected float32, float16 or bfloat16 for codes", 13, id=2012
        )


def chunk_ends(tokens: int, chunks: int) -> list[int]:
    """Returns the end of each of ``chunks`` equal parts of the tokens."""
    _core.checked_integer("chunks", chunks, 1, MOST)
    return [tokens * (part + 1) // chunks for part in range(chunks)]
