"""Counts and displacements as users give them are checked here and become plain lists of int."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, SupportsIndex

from alltoallv import _core
from alltoallv.errors import InvalidParamError, InvalidTensorError

Unit = Literal["element", "row"]
Layout = tuple[list[int], list[int], list[int], list[int]]  # send_counts, sdispls, recv_counts, rdispls
Counts = Sequence[SupportsIndex] | Any  # Any: integer arrays and tensors of every framework

_LIMIT = 2**63

packed = _core.pack  # displacements of regions that follow each other in rank order
scaled = _core.to_elements


def as_counts(name: str, values: Counts, size: int) -> list[int]:
    """Returns ``values`` as a list of ``size`` integers. Signs and bounds are checked later, against the tensors."""
    # torch.compile can look at lists, but not into the core.
    if type(values) is list and len(values) == size and all(type(n) is int and abs(n) < _LIMIT for n in values):
        return list(values)
    return _core.read_counts(name, values, size)


def integer(value: object) -> int | None:
    """Returns an integer of any type as int, and None for everything else, a bool included."""
    try:  # torch 2.10's compiler does not see what operator.index raises for a list
        return None if isinstance(value, bool | list | tuple) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def rows_of(shape: Sequence[int], name: str = "input") -> int:
    """Returns the length of dimension 0, in a way that torch.compile can trace; a scalar has none."""
    if not len(shape):
        raise InvalidTensorError(f"{name} has shape (), expected at least 1 dimension", id=2034)
    return shape[0]


def share_of(name: str, shape: Sequence[int], size: int, dimension: int = 0) -> int:
    """Returns the length of ``size`` equal parts of a dimension; raises InvalidTensorError if there are none such."""
    if not len(shape) or shape[dimension] % size:
        raise InvalidTensorError(
            f"{name} has shape {tuple(shape)}, expected dimension {dimension} to be a multiple of {size}", id=2080
        )
    return shape[dimension] // size


def even_split(name: str, length: int, size: int) -> list[int]:
    """Divides ``length`` rows into ``size`` equal shares; raises InvalidParamError if they do not divide."""
    if length % size:
        raise InvalidParamError(
            f"{name} has {length} rows in dimension 0, which {size} ranks cannot share equally: "
            "give split sizes, or a multiple of the number of ranks",
            id=1080,
        )
    return [length // size] * size


def even_parts(length: int, size: int) -> list[int]:
    """Divides ``length`` into ``size`` parts as equal as possible; the longer ones come first."""
    return [length // size + (j < length % size) for j in range(size)]


def chunks(length: int, size: int) -> list[int]:
    """Divides ``length`` into ``size`` parts of ceil(length / size), the last ones smaller or empty, as torch.chunk."""
    part = -(-length // size)
    return [max(0, min(part, length - j * part)) for j in range(size)]


def shares(name: str, counts: Counts | None, tensor: str, rows: int, size: int) -> list[int]:
    """Returns how many rows of dimension 0 each rank gets: ``counts``, or equal shares if that is None."""
    if counts is None:
        return even_split(tensor, rows, size)
    counts = as_counts(name, counts, size)
    if min(counts) < 0 or sum(counts) != rows:
        raise InvalidParamError(
            f"{name} is {counts}, expected entries >= 0 whose sum is {rows}, dimension 0 of {tensor}", id=1081
        )
    return counts


def plan_request(
    size: int, send_counts: Counts, recv_counts: Counts, sdispls: Counts | None, rdispls: Counts | None
) -> tuple[int, _core.Request]:
    """Returns the request, and how many elements its input must have, for an input that is not known yet."""
    counts, displs = as_counts("send_counts", send_counts, size), sdispls
    begins = packed(counts) if displs is None else as_counts("sdispls", displs, size)
    needed = max((begin + count for begin, count in zip(begins, counts, strict=True) if count > 0), default=0)
    recvs = as_counts("recv_counts", recv_counts, size)  # None is refused
    request = _core.Request.all_to_all_v(size, (min(needed, _LIMIT - 1),), counts, recvs, begins, rdispls, "element")
    return needed, request


def check_length(name: str, length: int, needed: int, covers: bool) -> None:
    """Checks the elements of a plan's input; ``covers``: its counts are packed, and take all of it."""
    if length < needed:
        raise InvalidParamError(f"{name} has {length} elements, expected at least {needed}", id=1119)
    if covers and length > needed:
        raise InvalidParamError(
            f"{name} has {length} elements, expected {needed}: give sdispls to leave elements out", id=1120
        )


def read_request(
    size: int,
    shape: Sequence[int],
    send_counts: Counts,
    recv_counts: Counts | None,
    sdispls: Counts | None,
    rdispls: Counts | None,
    unit: Unit | None,
    out: Any,
    gradient_later: bool,
    *,
    empty_rows: bool = False,
) -> _core.Request:
    """Checks the arguments of a call on an input of that shape over ``size`` ranks, and returns the request.

    ``out`` is a tensor or None. ``gradient_later``: the call is asynchronous, and its input wants a gradient.
    ``empty_rows``: the counts of rows without elements may be learnt.
    """
    into = None if out is None else out.shape
    request = _core.Request.all_to_all_v(size, shape, send_counts, recv_counts, sdispls, rdispls, unit, into)
    # An exchange of elements cannot announce rows that have none.
    if request.learns and request.row == 0 and not empty_rows:
        raise InvalidParamError("input has rows without elements, expected recv_counts to be given for it", id=1121)
    if request.learns and gradient_later:
        raise InvalidParamError(
            "async_op is True for an input that wants a gradient and recv_counts is None, expected recv_counts", id=1122
        )
    return request


def overlap(counts: Sequence[int], displs: Sequence[int]) -> bool:
    """Returns whether two regions share an element."""
    regions = sorted((d, d + n) for n, d in zip(counts, displs, strict=True) if n > 0)
    return any(begin < end for (_, end), (begin, _) in pairwise(regions))


def split_layout(sends: Sequence[int], recvs: Sequence[int], row: int) -> Layout:
    """Returns the layout, in elements, of packed parts whose sizes are given in rows."""
    send, recv = scaled(sends, row), scaled(recvs, row)
    return send, packed(send), recv, packed(recv)
