"""Reduce, gather, scatter and messages on backend alltoallv: right values, disagreement, late and lost ranks."""

from __future__ import annotations

import inspect
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, carrier, on_group, operators

import alltoallv.torch as at
from alltoallv.errors import CommTimeoutError, InvalidParamError, PeerLostError, PeerMismatchError


def column(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of -7, and its middle column, which counts up from ``value``."""
    whole = torch.full((4, 3), -7.0)
    whole[:, 1] = torch.arange(4.0) + value
    return whole, whole[:, 1]


@on_group(3)
def test_rooted_collectives(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Values, also of strided and uneven tensors, through the group and through functions of ours."""
    for functions in (dist, at):
        for root in range(size):
            here = rank == root
            whole, x = column(10.0 * rank)
            functions.reduce(x, root)
            sums = sum(column(10.0 * j)[1] for j in range(size))
            assert torch.equal(x, sums if here else column(10.0 * rank)[1])
            assert (whole[:, ::2] == -7).all()
            outs = [column(77) for _ in range(size)] if here else []
            functions.gather(column(10.0 * rank)[1], [out for _, out in outs] or None, root)
            for j, (whole, out) in enumerate(outs):
                assert torch.equal(out, column(10.0 * j)[1])
                assert (whole[:, ::2] == -7).all()
            whole, x = column(77)
            parts = [column(10.0 * j)[1] for j in range(size)]
            functions.scatter(x, parts if here else None, root)
            assert torch.equal(x, parts[rank])
            assert (whole[:, ::2] == -7).all()
            z = torch.tensor([1 + 2j * rank])
            functions.reduce(z, root)
            assert not here or z.item() == size + 1j * size * (size - 1)
        bits = torch.tensor([0b111 & ~(1 << rank)])
        functions.all_reduce(bits, dist.ReduceOp.BAND)
        assert bits.item() == 0
        functions.all_reduce(odd := torch.tensor([rank == 1, True]), dist.ReduceOp.BXOR)
        assert odd.tolist() == [True, size % 2 == 1]
    # A tensor that is in the place of another rank.
    for functions in (dist, at):
        for n in (3, 300_000):
            outs = [torch.full((n,), float(rank)) for _ in range(size)]
            functions.gather(outs[1], outs if rank == 0 else None, 0)
            assert rank or [out[-1].item() for out in outs] == [*range(size)]
            parts = [torch.full((n,), float(j)) for j in range(size)]
            functions.scatter(x := parts[(rank + 1) % size], parts if rank == 0 else None, 0)
            assert (x == rank).all()
    # Uneven: of ours alone, torch checks nothing here either.
    outs = [torch.empty(j + 1) for j in range(size)] if rank == 0 else None
    dist.gather(torch.full((rank + 1,), rank + 0.5), outs, 0)
    assert outs is None or [out.tolist() for out in outs] == [[0.5], [1.5] * 2, [2.5] * 3]
    work = dist.scatter(
        torch.empty(rank), list(torch.ones(3).split([0, 1, 2])) if rank == 2 else None, 2, async_op=True
    )
    assert work is not None
    work.wait()
    big = torch.arange(300_000.0) + rank / 3
    dist.all_reduce(every := big.clone())
    dist.reduce(big, 1)
    assert rank != 1 or torch.equal(big, every)  # the same bits
    before = operators(group)
    with pytest.raises(InvalidParamError, match=r"op is 'PREMUL_SUM', expected sum.*A2A-1043"):
        dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0))
    assert operators(group) == before


@on_group(3)
def test_messages(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """With tags, from any source, in batches, beside collectives, to strided tensors."""
    after, before = (rank + 1) % size, (rank - 1) % size
    ops = [dist.P2POp(dist.isend, torch.tensor([rank]), after)]
    ops.append(dist.P2POp(dist.irecv, got := torch.empty(1).long(), before))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.item() == before
    late = [torch.empty(n + 1) for n in range(4)]
    works = [dist.irecv(x, before, tag=n) for n, x in enumerate(late)]
    dist.all_reduce(torch.ones(2))  # which a pending receive does not hold up
    works += [dist.isend(torch.full((n + 1,), 10.0 * rank + n), after, tag=n) for n in reversed(range(4))]
    for work in works:
        assert work is not None
        work.wait()
        assert work.is_completed()
    assert [x[0].item() for x in late] == [10.0 * before + n for n in range(4)]
    if rank == 0:
        sources = [dist.recv(x := torch.empty(200_000), tag=3) for _ in range(2)]
        assert sorted(sources) == [1, 2]
        assert (x == sources[1]).all()
    else:
        dist.send(torch.full((200_000,), float(rank)), 0, tag=3)
    whole, x = column(77)
    if rank == 1:
        assert at.recv(x, 0, group) == 0
        assert torch.equal(x, column(5)[1])
        assert (whole[:, ::2] == -7).all()
        with pytest.raises(InvalidParamError, match=r"dst is 3, expected one of the group's ranks.*A2A-1169"):
            at.send(x, 3, group)
    elif rank == 0:
        at.send(column(5)[1], 1, group)
    if rank == 2:
        work = at.irecv(x := torch.empty(3), None, group, 9)
        assert work is not None
        assert work.result()[0] is x
        assert work._source_rank() == work.source_rank() == 1
    elif rank == 1:
        handle = at.isend(torch.ones(3), 2, group, 9)
        assert handle is not None
        handle.wait()


def test_messages_that_do_not_fit(grouped: Grouped) -> None:
    """An error on both, in the same words; the third rank has none, and everything goes on."""

    def run(rank: int, size: int, group: dist.ProcessGroup) -> list[str]:
        texts = []
        for sent, expected in ((torch.ones(6), torch.zeros(4)), (torch.ones(4).int(), torch.zeros(4))):
            for async_op in (False, True):
                if rank == 2:
                    continue
                with pytest.raises(PeerMismatchError) as caught:  # noqa: PT012
                    if async_op:
                        work = dist.isend(sent, 1) if rank == 0 else dist.irecv(expected, 0)
                        assert work is not None
                        work.wait()
                    elif rank == 0:
                        dist.send(sent, 1)
                    else:
                        dist.recv(expected, 0)
                texts.append(str(caught.value))
                assert not expected.any()
        dist.all_reduce(x := torch.ones(3))
        assert x.tolist() == [size] * 3
        return texts

    first, second, third = grouped(3)(run)
    assert first == second
    assert len(first) == 4
    assert third == []
    assert "rank 0 sends 6 float32 to rank 1, which expects 4 float32 [" in first[0]
    assert "rank 0 sends 4 int32 to rank 1, which expects 4 float32 [" in first[2]


@pytest.mark.parametrize("operator", ["recv", "send", "any"])
def test_a_message_that_nobody_answers(grouped: Grouped, operator: str) -> None:
    """The timeout names who did not come."""

    def run(rank: int, size: int, group: dist.ProcessGroup) -> None:
        dist.barrier()
        if rank == 0:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
            x = torch.ones(2)
            waits = {"recv": lambda: dist.recv(x, 1), "send": lambda: dist.send(x, 1), "any": lambda: dist.recv(x)}
            with pytest.raises(CommTimeoutError, match=r"rank 0 waited \d+\.\d s in (recv|send) of 2 float32 .*rank 1"):
                waits[operator]()
        else:  # computes meanwhile, then meets the end of the group, which is the same error
            while carrier(group).usable:
                time.sleep(0.01)
            with pytest.raises(CommTimeoutError, match="rank 0 waited"):
                dist.barrier()

    grouped(2, timeout=20)(run)


@pytest.mark.parametrize("operator", ["message", "gather"])
def test_a_lost_peer_ends_the_wait(grouped: Grouped, operator: str) -> None:
    """Of a receive, beside that of a send, and of a gather."""

    def run(rank: int, size: int, group: dist.ProcessGroup) -> float:
        x, comm = torch.ones(100_000), carrier(group)
        if rank == 1:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.isend(x, 1, tag=5) if operator == "message" and rank == 2 else None
        dist.barrier()
        begin = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1 was lost"):  # noqa: PT012
            if work is not None:
                work.wait()
            elif operator == "message":
                dist.recv(x, 1)
            else:
                dist.gather(x, [x.clone() for _ in range(size)] if rank == 0 else None, 0)
        assert not comm.usable
        return time.monotonic() - begin

    outcomes = grouped(3, fresh=True, outcomes=True)(run)
    assert outcomes[1].error is not None
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome
        assert outcome.result < 20  # milliseconds on an idle machine, and not the timeout


@on_group(2)
def test_the_place_of_the_roots_tensor(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """``rootTensor`` of another rank's or of no tensor was ignored; gloo also refuses it."""
    for method, options in (("broadcast", dist.BroadcastOptions), ("reduce", dist.ReduceOptions)):
        opts, x = options(), torch.full((2,), rank + 1.0)
        opts.rootRank = 0
        opts.rootTensor = 1 - rank
        text = "rootTensor is 1, expected 0, the index of the only tensor"
        with pytest.raises(InvalidParamError, match=text if rank == 0 else f"rank 0.*{text}"):
            getattr(group, method)([x], opts).wait()
        assert x.tolist() == [rank + 1] * 2


def test_arguments_are_those_of_torch() -> None:
    """In torch's order, with its defaults; ours after them are given by name."""
    names = [name for name in at.__all__ if inspect.isfunction(getattr(dist, name, None))]
    assert len(names) > 15
    for name in names:
        theirs = [(p.name, p.default) for p in inspect.signature(getattr(dist, name)).parameters.values()]
        ours = inspect.signature(getattr(at, name)).parameters.values()
        assert [(p.name, p.default) for p in ours if p.kind is not p.KEYWORD_ONLY][: len(theirs)] == theirs, name


@on_group(2)
def test_arguments_of_a_barrier(rank: int, size: int, group: dist.ProcessGroup) -> None:
    store = dist.distributed_c10d._get_default_store()
    at.barrier(group, False, [7], timedelta(seconds=50))
    if rank == 0:
        with pytest.raises(CommTimeoutError):
            at.barrier(timeout=timedelta(milliseconds=200))
        store.set("late", "")
    store.wait(["late"])
