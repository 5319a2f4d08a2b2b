"""Communicators of some ranks, and of those that are left: processes and threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import on_both

from alltoallv import Communicator, membership
from alltoallv import numpy as av
from alltoallv.errors import CommTimeoutError, InvalidParamError, PeerLostError
from alltoallv.testing import Ranks

Launch = Callable[..., list[Any]]


def told(comm: Communicator) -> list[int]:
    """What every rank of the new communicator knows itself by, in the order of its ranks."""
    ranks: list[int] = av.all_gather(np.array(comm.rank * 1000 + comm.size), group=comm).tolist()
    return ranks


def check_split(comm: Communicator, colors: list[int | None], keys: list[int]) -> list[int] | None:
    with_old = comm.split(colors[comm.rank], keys[comm.rank])
    assert comm.usable
    if with_old is None:
        return None
    with with_old as part:
        assert part.domain == f"{comm.domain}/{colors[comm.rank]}"
        members: list[int] = av.all_gather(np.array(comm.rank), group=part).tolist()
        assert members[part.rank] == comm.rank
        return members


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.none() | st.integers(-1, 1), st.integers(-2, 2)), min_size=1, max_size=4))
def test_split(launch: Launch, given: list[tuple[int | None, int]]) -> None:
    colors, keys = [color for color, _ in given], [key for _, key in given]
    for rank, members in enumerate(launch(len(given), check_split, colors, keys)):
        together = [r for r in range(len(given)) if colors[r] == colors[rank]]
        assert members == (None if colors[rank] is None else sorted(together, key=lambda r: (keys[r], r)))


def test_a_color_is_a_number_of_any_type(launch: Launch) -> None:
    def program(comm: Communicator) -> list[int]:
        part = comm.split([True, 1, np.int8(1)][comm.rank])
        assert part is not None
        return told(part)

    assert launch(3, program) == [[3, 1003, 2003]] * 3


@on_both(4)
def test_parts_are_split_again_and_the_same_twice(comm: Communicator) -> None:
    half, again = comm.split(comm.rank // 2), comm.split(comm.rank // 2)
    assert half is not None
    assert again is not None
    alone = half.split(half.rank)
    assert alone is not None
    av.barrier(group=comm)
    half.abort()
    assert told(alone) == [1]
    assert told(again) == [2, 1002]
    assert comm.usable


@pytest.mark.parametrize(("color", "key", "text"), [
    (0.5, 0, "color is 0.5, expected an integer or None"),
    (0, "a", "key is 'a', expected an integer"),
    (2**63, 0, "color is 9223372036854775808, expected a 64-bit integer"),
])  # fmt: skip
@on_both(3)
def test_what_split_refuses_fails_on_every_rank(comm: Communicator, color: Any, key: Any, text: str) -> None:
    with pytest.raises(InvalidParamError, match=text):
        comm.split(*((color, key) if comm.rank == 1 else (0, 0)))
    assert comm.split(0) is not None


def sum_on(comm: Communicator, steps: int, dies: dict[int, int]) -> list[int]:
    """Sums over the ranks that are left, step by step; rank r of the job dies before step ``dies[r]``."""
    me, sums = comm.rank, []
    for step in range(steps):
        if dies.get(me) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            try:
                sums.append(int(av.all_reduce(np.array([10**me]), group=comm)[0]))
                break
            except PeerLostError:
                lost, comm = comm, comm.shrink()
                assert not lost.usable
    return sums


@pytest.mark.parametrize(("size", "dies"), [(2, {0: 1}), (4, {2: 1}), (4, {0: 1, 3: 1}), (4, {0: 1, 1: 2})])
def test_survivors_sum_on(ranks: Ranks, size: int, dies: dict[int, int]) -> None:
    outcomes = ranks(size, fresh=True, outcomes=True)(sum_on, 4, dies)
    wanted = [sum(10**r for r in range(size) if dies.get(r, 9) > step) for step in range(4)]
    for outcome in outcomes:
        if outcome.rank not in dies:
            assert outcome.error is None, outcome.error
            assert outcome.result == wanted


def test_a_survivor_dies_between_agreeing_and_joining(ranks: Ranks) -> None:
    def program(comm: Communicator) -> list[int]:
        if comm.rank == 1:
            comm.destroy()
            return []
        if comm.rank == 3:
            membership._make = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError):
            av.barrier(group=comm)
        return told(comm.shrink())

    outcomes = ranks(4, fresh=True, outcomes=True, comm_timeout=30.0)(program)
    assert [outcome.result for outcome in outcomes if outcome.rank != 3] == [[2, 1002], [], [2, 1002]]


def test_threads_shrink_to_those_that_have_not_left(ranks: Ranks) -> None:
    def program(comm: Communicator) -> list[int]:
        if comm.rank == 1:
            comm.destroy()
            return []
        with pytest.raises(PeerLostError):
            av.barrier(group=comm)
        return told(comm.shrink())

    assert ranks(3, threads=True)(program) == [[2, 1002], [], [2, 1002]]


def test_after_an_abort_all_go_on(launch: Launch) -> None:
    def program(comm: Communicator) -> list[int]:
        if comm.rank == 0:
            return told(comm.shrink())  # still usable: the others learn of it
        with pytest.raises(PeerLostError, match=r"called shrink\(\)"):
            av.barrier(group=comm)
        return told(comm.shrink())

    assert launch(3, program) == [[3, 1003, 2003]] * 3


def test_not_after_destroy() -> None:
    (alone,) = Communicator.threads(1)
    alone.destroy()
    for call in (alone.shrink, lambda: alone.split(0)):
        with pytest.raises(InvalidParamError, match="has been destroyed"):
            call()


def test_a_rank_that_lives_and_does_not_come(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        av.barrier(group=comm)
        if comm.rank == 0:
            with pytest.raises(CommTimeoutError, match=r"waited 1.5 s for the ranks \[0, 1\], which live"):
                comm.shrink()
            av.send(np.zeros(1), 1, group=beside[0])
        else:
            av.recv(np.zeros(1), 0, group=beside[1])

    beside = Communicator.threads(2)
    ranks(2, threads=True, comm_timeout=1.5)(program)
