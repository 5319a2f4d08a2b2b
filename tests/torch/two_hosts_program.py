"""What every rank of test_two_hosts.py runs: 2 + 2 ranks, two network namespaces. Ends with status 0 if all is well."""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from engine_groups import logged, random_cases, run_case

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import BackendUnavailableError, PeerMismatchError


def who_carries_what(group: dist.ProcessGroup) -> Communicator:
    """The world crosses the wire, the two ranks of one host share memory, and both may be in use."""
    with logged(logging.INFO) as lines:
        comm = at.from_group(group, timeout=60)
    assert isinstance(comm, Communicator)
    assert comm.backend == "tcp"
    assert lines == [f"group {group.group_name!r}: cpu tensors of 4 ranks on 2 hosts go through tcp"], lines
    with pytest.raises(BackendUnavailableError, match=r"rank 0 and rank 2.*A2A-5054"):
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


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    comm = who_carries_what(group)
    for part in (exchanges, other_front_end):
        begin = time.monotonic()
        part(comm)
        print(
            f"rank {comm.rank} on {socket.gethostname()}: {part.__name__} {time.monotonic() - begin:.1f} s", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
