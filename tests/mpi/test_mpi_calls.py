"""Calls of mpi4py's, beyond the programs' calls: wrong arguments, memory with gaps, types, requests, neighbours."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks
from trouble import join

from alltoallv import Communicator
from alltoallv.errors import AllToAllVError, InvalidParamError, InvalidTensorError, PeerLostError, PeerMismatchError
from alltoallv.mpi import MPI
from alltoallv_tools.ports import free_port

Call = Callable[[Any], Any]
x, y = np.zeros(2), np.zeros(4)


class InGpu:
    __cuda_array_interface__ = ()


class Exports:
    """An array of another library, by one of the ways in which it shows its memory."""

    def __init__(self, array: np.ndarray, name: str) -> None:
        self.__dict__[name] = getattr(array, name)
        self.array = array


class ByDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


WRONG: list[tuple[Call, type[Exception], str]] = [
    (lambda comm: comm.Send(x, dest=5), InvalidParamError, "dest is 5, expected a rank below 2, or PROC_NULL"),
    (lambda comm: comm.Send(x, dest="0"), InvalidParamError, "dest is '0', expected a rank"),
    (lambda comm: comm.Recv(x, source=2), InvalidParamError, "source is 2, expected a rank below 2"),
    (lambda comm: comm.Send(x, 1 - comm.rank, tag=-7), InvalidParamError, "tag is -7, expected"),
    (lambda comm: comm.Send([1.0, 2.0], 1), InvalidTensorError, "buf is 1.0, expected an array"),
    (lambda comm: comm.Send(3.0, 1), InvalidTensorError, "buf is 3.0, expected an array"),
    (lambda comm: comm.Send(InGpu(), 1), InvalidTensorError, "buf is a InGpu in a GPU's memory, expected one in host"),
    (
        lambda comm: comm.Recv(b"xy", 1),
        InvalidTensorError,
        "the buffer that receives is read-only, expected a writable",
    ),
    (lambda comm: comm.Send([x, 3, MPI.DOUBLE], 1), InvalidParamError, "buf has 16 bytes, expected at least 24"),
    (lambda comm: comm.Send([x, 1, MPI.BOTTOM], 1), InvalidParamError, "buf ends with MPI.BOTTOM, expected a datatype"),
    (lambda comm: comm.Bcast(x, root=2), InvalidParamError, "root is 2, expected 0 <= root < 2"),
    (lambda comm: comm.Allgather(x, np.zeros(3)), InvalidParamError, "recvbuf has 24 bytes, expected a multiple of 16"),
    (lambda comm: comm.Alltoallv([y, [1, 2, 3]], [y, [1, 2]]), InvalidParamError, "sendbuf has 3 counts, expected 2"),
    (lambda comm: comm.Alltoallv([y, (1, 2, 3)], [y, [1, 2]]), InvalidParamError, r"sendbuf has \(1, 2, 3\) in place"),
    (lambda comm: comm.Allreduce(x, y), InvalidParamError, "recvbuf has 4 float64, expected 2 float64 as sendbuf"),
    (lambda comm: comm.Allreduce(x, np.zeros(2), op="sum"), InvalidParamError, "op is 'sum', expected one of MPI's"),
    (lambda comm: comm.Allreduce(x, np.zeros(2), MPI.BAND), InvalidParamError, "op is MPI.BAND, which is not defined"),
    (lambda comm: comm.Allreduce(x, np.zeros(2), MPI.MAXLOC), InvalidParamError, "expected pairs of a value and an"),
    (lambda comm: comm.alltoall([1]), InvalidParamError, "sendobj has 1 objects, expected 2"),
    (lambda comm: comm.Create_cart([3]), InvalidParamError, r"dims is \[3\], expected dimensions of at most 2 ranks"),
    (lambda comm: comm.Set_errhandler(MPI.ERRORS_ABORT), NotImplementedError, "errhandler is MPI.ERRORS_ABORT"),
    (
        lambda comm: comm.Isend(x, 0, 1) and comm.Irecv(x, 0, 9).Cancel(),
        NotImplementedError,
        "Request.Cancel is not in",
    ),
    (lambda comm: comm.Create_intercomm, AttributeError, "Comm.Create_intercomm is not in alltoallv.mpi"),
    (lambda comm: MPI.Win, AttributeError, "MPI.Win is not in alltoallv.mpi"),
]


@on_ranks(2)
def test_a_wrong_argument_gets_a_sentence(comm: Communicator) -> None:
    for call, kind, text in WRONG:
        with pytest.raises(kind, match=text):
            call(MPI.Intracomm(comm))


@on_ranks(2)
def test_a_wrong_argument_of_one_rank_is_an_error_of_both(comm: Communicator) -> None:
    world, rank = MPI.Intracomm(comm), comm.rank
    calls: list[tuple[Call, type[AllToAllVError]]] = [
        (lambda c: c.Bcast(x, root=5 if rank else 0), InvalidParamError),
        (lambda c: c.Allreduce(x, np.zeros(3 - rank)), InvalidParamError),
        (lambda c: c.Gather(x, np.zeros(3) if rank == 0 else None), InvalidParamError),
        (lambda c: c.Alltoallv([y, [2, 2]], [np.zeros(4), [2, 3 - rank]]), AllToAllVError),
        (lambda c: c.Allgather(np.zeros(2, "f" if rank else "d"), y), AllToAllVError),
    ]
    for number, (call, kind) in enumerate(calls):
        with pytest.raises(kind):
            call(world)
        assert comm.usable, number
        world.Barrier()
    if rank == 1:
        with pytest.raises(PeerMismatchError, match=r"sends 4 float64 to rank 1, which expects 2 float64.*A2A-3008"):
            world.Recv(x, 0)
    else:
        world.Send(y, 1)
    world.Barrier()


@on_ranks(2)
def test_memory_with_gaps(comm: Communicator) -> None:
    world, peer = MPI.Intracomm(comm), 1 - comm.rank
    mine = (np.arange(24.0) + 100 * comm.rank).reshape(4, 6)
    theirs = (np.arange(24.0) + 100 * peer).reshape(4, 6)

    strided, whole = np.full((4, 6), -1.0), np.full((4, 6), -1.0)
    world.Sendrecv(mine[:, ::3], peer, recvbuf=strided[:, 1::3], source=peer)
    assert np.array_equal(strided[:, 1::3], theirs[:, ::3])
    assert (np.delete(strided, [1, 4], axis=1) == -1).all()

    world.Sendrecv(np.asfortranarray(mine), peer, recvbuf=whole, source=peer)  # memory as it lies
    assert np.array_equal(whole.ravel(), theirs.ravel(order="F"))

    column = MPI.DOUBLE.Create_vector(4, 1, 6).Create_resized(0, 8).Commit()
    target = np.full((4, 6), -1.0)
    world.Alltoall([mine, 2, column], [target, 2, column])
    want = np.full((4, 6), -1.0)
    for j, source in enumerate((mine, theirs) if comm.rank == 0 else (theirs, mine)):
        want[:, 2 * j : 2 * j + 2] = source[:, 2 * comm.rank : 2 * comm.rank + 2]
    assert np.array_equal(target, want)

    inner = MPI.DOUBLE.Create_subarray([4, 6], [2, 3], [1, 2]).Commit()
    target = np.full((4, 6), -1.0)
    world.Allreduce([mine, 1, inner], [target, 1, inner])
    assert np.array_equal(target[1:3, 2:5], (mine + theirs)[1:3, 2:5])
    assert (target == -1).sum() == 18

    indexed, status, got = MPI.INT.Create_indexed([2, 1], [3, 0]), MPI.Status(), np.full(8, -1, "i")
    world.Isend([np.arange(6, dtype="i"), 1, indexed], peer)
    world.Recv(got, peer, status=status)
    assert (got.tolist(), status.Get_count(MPI.INT), status.count) == ([3, 4, 0, -1, -1, -1, -1, -1], 3, 12)
    world.Barrier()


@on_ranks(3)
def test_transfers_of_a_divided_array(comm: Communicator) -> None:
    """As mpi4py-fft has them: parts of one dimension become parts of another, by a type for each rank."""
    world = MPI.Intracomm(comm)
    whole = np.arange(216, dtype="c16").reshape(6, 9, 4)

    def cut(array: np.ndarray, axis: int, rank: int) -> np.ndarray:
        return np.split(array, comm.size, axis)[rank]

    def types(local: tuple[int, ...], axis: int) -> list[MPI.Datatype]:
        sizes, part = list(local), local[axis] // comm.size
        subsizes = [*sizes[:axis], part, *sizes[axis + 1 :]]
        starts = [[0] * axis + [part * rank] + [0] * (2 - axis) for rank in range(comm.size)]
        return [MPI.C_DOUBLE_COMPLEX.Create_subarray(sizes, subsizes, start).Commit() for start in starts]

    for have, want in ((0, 1), (1, 0)):
        x = cut(whole, have, comm.rank).copy()
        y = np.full_like(cut(whole, want, comm.rank), -1, order="C")
        every = [x, types(x.shape, want)], [y, types(y.shape, have)]
        world.Alltoallw(*every)
        assert np.array_equal(y, cut(whole, want, comm.rank))
        y[:] = -1
        world.Ialltoallw(*every).Wait()
        assert np.array_equal(y, cut(whole, want, comm.rank))

    # On one rank elements that are in no rows, on another in one piece, on the third in rows.
    scattered = MPI.INT.Create_indexed([1, 1, 1], [5, 0, 2])
    given = np.arange(18, dtype="i").reshape(3, 6) + 100 * comm.rank
    kinds = [scattered.Create_resized(0, 24), MPI.INT.Create_contiguous(3), MPI.INT.Create_vector(3, 1, 2)]
    starts = np.arange(3) * 24
    got = np.full((3, 3), -1, "i")
    world.Alltoallw([given, [1] * 3, starts, [kinds[comm.rank]] * 3], [got, [1] * 3, starts // 2, [kinds[1]] * 3])
    places = ([5, 0, 2], [0, 1, 2], [0, 2, 4])
    assert np.array_equal(got, [6 * comm.rank + 100 * j + np.array(places[j]) for j in range(3)])

    same = np.arange(9, dtype="i").reshape(3, 3) + 10 * comm.rank
    world.Alltoallw(MPI.IN_PLACE, [same, [1] * 3, np.arange(3) * 12, [kinds[1]] * 3])
    assert np.array_equal(same, [np.arange(3) + 3 * comm.rank + 10 * j for j in range(3)])
    half = np.arange(12, dtype="i") + 100 * comm.rank  # what is sent and received lies in one array
    world.Alltoallw([half, [1] * 3, [0, 4, 8], [MPI.INT] * 3], [half[6:], [1] * 3, [0, 4, 8], [MPI.INT] * 3])
    assert half[6:9].tolist() == [100 * j + comm.rank for j in range(3)]


@on_ranks(2)
def test_arrays_of_other_libraries(comm: Communicator) -> None:
    world, peer = MPI.Intracomm(comm), 1 - comm.rank
    values = np.arange(4.0) + comm.rank
    out = np.zeros(4)
    for given in (ByDlpack(values), Exports(values, "__array_interface__"), memoryview(values), bytearray(values)):
        kind = [given, MPI.DOUBLE]
        world.Sendrecv(kind, peer, recvbuf=out, source=peer)
        assert out.tolist() == (np.arange(4.0) + peer).tolist()
        out[:] = 0
    world.Sendrecv(values, peer, recvbuf=Exports(out, "__array_interface__"), source=peer)
    assert out.tolist() == (np.arange(4.0) + peer).tolist()


@on_ranks(3)
def test_reductions_that_the_core_has_no_kernel_for(comm: Communicator) -> None:
    world, rank = MPI.Intracomm(comm), comm.rank
    pairs = [np.array([(r % 2, r), (-r, r)], MPI.DOUBLE_INT.todtype()) for r in range(3)]
    for op, want in ((MPI.MAXLOC, [(1.0, 1), (0.0, 0)]), (MPI.MINLOC, [(0.0, 0), (-2.0, 2)])):
        out = np.zeros(2, pairs[0].dtype)
        world.Allreduce([pairs[rank], MPI.DOUBLE_INT], [out, MPI.DOUBLE_INT], op)
        assert out.tolist() == want
    flags, out = np.array([rank, 1, 0]), np.zeros(3, int)
    for op, bits in ((MPI.LAND, [0, 1, 0]), (MPI.LOR, [1, 1, 0]), (MPI.LXOR, [0, 1, 0])):
        world.Reduce(flags, out if rank == 2 else None, op, root=2)
        assert rank < 2 or out.tolist() == bits
    factors = [np.array([1 + r * 1j, 0.1 * r]) for r in range(3)]
    product = np.zeros(2, complex)
    world.Exscan(factors[rank], product, MPI.PROD)
    assert rank == 0 or np.array_equal(product, reduce(np.multiply, factors[:rank]))

    def put(a: memoryview, b: memoryview, kind: Any) -> None:
        np.frombuffer(b, "i")[:] = 10 * np.frombuffer(a, "i") + np.frombuffer(b, "i")

    digits = MPI.Op.Create(put)
    part, request = np.zeros(1, "i"), None
    world.Reduce_scatter(np.array([1 + rank, 4 + rank, 7 + rank], "i"), part, [1, 1, 1], digits)
    assert part[0] == [123, 456, 789][rank]
    request = world.Iallreduce(MPI.IN_PLACE, part, digits)
    request.Wait()
    assert part[0] == reduce(lambda a, b: 10 * a + b, [123, 456, 789])
    assert world.scan(str(rank), op=lambda a, b: a + b) == "012"[: rank + 1]


@on_ranks(2)
def test_requests(comm: Communicator) -> None:
    world, peer = MPI.Intracomm(comm), 1 - comm.rank
    outs = [np.empty(1) for _ in range(3)]
    coming = [world.Irecv(out, peer, tag) for tag, out in enumerate(outs)] + [world.irecv(source=peer, tag=3)]
    assert not MPI.Request.Testall(coming)
    assert MPI.Request.Testsome(coming) == []
    world.Barrier()
    for tag in (2, 0, 1):
        world.Ssend(np.full(1, 10.0 + tag), peer, tag) if comm.rank else world.Isend(np.full(1, 10.0 + tag), peer, tag)
    world.issend("x" * 100_000, peer, 3)
    status, statuses = MPI.Status(), []
    first = MPI.Request.Waitany(coming, status)
    rest = MPI.Request.waitall(coming, statuses)
    assert status.Get_tag() == first
    assert [out[0] for out in outs] == [10, 11, 12]
    assert first == 3 or rest[3] == "x" * 100_000
    assert all(request == MPI.REQUEST_NULL for request in coming)
    assert MPI.Request.Waitany(coming) == MPI.UNDEFINED
    assert MPI.Request.Waitsome(coming) is None
    assert [s.tag for s in statuses] == [MPI.ANY_TAG if j == first else j for j in range(4)]
    nothing = MPI.Status()
    world.Recv(outs[0], MPI.PROC_NULL, status=nothing)
    world.Send(outs[0], MPI.PROC_NULL)
    assert (nothing.source, nothing.count, outs[0][0]) == (MPI.PROC_NULL, 0, 10)
    again = [world.Recv_init(outs[0], peer, 5), world.Send_init(outs[1], peer, 5)]
    for number in range(3):
        outs[1][:] = number
        MPI.Prequest.Startall(again)
        MPI.Request.Waitall(again)
        assert outs[0][0] == number
    world.Barrier()


@on_ranks(4)
def test_neighbours(comm: Communicator) -> None:
    world, rank = MPI.Intracomm(comm), comm.rank
    torus = world.Create_cart([2, 2], periods=[True, False])
    y0, x0 = torus.coords
    out = np.full((4, 1), -1)
    torus.Neighbor_alltoall(np.arange(4) + 10 * rank, out)
    # What arrives from above has gone down, also where above and below are one rank; no rank: the value stays.
    above, side = 2 * (1 - y0) + x0, 2 * y0 + 1 - x0
    want = [10 * above + 1, 10 * above, 10 * side + 3 if x0 else -1, -1 if x0 else 10 * side + 2]
    assert out.ravel().tolist() == want
    assert torus.neighbor_alltoall([f"{rank}{e}" for e in "abcd"]) == [
        f"{above}b", f"{above}a", f"{side}d" if x0 else None, None if x0 else f"{side}c"
    ]  # fmt: skip
    row = torus.Sub([False, True])
    there = row.Get_group().Translate_ranks(None, world.Get_group())
    assert (row.dims, row.periods, there) == ([2], [0], [2 * y0, 2 * y0 + 1])
    assert MPI.Compute_dims(12, 2) == [4, 3]
    assert MPI.Compute_dims(12, [0, 2, 0]) == [3, 2, 2]

    tree = world.Create_graph([3, 4, 5, 6], [1, 2, 3, 0, 0, 0])
    got = [np.zeros(n + 1) for n in ([1, 2, 3] if rank == 0 else [0])]
    flat = np.zeros(sum(len(part) for part in got))
    tree.Neighbor_allgatherv(np.full(rank + 1, float(rank)), [flat, [len(part) for part in got]])
    assert flat.tolist() == ([1, 1, 2, 2, 2, 3, 3, 3, 3] if rank == 0 else [0])

    edges = world.Create_dist_graph([rank], [2], [(rank + 1) % 4, rank], weights=[3, 4])
    weights = ([4, 3] if rank == 0 else [3, 4], [3, 4])
    assert edges.Get_dist_neighbors() == (sorted([(rank - 1) % 4, rank]), [(rank + 1) % 4, rank], weights)


@on_ranks(3)
def test_groups(comm: Communicator) -> None:
    world = MPI.Intracomm(comm)
    group = world.Get_group()
    odd = group.Incl([2, 0])
    made = world.Create(odd)
    assert (made == MPI.COMM_NULL) == (comm.rank == 1)
    if made:
        assert made.allgather(comm.rank) == [2, 0]
        assert made.Compare(made.Dup()) == MPI.CONGRUENT
    assert group.Excl([0]).Union(odd).Translate_ranks(None, group) == [1, 2, 0]
    assert world.Split(MPI.UNDEFINED) == MPI.COMM_NULL
    with pytest.raises(InvalidParamError, match=r"the communicator is COMM_NULL.*A2A-1367"):
        MPI.COMM_NULL.Get_rank()


def test_messages_between_hosts(ranks: Any) -> None:
    port = free_port()

    def program(comm: Communicator) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with join(comm.rank, 2, backend="tcp") as apart:
            world, peer, status = MPI.Intracomm(apart), 1 - apart.rank, MPI.Status()
            assert not world.Iprobe(peer, 7)
            for n in (3, 200_000):
                value, out = {"rank": apart.rank, "values": list(range(n))}, np.full(n + 2, -1.0)
                coming, going = world.irecv(source=MPI.ANY_SOURCE, tag=1), world.issend(value, peer, 1)
                assert coming.wait(status) == {"rank": peer, "values": list(range(n))}
                going.wait()
                sent = world.Isend(np.arange(float(n)), peer, 5)
                world.Probe(status=status)
                assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (peer, 5, n)
                world.Recv(out, status=status)
                sent.Wait()
                assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (peer, 5, n)
                assert out.tolist() == [*range(n), -1, -1]
            world.Barrier()

    ranks(2)(program)


@on_ranks(2)
def test_operators_and_types_are_sent_as_themselves(comm: Communicator) -> None:
    world, own = MPI.Intracomm(comm), (MPI.MAX, MPI.SUM, MPI.LXOR, MPI.MINLOC, MPI.DOUBLE, MPI.INT)
    assert world.bcast(own) == own
    assert copy.deepcopy(own) == own
    vector = pickle.loads(pickle.dumps(MPI.INT.Create_vector(2, 1, 3)))
    assert (vector.Get_size(), vector.Get_extent()) == (8, (0, 16))


@on_ranks(2)
def test_a_communicator_is_freed_before_a_message_of_another_is_received(comm: Communicator) -> None:
    world = MPI.Intracomm(comm)
    part = world.Dup()
    if comm.rank == 0:
        world.send("text", 1)
    part.Free()
    world.Barrier()
    if comm.rank == 1:
        assert world.recv(source=0) == "text"
    world.Free()


@on_ranks(2)
def test_a_lost_peer(comm: Communicator) -> None:
    world = MPI.Intracomm(comm)
    if comm.rank == 1:
        world.Free()
        return
    with pytest.raises(PeerLostError, match="recv of any number of uint8 with any tag from rank 1"):
        world.recv(source=1)
