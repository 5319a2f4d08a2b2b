"""Bounds and overlap of regions, against sets of the indices that they cover; tests/matrix has the messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alltoallv import _core
from alltoallv.errors import InvalidParamError

INT64_MAX = 2**63 - 1
WORLD = st.shared(st.integers(1, 6))
COUNTS = WORLD.flatmap(lambda world: st.lists(st.integers(0, 4), min_size=world, max_size=world))
DISPLS = WORLD.flatmap(lambda world: st.lists(st.integers(0, 14), min_size=world, max_size=world))
NUMEL = st.integers(0, 16)


def covered(count: int, displ: int) -> set[int]:
    return set(range(displ, displ + count))


def regions_are_valid(numel: int, counts: list[int], displs: list[int], may_overlap: bool) -> bool:
    """The rule, from the definition: every covered index exists and, in an output, is covered once."""
    seen: set[int] = set()
    for count, displ in zip(counts, displs, strict=True):
        indices = covered(count, displ)
        if (numel >= 0 and not indices <= set(range(numel))) or (seen & indices and not may_overlap):
            return False
        seen |= indices
    return True


def check_receive(numel: int, counts: list[int], displs: list[int]) -> int:
    zeros = [0] * len(counts)
    return _core.check_exchange(0, numel, zeros, zeros, counts, displs, len(counts))


@given(NUMEL, st.integers(-1, 16), COUNTS, DISPLS, COUNTS, DISPLS)
def test_agrees_with_index_sets(
    numel_in: int,
    numel_out: int,
    send_counts: list[int],
    sdispls: list[int],
    recv_counts: list[int],
    rdispls: list[int],
) -> None:
    arrays = (send_counts, sdispls, recv_counts, rdispls)
    is_valid = regions_are_valid(numel_in, send_counts, sdispls, may_overlap=True) and regions_are_valid(
        numel_out, recv_counts, rdispls, may_overlap=False
    )
    if is_valid:
        ends = [c + d for c, d in zip(recv_counts, rdispls, strict=True) if c]
        assert _core.check_exchange(numel_in, numel_out, *arrays, len(rdispls)) == max(ends, default=0)
    else:
        with pytest.raises(InvalidParamError):
            _core.check_exchange(numel_in, numel_out, *arrays, len(rdispls))


def test_empty_regions_have_no_place() -> None:
    """Their displacement may lie anywhere, inside another region too; ATB's rule is the operator's alone."""
    assert _core.check_exchange(0, 3, [0, 0], [99, 0], [3, 0], [0, 1], 2) == 3
    assert _core.check_exchange(0, 0, [0], [INT64_MAX], [0], [INT64_MAX], 1) == 0
    _core.check_send(0, [0, 0], [7, 7], 2)
    with pytest.raises(InvalidParamError, match=r"sdispls\[0\] is -1.*A2A-1079"):
        _core.check_send(0, [0, 0], [-1, 7], 2)


def test_the_largest_span_passes() -> None:
    assert check_receive(-1, [1, INT64_MAX - 1], [0, 1]) == INT64_MAX
    assert check_receive(-1, [INT64_MAX - 1, 1], [1, 0]) == INT64_MAX
