"""Rows of experts go back in pieces, each of some tokens of every rank, so that a piece stays in the caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from alltoallv._calls.counts import packed
from alltoallv._calls.routing import Numbers, chunk_ends

PIECE_BYTES = 16 << 20  # that a rank sends or receives, about


class Piece(NamedTuple):
    """One exchange of rows."""

    rows: Numbers  # of the experts, that go, by rank
    sends: list[int]
    recvs: list[int]
    tokens: slice  # of this rank, that are complete with it
    places: Numbers  # [tokens, k], which of the rows received a pair is; -1: none, it was dropped


def pieces(
    order: Numbers, source: Numbers, ranks: Sequence[Sequence[int]], token: Numbers, tokens: int, k: int, row: int
) -> list[Piece]:
    """The way back of rows of so many bytes; as many pieces on every rank.

    ``ranks`` and ``token``: what peers told, see `alltoallv._calls.notes`. Without tokens and choices: one piece.
    """
    sent, arrived, *about = ranks
    count = 1
    if about:
        most = max(n * choices for n, choices in zip(*about, strict=True))
        count = max(1, -(-most * row // PIECE_BYTES))
    there = places(source, sum(arrived))
    if count == 1:
        whole = positions(order, tokens, k)
        return [Piece(there, list(arrived), list(sent), slice(0, tokens), whole)]
    ends = [chunk_ends(n, count) for n in about[0]]
    parts = np.split(token, packed(arrived)[1:])
    going = np.concatenate([np.searchsorted(end, part, "right") for end, part in zip(ends, parts, strict=True)])
    coming = np.searchsorted(chunk_ends(tokens, count), order // k, "right")
    first, made = 0, []
    for piece, last in enumerate(chunk_ends(tokens, count)):
        goes, comes = np.flatnonzero(going == piece), np.flatnonzero(coming == piece)
        counts = _by_rank(goes, arrived), _by_rank(comes, sent)
        made.append(
            Piece(there[goes], *counts, slice(first, last), positions(order[comes] - first * k, last - first, k))
        )
        first = last
    return made


def _by_rank(which: Numbers, counts: Sequence[int]) -> list[int]:
    """How many of these, ascending, are each rank's, when ``counts`` of all are."""
    made: list[int] = np.diff(np.searchsorted(which, [*packed(counts), sum(counts)])).tolist()
    return made


def places(source: Numbers, rows: int) -> Numbers:
    """Where each of the rows that came lies among those of the experts."""
    there = np.flatnonzero(source >= 0)
    result = np.empty(rows, np.int64)
    result[source[there]] = there
    return result


def positions(order: Numbers, tokens: int, k: int) -> Numbers:
    """Of every pair, ``[tokens, k]``, which row sent it is; -1: none, it was dropped."""
    result = np.full(tokens * k, -1)
    result[order] = np.arange(len(order))
    return result.reshape(tokens, k)
