"""A token goes once to every rank that has experts of it, behind headers that list the pairs it stands for.

What goes to a rank is a matrix of bytes: rows of a header, then a row for each token. A header begins with four int32:
the digest of the terms, the number of pairs, and how many tokens and choices of each the sender has. Columns follow,
which have some bytes of every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alltoallv._calls.counts import packed
from alltoallv._calls.routing import Numbers
from alltoallv.errors import PeerMismatchError

Bytes = npt.NDArray[np.uint8]
_DIGEST = 0x7FFFFFFF
_ALIGNED = 16  # so that columns can be viewed as any dtype, and a row has room for what a header begins with


def row_bytes(width: int) -> int:
    """Returns how many bytes a row of ``width`` bytes takes with its padding."""
    return max(_padded(width), _ALIGNED)


def _padded(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def distinct(tokens: Numbers, pairs: Sequence[int]) -> list[Numbers]:
    """Returns, for every rank, the distinct tokens of its pairs, ascending."""
    return [numbered(part)[0] for part in np.split(tokens, packed(pairs)[1:])]


def numbered(tokens: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the distinct tokens, ascending, and for every token its place among them."""
    there = np.zeros(tokens.max(initial=-1) + 1, np.bool_)  # many times as fast as numpy.unique, which sorts
    there[tokens] = True
    return np.flatnonzero(there), np.cumsum(there)[tokens] - 1


def encode(columns: Sequence[Bytes], pairs: Sequence[int], head: Sequence[int], stride: int) -> list[Bytes]:
    """Returns the header for every rank from columns ``[sum(pairs), width]``; ``head``: terms, tokens, choices."""
    made = []
    for begin, count in zip(packed(pairs), pairs, strict=True):
        terms, *about = head
        texts = [np.array([terms & _DIGEST, count, *about], np.int32).view(np.uint8)]
        texts += [column[begin : begin + count].reshape(-1) for column in columns]
        header = np.zeros(_rows(count, [column.shape[1] for column in columns], stride) * stride, np.uint8)
        place = 0
        for text in texts:
            header[place : place + len(text)] = text
            place += _padded(len(text))
        made.append(header.reshape(-1, stride))
    return made


def _rows(pairs: int, widths: Sequence[int], stride: int) -> int:
    return -(-(_ALIGNED + sum(_padded(pairs * width) for width in widths)) // stride)


def lines(parsed: Headers, token: Numbers) -> Numbers:
    """Returns, for every pair that came with its token, the row in which the token stands."""
    parts = np.split(token, packed(parsed.pairs)[1:])
    return np.concatenate([numbered(part)[1] + first for part, first in zip(parts, parsed.firsts, strict=True)])


class Headers(NamedTuple):
    """Holds what the headers of all ranks say, by rank."""

    pairs: list[int]
    tokens: list[int]
    choices: list[int]
    firsts: list[int]  # the first row of tokens
    columns: list[Bytes]  # [sum(pairs), width]


def decode(
    fetch: Callable[[Numbers], Bytes], recvs: Sequence[int], widths: Sequence[int], terms: int, rank: int
) -> Headers:
    """Reads the headers in the rows that arrived, ``recvs`` from every rank; ``fetch`` returns chosen rows.

    Raises:
        PeerMismatchError: a peer's terms are others, which a device compares in the first calls only.
    """
    begins = packed(recvs)
    heads = np.ascontiguousarray(fetch(np.array(begins))[:, :_ALIGNED]).view(np.int32)
    other = np.flatnonzero(heads[:, 0] != terms & _DIGEST)
    if len(other):
        raise PeerMismatchError(
            f"rank {int(other[0])} dispatches other rows than rank {rank}: expected one dtype and row shape of tokens, "
            "one dtype of gate_weights, one number of experts and the same options on all ranks"
        )
    pairs, tokens, choices = heads[:, 1:].T.tolist()
    stride = fetch(np.zeros(0, np.int64)).shape[1]
    rows = [_rows(count, widths, stride) for count in pairs]
    firsts = [begin + count for begin, count in zip(begins, rows, strict=True)]
    headers = fetch(np.concatenate([np.arange(*ends) for ends in zip(begins, firsts, strict=True)]))
    columns: list[list[Bytes]] = [[] for _ in widths]
    for header, count in zip(np.split(headers, packed(rows)[1:]), pairs, strict=True):
        text, place = header.reshape(-1), _ALIGNED
        for column, width in zip(columns, widths, strict=True):
            column.append(text[place : place + count * width].reshape(count, width))
            place += _padded(count * width)
    return Headers(pairs, tokens, choices, firsts, [np.concatenate(column) for column in columns])
