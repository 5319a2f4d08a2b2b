"""Describes where the tokens of a mixture of experts go and how they come back, once for all front ends.

A pair is a token and one of its k choices of an expert: pair ``t * k + j``. Rows are sent sorted by rank and expert,
and within an expert by pair. A receiver has them sorted by its expert, then by the rank that they come from, then as
they lay there; behind the rows of an expert are rows of zeros, up to a multiple of the alignment. Everything here is
arithmetic on numbers of rows, in host memory.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import packed
from alltoallv.errors import InvalidParamError, InvalidTensorError

Numbers = npt.NDArray[np.int64]
Drop = Literal["last", "lightest"]
MOST = 2**20  # experts, rows of an alignment, chunks: every rank keeps lists of them
CODES = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # dtypes of codes for experts


class Load(NamedTuple):
    """Says how much work the experts have over all ranks, in two int64 arrays of shape ``[num_experts]``."""

    chosen: Any  # how often an expert was chosen
    kept: Any  # rows that it got: fewer where a capacity was reached, or the expert is lost


@dataclass(frozen=True)
class Routing:
    """The options of a dispatcher; they are equal on all ranks.

    Attributes:
        num_experts: Experts on all ranks together, at most 2**20.
        capacity: Rows that one rank may send to one expert in a call: an integer of at least 1, or as a float the
            factor by which it exceeds an even share, ``ceil(capacity * tokens * k / num_experts)``. None: any number.
        drop: Which pairs are dropped beyond the capacity: ``"last"``, those of the last tokens, or ``"lightest"``,
            those with the smallest gate weights, of equal ones the last.
        alignment: The rows of every expert are filled up with zeros to a multiple of this.
        payload, combine_payload: How rows travel to the experts and back: None as they are, or as codes of a format,
            ``"int8"``, ``"fp8_e4m3"``, ``"mxfp8"`` and others. A row has one scale, or those of the format's groups.
        codes: With ``payload`` int8, fp8_e4m3 or fp8_e5m2: give the experts the codes, and their scales in the state,
            not their values.
        placement: Which experts each rank has. None: neighbouring ones, ``num_experts // W`` each and one more on the
            first ``num_experts % W`` ranks. Experts that no rank has are lost: pairs that choose them are dropped.
    """

    num_experts: int
    capacity: float | None = None
    drop: Drop = "last"
    alignment: int = 1
    payload: str | None = None
    combine_payload: str | None = None
    placement: tuple[tuple[int, ...], ...] | None = None
    codes: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "alignment"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
                raise InvalidParamError(f"{name} is {value!r}, expected an integer from 1 to {MOST}")
        room = self.capacity
        is_number = isinstance(room, int | float) and not isinstance(room, bool)
        if room is not None and not (is_number and 0 < room < math.inf):
            raise InvalidParamError(f"capacity is {room!r}, expected an integer >= 1, a factor > 0, or None")
        if self.drop not in get_args(Drop):
            raise InvalidParamError(f"drop is {self.drop!r}, expected 'last' or 'lightest'")
        for name in ("payload", "combine_payload"):
            value = getattr(self, name)
            if value is not None and value not in _core.code_formats:
                raise InvalidParamError(f"{name} is {value!r}, expected None or one of {', '.join(_core.code_formats)}")
        if self.codes and self.payload not in CODES:
            raise InvalidParamError(f"codes is True with payload {self.payload!r}, expected one of {', '.join(CODES)}")
        placed = [expert for part in self.placement or () for expert in part]
        if len(set(placed)) < len(placed) or not set(placed) <= set(range(self.num_experts)):
            raise InvalidParamError(
                f"placement is {self.placement}, expected distinct numbers from 0 to {self.num_experts - 1}"
            )

    def placed(self, size: int) -> Sequence[Sequence[int]]:
        """Returns the experts of every rank of a group of ``size`` ranks."""
        if self.placement is None:
            each, more = divmod(self.num_experts, size)
            begins = [*packed([each + (rank < more) for rank in range(size)]), self.num_experts]
            return [range(begin, end) for begin, end in pairwise(begins)]
        if len(self.placement) != size:
            raise InvalidParamError(f"placement has experts of {len(self.placement)} ranks, expected {size}")
        return self.placement

    @property
    def code_dtype(self) -> str | None:
        """Returns the dtype of the rows that experts get as codes; None: they get values."""
        return CODES[str(self.payload)] if self.codes else None

    @property
    def weighs(self) -> bool:
        """Returns whether weights decide which pairs are dropped."""
        return self.capacity is not None and self.drop == "lightest"

    def room(self, tokens: int, k: int) -> int | None:
        """Returns how many rows a rank with that many tokens may send to one expert; None: any number."""
        if self.capacity is None or isinstance(self.capacity, int):
            return self.capacity
        return math.ceil(self.capacity * tokens * k / self.num_experts)

    def check_ids(self, ids: npt.NDArray[Any]) -> None:
        """Raises InvalidParamError for numbers of experts that do not exist."""
        wrong = ids[(ids < 0) | (ids >= self.num_experts)]
        if len(wrong):
            raise InvalidParamError(f"expert_ids holds {int(wrong[0])}, expected 0 to {self.num_experts - 1}")

    def send(self, ids: Numbers, weights: npt.NDArray[Any] | None, size: int, about: str) -> Sending:
        """Returns the rows of tokens with choices ``ids``, ``[n, k]``; ``about``: what else peers must agree on."""
        parts = self.placed(size)
        slots = np.full(self.num_experts, -1)  # an expert's place among all
        order_of_experts = np.array([expert for part in parts for expert in part], np.int64)
        slots[order_of_experts] = np.arange(len(order_of_experts))
        flat = slots[ids.reshape(-1)]
        order = np.argsort(flat.astype(np.uint16) if self.num_experts < 2**16 - 1 else flat, kind="stable")
        lost = flat == -1
        if lost.any():
            order = order[~lost[order]]
        room = self.room(*ids.shape)
        if room is not None:
            order = order[_within(flat, order, room, weights if self.weighs else None)[order]]
        ends = np.cumsum([len(part) for part in parts])
        sent = flat[order]
        owners = np.searchsorted(ends, sent, side="right")
        sends = np.bincount(owners, minlength=size)
        local = sent - np.concatenate([[0], ends])[owners]
        text = f"{about} {self.num_experts} {parts} {self.alignment} {self.payload} {self.combine_payload} "
        text += f"{self.capacity!r} {self.drop} {self.codes}"
        tags = np.stack([local, order // ids.shape[1]], 1).astype(np.int32)
        return Sending(order, sends.tolist(), tags, text)

    def receive(self, experts: Numbers, size: int, rank: int) -> Arrival:
        """Sorts the pairs that have arrived, given by their experts in the order of ranks, and returns their rows."""
        received = np.bincount(experts, minlength=len(self.placed(size)[rank]))
        counts = -(-received // self.alignment) * self.alignment
        within = np.arange(len(experts)) + np.repeat(
            np.cumsum(counts) - counts - np.cumsum(received) + received, received
        )
        source = np.full(counts.sum(), -1)
        source[within] = np.argsort(experts, kind="stable")
        return Arrival(source, received, counts)


class Sending(NamedTuple):
    """Holds what a rank sends to the others."""

    order: Numbers  # pairs, by rank and expert
    sends: list[int]  # pairs for every rank
    tags: npt.NDArray[np.int32]  # per pair its expert, by the receiver's numbers, and its token
    about: str  # what peers must agree on


class Arrival(NamedTuple):
    """Holds what a rank has received from the others."""

    source: Numbers  # per row of the experts the index of the received row; -1: zeros
    received: Numbers  # rows of every expert
    counts: Numbers  # rows of every expert with the rows of zeros


def _within(flat: Numbers, order: Numbers, room: int, weights: npt.NDArray[Any] | None) -> npt.NDArray[np.bool_]:
    """Returns, for every pair, whether it is among the first, or the heaviest, ``room`` pairs of its expert."""
    if weights is not None:
        order = order[np.lexsort((-weights.reshape(-1)[order].astype(np.float64), flat[order]))]
    sent = flat[order]
    first = np.searchsorted(sent, sent)  # where the rows of the same expert begin
    kept = np.zeros(len(flat), np.bool_)
    kept[order] = np.arange(len(order)) - first < room
    return kept


def check_shapes(
    tokens: Sequence[int], ids: Sequence[int], weights: Sequence[int] | None, integers: bool, dtype: object
) -> tuple[int, int]:
    """Checks the arguments' shapes; returns the numbers of tokens and choices. ``integers``: the choices are."""
    if not integers:
        raise InvalidTensorError(f"expert_ids has dtype {dtype}, expected integers", 13)
    if len(tokens) == 0 or len(ids) not in (1, 2) or ids[0] != tokens[0] or 0 in ids[1:]:
        raise InvalidTensorError(
            f"expert_ids has shape {tuple(ids)} and tokens {tuple(tokens)}, "
            "expected [n, k] or [n], with k at least 1, and [n, ...]"
        )
    if weights is not None and tuple(weights) != tuple(ids):
        raise InvalidTensorError(f"gate_weights has shape {tuple(weights)}, expected {tuple(ids)}, that of expert_ids")
    return ids[0], ids[1] if len(ids) == 2 else 1


def check_again(tokens: Sequence[int], weights: Sequence[int] | None, n: int, k: int) -> None:
    """Raises InvalidTensorError if the shapes of tokens and weights are not those of ``n`` tokens dispatched before."""
    if len(tokens) == 0 or tokens[0] != n:
        raise InvalidTensorError(f"tokens has shape {tuple(tokens)}, expected {n} rows, as dispatched before")
    if weights is not None and tuple(weights) != (n, k) and (tuple(weights), k) != ((n,), 1):
        raise InvalidTensorError(f"gate_weights has shape {tuple(weights)}, expected {(n, k)}, as dispatched before")


def check_outputs(shape: Sequence[int], rows: int) -> None:
    """Raises InvalidTensorError if the experts' output has another number of rows than was dispatched."""
    if len(shape) == 0 or shape[0] != rows:
        raise InvalidTensorError(f"expert_outputs has shape {tuple(shape)}, expected {rows} rows, as dispatched")


@lru_cache(maxsize=256)
def row_terms(dtype: object, columns: int, *about: object) -> int:
    """Returns what all ranks agree on that move rows of bytes, for the root of an exchange."""
    digest = zlib.crc32(f"{dtype} {columns} {about}".encode())
    return _core.token_terms(str(dtype).rpartition(".")[2], columns, digest)


def group_of(payload: str, length: int) -> int:
    """Returns how many elements of a row of ``length`` share a scale: all, unless the format says how many."""
    return int(_core.code_formats[payload].group_size) or max(length, 1)


def check_coded(name: str, dtype: object) -> None:
    """Raises InvalidTensorError if rows of a dtype of that name cannot travel as codes."""
    if name not in ("float32", "float16", "bfloat16"):
        raise InvalidTensorError(f"rows have dtype {dtype}, expected float32, float16 or bfloat16 for codes", 13)


def chunk_ends(tokens: int, chunks: int) -> list[int]:
    """Returns the end of each of ``chunks`` equal parts of the tokens."""
    if isinstance(chunks, bool) or not isinstance(chunks, int) or not 1 <= chunks <= MOST:
        raise InvalidParamError(f"chunks is {chunks!r}, expected an integer from 1 to {MOST}")
    return [tokens * (part + 1) // chunks for part in range(chunks)]
