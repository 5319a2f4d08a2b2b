"""Views of tensors, and groups of every kind; tests/matrix has the values of every dtype."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import joined, on_group
from compiled import compiled
from on_ranks import on_ranks
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidTensorError, PeerMismatchError
from alltoallv.testing import Ranks


@on_ranks(2)
def test_views(comm: Communicator) -> None:
    """Transposed, strided, expanded, conjugated and negated views are read as what they show."""
    z = torch.randn(4, 6, dtype=torch.complex64)
    views = [z.t(), z[:, ::2], z[1:3, 1:3], z[0].expand(4, 6), z.conj(), z.conj().imag, z.real, z.t().conj()]
    for view in views:
        n = view.numel()
        y = at.all_to_all_v(view, [n, n], [n, n], sdispls=[0, 0], rdispls=[n, 0], unit="element", group=comm)
        own = y[n:] if comm.rank == 0 else y[:n]
        assert torch.equal(own.view(view.shape), view)
        gathered = torch.empty(2, *view.shape, dtype=view.dtype)
        at.all_gather_into_tensor(gathered, view, comm)
        assert torch.equal(gathered[comm.rank], view)
        rows = at.functional.all_gather(view, comm)
        assert torch.equal(rows[comm.rank * len(view) :][: len(view)], view)
        outputs = [torch.empty(view.shape, dtype=view.dtype) for _ in range(2)]
        at.all_to_all(outputs, [view, view], comm)
        assert torch.equal(outputs[comm.rank], view)


@on_ranks(2)
def test_integers_of_fewer_bits(comm: Communicator) -> None:
    """DLPack shows them as bytes, which a result would then be."""
    x = torch.empty(2, dtype=torch.int4)
    for call in (lambda: at.all_to_all_v(x, [1, 1], group=comm), lambda: at.all_reduce(x, group=comm)):
        with pytest.raises(InvalidTensorError, match=r"dtype is torch\.int4.*A2A-2092"):
            call()


@on_ranks(2)
def test_no_memory_for_a_copy_of_an_input(comm: Communicator) -> None:
    x, half = (torch.ones(1).expand(1 << 45), 1 << 44) if comm.rank == 1 else (torch.ones(2), 1)
    for call in (
        lambda: at.all_to_all_v(x, [half] * 2, group=comm),
        lambda: at.all_to_all_single(torch.ones(2), x, group=comm),
        lambda: at.all_reduce(x, group=comm),
        lambda: at.quantized_all_reduce(x, group=comm),
    ):
        with pytest.raises(RuntimeError, match="failed on rank 1.*allocate memory" if comm.rank == 0 else "allocate"):
            call()


@on_group(2)
def test_tensors_without_memory_of_their_own(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """What torch's functional collectives return is taken; a DTensor of one rank is an error on all."""
    from torch.distributed.tensor import DTensor, init_device_mesh

    def two() -> Tensor:
        return functional.all_reduce(torch.ones(size, 2), "sum", group)

    assert at.all_to_all_v(two(), [1, 1]).tolist() == [[2, 2], [2, 2]]
    assert at.quantized_all_reduce(two()).tolist() == [[4, 4], [4, 4]]
    at.all_reduce(x := two())
    at.all_gather(parts := [two(), two()], x)
    assert (parts[1] + 0).tolist() == [[4, 4], [4, 4]]
    with pytest.raises(InvalidTensorError, match=r"output is not contiguous.*A2A-2037"):
        at.all_to_all_single(two(), torch.ones(size, 2))

    whole = DTensor.from_local(torch.ones(size, 2), init_device_mesh("cpu", (size,)))
    calls: list[Callable[[Tensor], object]] = [
        lambda x: at.all_to_all_v(x, [1, 1]),
        lambda x: at.all_to_all_v(torch.ones(size, 2), [1, 1], [1, 1], out=x),
        lambda x: at.all_to_all_single(torch.empty(size, 2), x, async_op=True).wait(),
        lambda x: at.quantized_all_reduce(x),
        at.all_reduce,
        lambda x: at.broadcast(x, 0),
    ]
    for call in calls:
        with pytest.raises(InvalidTensorError, match=r"is a DTensor, expected a tensor with its own memory.*A2A-2118"):
            call(whole if rank == 0 else torch.ones(size, 2))

    (freed := torch.ones(size, 2)).untyped_storage().resize_(0)  # as FSDP does between two uses
    calls += [dist.all_reduce, lambda x: dist.all_gather([torch.empty(size, 2), torch.empty(size, 2)], x)]
    for call in calls:
        with pytest.raises(InvalidTensorError, match=r"has 4 elements but a storage of 0 bytes.*A2A-2121"):
            call(freed if rank == 0 else torch.ones(size, 2))


@on_group(4, backend="gloo")
def test_process_groups(rank: int, size: int, world: dist.ProcessGroup) -> None:
    """The default group, sub-groups and communicators side by side; names of dist.new_group as of Communicator."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    reverse = dist.new_group([3, 1, 0])
    other = Communicator.from_env("other", timeout=30)
    mine = halves[rank // 2]
    x = torch.tensor([float(rank)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for group, members in ((None, [0, 1, 2, 3]), (world, [0, 1, 2, 3]), (other, [0, 1, 2, 3])):
            assert at.functional.all_gather(x, group).tolist() == members
        assert at.functional.all_gather(x, mine).tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
        works = []
        groups = [mine, other, world] if rank % 2 else [world, mine, other]
        for group in groups:  # in another order on every second rank: they do not wait for each other
            n = dist.get_world_size(group) if group is not other else 4
            works.append(at.all_to_all_v(x.expand(n), [1] * n, [1] * n, group=group, async_op=True))
        for group, (y, work) in zip(groups, works, strict=True):
            work.wait()
            assert y.tolist() == ([rank // 2 * 2, rank // 2 * 2 + 1] if group is mine else [0, 1, 2, 3])
    if rank != 2:
        ranks_of = dist.get_process_group_ranks(reverse)
        assert at.functional.all_gather(x, reverse).tolist() == ranks_of
    assert at.from_group(mine) is at.from_group(mine)
    assert at.from_group(mine).size == 2
    other.destroy()


@on_group(3, backend="gloo")
def test_a_rank_outside_the_group_is_warned(rank: int, size: int, group: dist.ProcessGroup) -> None:
    pair = dist.new_group([0, 1])
    x = torch.ones(2)
    calls = {
        "all_to_all_v": lambda: at.all_to_all_v(x, [1, 1], group=pair),
        "all_to_all_single": lambda: at.all_to_all_single(torch.empty(2), x, group=pair),
        "all_to_all": lambda: at.all_to_all([torch.empty(1)] * 2, list(x.split(1)), group=pair),
        "all_gather": lambda: at.all_gather_into_tensor(torch.empty(4), x, group=pair),
        "exchange_counts": lambda: at.exchange_counts([1, 1], group=pair),
        "global_scatter": lambda: at.global_scatter(x, [1, 1], [1, 1], group=pair),
        "global_gather": lambda: at.global_gather(x, [1, 1], [1, 1], group=pair),
        "async": lambda: at.all_to_all_single(torch.empty(2), x, group=pair, async_op=True),
    }
    if rank == 2:
        for call in calls.values():
            with pytest.warns(UserWarning, match="not a member of the group"):
                assert call() is None
        with pytest.warns(UserWarning, match="not a member of the group"):
            assert at.all_to_all_v(x, [1, 1], group=pair, async_op=True) == (None, None)
    else:
        assert at.all_to_all_v(x, [1, 1], group=pair).tolist() == [1, 1]


@on_group(2, backend="gloo", seconds=120)
def test_graphs_name_process_groups(rank: int, size: int, world: dist.ProcessGroup) -> None:
    x = torch.ones(2, requires_grad=True)
    y = compiled(lambda x: at.functional.all_gather(at.all_to_all_v(x * 2, [1, 1], group=world), world))(x)
    assert y.tolist() == [2] * 4
    y.sum().backward()
    assert x.grad.tolist() == [4, 4]


def test_a_new_group_under_an_old_name(ranks: Ranks, tmp_path: Path) -> None:
    """torch.distributed numbers its groups from 0 again after destroy_process_group."""

    def check(rank: int, size: int, folder: str) -> list[int]:
        seen = []
        for n in range(3):
            with joined(rank, size, f"{folder}/{n}", backend="gloo") as world:
                assert at.functional.all_gather(torch.tensor([rank + 10 * n]), world).tolist() == [10 * n, 10 * n + 1]
                seen.append(at.from_group(world))
        return len({id(comm) for comm in seen})

    assert ranks(2, communicator=False)(check, str(tmp_path)) == [3, 3]


@on_ranks(2)
def test_an_error_in_backward_is_an_error_on_all(comm: Communicator) -> None:
    """One rank differentiates, the other does something else: both hear of it."""
    x = torch.ones(2, requires_grad=True)
    y = at.all_to_all_v(x, [1, 1], [1, 1], group=comm)
    call = (lambda: at.functional.all_reduce(torch.ones(2), comm)) if comm.rank else y.sum().backward
    with pytest.raises(PeerMismatchError, match=r"all_reduce.*A2A-3009"):
        call()
    y.sum().backward()
    assert x.grad.tolist() == [1, 1]


ROWS, LEAF = torch.ones(4, 3), torch.ones(4, 3, requires_grad=True)
MISTAKES: dict[str, tuple[Callable[[Communicator, Any], Any], Any, Any]] = {
    "reduce_scatter": (lambda c, n: at.functional.reduce_scatter(ROWS[:n], c), 4, 3),
    "all_to_all_single": (lambda c, n: at.functional.all_to_all_single(ROWS[:n], group=c), 4, 3),
    "all_gather": (lambda c, shape: at.functional.all_gather(torch.ones(shape), c), (1,), ()),
    "rows": (lambda c, counts: at.quantized_all_to_all(LEAF, counts, [2, 2], group=c), [2, 2], ["a", 2]),
    "timeout": (lambda c, t: at.quantized_all_to_all(LEAF, [2, 2], [2, 2], group=c, timeout=t), None, 1.0),
    "weight": (lambda c, x: at.quantized_linear_all_reduce(ROWS, x, group=c, group_size="token"), ROWS, ROWS[0, 0]),
    "gather": (lambda c, x: at.gather(ROWS, x, 1, group=c), [torch.empty(4, 3) for _ in range(2)], torch.zeros(2)),
    "scatter": (lambda c, x: at.scatter(ROWS.clone(), x, 1, group=c), [ROWS, ROWS], torch.zeros(2)),
}


@on_ranks(2)
def test_peers_learn_of_a_mistake(comm: Communicator) -> None:
    """Rank 1's argument is wrong: rank 0 also raises at once, and the next call works."""
    for name, (call, good, bad) in MISTAKES.items():
        print(name)  # is shown if it fails
        with pytest.raises(ValueError, match="is|has" if comm.rank else "failed on rank 1: "):
            call(comm, bad if comm.rank else good)
        at.barrier(comm)
        call(comm, good)
