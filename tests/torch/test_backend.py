"""Unmodified programs of torch.distributed on backend alltoallv: documented examples, groups, what runs where."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import carrier, joined, on_group, operators
from on_ranks import on_ranks
from torch import Tensor

import alltoallv.torch as at
from alltoallv.errors import CommTimeoutError, InvalidTensorError, PeerMismatchError


@on_ranks(2, communicator=False)
def test_what_the_group_says_of_itself(rank: int, size: int, file: str) -> None:
    with joined(rank, size, file, backend="cpu:alltoallv,cuda:nccl", timeout=50) as group:
        assert group.name() == "alltoallv"
        assert (group.rank(), group.size()) == (rank, size)
        assert group._get_backend(torch.device("cpu")).name() == "gloo"
        devices = [device.type for device in group._device_types]
        if torch.cuda.is_available():
            assert devices == ["cpu", "cuda"]
            assert group._get_backend(torch.device("cuda")).name() == "nccl"
        else:
            print("no GPU here: the engine for CUDA tensors is not tried")
            assert devices == ["cpu"]
            with pytest.raises(RuntimeError, match=r"'nccl' is not available here.*A2A-5060"):
                group._get_backend(torch.device("cuda"))
        sub = dist.new_group([1, 0], backend="alltoallv", timeout=timedelta(seconds=40))
        assert dist.get_backend(sub) == "alltoallv"
        assert sub.group_name != group.group_name
        assert dist.distributed_c10d._resolve_process_group(sub.group_name) is sub
        assert carrier(sub) is not carrier(group)
    with pytest.raises(ValueError, match="Default process group"):
        dist.get_backend()


@on_group(3)
def test_collectives_run_over_shared_memory(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Coalesced ones and objects; test_backend_programs.py counts the others' operators."""
    x = torch.arange(6.0) + rank
    before = operators(group)

    def ran(expected: int) -> None:
        nonlocal before
        assert operators(group) == before + expected
        before = operators(group)

    dist.barrier()
    dist.all_reduce_coalesced([y := x.clone(), z := torch.ones(3)])
    assert y[0].item() == 3
    assert z.tolist() == [3, 3, 3]
    ran(3)

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
    assert [(o["rank"], len(o["text"])) for o in objects] == [(0, 0), (1, 1000), (2, 2000)]
    objects = [{1, 2}, "two", 3] if rank == 1 else [None] * 3
    dist.broadcast_object_list(objects, src=1)
    assert objects == [{1, 2}, "two", 3]
    ran(4)
    dist.scatter_object_list(got := [None], [f"for {j}" for j in range(size)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    dist.gather_object((rank, "here"), objects if rank == 2 else None, dst=2)
    assert rank != 2 or objects == [(j, "here") for j in range(size)]


@on_group(3)
def test_what_goes_to_gloo(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Sparse tensors, once all ranks have agreed on it."""
    before = operators(group)
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (4,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1, 1, 1, 0]
    assert operators(group) == before + 1
    with pytest.raises(PeerMismatchError, match=r"rank 0 calls handed_to_gloo, rank 1 calls all_reduce.*A2A-3009"):
        dist.all_reduce(sparse if rank == 0 else sparse.to_dense())
    # Groups other than the default one make their gloo now.
    some = dist.new_group([0, 2])
    if rank != 1:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=40), some)
        assert some.timeout == timedelta(seconds=40)
        dist.all_reduce(sparse := torch.sparse_coo_tensor([[rank]], [1.0], (4,)), group=some)
        assert sparse.to_dense().tolist() == [1, 0, 1, 0]
    every = dist.new_group(timeout=timedelta(seconds=30))
    name, description = every.group_name, every.group_desc
    dist.all_reduce(sparse := torch.sparse_coo_tensor([[rank]], [1.0], (4,)), group=every)
    assert sparse.to_dense().tolist() == [1, 1, 1, 0]
    assert (every.group_name, every.group_desc) == (name, description)
    assert every._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=30)


class Image(torch.Tensor):
    """Has elements like any tensor."""


class Weight(torch.nn.Parameter):
    """Another class of a parameter."""


@on_group(2)
def test_a_subclass_meets_a_plain_tensor(rank: int, size: int, group: dist.ProcessGroup) -> None:
    before = operators(group)
    for kind in (Image, Weight):

        def made(*values: float, kind: Any = kind) -> torch.Tensor:
            x = torch.tensor(values, dtype=torch.float32)
            return kind(x) if rank == 0 else x

        dist.all_reduce(x := made(1, 2))
        assert x.tolist() == [2, 4]
        dist.broadcast(x := made(rank, 2), 1, async_op=True).wait()
        assert x.tolist() == [1, 2]
        dist.all_gather(outs := [made(0), made(0)], made(rank))
        assert [out.tolist() for out in outs] == [[0], [1]]
        dist.all_reduce_coalesced([x := made(1), made(2)])
        assert x.tolist() == [2]
        if rank == 0:
            dist.send(made(7), 1)
        else:
            dist.recv(x := made(0), 0)
            assert x.tolist() == [7]
    assert operators(group) == before + 10


@on_group(2)
def test_tensors_that_need_copies(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Strided, conjugated, shared between input and output, or leaves of autograd."""
    whole = torch.arange(12.0).view(3, 4) + rank
    dist.all_reduce(whole[:, 1])
    expected = torch.arange(12.0).view(3, 4) + rank
    expected[:, 1] = 2 * torch.arange(12.0).view(3, 4)[:, 1] + 1
    assert whole.equal(expected)
    work = dist.all_reduce(whole.t()[2], async_op=True)
    work.wait()
    expected[:, 2] = 2 * torch.arange(12.0).view(3, 4)[:, 2] + 1
    assert whole.equal(expected)
    dist.broadcast(whole[:, 3], src=1)
    expected[:, 3] = torch.arange(12.0).view(3, 4)[:, 3] + 1
    assert whole.equal(expected)

    out = torch.zeros(2, 6)
    dist.all_gather([out[:, 1], out[:, 4]], (torch.arange(4.0) + 10 * rank)[::2])
    assert out.tolist() == [[0, 0, 0, 0, 10, 0], [0, 2, 0, 0, 12, 0]]
    dist.all_to_all_single(out.t(), torch.full((6, 2), float(rank)))
    assert out.tolist() == [[0, 0, 0, 1, 1, 1]] * 2

    sizes = torch.tensor([1, 2] if rank == 0 else [2, 1])  # as Megatron's dispatcher gives split sizes
    dist.all_to_all_single(some := torch.empty(3), torch.arange(3.0) + 10 * rank, sizes, sizes)
    assert some.tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 12])

    for flat, rows in ((torch.zeros(4), torch.zeros(2, 2)), (torch.zeros(2, 2).t(), torch.zeros(4))):
        dist.all_to_all_single(flat, rows + rank)  # equal parts count elements, as torch's engines do it
        assert flat.reshape(-1).tolist() == [0, 0, 1, 1]

    flat = torch.zeros(6)
    flat[3 * rank : 3 * rank + 3] = rank + 1
    dist.all_gather_into_tensor(flat, flat[3 * rank : 3 * rank + 3])  # in place, as FSDP does
    assert flat.tolist() == [1, 1, 1, 2, 2, 2]
    dist.reduce_scatter_tensor(flat[3 * rank : 3 * rank + 3], flat)
    assert flat[3 * rank : 3 * rank + 3].tolist() == [[2] * 3, [4] * 3][rank]

    z = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    dist.all_reduce(z)
    assert z.tolist() == [3 + 6j, 9 - 3j]
    assert z.conj().imag.is_neg()
    dist.all_reduce(z.conj().imag)
    assert z.tolist() == [3 + 12j, 9 - 6j]
    expanded = torch.ones(1).expand(3)
    dist.broadcast(expanded if rank == 0 else torch.empty(3), 0)  # is read only
    with pytest.raises(InvalidTensorError, match=r"an output's elements share memory.*A2A-2107"):
        dist.all_reduce(expanded if rank == 0 else torch.ones(3), async_op=True).wait()
    leaf = torch.ones(3, requires_grad=True)
    dist.broadcast(leaf, 0)
    with torch.no_grad():
        dist.all_reduce(leaf)
    assert leaf.tolist() == [2, 2, 2]


@on_group(2)
def test_async_works(rank: int, size: int, group: dist.ProcessGroup, file: str) -> None:
    x = torch.full((1000,), rank + 1.0)
    asked = Path(f"{file}-asked")
    while rank == 1 and not asked.exists():  # the other one's call has returned by then
        time.sleep(0.01)
    work = dist.all_reduce(x, async_op=True)
    assert isinstance(work, dist.Work)
    if rank == 0:
        assert not work.is_completed()
        for limit in (timedelta(milliseconds=20), 0.02):
            with pytest.raises(CommTimeoutError, match=r"after 0\.02 s; it is still under way"):
                work.wait(limit)
        asked.touch()
    assert work.wait(timedelta(seconds=30))
    assert work.wait(30.0)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    assert x[0].item() == 3

    # Dropped handles, strided results, futures and their callbacks.
    table = torch.zeros(4, 2)
    futures = []
    for row in range(4):
        table[row] = rank + row
        futures.append(dist.all_reduce(table[row], async_op=True).get_future())
        dist.barrier(async_op=True)
    last = dist.all_gather(parts := [torch.empty(2) for _ in range(size)], torch.full((2,), float(rank)), async_op=True)
    sums = [f.then(lambda f: f.value()[0].sum().item()) for f in futures]
    assert [f.wait() for f in sums] == [2, 6, 10, 14]
    last.get_future().wait()
    assert [p[0].item() for p in parts] == [0, 1]
    done = dist.all_reduce(x, async_op=True)
    done.wait()
    assert done.get_future().wait()[0] is x


def _methods(rank: int, size: int) -> list[Callable[[Any], tuple[Any, Any]]]:
    """Calls of a group's methods as torch's own take them; each returns the work and the outputs."""
    op, limit = dist.ReduceOp.MAX, timedelta(seconds=30)
    x, outs = torch.full((2,), rank + 1.0), [torch.zeros(2) for _ in range(size)]
    at_root = [x, x + 1] if rank == 0 else []
    return [
        lambda group: (group.allreduce(x), x),
        lambda group: (group.allreduce([x], op), x),
        lambda group: (group.allreduce(tensor=x, op=op, timeout=limit), x),
        lambda group: (group.allreduce(tensors=[x], opts=dist.AllreduceOptions()), x),
        lambda group: (group.broadcast(x, 1), x),
        lambda group: (group.broadcast(x, root=1), x),
        lambda group: (group.reduce(x, 0, op), x if rank == 0 else 0),
        lambda group: (group.allgather(outs, x), outs),
        lambda group: (group.gather(outs if rank == 0 else [], x, 0), outs),
        lambda group: (group.scatter(x, at_root, 0), x),
        lambda group: (group.reduce_scatter(x, outs, op), x),
        lambda group: (group.barrier(timeout=limit), 0),
    ]


@on_group(2)
def test_methods_of_the_group(rank: int, size: int, group: dist.ProcessGroup) -> None:
    gloo = dist.new_group(backend="gloo")
    for ours, theirs in zip(_methods(rank, size), _methods(rank, size), strict=True):
        found, expected = ours(group), theirs(gloo)
        assert found[0].wait()
        assert expected[0].wait()
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


@on_group(2)
def test_coalescing(rank: int, size: int, group: dist.ProcessGroup) -> None:
    for device in (None, torch.device("cpu")):
        xs = [torch.full((4,), float(rank + j)) for j in range(3)]
        with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        assert [x[0].item() for x in xs] == [1, 3, 5]
        with dist.distributed_c10d._coalescing_manager(group, device):
            dist.all_gather_into_tensor(a := torch.empty(8), xs[0] + rank)
            dist.all_gather_into_tensor(b := torch.empty(2), xs[1][:1])
        assert a.tolist() == [1] * 4 + [2] * 4
        assert b.tolist() == [3, 3]
        with dist.distributed_c10d._coalescing_manager(group, device):
            dist.reduce_scatter_tensor(c := torch.empty(4), a)
        assert c.tolist() == [2 + 2 * rank] * 4


@on_group(2)
def test_functional_collectives(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """What DTensor and compiled programs call; they reach the group from C++."""
    import torch.distributed._functional_collectives as functional

    before = operators(group)
    x = torch.arange(4.0) + rank

    def done(tensor: Tensor) -> Tensor:
        return functional.wait_tensor(tensor)

    assert done(functional.all_reduce(x, "sum", group)).tolist() == [1, 3, 5, 7]
    assert done(functional.all_gather_tensor(x, 0, group)).tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert done(functional.reduce_scatter_tensor(x, "sum", 0, group)).tolist() == [[1, 3], [5, 7]][rank]
    splits = [1, 3] if rank == 0 else [2, 2]
    out = done(functional.all_to_all_single(x, [[1, 2], [3, 2]][rank], splits, group))
    assert out.tolist() == [[0, 1, 2], [1, 2, 3, 3, 4]][rank]
    assert done(functional.broadcast(x, 1, group)).tolist() == [1, 2, 3, 4]
    a, b = functional.all_reduce_coalesced([x, x + 1], "max", group)
    assert (done(a)[0].item(), done(b)[0].item()) == (1, 2)
    assert operators(group) == before + 7

    y = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", group) + 1, fullgraph=True, backend="eager")
    assert y(x).tolist() == [3, 7, 11, 15]


@on_ranks(3, communicator=False)
def test_several_hosts_use_tcp(rank: int, size: int, file: str) -> None:
    """Ranks that are told they have no host in common make their default group and one of its groups over TCP.

    What groups on two real hosts do is tested in test_two_hosts.py.
    """
    from alltoallv import _core

    here = _core.this_place
    _core.this_place = lambda: f"host-{rank // 2}"
    try:
        with joined(rank, size, file) as group:
            assert isinstance(group, at.backend.AllToAllVGroup)
            assert group.communicator.backend == "tcp"
            for ranks_of in (group, dist.new_group([0, 1, 2])):
                dist.all_reduce(x := torch.tensor([rank]), group=ranks_of)
                assert x.item() == 3
            dist.barrier()
    finally:
        _core.this_place = here
