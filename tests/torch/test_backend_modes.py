"""Tools that watch or trace through torch's dispatcher see the calls of backend alltoallv, as they see gloo's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from backend_groups import on_group
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from alltoallv.errors import PeerMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
MAX = dist.ReduceOp.MAX


class Seen(TorchDispatchMode):
    """Lists the collectives and their groups' names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            names = [argument.name for argument in func._schema.arguments]
            group = dist.ProcessGroup.unbox(args[names.index("process_group")])
            assert group is dist.group.WORLD
            self.calls.append((func._opname, group.group_name))
        return func(*args, **(kwargs or {}))


def calls_of(rank: int, size: int, group: dist.ProcessGroup) -> dict[str, tuple[Callable[[], object], object]]:
    """By operator: a call, which returns its output, and what that is."""

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    def into(output: Any, call: Callable[[Any], Any]) -> object:
        work = call(output)
        if work is not None:
            work.wait()
        return output.tolist() if isinstance(output, torch.Tensor) else [x.tolist() for x in output]

    def messages(output: torch.Tensor) -> None:
        works = [dist.isend(tensor([rank]), 1 - rank), dist.irecv(output, 1 - rank)]
        for work in works:
            work.wait()

    x, both = tensor([rank, rank + 1]), [[0, 1], [1, 2]]
    empty = torch.zeros(2)
    parts = [tensor([0]), tensor([1])]
    return {
        "allreduce_": (lambda: into(x.clone(), lambda y: dist.all_reduce(y, MAX)), [1, 2]),
        "allreduce_ async": (lambda: into(x.clone(), lambda y: dist.all_reduce(y, async_op=True)), [1, 3]),
        "allreduce_coalesced_": (lambda: into([x.clone(), empty + 1], dist.all_reduce_coalesced), [[1, 3], [2, 2]]),
        "broadcast_": (lambda: into(x.clone(), lambda y: dist.broadcast(y, 1)), [1, 2]),
        "reduce_": (lambda: into(x.clone(), lambda y: dist.reduce(y, rank * 0)), [1, 3] if rank == 0 else [1, 2]),
        "allgather_": (lambda: into([empty.clone(), empty.clone()], lambda ys: dist.all_gather(ys, x)), both),
        "_allgather_base_": (lambda: into(torch.zeros(2, 2), lambda y: dist.all_gather_into_tensor(y, x)), both),
        "gather_": (
            lambda: into([empty.clone(), empty.clone()], lambda ys: dist.gather(x, ys if rank == 0 else None)),
            both if rank == 0 else [[0, 0], [0, 0]],
        ),
        "scatter_": (lambda: into(tensor([9]), lambda y: dist.scatter(y, parts if rank == 0 else None)), [rank]),
        "reduce_scatter_": (lambda: into(tensor([9]), lambda y: dist.reduce_scatter(y, parts)), [2 * rank]),
        "_reduce_scatter_base_": (
            lambda: into(tensor([9]), lambda y: dist.reduce_scatter_tensor(y, x, MAX)), [rank + 1],
        ),
        "alltoall_": (lambda: into([tensor([9]), tensor([9])], lambda ys: dist.all_to_all(ys, [x[:1], x[1:]])),
            [[rank], [rank + 1]]),
        "alltoall_base_": (lambda: into(empty.clone(), lambda y: dist.all_to_all_single(y, x, [1, 1], [1, 1])),
            [rank, rank + 1]),
        "barrier": (lambda: dist.barrier(), None),
        "send recv_": (lambda: into(tensor([9]), messages), [1 - rank]),
    }  # fmt: skip


@on_group(2)
def test_every_collective_is_seen_once(rank: int, size: int, group: dist.ProcessGroup) -> None:
    for name, (call, want) in calls_of(rank, size, group).items():
        operators = name.removesuffix(" async").split()
        assert call() == want, name
        with Seen() as outer, Seen() as inner:
            assert call() == want, name
        assert [each for each, _ in outer.calls] == [each for each, _ in inner.calls] == operators
        with DebugMode() as debug:
            assert call() == want, name
        assert all(f"c10d::{each}" in debug.debug_string() for each in operators)
        with CommDebugMode() as counts:
            assert call() == want, name
        if name not in ("barrier", "send recv_", "allreduce_coalesced_"):  # which it does not count
            assert counts.get_total_counts() == 1, name
        assert call() == want, name


@on_group(2)
def test_seen_calls_have_the_same_errors(rank: int, size: int, group: dist.ProcessGroup) -> None:
    for async_op in (False, True):
        with Seen(), pytest.raises(PeerMismatchError, match=r"rank 1 has elements: 3.*A2A-3009"):  # noqa: PT012
            work = dist.all_reduce(torch.ones(2 + rank), async_op=async_op)
            if async_op:
                work.wait()
    with Seen() if rank == 0 else torch.no_grad():  # one rank may be watched alone
        dist.all_reduce(x := torch.ones(3))
    assert x.tolist() == [2] * 3


@on_group(2)
def test_gradients_of_ddp_are_seen(rank: int, size: int, group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 2, bias=False), bucket_cap_mb=1)
    with CommDebugMode() as counts:
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
    grad = model.module.weight.grad
    assert grad is not None
    assert torch.equal(grad, torch.full((2, 3), 1.5))
    assert counts.get_total_counts() == 1


@on_group(2)
def test_nothing_is_sent_for_tensors_without_data(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """One rank alone makes the calls, on fake tensors and on meta tensors, and gets shapes."""

    def calls(**where: Any) -> None:
        x, whole, half = torch.ones(4, **where), torch.ones(8, **where), torch.ones(2, **where)
        for async_op in (False, True):
            works = [
                dist.all_reduce(x, async_op=async_op),
                dist.broadcast(x, 1, async_op=async_op),
                dist.reduce(x, 1, async_op=async_op),
                dist.all_gather([x, x], x, async_op=async_op),
                dist.all_gather_into_tensor(whole, x, async_op=async_op),
                dist.gather(x, [x, x], async_op=async_op),
                dist.scatter(x, [x, x], async_op=async_op),
                dist.reduce_scatter(x, [x, x], async_op=async_op),
                dist.reduce_scatter_tensor(half, x, async_op=async_op),
                dist.all_to_all([x, x], [x, x], async_op=async_op),
                dist.all_to_all_single(whole, whole, async_op=async_op),
                dist.isend(x, 1),
                dist.irecv(x, 1),
            ]
            assert all(work.wait() for work in works if work is not None)
        assert functional.all_gather_tensor(x, 0, group).shape == (8,)
        assert (x + 1).shape == (4,)

    if rank == 0:
        with FakeTensorMode():
            calls()
        calls(device="meta")
    dist.all_reduce(x := torch.ones(3))
    assert x.tolist() == [2] * 3


@on_group(2)
def test_other_backends_keep_their_kernels(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """A kernel in Python would hold the interpreter's lock where gloo's thread may wait for it."""
    before = torch._C._dispatch_dump("c10d::allreduce_")
    with Seen() as seen:
        dist.all_reduce(torch.ones(2))
    assert [name for name, _ in seen.calls] == ["allreduce_"]
    assert torch._C._dispatch_dump("c10d::allreduce_") == before
