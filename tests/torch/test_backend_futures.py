"""Futures of backend alltoallv, whose callbacks begin collectives and wait for them, as hooks of DDP do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, on_group

Future = torch.futures.Future[Any]


def summed(value: float, group: Any = None) -> Future:
    """A future of the sum over the ranks."""
    work = dist.all_reduce(torch.full((4,), value), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0][0].item())


@on_group(2)
def test_callbacks_that_wait(rank: int, size: int, group: dist.ProcessGroup, file: str) -> None:
    """For collectives that they begin, and for ones that have begun before; errors go along."""
    nested = summed(1).then(lambda done: done.value() + summed(5).wait())
    assert nested.wait() == 12

    begun = dist.FileStore(file + "-begun", size)
    if rank == 1:
        begun.wait(["both"])  # calls of rank 0 are under way when its callback is added
    first, second = dist.all_reduce(torch.ones(1), async_op=True).get_future(), summed(2)
    both = first.then(lambda done: done.value()[0].item() + second.wait())
    begun.set("both", "")
    assert both.wait() == 6

    other = dist.new_group([0, 1])
    failed = summed(1).then(lambda done: dist.all_reduce(torch.ones(3 + rank), group=other))
    with pytest.raises(RuntimeError, match="PeerMismatchError"):
        failed.wait()
    deep = summed(1)
    for _ in range(6):
        deep = deep.then(lambda done: done.value() + summed(1, other).wait())
    assert deep.wait() == 14


@on_group(3)
def test_callbacks_begin_in_order(rank: int, size: int, group: dist.ProcessGroup, file: str) -> None:
    """What callbacks begin comes in the order of their futures on every rank, however long they take."""

    def slow(number: int) -> Callable[[Future], float]:
        def callback(done: Future) -> float:
            value: float = done.value()
            if rank == number % 3:
                time.sleep(0.02)  # ranks are quick with different ones
            for step in range(2):
                value += summed(10 * number + step, other).then(meet).wait()
            return value

        return callback

    def meet(done: Future) -> float:
        dist.barrier(other)
        value: float = done.value()
        return value

    other = dist.new_group([0, 1, 2])
    added = dist.FileStore(file + "-added", size)
    if rank == 2:  # comes last and without callbacks, so that none of the others' futures is done at once
        added.wait(["0", "1"])
        (done := torch.futures.Future[Any]()).set_result(0.0)
        found = [summed(number).wait() + slow(number)(done) for number in range(8)]
    else:
        futures = [summed(number).then(slow(number)) for number in range(8)]
        added.set(str(rank), "")
        found = [future.wait() for future in futures]
    assert found == [63 * number + 3 for number in range(8)]


def test_powersgd(grouped: Grouped) -> None:
    """Torch's own hook, which waits in callbacks."""

    def run(rank: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        from torch import nn
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().sum().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    found = grouped(2)(run)
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)
