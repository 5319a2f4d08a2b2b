"""What programs use of torch, shortly: `nox -s torch_versions` runs it on every version that is tested."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backend_groups import joined, on_group
from on_ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import alltoallv.torch as at
from alltoallv.errors import BackendUnavailableError, CommTimeoutError, PeerLostError, PeerMismatchError
from alltoallv.testing import Ranks
from alltoallv_tools.doctor.tested import state_of

FROM_2_14 = torch.__version__ >= (2, 14)


def test_this_version_is_in_the_table() -> None:
    assert state_of("torch", torch.__version__) == "tested"


@on_group(3)
def test_collectives(rank: int, size: int, group: dist.ProcessGroup) -> None:
    x, every = torch.arange(3.0) + 10 * rank, torch.arange(3.0).repeat(3) + 10 * torch.arange(3.0).repeat_interleave(3)
    column = every[rank::3]
    for module in (dist, at):
        module.all_reduce(total := x.clone())
        assert total.equal(every.view(3, 3).sum(0))
        module.all_gather_into_tensor(out := torch.empty(9), x)
        assert out.equal(every)
        module.all_gather(parts := [torch.empty(3) for _ in range(3)], x)
        assert torch.cat(parts).equal(every)
        module.reduce_scatter_tensor(out := torch.empty(1), x)
        assert out.equal(column.sum(0, keepdim=True))
        module.all_to_all_single(out := torch.empty(3), x)
        assert out.equal(column)
        module.all_to_all([*(out := torch.empty(3, 1))], [*x.view(3, 1)])
        assert out.flatten().equal(column)
        module.broadcast(y := x.clone(), 1)
        assert y.equal(every[3:6])
        module.reduce(y := x.clone(), 2)
        assert rank != 2 or y.equal(total)
        module.gather(x, parts if rank == 0 else None, 0)
        assert torch.cat(parts).equal(every)
        module.scatter(y := torch.empty(1), [*x.view(3, 1)] if rank == 1 else None, 1)
        assert y.equal(every[3 + rank : 4 + rank])
        module.barrier()
        work = module.all_reduce(y := x.clone(), async_op=True)
        work.wait()
        assert y.equal(total)
    counts = [[0, 2, 1], [1, 0, 2], [3, 0, 0]]
    out = at.all_to_all_v(x, counts[rank])
    begins = [sum(counts[j][:rank]) for j in range(3)]
    assert out.equal(torch.cat([every.view(3, 3)[j, begins[j] : begins[j] + counts[j][rank]] for j in range(3)]))
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == [0, 1, 2]
    pair = [x.clone(), x[:1].clone()]
    with dist._coalescing_manager():
        for each in pair:
            dist.all_reduce(each)
    assert pair[0].equal(total)
    assert pair[1].equal(total[:1])
    turned = torch.ones(4, 4).t()[:, ::2]
    dist.all_reduce(turned)
    assert turned.eq(3).all()
    assert at.quantized_all_reduce(torch.ones(8)).equal(torch.full((8,), 3.0))
    if hasattr(dist, "gather_single"):
        dist.gather_single(x, out := torch.empty(9) if rank == 1 else None, 1)
        assert out is None or out.equal(every)
        text = r"gather_tensor has shape \(8,\) .*expected 3 times the 3 elements"
        with pytest.raises(ValueError, match=text if rank == 1 else f"rank 1.*{text}"):
            dist.gather_single(x, torch.empty(8) if rank == 1 else None, 1)


@on_group(3)
def test_groups_and_messages(rank: int, size: int, group: dist.ProcessGroup) -> None:
    every = dist.new_group([0, 1, 2])
    if rank < 2:  # rank 2 has nothing to do with it
        x, y = torch.full((4,), float(rank)), torch.empty(4)
        calls = [dist.P2POp(dist.isend, x, 1 - rank, group=every), dist.P2POp(dist.irecv, y, 1 - rank, group=every)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        assert y.equal(torch.full((4,), 1.0 - rank))
    dist.send(torch.tensor([rank]), (rank + 1) % 3) if rank == 0 else None
    if rank == 1:
        source = dist.recv(y := torch.empty(1, dtype=torch.int64))
        assert (source, y.item()) == (0, 0)
    for accelerator in (False, True):
        with mock.patch.object(torch.accelerator, "is_available", return_value=accelerator):
            part = dist.split_group(split_ranks=[[2, 0]])
        assert (part in (None, dist.GroupMember.NON_GROUP_MEMBER)) == (rank == 1)
        if isinstance(part, dist.ProcessGroup):
            assert dist.get_process_group_ranks(part) == ([2, 0] if FROM_2_14 else [0, 2])
            dist.broadcast(y := torch.tensor([rank]), group_src=0, group=part)
            assert y.item() == (2 if FROM_2_14 else 0)
    smaller = dist.shrink_group([1], every) if rank != 1 else None
    if smaller is not None:
        dist.all_reduce(y := torch.tensor([rank]), group=smaller)
        assert y.item() == 2


@on_group(2)
def test_graphs(rank: int, size: int, group: dist.ProcessGroup) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        at.all_reduce(y)
        return at.all_to_all_v(y, [1, 1], [1, 1], group=dist.group.WORLD) + at.functional.all_gather(x).sum()

    x = torch.arange(2.0) + rank
    assert torch.compile(f, fullgraph=True, backend="aot_eager")(x).equal(f(x))


@on_group(2)
def test_training(rank: int, size: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    x = torch.arange(12.0).view(4, 3)
    layer(x).square().mean().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    model = torch.nn.parallel.DistributedDataParallel(layer)
    model(x.chunk(2)[rank]).square().mean().backward()
    torch.testing.assert_close(layer.weight.grad, expected)
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    assert whole.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local().equal(x)
    assert at.reshard(whole.to_local(), (mesh, [Shard(0)]), (mesh, [Replicate()]), shape=(4, 3)).equal(x)
    dispatcher = at.nn.MoEDispatcher(4)
    tokens = (x + rank).requires_grad_()
    rows, counts, state = dispatcher.dispatch(tokens, torch.tensor([[0, 3], [1, 2], [3, 0], [2, 1]]), torch.ones(4, 2))
    assert counts == [4, 4]
    dispatcher.combine(rows, state).sum().backward()
    assert tokens.grad.eq(2).all()


@on_group(2)
def test_errors_name_ranks(rank: int, size: int, group: dist.ProcessGroup) -> None:
    with pytest.raises(PeerMismatchError, match=r"rank 1.*A2A-3009"):
        dist.all_reduce(torch.ones(2 + rank))
    if rank == 0:
        with pytest.raises(CommTimeoutError, match=r"^Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        group.get_group_store().set("over", "1")
    group.get_group_store().wait(["over"])


@on_ranks(2, communicator=False, fresh=True)  # torch warns once in a process
def test_warns_of_nothing_that_gloo_is_silent_about(rank: int, size: int, file: str) -> None:
    told = {}
    errors, kept = Path(f"{file}-errors-{rank}"), os.dup(2)
    for backend in ("gloo", "alltoallv"):
        with errors.open("w") as target:
            os.dup2(target.fileno(), 2)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with joined(rank, size, f"{file}-{backend}", backend=backend):
                    dist.all_reduce(torch.ones(1))
                    dist.new_group([0, 1])
                    dist.barrier()
        finally:
            os.dup2(kept, 2)
        told[backend] = {str(each.message) for each in caught} | set(
            re.sub(r"\S*\d\S*", "", errors.read_text()).splitlines()
        )
    assert told["alltoallv"] <= told["gloo"]


def reconfigured(rank: int, size: int, file: str) -> None:
    store = dist.FileStore(file, size)
    dist.init_process_group("alltoallv", store=store, rank=rank, world_size=size, enable_reconfigure=True)
    group = dist.group.WORLD
    assert group is not None
    assert dist._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (-1, -1)
    with pytest.raises(BackendUnavailableError, match="has no ranks: after"):
        dist.all_reduce(torch.ones(1))
    store.set(f"handle-{rank}", dist._get_reconfigure_handle())
    handles = [store.get(f"handle-{j}").decode() for j in range(size)]
    limit = timedelta(seconds=20)

    def check(members: list[int]) -> None:
        assert (dist.get_rank(), dist.get_world_size()) == (members.index(rank), len(members))
        dist.all_reduce(x := torch.tensor([1 << rank]))
        assert x.item() == sum(1 << member for member in members)
        dist.all_gather_object(found := [None] * len(members), rank)
        assert found == members
        at.broadcast(x := torch.tensor([rank]), 0)
        assert x.item() == members[0]
        layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        layer(torch.tensor([float(rank)])).sum().backward()  # C++ divides by the number of ranks
        assert layer.module.weight.grad.item() == sum(members) / len(members)

    dist._reconfigure(1, handles, timeout=limit).wait()
    check([0, 1, 2])
    pair = dist.new_group([0, 2])
    if pair != dist.GroupMember.NON_GROUP_MEMBER:
        with pytest.raises(BackendUnavailableError, match="expected the default group"):
            dist._reconfigure(2, handles, group=pair)
    with pytest.raises(ValueError, match="uuid is 1, already used"):
        dist._reconfigure(1, handles)
    with pytest.raises(ValueError, match="expected each once, and this rank's"):
        dist._reconfigure(2, handles[:1] * 2)
    if rank == 1:
        with pytest.raises(PeerLostError):
            dist.barrier()
    else:
        dist._reconfigure(3, [handles[2], handles[0]], timeout=limit).wait()
        check([2, 0])
        with pytest.raises(CommTimeoutError, match=r"for rank 2 to join"):
            dist._reconfigure(4, [handles[0], handles[2], handles[1]], timeout=timedelta(seconds=0.5))
        with pytest.raises(BackendUnavailableError, match="has no ranks: after"):
            dist.barrier()
    dist._reconfigure(5, set(handles), timeout=limit).wait()
    check(sorted(range(size), key=lambda j: handles[j]))
    dist._reconfigure(6, handles, timeout=limit).wait()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 0"):
        dist.barrier()
    dist._reconfigure(7, handles[1:], timeout=limit).wait()
    check([1, 2])
    with pytest.raises(BackendUnavailableError, match="calls none"):
        group.register_pre_hook(1, print)
    dist.destroy_process_group()


def test_reconfigure(ranks: Ranks, file: str) -> None:
    """Torch 2.14's way to go on with other processes: fewer, in another order, all again, and after a loss."""
    if not FROM_2_14:
        assert not hasattr(dist, "_reconfigure")
        return
    outcomes = ranks(3, communicator=False, timeout=60, fresh=True, outcomes=True)(reconfigured, file)
    assert [outcome.error for outcome in outcomes[1:]] == [None, None]


PROGRAM = """
import torch, torch.distributed as dist, alltoallv.torch
dist.init_process_group("alltoallv")
dist.all_reduce(x := torch.ones(1))
print(f"{x.item():g} of {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.count("2 of 2") == 2, done.stdout + done.stderr
