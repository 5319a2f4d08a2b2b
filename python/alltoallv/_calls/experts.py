"""The options of the dispatchers of all front ends, by which the core routes (op_host/moe/routing.h), and counts of
rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import Counts, Layout, as_counts, packed, rows_of
from alltoallv._calls.guard import Member, guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

Drop = Literal["last", "lightest"]
MOST = 2**20  # experts, rows of an alignment, chunks: every rank keeps lists of them
CODES = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # dtypes of codes for experts


class RoutingOptions(TypedDict, total=False):
    """The options of a dispatcher; they are equal on all ranks.

    Attributes:
        capacity: Rows that one rank may send to one expert in a call: an integer of at least 1, or as a float the
            factor by which it exceeds an even share, ``ceil(capacity * tokens * k / num_experts)``. Default: None, any
            number.
        drop: Which pairs are dropped beyond the capacity: ``"last"`` (default), the last tokens' pairs, or
            ``"lightest"``, those with the smallest gate weights, of equal ones the last.
        alignment: The rows of every expert are filled up with zeros to a multiple of this. Default: 1.
        payload, combine_payload: How rows travel to the experts and back: None (default) as they are, or as codes of a
            format, ``"int8"``, ``"fp8_e4m3"``, ``"mxfp8"`` and others. A row has one scale, or one per group of the
            format.
        codes: With ``payload`` int8, fp8_e4m3 or fp8_e5m2: give the experts the codes, and their scales in the state,
            not their values. Default: False.
        placement: Which experts each rank has. Default: None, neighbouring ones, ``num_experts // W`` each and one more
            on the first ``num_experts % W`` ranks. Experts that no rank has are lost: pairs that choose them are
            dropped.
        active_ranks: An array, tensor or list of a bool for each rank, which every dispatch reads anew: while a rank's
            is False, pairs that choose its experts are dropped, and the token gets the sum over its other choices,
            whose weights are not divided anew. The rank takes part in all calls, and its own tokens travel. Default:
            None, all are active. ``survivors()`` sets lost ranks' to False.
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


Matrix = npt.NDArray[np.int64]  # [card, expert]


def read(
    size: int, shape: Sequence[int], local_count: Counts, global_count: Counts, rows_of_x: str
) -> tuple[Matrix, Matrix]:
    """Returns both counts as ``[card, expert]`` matrices, for an x of that shape whose rows ``rows_of_x`` counts."""
    local, global_ = _matrix("local_count", local_count, size), _matrix("global_count", global_count, size)
    if local.shape != global_.shape:
        raise InvalidParamError(
            f"local_count has {local.size} entries and global_count {global_.size}, expected one length", id=1130
        )
    total, rows = int((local if rows_of_x == "local_count" else global_).sum()), rows_of(shape, "x")
    if total != rows:
        raise InvalidParamError(f"{rows_of_x} sums to {total}, expected {rows}, the rows of x", id=1131)
    return local, global_


def _matrix(name: str, counts: Counts, size: int) -> Matrix:
    try:
        array = np.asarray(
            counts.tolist() if hasattr(counts, "tolist") and not isinstance(counts, np.ndarray) else counts
        )
    except (TypeError, ValueError) as error:
        raise InvalidTensorError(
            f"{name} is a {type(counts).__name__}, expected values that NumPy converts to an array ({error})", id=2042
        ) from error
    flat = array.ndim == 1 or (array.ndim == 2 and len(array) == size)  # Paddle's layers also give a row for each card
    if not flat or array.dtype.kind not in "iu" or array.size % size or not array.size:
        dtype = getattr(counts, "dtype", array.dtype)
        raise InvalidParamError(
            f"{name} has dtype {dtype} and shape {array.shape}, expected integers, "
            f"{size} cards times the number of experts",
            id=1132,
        )
    matrix = np.ascontiguousarray(array, np.int64).reshape(size, -1)
    _core.check_signs(name, matrix.reshape(-1).tolist())
    return matrix


def layout(local: Matrix) -> Layout:
    """Returns the layout of the exchange by which cards send each other their rows of ``local_count``."""
    each = [local.shape[1]] * local.shape[0]
    return each, packed(each), each, packed(each)


def check_received(comm: Member, operator: str, received: Matrix, global_: Matrix) -> None:
    """Raises PeerMismatchError if the counts that peers announced are not the expected ones.

    The exchange of rows compares only sums per card; wrong counts of single experts would mix up rows.
    """
    with guard(comm, operator):
        for card, expert in np.argwhere(received != global_):
            raise PeerMismatchError(
                f"rank {card} sends {received[card, expert]} rows to expert {expert} of rank {comm.rank}, "
                f"which expects {global_[card, expert]}",
                id=3015,
            )


def agree(comm: Communicator, operator: str, local: Matrix, global_: Matrix) -> None:
    """Sends the counts to the peers over shared memory, and raises if theirs do not match."""
    check_received(comm, operator, _exchanged(comm, local), global_)


def exchange_counts(comm: Communicator, send_counts: Counts) -> npt.NDArray[np.int64]:
    """Returns what every rank will send to this one, over shared memory: entry j is rank j's entry for this rank."""
    with guard(comm, "exchange_counts"):
        counts = read_counts(send_counts, comm.size)
    return _exchanged(comm, counts.reshape(-1, 1)).reshape(-1)


def gathered(comm: Communicator, numbers: Sequence[int] | npt.NDArray[np.int64]) -> Matrix:
    """Returns the numbers of all ranks, equally many from each, one row per rank."""
    return _exchanged(comm, np.array([numbers] * comm.size, np.int64))


def _exchanged(comm: Communicator, rows: Matrix) -> Matrix:
    """Sends row j to rank j, over shared memory; returns the rows that arrive."""
    received = np.empty_like(rows)
    plan = _core.Plan(comm.core, "exchange_counts", "int64", *layout(rows))
    plan.run(rows.ctypes.data, received.ctypes.data)
    return received


def read_counts(send_counts: Counts, size: int) -> npt.NDArray[np.int64]:
    """Checks and returns one count >= 0 per rank."""
    counts = as_counts("send_counts", send_counts, size)
    _core.check_signs("send_counts", counts)
    return np.array(counts, np.int64)


def transposition(counts: Matrix) -> npt.NDArray[np.int64] | None:
    """Returns the order that sorts rows by (k, i) which lie by (i, k), ``counts[i, k]`` each; None: they already are.

    Row n of the result is row ``order[n]`` of the given rows.
    """
    if 1 in counts.shape:
        return None
    flat = counts.ravel()
    block = np.arange(flat.size).reshape(counts.shape).T.ravel()
    lengths = flat[block]
    begin = (np.cumsum(flat) - flat)[block] - (np.cumsum(lengths) - lengths)
    return np.repeat(begin, lengths) + np.arange(lengths.sum())
