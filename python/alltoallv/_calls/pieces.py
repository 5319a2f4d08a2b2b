"""Rows of experts go back in pieces, each with some tokens of every rank, so that a piece stays in the caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from alltoallv._calls.counts import packed
from alltoallv._calls.routing import Numbers, chunk_ends

PIECE_BYTES = 16 << 20  # about what a rank sends or receives in one piece


class Piece(NamedTuple):
    """One of the exchanges in which rows go back."""

    rows: Numbers  # the experts' rows that are sent, by rank
    sends: list[int]
    recvs: list[int]
    tokens: slice  # this rank's tokens that are complete after this piece
    places: Numbers  # [tokens, k]: the received row of each pair; -1: none, the pair was dropped


def pieces(
    order: Numbers, source: Numbers, ranks: Sequence[Sequence[int]], token: Numbers, tokens: int, k: int, row: int
) -> list[Piece]:
    """Divides the way back of rows of ``row`` bytes into pieces, equally many on every rank.

    ``ranks`` and ``token`` come from the peers' headers, see `alltoallv._calls.headers`. If ``ranks`` holds no numbers
    of tokens and choices, there is one piece.
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
    """Counts how many of the ascending indices ``which`` belong to each rank, where rank j has ``counts[j]`` of all."""
    made: list[int] = np.diff(np.searchsorted(which, [*packed(counts), sum(counts)])).tolist()
    return made


def places(source: Numbers, rows: int) -> Numbers:
    """Returns, for each received row, its place among the rows of the experts."""
    there = np.flatnonzero(source >= 0)
    result = np.empty(rows, np.int64)
    result[source[there]] = there
    return result


def positions(order: Numbers, tokens: int, k: int) -> Numbers:
    """Returns, ``[tokens, k]``, the row in which each pair was sent; -1: none, the pair was dropped."""
    result = np.full(tokens * k, -1)
    result[order] = np.arange(len(order))
    return result.reshape(tokens, k)
