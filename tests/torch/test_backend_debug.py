"""What torch adds to its own backends from outside: the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL, shrinking; aborts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, joined, on_group
from on_ranks import on_ranks

from alltoallv.errors import PeerLostError, PeerMismatchError


def ones(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype)


# Given whether the rank is the odd one. First what torch's wrapper of its own backends finds, then what it does not.
WRONG: dict[str, Callable[[bool], object]] = {
    "operator": lambda odd: dist.barrier() if odd else dist.all_reduce(ones(4)),
    "all_reduce of sizes": lambda odd: dist.all_reduce(ones(5 if odd else 4)),
    "all_reduce of dtypes": lambda odd: dist.all_reduce(ones(4, torch.int32 if odd else torch.float32)),
    "all_gather of sizes": lambda odd: dist.all_gather([ones(4 + odd), ones(4 + odd)], ones(4 + odd)),
    "broadcast of sizes": lambda odd: dist.broadcast(ones(4 + odd), 0),
    "reduce of dtypes": lambda odd: dist.reduce(ones(4, torch.float64 if odd else torch.float32), 0),
    "gather of sizes": lambda odd: dist.gather(ones(4 + odd), None if odd else [ones(4), ones(4)], 0),
    "scatter of sizes": lambda odd: dist.scatter(ones(4 + odd), None if odd else [ones(4), ones(4)], 0),
    "broadcast of roots": lambda odd: dist.broadcast(ones(4), int(odd)),
    "all_reduce of operations": lambda odd: dist.all_reduce(ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
}


@on_ranks(2, communicator=False, fresh=True)
def test_detail_has_nothing_to_add(rank: int, size: int, tmp_path: Path) -> None:
    """Every rank is told of what the wrapper would have found, and the group goes on."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with joined(rank, size, str(tmp_path / "store")):
        for name, call in WRONG.items():
            print(name)  # is shown if it fails
            with pytest.raises(PeerMismatchError):
                call(rank == 1)
            dist.all_reduce(x := ones(4))
            assert x.tolist() == [size] * 4, name


def summed(group: dist.ProcessGroup | None = None) -> float:
    """The number of ranks that take part."""
    dist.all_reduce(x := ones(1), group=group)
    return float(x)


@on_group(4, fresh=True)
def test_fewer_ranks(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """``shrink_group`` of the default group and of another, and ``split_group``."""
    smaller = group.split_group([0, 2])
    assert (smaller is None) == (rank % 2 == 1)
    if smaller is not None:
        assert summed(smaller) == 2
        smaller.shutdown()
    some = dist.new_group([0, 2, 3])
    if rank in (0, 3):
        some = dist.shrink_group([1], group=some)  # rank 2 of the job
        assert (dist.get_world_size(some), summed(some)) == (2, 2)
        assert dist.get_process_group_ranks(some) == [0, 3]
    dist.barrier()
    assert summed() == size
    if rank == 1:
        return
    for excluded in ([], [4], [0, 0], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="rank"):
            dist.shrink_group(excluded)
    shrunk = dist.shrink_group([1])
    assert shrunk is dist.group.WORLD
    assert shrunk.name() == "alltoallv"
    assert (dist.get_rank(), dist.get_world_size(), summed()) == ([0, None, 1, 2][rank], 3, 3)
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        assert summed(pair) == 2
    dist.barrier()


@pytest.mark.parametrize("size", [3, 4])
def test_fewer_ranks_after_a_loss(grouped: Grouped, size: int) -> None:
    def run(rank: int, size: int, group: dist.ProcessGroup) -> None:
        assert summed() == size
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError):
            dist.barrier()
        dist.shrink_group([1], shrink_flags=1)  # SHRINK_ABORT
        assert summed() == size - 1
        dist.broadcast_object_list(told := [rank], src=size - 2)
        assert told == [size - 1]

    outcomes = grouped(size, fresh=True, outcomes=True)(run)
    assert [outcome.error is None for outcome in outcomes] == [rank != 1 for rank in range(size)], outcomes


CALLS: dict[str, Callable[[], object]] = {
    "call": lambda: dist.all_reduce(ones(4)),
    "wait": lambda: dist.all_reduce(ones(4), async_op=True).wait(),
    "future": lambda: dist.all_reduce(ones(4), async_op=True).get_future().wait(),
}


@pytest.mark.parametrize("way", CALLS)
@on_group(2)
def test_abort_from_another_thread(rank: int, size: int, group: dist.ProcessGroup, tmp_path: Path, way: str) -> None:
    """It ends what waits for a peer, and what the peer calls later."""
    dist.barrier()
    told = dist.FileStore(str(tmp_path / "told"), size)
    if rank == 0:
        aborting = threading.Timer(0.1, group.abort)
        aborting.start()
        with pytest.raises(RuntimeError if way == "future" else PeerLostError, match="rank 0 aborted"):
            CALLS[way]()
        aborting.join()
        told.set("aborted", "")
    else:
        told.wait(["aborted"])
        with pytest.raises(PeerLostError, match="rank 0 aborted"):
            dist.all_reduce(ones(4))
