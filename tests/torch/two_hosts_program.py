"""What every rank of test_two_hosts.py runs: 2 + 2 ranks, two network namespaces. Ends with status 0 if all is well."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from engine_groups import logged, random_cases, run_case
from test_quantized_engine import dispatched, scattered

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError, PeerLostError, PeerMismatchError
from alltoallv.testing import reference
from alltoallv.torch.nn import MoEDispatcher


def who_carries_what(group: dist.ProcessGroup) -> Communicator:
    """The world crosses the wire, the two ranks of one host share memory, and both may be in use."""
    with logged(logging.INFO) as lines:
        comm = at.from_group(group, timeout=60)
    assert isinstance(comm, Communicator)
    assert comm.backend == "tcp"
    assert lines == [f"group {group.group_name!r}: cpu tensors of 4 ranks on 2 hosts go through tcp"], lines
    with pytest.raises(BackendUnavailableError, match="rank 0 and rank 2"):
        at.from_group(group, backend="shm")

    rank = dist.get_rank()
    local, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    assert at.from_group(local).backend == "shm"
    x = torch.tensor([rank * 10.0, rank * 10 + 1])
    first = rank // 2 * 2
    assert at.all_to_all_v(x, [1, 1], [1, 1], group=local).tolist() == [
        first * 10 + rank % 2,
        first * 10 + 10 + rank % 2,
    ]
    return comm


def exchanges(comm: Communicator) -> None:
    """Zeros, gaps, permutations, learnt counts, asynchronous calls; and more than fits into a socket's buffer."""
    for number, case in enumerate(random_cases(comm.size, 24)):
        run_case(comm, case, number, alike=False)
    part = 1 << 19  # 2 MiB each
    x = torch.arange(part * comm.size, dtype=torch.int32) + comm.rank
    out = at.all_to_all_v(x, [part] * comm.size, group=None)
    expected = torch.arange(part, dtype=torch.int32) + part * comm.rank
    for j, piece in enumerate(out.split(part)):
        assert torch.equal(piece, expected + j)


def experts(comm: Communicator) -> None:
    local = [[(3 * r + i) % 4 for i in range(8)] for r in range(4)]
    global_ = [[local[j][e + r * 2] for j in range(4) for e in range(2)] for r in range(4)]
    xs = [torch.arange(2.0 * sum(counts)).view(-1, 2) + 100 * r for r, counts in enumerate(local)]
    x = xs[comm.rank].clone().requires_grad_()
    rows = at.global_scatter(x, local[comm.rank], global_[comm.rank])
    expected = reference.global_scatter([x.numpy() for x in xs], local, global_)[comm.rank]
    assert torch.equal(rows.detach(), torch.from_numpy(expected))
    back = at.global_gather(rows, local[comm.rank], global_[comm.rank])
    assert torch.equal(back.detach(), xs[comm.rank])
    back.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def breaches(comm: Communicator) -> None:
    """Found before data move: the same error on all four ranks, prefilled outputs untouched, the next call works."""
    x = torch.arange(8.0) + 10 * comm.rank
    out = torch.full((8,), -1.0)
    two = [2] * 4
    sends = [2, 1, 2, 2] if comm.rank == 3 else two
    with pytest.raises(PeerMismatchError, match=r"rank 3 sends 1 elements to rank 1, which expects 2$"):
        at.all_to_all_v(x, sends, two, out=out)
    assert (out == -1).all()
    with pytest.raises(InvalidParamError, match=re.escape("sdispls[3] + send_counts[3] is 6 + 3")):
        at.all_to_all_v(x, [2, 2, 2, 3] if comm.rank == 2 else two, two, out=out)
    assert (out == -1).all()
    work = at.all_to_all_v(x.int() if comm.rank == 1 else x, two, two, async_op=True)[1]
    with pytest.raises(PeerMismatchError, match=r"rank 0 has dtype float32, rank 1 has dtype int32$"):
        work.wait()
    assert at.all_to_all_v(x, two, two, out=out) is out
    assert out.tolist() == [10.0 * j + 2 * comm.rank + k for j in range(4) for k in range(2)]


def quantized(comm: Communicator) -> None:
    """Parts and rows as a user calls them, with the oracle's bits; and more than one chunk."""
    scattered(comm, [4, 0, 1, 9], (33,), group_size=32)
    dispatched(comm, [[1, 2, 0, 1], [0, 0, 3, 1], [1, 1, 1, 1], [0, 0, 0, 0]], (3, 5), "cpu", bits=4, group_size=7)
    n = 255 * 20_000  # whole groups
    x = torch.arange(n, dtype=torch.float32).remainder_(255).sub_(127) * (comm.rank + 1)
    for gather in ("full", "quantized"):
        total = at.quantized_all_reduce(x, group_size=255, gather=gather)  # codes and their sums are exact
        assert torch.equal(total, x / (comm.rank + 1) * 10), gather


def following_tokens(comm: Communicator) -> None:
    """Tokens that follow their headers in pieces, from some ranks, and come back unchanged."""
    n = (700, 3, 0, 400)[comm.rank]
    tokens = torch.arange(n * 1024, dtype=torch.float32).view(n, 1024) % 127 + 1000 * comm.rank
    ids = torch.randint(12, (n, 3), generator=torch.Generator().manual_seed(comm.rank))
    for payload in (None, "int8"):
        dispatcher = MoEDispatcher(12, dist.group.WORLD, payload=payload, alignment=4)
        for begins in (False, True):
            made = dispatcher.dispatch(tokens, ids, async_op=begins)
            rows, counts, state = made.result() if begins else made
            assert rows.shape[0] == sum(counts)
            off = (dispatcher.combine(rows, state) - 3 * tokens).abs()
            assert not len(off) or off.max() <= (0 if payload is None else 3 * 13)
            assert (rows[state.sources < 0] == 0).all()
    x = tokens.clone().requires_grad_()
    rows, _, state = MoEDispatcher(12, dist.group.WORLD).dispatch(x, ids)
    (rows * 2).sum().backward()
    assert x.grad is not None
    assert (x.grad == 6).all()


def other_front_end(comm: Communicator) -> None:
    """Backend alltoallv of torch.distributed, which finds itself on two hosts."""
    group = dist.new_group([0, 1, 2, 3], backend="alltoallv")
    out = torch.empty(4)
    dist.all_to_all_single(out, torch.arange(4.0) + 10 * comm.rank, group=group)
    assert out.tolist() == [10.0 * j + comm.rank for j in range(4)]
    assert at.from_group(group).backend == "tcp"
    assert torch.equal(at.all_to_all_v(torch.arange(4.0) + 10 * comm.rank, [1] * 4, group=group), out)
    rank = comm.rank
    for n in (5, 300_000):
        x, got = torch.full((n,), float(rank)), torch.empty(n)
        after, before = (rank + 1) % 4, (rank - 1) % 4
        works = [dist.P2POp(dist.isend, x, after, group, 7), dist.P2POp(dist.irecv, got, before, group, 7)]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        assert (got == before).all()
        parts = [torch.empty(n) for _ in range(4)] if rank == 1 else None
        dist.gather(x, parts, dst=1, group=group)
        assert parts is None or all((part == j).all() for j, part in enumerate(parts))
        dist.reduce(x, 2, group=group)
        assert (x == (6.0 if rank == 2 else rank)).all()
    with pytest.raises(PeerMismatchError):
        dist.all_reduce(torch.ones(3 + (rank == 3)), group=group)
    dist.all_gather(parts := [torch.empty(2) for _ in range(4)], torch.full((2,), float(rank)), group=group)
    assert torch.stack(parts).tolist() == [[j, j] for j in range(4)]
    dist.barrier(group)
    said: list[object] = [None] * 4
    dist.all_gather_object(said, {"rank": rank}, group=group)
    assert said == [{"rank": j} for j in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group)
    model(torch.full((2, 64), float(rank))).sum().backward()
    grad = model.module.weight.grad
    assert grad is not None
    assert (grad == 3.0).all()  # 2 rows of the mean of the ranks


def loss(comm: Communicator) -> None:
    """A rank dies on the other host."""
    pids = [int(pid) for pid in at.functional.all_gather(torch.tensor([os.getpid()]))]
    if comm.rank == 3:
        time.sleep(0.5)
        os._exit(0)
    with pytest.raises(PeerLostError, match="rank 3 was lost: ") as caught:
        at.all_to_all_v(torch.ones(4), [1] * 4, [1] * 4)
    assert f"rank 3 (pid {pids[3]}" in str(caught.value)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    comm = who_carries_what(group)
    for part in (exchanges, experts, following_tokens, breaches, quantized, other_front_end, loss):
        begin = time.monotonic()
        part(comm)
        print(
            f"rank {comm.rank} on {socket.gethostname()}: {part.__name__} {time.monotonic() - begin:.1f} s", flush=True
        )
    sys.stdout.flush()
    store = dist.distributed_c10d._world.pg_map[group][1]  # rank 0 keeps it, and goes last
    store.set(f"ready/{comm.rank}", "")
    store.wait(["ready/0", "ready/1", "ready/2"], timedelta(seconds=20))  # one that leaves early is lost, too
    if comm.rank == 0:
        store.wait(["gone/1", "gone/2"], timedelta(seconds=20))
    else:
        store.set(f"gone/{comm.rank}", "")
    os._exit(0)  # torch's own group waits for the rank that has gone


if __name__ == "__main__":
    main()
