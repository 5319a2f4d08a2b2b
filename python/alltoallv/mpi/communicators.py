"""Communicators: messages and collectives under MPI's names."""

from __future__ import annotations

import operator
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from alltoallv import _core
from alltoallv import numpy as an
from alltoallv._calls import messages
from alltoallv._calls.counts import packed
from alltoallv._calls.guard import guard
from alltoallv._calls.messages import loads, pickled
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mpi import requests
from alltoallv.mpi.constants import (
    ANY_SOURCE,
    ANY_TAG,
    CONGRUENT,
    ERRORS_RETURN,
    HIGHEST_TAG,
    IDENT,
    IN_PLACE,
    PROC_NULL,
    SIMILAR,
    TAG_UB,
    UNDEFINED,
    UNEQUAL,
)
from alltoallv.mpi.datatypes import Array, Blocks, check_number, simple, typed, vector
from alltoallv.mpi.groups import Group
from alltoallv.mpi.operations import SUM, Op, as_op
from alltoallv.mpi.requests import Prequest, Request, Status, fill
from alltoallv.numpy.messages import message

EAGER = 64 << 10  # bytes up to which a send returns before it is received, as programs expect of small ones

Self = TypeVar("Self", bound="Comm")
Done = Callable[[], None]


class Comm:
    """Ranks that call each other. Every rank makes the collective calls of one communicator in the same order."""

    def __init__(self, make: Communicator | Callable[[], Communicator] | None = None, name: str = "") -> None:
        self._made, self._name = make, name

    @property
    def alltoallv(self) -> Communicator:
        """The `alltoallv.Communicator` behind it, which the first use makes."""
        if self._made is None:
            raise InvalidParamError("the communicator is COMM_NULL, expected one that has ranks", id=1367)
        if not isinstance(self._made, Communicator):
            self._made = self._made()
        return self._made

    if not TYPE_CHECKING:  # which shall find names that are missing

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(
                f"Comm.{name} is not in alltoallv.mpi, expected one of the names that docs/migration.md has"
            )

    def __bool__(self) -> bool:
        return self._made is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comm) and self._made is other._made

    __hash__ = object.__hash__

    # What it is

    def Get_rank(self) -> int:
        return self.alltoallv.rank

    def Get_size(self) -> int:
        return self.alltoallv.size

    rank, size = property(Get_rank), property(Get_size)

    def Get_name(self) -> str:
        return self._name

    def Set_name(self, name: str) -> None:
        self._name = name

    name = property(Get_name, Set_name)

    def Get_group(self) -> Group:
        ranks = _world_ranks(self.alltoallv)
        return Group(ranks, ranks[self.rank])

    group = property(Get_group)

    def Get_topology(self) -> int:
        return UNDEFINED

    def Is_inter(self) -> bool:
        return False

    def Is_intra(self) -> bool:
        return True

    is_inter, is_intra = property(Is_inter), property(Is_intra)
    topology = property(lambda self: self.Get_topology())
    is_topo = property(lambda self: self.Get_topology() != UNDEFINED)

    def Get_attr(self, keyval: int) -> int | None:
        return HIGHEST_TAG if keyval == TAG_UB else None

    def Set_errhandler(self, errhandler: Any) -> None:
        if errhandler is not ERRORS_RETURN:
            raise NotImplementedError(
                f"errhandler is {errhandler!r}, expected ERRORS_RETURN: errors are exceptions here"
            )

    def Get_errhandler(self) -> Any:
        return ERRORS_RETURN

    def Compare(self, comm: Comm) -> int:
        if self.alltoallv is comm.alltoallv:
            return IDENT
        alike = self.Get_group().Compare(comm.Get_group())
        return {IDENT: CONGRUENT, SIMILAR: SIMILAR}.get(alike, UNEQUAL)

    # Others from it

    def Dup(self: Self, info: Any = None) -> Self:
        duplicate: Self = object.__new__(type(self))
        duplicate.__dict__ = dict(self.__dict__)
        comm = self.alltoallv.split(0, self.alltoallv.rank)
        assert comm is not None
        duplicate._made = note_world_ranks(comm, self.alltoallv)
        return duplicate

    Clone = Dup

    def Free(self) -> None:
        requests.wait_for_sends(self.alltoallv)
        if self._made is not None:
            self.alltoallv.destroy()
        self._made = None

    def Disconnect(self) -> None:
        self.Free()

    def Abort(self, errorcode: int = 0) -> None:
        """Ends all ranks; this one with ``errorcode``, and at once."""
        self.alltoallv.abort(f"rank {self.rank} called Abort({errorcode})")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(errorcode & 255)

    # Messages

    def _peer(self, name: str, rank: Any) -> int:
        try:
            number = operator.index(rank)
        except TypeError:
            raise InvalidParamError(f"{name} is {rank!r}, expected a rank", id=1368) from None
        if not 0 <= number < self.size:
            raise InvalidParamError(f"{name} is {number}, expected a rank below {self.size}, or PROC_NULL", id=1369)
        return number

    def _source(self, source: Any) -> int | None:
        return None if source == ANY_SOURCE else self._peer("source", source)

    def _send(self, x: Array, dest: Any, tag: int, eager: int) -> None:
        """Sends; up to ``eager`` bytes without waiting for the receiver."""
        peer = self._peer("dest", dest)
        if x.nbytes <= eager:
            requests.let_go(self.alltoallv, an.isend(x.copy(), peer, tag, group=self.alltoallv))
        elif peer == self.rank:
            an.isend(x, peer, tag, group=self.alltoallv).wait()
        else:
            an.send(x, peer, tag, group=self.alltoallv)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        if dest != PROC_NULL:
            self._send(simple("buf", buf).packed(), dest, tag, EAGER)

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        if dest != PROC_NULL:
            self._send(simple("buf", buf).packed(), dest, tag, -1)

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        if dest != PROC_NULL:
            self._send(simple("buf", buf).packed(), dest, tag, sys.maxsize)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.Send(buf, dest, tag)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        return self._isend(buf, dest, tag, True)

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        return self._isend(buf, dest, tag, False)

    Ibsend, Irsend = Isend, Isend

    def _isend(self, buf: Any, dest: int, tag: int, eager: bool) -> Request:
        if dest == PROC_NULL:
            return Request(finish=lambda status: None)
        x, peer = simple("buf", buf).packed(), self._peer("dest", dest)
        if eager and x.nbytes <= EAGER:
            requests.let_go(self.alltoallv, an.isend(x.copy(), peer, tag, group=self.alltoallv))
            return Request(finish=lambda status: None)
        work = an.isend(x, peer, tag, group=self.alltoallv)
        return Request(work, lambda status: None)

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        if source == PROC_NULL:
            return fill(status, PROC_NULL, ANY_TAG, 0)
        blocks, peer = simple("buf", buf), self._source(source)
        target, store = blocks.target()
        if peer is None or peer == self.rank:
            self._irecv(blocks, peer, tag).Wait(status)
            return None
        begin = message("recv", target, peer, _tag(tag), self.alltoallv, None, waits=True, at_most=True)
        matched = begin()
        store()
        return fill(status, matched.source, matched.tag, matched.count * target.itemsize)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        if source == PROC_NULL:
            return Request(finish=lambda status: fill(status, PROC_NULL, ANY_TAG, 0))
        return self._irecv(simple("buf", buf), self._source(source), tag)

    def _irecv(self, blocks: Blocks, peer: int | None, tag: int) -> Request:
        target, store = blocks.target()
        work = an.irecv(target, peer, _tag(tag), at_most=True, group=self.alltoallv)
        return Request(work, lambda status: store())

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        coming = self.Irecv(recvbuf, source, recvtag)
        going = self.Issend(sendbuf, dest, sendtag)
        going.Wait()
        coming.Wait(status)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        copy = None if dest == PROC_NULL else simple("buf", buf).packed().copy()
        self.Sendrecv(copy, dest, sendtag, buf, source, recvtag, status)

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:
        coming = self.Irecv(recvbuf, source, recvtag)
        going = self.Issend(sendbuf, dest, sendtag)

        def finish(status: Status | None) -> None:
            going.Wait()
            coming._complete(status)

        return Request(coming._work, finish)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        copy = None if dest == PROC_NULL else simple("buf", buf).packed().copy()
        return self.Isendrecv(copy, dest, sendtag, buf, source, recvtag)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        return Prequest(lambda: self.Isend(buf, dest, tag))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        return Prequest(lambda: self.Issend(buf, dest, tag))

    Bsend_init, Rsend_init = Send_init, Send_init

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        return Prequest(lambda: self.Irecv(buf, source, tag))

    def _probe(self, source: int, tag: int, status: Status | None, *, wait: bool) -> bool:
        if source == PROC_NULL:
            fill(status, PROC_NULL, ANY_TAG, 0)
            return True
        matched = an.probe(self._source(source), _tag(tag), wait=wait, group=self.alltoallv)
        if matched is not None:
            fill(status, matched.source, matched.tag, matched.nbytes)
        return matched is not None

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        return self._probe(source, tag, status, wait=True)

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        return self._probe(source, tag, status, wait=False)

    probe, iprobe = Probe, Iprobe

    # Messages of objects

    def _send_object(self, obj: Any, dest: int, tag: int, eager: int) -> None:
        if dest != PROC_NULL:
            self._send(np.frombuffer(pickled("obj", obj), np.uint8), dest, tag, eager)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._send_object(obj, dest, tag, EAGER)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._send_object(obj, dest, tag, -1)

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        self._send_object(obj, dest, tag, sys.maxsize)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        return self.Isend(np.frombuffer(pickled("obj", obj), np.uint8), dest, tag)

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        return self.Issend(np.frombuffer(pickled("obj", obj), np.uint8), dest, tag)

    ibsend = isend

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Returns an object; ``buf`` is not needed and not used, of which a warning tells."""
        if buf is not None:
            warnings.warn("recv: buf is ignored, objects of any size are received without", UserWarning, stacklevel=2)
        return self._recv_object(source, tag, waits=source not in (ANY_SOURCE, self.rank)).wait(status)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receives an object of any size; ``buf`` is not needed and not used."""
        return self._recv_object(source, tag, waits=False)

    def _recv_object(self, source: int, tag: int, *, waits: bool) -> Request:
        if source == PROC_NULL:
            return Request(finish=lambda status: fill(status, PROC_NULL, ANY_TAG, 0))
        comm = self.alltoallv
        post = messages.post("recv", comm, "uint8", None, self._source(source), _tag(tag), waits=waits)
        if waits:
            matched = post.run()
            return Request(finish=lambda status: _loaded(matched, status))
        work: Any = post.submit()
        return Request(an.MessageWork(comm, work, (), lambda: None), lambda status: _loaded(work, status))

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        going = self.issend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        going.wait()
        return received

    # Collectives

    def Barrier(self) -> None:
        an.barrier(group=self.alltoallv)

    barrier = Barrier

    def Ibarrier(self) -> Request:
        return Request(an.barrier(group=self.alltoallv, async_op=True), lambda status: None)

    def _root(self, root: Any) -> int:
        return _core.checked_rank("root", root, self.size)

    def _bcast(self, buf: Any, root: int, later: bool) -> Request | None:
        comm = self.alltoallv
        with guard(comm, "broadcast"):
            blocks, root = simple("buf", buf), self._root(root)
            x, store = (blocks.packed(), lambda: None) if comm.rank == root else blocks.target()
        if comm.rank == root and not x.flags.writeable:
            x = x.copy()
        return _ended(an.broadcast(x, root, group=comm, async_op=later), store)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        self._bcast(buf, root, False)

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        return _begun(self._bcast(buf, root, True))

    def _gather(
        self, sendbuf: Any, recvbuf: Any, root: int, later: bool, receive: Callable[..., Blocks]
    ) -> Request | None:
        comm, target, store, counts = self.alltoallv, None, _nothing, None
        with guard(comm, "gather"):
            root = self._root(root)
            if comm.rank == root:
                blocks = receive("recvbuf", recvbuf, comm.size)
                target, store = blocks.target()
                counts = blocks.sizes
            if _in_place(sendbuf):
                if comm.rank != root:
                    raise _not_root("sendbuf")
                x = blocks.block(root).packed().copy()
            else:
                x = simple("sendbuf", sendbuf).packed()
        return _ended(an.gather(x, root, counts, out=target, group=comm, async_op=later), store)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        self._gather(sendbuf, recvbuf, root, False, simple)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        return _begun(self._gather(sendbuf, recvbuf, root, True, simple))

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        self._gather(sendbuf, recvbuf, root, False, vector)

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        return _begun(self._gather(sendbuf, recvbuf, root, True, vector))

    def _scatter(
        self, sendbuf: Any, recvbuf: Any, root: int, later: bool, send: Callable[..., Blocks]
    ) -> Request | None:
        comm, x, counts = self.alltoallv, None, None
        with guard(comm, "scatter"):
            root = self._root(root)
            if comm.rank == root:
                blocks = send("sendbuf", sendbuf, comm.size)
                x, counts = blocks.packed(), blocks.sizes
            if _in_place(recvbuf):
                if comm.rank != root:
                    raise _not_root("recvbuf")
                target, store = np.empty(blocks.sizes[root], blocks.dtype), _nothing
            else:
                target, store = simple("recvbuf", recvbuf).target()
        return _ended(an.scatter(target, x, root, counts, group=comm, async_op=later), store)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        self._scatter(sendbuf, recvbuf, root, False, simple)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        return _begun(self._scatter(sendbuf, recvbuf, root, True, simple))

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        self._scatter(sendbuf, recvbuf, root, False, vector)

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> Request:
        return _begun(self._scatter(sendbuf, recvbuf, root, True, vector))

    def _allgather(self, sendbuf: Any, recvbuf: Any, later: bool, receive: Callable[..., Blocks]) -> Request | None:
        comm = self.alltoallv
        with guard(comm, "all_gather"):
            blocks = receive("recvbuf", recvbuf, comm.size)
            target, store = blocks.target()
            x = blocks.block(comm.rank).packed().copy() if _in_place(sendbuf) else simple("sendbuf", sendbuf).packed()
        return _ended(an.all_gather_v(x, blocks.sizes, out=target, group=comm, async_op=later), store)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        self._allgather(sendbuf, recvbuf, False, simple)

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _begun(self._allgather(sendbuf, recvbuf, True, simple))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        self._allgather(sendbuf, recvbuf, False, vector)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _begun(self._allgather(sendbuf, recvbuf, True, vector))

    def _alltoall(self, sendbuf: Any, recvbuf: Any, later: bool, read: Callable[..., Blocks]) -> Request | None:
        comm = self.alltoallv
        with guard(comm, "all_to_all_v"):
            coming = read("recvbuf", recvbuf, comm.size)
            going = coming if _in_place(sendbuf) else read("sendbuf", sendbuf, comm.size)
            x = going.packed().copy() if _in_place(sendbuf) else going.packed()
            target, store = coming.target()
        result = an.all_to_all_v(x, going.sizes, coming.sizes, out=target, group=comm, async_op=later)  # type: ignore[call-overload]
        return _ended(result, store)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        self._alltoall(sendbuf, recvbuf, False, simple)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _begun(self._alltoall(sendbuf, recvbuf, True, simple))

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        self._alltoall(sendbuf, recvbuf, False, vector)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _begun(self._alltoall(sendbuf, recvbuf, True, vector))

    def _alltoallw(self, sendbuf: Any, recvbuf: Any, later: bool) -> Request | None:
        comm, store = self.alltoallv, _nothing
        with guard(comm, "all_to_all_v"):
            coming = typed("recvbuf", recvbuf, comm.size)
            going = coming if _in_place(sendbuf) else typed("sendbuf", sendbuf, comm.size)
            goal, source, one_piece = coming.regions(), going.regions(), [0, 0] * comm.size
            if goal is None or not coming.array.flags.writeable:
                target, store = coming.target()
                goal = target, packed(coming.sizes), one_piece
            if source is None or np.may_share_memory(source[0], goal[0]):
                source = going.packed().copy(), packed(going.sizes), one_piece
            # Rows with gaps between them are read and written where they lie.
            places = going.sizes, source[1], coming.sizes, goal[1]
            plan = _core.Plan(comm.core, "all_to_all_v", "uint8", *places, steps=source[2] + goal[2])
        memory = source[0], goal[0]
        if later:
            begun = plan.submit(*(array.ctypes.data for array in memory))
            return _ended(an.Work(comm, begun, memory, lambda: None), store)
        plan.run(*(array.ctypes.data for array in memory))
        return _ended(None, store)

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        self._alltoallw(sendbuf, recvbuf, False)

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        return _begun(self._alltoallw(sendbuf, recvbuf, True))

    # Reductions

    def _operands(self, call: str, sendbuf: Any, recvbuf: Any, op: Any, has_result: bool) -> Any:
        """Returns the input, where to put the result and what stores it, and the datatype and operator."""
        with guard(self.alltoallv, call):
            op, target, store, blocks = as_op(op), None, _nothing, None
            if has_result:
                blocks = simple("recvbuf", recvbuf)
                target, store = blocks.target()
            elif _in_place(sendbuf):
                raise _not_root("sendbuf")
            if _in_place(sendbuf):
                assert blocks is not None
                input = blocks
            else:
                input = simple("sendbuf", sendbuf)
            fits = blocks is None or (input.dtype == blocks.dtype and input.sizes == blocks.sizes)
            if blocks is not None and not fits and call != "reduce_scatter":
                raise InvalidParamError(
                    f"recvbuf has {blocks.sizes[0]} {blocks.dtype}, expected {input.sizes[0]} {input.dtype} as sendbuf",
                    id=1373,
                )
            if not op.reduces(input.dtype):
                op.check(input.types[0])
            return input.packed(), target, store, input.types[0], op

    def _folded(
        self, x: Array, op: Op, kind: Any, later: bool, result: Callable[[Array | None], None], upto: int
    ) -> Request | None:
        """Combines the inputs of ranks 0 to ``upto`` here, where the core has no kernel for it."""
        comm, size = self.alltoallv, self.size

        def end(parts: Array) -> None:
            result(op.fold(np.split(parts, size)[: upto + 1], kind) if upto >= 0 else None)

        gathered = an.all_gather_v(x, [x.size] * size, group=comm, async_op=later)
        if later:
            work = gathered[1]
            return Request(work, lambda status: end(work.result()))
        end(gathered)
        return None

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Op, later: bool) -> Request | None:
        x, target, store, kind, op = self._operands("all_reduce", sendbuf, recvbuf, op, True)
        if op.reduces(x.dtype):
            core: Any = op.core
            return _ended(an.all_reduce(x, core, out=target, group=self.alltoallv, async_op=later), store)
        return self._folded(x, op, kind, later, _into(target, store), self.size)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        self._allreduce(sendbuf, recvbuf, op, False)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        return _begun(self._allreduce(sendbuf, recvbuf, op, True))

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: Op, root: int, later: bool) -> Request | None:
        with guard(self.alltoallv, "reduce"):
            is_root = self._root(root) == self.rank
        x, target, store, kind, op = self._operands("reduce", sendbuf, recvbuf, op, is_root)
        if op.reduces(x.dtype):
            core: Any = op.core
            return _ended(an.reduce(x, root, core, out=target, group=self.alltoallv, async_op=later), store)
        return self._folded(x, op, kind, later, _into(target, store), self.size if is_root else -1)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> None:
        self._reduce(sendbuf, recvbuf, op, root, False)

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Request:
        return _begun(self._reduce(sendbuf, recvbuf, op, root, True))

    def _reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, counts: Sequence[int] | None, op: Op, later: bool
    ) -> Request | None:
        comm, call = self.alltoallv, "reduce_scatter"
        x, target, store, kind, op = self._operands(call, sendbuf, recvbuf, op, True)
        with guard(comm, call):
            if counts is None:
                if not _in_place(sendbuf) and x.size != target.size * comm.size:
                    raise InvalidParamError(
                        f"sendbuf has {x.size} elements, expected {target.size} for each of {comm.size} ranks", id=1374
                    )
                counts = [x.size // comm.size] * comm.size
            counts = [int(count) * kind.number for count in counts]
            if len(counts) != comm.size or sum(counts) > x.size:
                raise InvalidParamError(
                    f"recvcounts is {counts}, expected {comm.size} counts of {x.size} elements", id=1375
                )
            own = counts[comm.rank]
            x = x[: sum(counts)].copy() if _in_place(sendbuf) else x[: sum(counts)]
            if target.size < own:
                raise InvalidParamError(f"recvbuf has {target.size} elements, expected {own}", id=1376)
            target = target[:own]
        if op.reduces(x.dtype):
            core: Any = op.core
            return _ended(an.reduce_scatter(x, counts, core, out=target, group=comm, async_op=later), store)
        begin = sum(counts[: comm.rank])

        def put(result: Array | None) -> None:
            assert result is not None
            _into(target, store)(result[begin : begin + own])

        return self._folded(x, op, kind, later, put, comm.size)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        self._reduce_scatter(sendbuf, recvbuf, None, op, False)

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        return _begun(self._reduce_scatter(sendbuf, recvbuf, None, op, True))

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM) -> None:
        self._reduce_scatter(sendbuf, recvbuf, self._recv_counts(sendbuf, recvbuf, recvcounts), op, False)

    def Ireduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Request:
        return _begun(self._reduce_scatter(sendbuf, recvbuf, self._recv_counts(sendbuf, recvbuf, recvcounts), op, True))

    def _recv_counts(self, sendbuf: Any, recvbuf: Any, counts: Sequence[int] | None) -> Sequence[int] | None:
        """Learns the counts of the ranks from their buffers where they are left out."""
        if counts is not None or _in_place(sendbuf):
            return counts
        with guard(self.alltoallv, "all_gather"):
            blocks = simple("recvbuf", recvbuf)
        own = np.array(blocks.counts, np.int64)
        return [int(n) for n in an.all_gather_v(own, [1] * self.size, group=self.alltoallv)]

    def _scan(self, sendbuf: Any, recvbuf: Any, op: Op, exclusive: bool, later: bool) -> Request | None:
        x, target, store, kind, op = self._operands("scan", sendbuf, recvbuf, op, True)
        if op.reduces(x.dtype) and not later:
            core: Any = op.core
            an.scan(x, core, exclusive=exclusive, out=target, group=self.alltoallv)
            store()
            return None
        return self._folded(x, op, kind, later, _into(target, store), self.rank - exclusive)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        self._scan(sendbuf, recvbuf, op, False, False)

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        return _begun(self._scan(sendbuf, recvbuf, op, False, True))

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        self._scan(sendbuf, recvbuf, op, True, False)

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Request:
        return _begun(self._scan(sendbuf, recvbuf, op, True, True))

    # Collectives of objects

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return an.broadcast_object(obj, root, group=self.alltoallv)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        return an.gather_object(sendobj, root, group=self.alltoallv)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        return an.scatter_object(sendobj, root, group=self.alltoallv)

    def allgather(self, sendobj: Any) -> list[Any]:
        return an.all_gather_object(sendobj, group=self.alltoallv)

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Sends object j to rank j; returns what came, by rank."""
        comm = self.alltoallv
        with guard(comm, "all_to_all_v"):
            parts = [pickled(f"sendobj[{j}]", value) for j, value in enumerate(sendobj)]
            check_number("sendobj", "objects", parts, comm.size)
        return exchange_objects(comm, parts)

    def reduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM, root: int = 0) -> Any:
        gathered = self.gather(sendobj, root)
        return None if gathered is None else _combined(gathered, op)

    def allreduce(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        return _combined(self.allgather(sendobj), op)

    def scan(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        return _combined(self.allgather(sendobj)[: self.rank + 1], op)

    def exscan(self, sendobj: Any, op: Op | Callable[[Any, Any], Any] = SUM) -> Any:
        gathered = self.allgather(sendobj)[: self.rank]
        return _combined(gathered, op) if gathered else None


def _loaded(matched: _core.MessageWork, status: Status | None) -> Any:
    fill(status, matched.source, matched.tag, matched.count)
    data = matched.memory
    return pickle.loads(data) if data else None  # as mpi4py reads a message of no bytes


def exchange_objects(comm: Communicator, parts: Sequence[bytes]) -> list[Any]:
    """Sends pickled objects to the ranks, and returns those that came; no bytes stand for none."""
    sends = [len(part) for part in parts]
    coming = an.exchange_counts(sends, group=comm).tolist()
    data = an.all_to_all_v(np.frombuffer(b"".join(parts), np.uint8), sends, coming, group=comm)
    return loads(data.data, coming)


def _tag(tag: int) -> int | None:
    return None if tag == ANY_TAG else tag


def _combined(values: Sequence[Any], op: Any) -> Any:
    if not callable(op):
        raise InvalidParamError(
            f"op is {op!r}, expected one of MPI's operators, an Op or a function of two objects", id=1378
        )
    result = values[0]
    for value in values[1:]:
        result = op(result, value)
    return result


def _in_place(buf: Any) -> bool:
    """Returns whether a buffer is left out, by either of the marks that mpi4py takes."""
    return buf is None or buf is IN_PLACE


def _not_root(name: str) -> InvalidParamError:
    return InvalidParamError(f"{name} is MPI.IN_PLACE, expected that on the root alone", id=1371)


def _nothing() -> None:
    """There is nothing to store."""


def _into(target: Array | None, store: Done) -> Callable[[Array | None], None]:
    def put(result: Array | None) -> None:
        if result is not None and target is not None:
            target[...] = result
            store()

    return put


def _ended(result: Any, store: Done) -> Request | None:
    """Stores what a call has received; of one that is under way it returns the request."""
    work = result[1] if isinstance(result, tuple) else result
    if isinstance(work, an.Work):
        return Request(work, lambda status: store())
    store()
    return None


def _begun(request: Request | None) -> Request:
    return Request(finish=lambda status: None) if request is None else request


worlds: dict[str, list[int]] = {}  # ranks in COMM_WORLD, by a communicator's name


def _world_ranks(comm: Communicator) -> list[int]:
    return worlds.get(comm.name) or list(range(comm.size))


def note_world_ranks(comm: Communicator, parent: Communicator) -> Communicator:
    """Notes which ranks of COMM_WORLD a new communicator has."""
    own = np.array([_world_ranks(parent)[parent.rank]], np.int64)
    worlds[comm.name] = [int(each) for each in an.all_gather_v(own, [1] * comm.size, group=comm)]
    return comm
