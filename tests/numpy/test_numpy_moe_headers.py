"""What a peer says in the headers before its tokens is checked against what it sent, before memory is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alltoallv import _core
from alltoallv.errors import InvalidParamError, PeerMismatchError

Array = np.ndarray[Any, Any]
TERMS, STRIDE = 77, 16
OPTIONS = _core.MoeOptions(2, [[0, 1]], [True], None, False, 1, "", False, "")


def sent() -> Array:
    """The rows of three tokens for one rank: a header in int32, and 16 bytes a token."""
    ids = np.array([[0], [1], [0]])
    _, _, counts, header, header_at, _, token_at = _core.moe_pack(OPTIONS, ids, None, None, None, 3, 1, 16, TERMS)
    rows = np.zeros((sum(counts), STRIDE), np.uint8)
    rows[header_at], rows[token_at] = header, np.arange(1, 4)[:, None]
    return rows


def read(rows: Array) -> Any:
    recvs: list[int] = [len(rows)]
    return _core.moe_unpack(OPTIONS, lambda which: rows[which], recvs, None, STRIDE, TERMS, 0)


def test_a_header_is_read_as_it_was_sent() -> None:
    rows = sent()
    source, token, *of_ranks, experts, _, index = read(rows)
    assert (source.tolist(), token.tolist(), of_ranks) == ([0, 1, 2], [0, 2, 1], [[3], [3], [1]])
    assert experts.tolist() == [[2, 1]] * 2
    assert rows[index, 0].tolist() == [1, 3, 2]


def put(place: int, value: int) -> Callable[[Array], Array]:
    def change(rows: Array) -> Array:
        rows.reshape(-1).view(np.int32)[place] = value
        return rows

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put(0, TERMS + 1), "rank 0 dispatches other rows than rank 0"),
        (put(1, 10**6), "a header that does not fit them"),
        (put(1, -1), "a header that does not fit them"),
        (put(2, -1), "a header that does not fit them"),
        (put(4, 2), "for expert 2 of this rank, expected 0 to 1"),
        (put(4, -1), "for expert -1 of this rank"),
        (put(5, 3), "a pair of token 3 of 3"),
        (put(5, -1), "a pair of token -1 of 3"),
        (lambda rows: rows[:-1], "sent 2 tokens behind a header of 3"),
        (lambda rows: rows[:0], "rank 0 sent no header"),
    ],
    ids=range(10),
)
def test_a_header_of_a_broken_peer(change: Callable[[Array], Array], text: str) -> None:
    with pytest.raises(PeerMismatchError, match=text):
        read(change(sent()))


def test_a_way_that_leads_nowhere() -> None:
    with pytest.raises(InvalidParamError, match=r"expert_ids holds 2, expected 0 to 1.*A2A-1026"):
        _core.moe_pack(OPTIONS, np.array([[2]]), None, None, None, 1, 1, 16, TERMS)
