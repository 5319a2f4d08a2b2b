"""Messages both ways, and objects: processes and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from on_ranks import on_both, on_ranks

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError, PeerLostError, PeerMismatchError

Launch = Callable[..., list[Any]]


def test_sendrecv(launch: Launch) -> None:
    def program(comm: Communicator) -> list[Any]:
        out, me = np.zeros(2, np.int64), comm.rank
        to_self = av.sendrecv([me, 7], me, out, me, group=comm), out.tolist()
        large = np.full(1 << 18, me, np.int32)  # would wait for ever if sends came first
        got = np.empty_like(large)
        source = av.sendrecv(large, 1 - me, got, send_tag=me, recv_tag=1 - me, group=comm)
        with pytest.raises(InvalidParamError, match=r"overlap.*A2A-1085"):
            av.sendrecv(out, 1 - me, out, 1 - me, group=comm)
        return [to_self, source, set(got.tolist())]

    assert launch(2, program) == [[(0, [0, 7]), 1, {1}], [(1, [1, 7]), 0, {0}]]


def test_a_refused_sendrecv_leaves_no_message_behind(launch: Launch) -> None:
    def program(comm: Communicator) -> tuple[list[float], list[float]]:
        x, out, got = np.full(2, comm.rank + 1.0), np.zeros(2), np.zeros(2)
        for dst, src, text in ((5, 1, "dst is 5"), (None, 1, "dst is None"), (1, 2, "src is 2"), (1, -1, "src is -1")):
            with pytest.raises(InvalidParamError, match=text):
                av.sendrecv(x, dst, out, src, group=comm)
        assert av.sendrecv(x, 1 - comm.rank, got, 1 - comm.rank, group=comm) == 1 - comm.rank
        return out.tolist(), got.tolist()

    assert launch(2, program) == [([0, 0], [2, 2]), ([0, 0], [1, 1])]


def test_a_sendrecv_whose_send_fails_has_received(launch: Launch) -> None:
    """Nothing is written into the caller's array after the error."""

    def program(comm: Communicator) -> list[float]:
        out, later = np.zeros(1 << 21), np.zeros(1 << 21)
        if comm.rank == 0:
            with pytest.raises(PeerMismatchError, match=r"expects 3 float64.*A2A-3008"):
                av.sendrecv(np.ones(2), 1, out, 1, group=comm)
            received = out[-1]
            av.recv(later, 1, group=comm)
            return [received, later[-1]]
        with pytest.raises(PeerMismatchError):
            av.recv(np.zeros(3), 0, group=comm)
        for value in (7.0, 8.0):
            av.send(np.full_like(out, value), 0, group=comm)
        return []

    assert launch(2, program) == [[7, 8], []]


VALUES = [None, {"a": [1, 2]}, "x" * 100_000]


@pytest.mark.parametrize("words", [8, 20_000], ids=["small", "in pieces"])
@pytest.mark.parametrize("source", [1, None], ids=["of a rank", "of any"])
@on_ranks(2, env={"ALLTOALLV_PATH": "staged"})
def test_receives_take_messages_of_a_tag_in_their_order(comm: Communicator, words: int, source: int | None) -> None:
    """Messages that arrive while the receives are looked at must not pass an earlier one by."""
    for _ in range(20):
        av.barrier(group=comm)
        if comm.rank == 0:
            outs = [np.full(words, -1) for _ in range(30)]
            works = [av.irecv(out, source, group=comm) for out in outs]
            av.barrier(group=comm)
        else:
            av.barrier(group=comm)
            works = [av.isend(np.full(words, number), 0, group=comm) for number in range(30)]
        for work in works:
            work.wait()
        assert comm.rank == 1 or all((out == number).all() for number, out in enumerate(outs))


@on_both(3)
def test_objects(comm: Communicator) -> None:
    me, mine = comm.rank, VALUES[comm.rank]
    assert av.all_gather_object(mine, group=comm) == VALUES
    for root in range(3):
        assert av.gather_object(mine, root, group=comm) == (VALUES if me == root else None)
        assert av.broadcast_object(mine, root, group=comm) == VALUES[root]
        assert av.scatter_object(VALUES if me == root else None, root, group=comm) == mine
    if me == 0:
        assert [av.recv_object(tag=3, group=comm), av.recv_object(2, group=comm)] == [VALUES[1], "last"]
    elif me == 1:
        av.send_object(mine, 0, 3, group=comm)
    else:
        av.send_object("last", 0, group=comm)


@on_both(2)
def test_objects_that_cannot_be_pickled(comm: Communicator) -> None:
    bad = (lambda: None) if comm.rank == 1 else 1
    for call in (
        lambda: av.all_gather_object(bad, group=comm),
        lambda: av.gather_object(bad, group=comm),
        lambda: av.broadcast_object(bad, 1, group=comm),
        lambda: av.scatter_object([0, bad], 1, group=comm),
    ):
        with pytest.raises(InvalidParamError, match=r"is a function that cannot be pickled \(.*A2A-1149"):
            call()
    for values, text in ((None, "values is None, expected 2"), ([1], r"values is \[1\], expected 2 objects")):
        with pytest.raises(InvalidParamError, match=text):
            av.scatter_object(values, group=comm)
    assert av.all_gather_object(comm.rank, group=comm) == [0, 1]


@on_ranks(2)
def test_a_lost_peer_of_objects(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.destroy()
        return
    with pytest.raises(PeerLostError):
        av.recv_object(1, group=comm)
    with pytest.raises(PeerLostError):
        av.all_gather_object(1, group=comm)


@on_ranks(2)
def test_tags_that_no_program_may_use(comm: Communicator) -> None:
    """Negative ones would meet those with which groups are set up."""
    for tag in (-1, -(2**31), 2**31):
        for call in (av.send, av.recv, av.isend, av.irecv):
            with pytest.raises(
                InvalidParamError, match=rf"tag is {tag}, expected an integer from 0 to 2147483647.*A2A-1158"
            ):
                call(np.zeros(1), 1 - comm.rank, tag, group=comm)
    av.barrier(group=comm)


def test_a_probe_finds_what_a_receive_takes(launch: Launch) -> None:
    def program(comm: Communicator) -> Any:
        if comm.rank == 1:
            av.send(np.arange(3.0), 0, 5, group=comm)
            av.send(np.arange(20_000, dtype=np.int32), 0, 4, group=comm)
            av.barrier(group=comm)
            return None
        assert av.probe(1, 4, wait=False, group=comm) is None
        found = [av.probe(group=comm), av.probe(1, 5, group=comm), av.probe(None, 5, wait=False, group=comm)]
        out, rest = np.full(5, -1.0), np.empty(20_000, np.int32)
        work = av.irecv(out, tag=None, at_most=True, group=comm)
        work.wait()
        assert found == [av.Envelope(1, 5, 3, 24)] * 3 == [av.Envelope(work.source, work.tag, work.count, 24)] * 3
        assert av.probe(tag=4, group=comm) == av.Envelope(1, 4, 20_000, 80_000)
        assert av.recv(rest, None, None, group=comm) == 1
        assert av.probe(wait=False, group=comm) is None
        av.barrier(group=comm)
        return out.tolist(), (rest == np.arange(20_000)).all()

    assert launch(2, program)[0] == ([0, 1, 2, -1, -1], True)


@on_both(2)
def test_a_message_of_more_than_at_most(comm: Communicator) -> None:
    out, want = np.zeros(2), "rank 0 sends 3 float64 to rank 1, which expects 2 float64"
    with pytest.raises(PeerMismatchError, match=want):
        av.send(np.ones(3), 1, group=comm) if comm.rank == 0 else av.recv(out, 0, at_most=True, group=comm)
    assert out.tolist() == [0, 0]
    with pytest.raises(InvalidParamError, match=r"tag is None.*A2A-1158"):
        av.send(np.ones(1), 1 - comm.rank, None, group=comm)  # type: ignore[arg-type]
    av.barrier(group=comm)
    if comm.rank == 1:
        comm.destroy()
        return
    with pytest.raises(PeerLostError, match="recv of 0 uint8 with any tag from any rank"):
        av.probe(group=comm)
