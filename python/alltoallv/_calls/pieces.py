"""Rows travel in pieces, each with some tokens of every rank.

Rows of experts go back in pieces that stay in the caches. Between hosts, tokens follow their headers in pieces, so that
a rank works on one while the next travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from alltoallv._calls.counts import packed
from alltoallv._calls.headers import Headers, numbered
from alltoallv._calls.routing import Numbers, chunk_ends

PIECE_BYTES = 16 << 20  # about what a rank sends or receives in one piece
FOLLOWING_BYTES = 1 << 20  # about what a rank sends to all in one piece from host to host


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


def follow(apart: bool, tokens: int, row: int) -> bool:
    """Returns whether a rank's tokens, of ``row`` bytes, follow their headers; ``apart``: on several hosts."""
    return apart and tokens * row > FOLLOWING_BYTES


class Following(NamedTuple):
    """One of the exchanges in which tokens follow their headers."""

    until: int  # this rank's tokens that have gone after this piece
    going: list[Numbers]  # this rank's tokens for every rank
    recvs: list[int]
    pairs: Numbers  # the pairs whose tokens arrive, in the order of their rows
    rows: Numbers  # the received row of each


def following(
    parsed: Headers, token: Numbers, which: Sequence[Numbers], late: Sequence[bool], rank: int, row: int
) -> list[Following]:
    """Divides the tokens of the ranks that are ``late``, whose tokens follow their headers; a rank's own do not travel.

    Args:
        token: The pairs' tokens.
        which: This rank's tokens for every rank.
        row: Bytes of a token.
    """
    behind = [n if follows else 0 for n, follows in zip(parsed.tokens, late, strict=True)]
    count = -(-max(behind) * row // FOLLOWING_BYTES)
    ends = [[0, *chunk_ends(n, count)] for n in behind]
    mine, ends[rank] = ends[rank], [0] * (count + 1)
    found = [numbered(part) for part in np.split(token, packed(parsed.pairs)[1:])]
    made = []
    for piece in range(count):
        span = slice(piece, piece + 2)
        spans = [np.searchsorted(each, end[span]).tolist() for (each, _), end in zip(found, ends, strict=True)]
        recvs = [last - first for first, last in spans]
        going = [tokens[slice(*np.searchsorted(tokens, mine[span]))] for tokens in which]
        going[rank] = going[rank][:0]
        about = [(line, *ends, place) for (_, line), ends, place in zip(found, spans, packed(recvs), strict=True)]
        pairs = np.flatnonzero(np.concatenate([(line >= first) & (line < last) for line, first, last, _ in about]))
        rows = np.concatenate([line - first + place for line, first, _, place in about])[pairs]
        order = np.argsort(rows, kind="stable")
        made.append(Following(mine[piece + 1], going, recvs, pairs[order], rows[order]))
    return made
