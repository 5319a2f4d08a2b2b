"""What a call of `all_to_all_v` asks for: the checks that need no tensor's memory, the same in every front end."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from alltoallv import _core
from alltoallv._calls.counts import Counts, Layout, Unit, as_counts, packed, scaled
from alltoallv.errors import InvalidParamError, InvalidTensorError


def row_size(shape: Sequence[int]) -> int:
    """Elements per row of dimension 0."""
    if len(shape) == 0:
        raise InvalidTensorError("a 0-dimensional input has no rows, expected at least 1 dimension")
    return math.prod(shape[1:])


@dataclass(slots=True)
class Sends:
    """What a rank sends, in elements.

    Attributes:
        counts, displs: One entry per rank.
        row: Elements in what the caller's counts count: 1, or those of a row of dimension 0.
        tail: The dimensions behind a row; none where the caller counts elements.
    """

    counts: list[int]
    displs: list[int]
    row: int
    tail: tuple[int, ...]

    @classmethod
    def read(
        cls,
        shape: Sequence[int],
        send_counts: Counts,
        sdispls: Counts | None,
        unit: Unit | None,
        size: int,
    ) -> Sends:
        """From the caller's arguments for an input of that shape."""
        by_row = counts_rows(unit, len(shape))
        row = row_size(shape) if by_row else 1
        counts = scaled(as_counts("send_counts", send_counts, size), row)
        displs = packed(counts) if sdispls is None else scaled(as_counts("sdispls", sdispls, size), row)
        return cls(counts, displs, row, tuple(shape[1:]) if by_row else ())

    def check_without_receives(self, rdispls: object, out: object) -> None:
        """Refuses what a call without receive counts cannot have."""
        for name, value in (("rdispls", rdispls), ("out", out)):
            if value is not None:
                raise InvalidParamError(f"{name} is given but recv_counts is None, expected recv_counts with {name}")

    def check_learning(self, numel: int, rdispls: object, out: object, *, gradient_later: bool) -> None:
        """Refuses what a call that learns its receive counts cannot have; ``numel`` is the input's.

        ``gradient_later`` says that the call is asynchronous and its input wants a gradient.
        """
        self.check_without_receives(rdispls, out)
        if self.row == 0:  # rows without elements leave no trace in an exchange of elements
            raise InvalidParamError("input has rows without elements, expected recv_counts to be given for it")
        if gradient_later:
            raise InvalidParamError(
                "async_op is True for an input that wants a gradient and recv_counts is None, expected recv_counts"
            )
        _core.check_send(numel, self.counts, self.displs, len(self.counts))

    def with_receives(self, recv_counts: Counts, rdispls: Counts | None) -> Request:
        """The whole request."""
        size = len(self.counts)
        rows = as_counts("recv_counts", recv_counts, size)
        counts = scaled(rows, self.row)
        displs = packed(counts) if rdispls is None else scaled(as_counts("rdispls", rdispls, size), self.row)
        return Request((self.counts, self.displs, counts, displs), self.row, self.tail, sum(rows))


@dataclass(slots=True)
class Request:
    """Counts and displacements of all four kinds, in elements; ``row`` and ``tail`` as in `Sends`."""

    layout: Layout
    row: int
    tail: tuple[int, ...]
    rows: int  # received, as the caller counts

    def check_out(self, shape: Sequence[int]) -> None:
        """Refuses an output whose rows have another shape than the input's."""
        check_rows(shape, self.tail)

    def check(self, numel_in: int, numel_out: int = -1) -> tuple[int, ...]:
        """Bounds and overlaps, also of a given output; the shape that an allocated output has."""
        needed = _core.check_exchange(numel_in, numel_out, *self.layout, len(self.layout[0]))
        return (needed // self.row if self.row else self.rows, *self.tail)

    def has_gaps(self, shape: Sequence[int]) -> bool:
        """Whether an output of that shape has elements that no region covers."""
        return sum(self.layout[2]) < math.prod(shape)


def check_rows(shape: Sequence[int], tail: tuple[int, ...]) -> None:
    """Refuses an output whose rows have another shape than ``tail``, unless that is none."""
    if tail and tuple(shape[1:]) != tail:
        raise InvalidTensorError(f"out has rows of shape {tuple(shape[1:])}, expected {tail}, those of the input")


def counts_rows(unit: object, dimensions: int) -> bool:
    """Whether counts count rows; ``None`` means rows of an input of two dimensions or more, elements of others.

    Raises:
        InvalidParamError: ``unit`` is neither a `Unit` nor None.
    """
    if unit not in ("element", "row", None):
        raise InvalidParamError(f"unit is {unit!r}, expected 'element', 'row' or None")
    return dimensions > 1 if unit is None else unit == "row"


def seconds(timeout: float | None) -> float:
    """A timeout as the core takes it.

    Raises:
        InvalidParamError: no number above 0.
    """
    if timeout is None:
        return -1.0
    if not isinstance(timeout, numbers.Real) or not timeout > 0:
        raise InvalidParamError(f"timeout is {timeout!r}, expected seconds above 0, or None")
    return float(timeout)
