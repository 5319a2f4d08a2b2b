"""What torch adds to its own backends from outside: the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL, shrinking; aborts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend_groups import joined

from alltoallv.errors import PeerLostError, PeerMismatchError
from alltoallv.testing import Ranks


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
    "broadcast of roots": lambda odd: dist.broadcast(ones(4), int(odd)),
    "all_reduce of operations": lambda odd: dist.all_reduce(ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
}


def test_detail_has_nothing_to_add(ranks: Ranks, tmp_path: Path) -> None:
    """Every rank is told of what the wrapper would have found, and the group goes on."""

    def run(rank: int, size: int) -> None:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        with joined(rank, size, str(tmp_path / "store")):
            for name, call in WRONG.items():
                print(name)  # is shown if it fails
                with pytest.raises(PeerMismatchError):
                    call(rank == 1)
                dist.all_reduce(x := ones(4))
                assert x.tolist() == [size] * 4, name

    ranks(2, communicator=False, fresh=True)(run)


def test_fewer_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Torch makes what ``shrink_group`` returns of its own backends alone, and says so; ``split_group`` does it."""

    def run(rank: int, size: int) -> None:
        with joined(rank, size, str(tmp_path / "store")) as group:
            with pytest.raises(TypeError, match="does not support shrinking"):
                dist.shrink_group([1])
            if (smaller := group.split_group([0, 2])) is not None:
                smaller.allreduce([x := ones(3)]).wait()
                assert x.tolist() == [2] * 3

    ranks(3, communicator=False)(run)


CALLS: dict[str, Callable[[], object]] = {
    "call": lambda: dist.all_reduce(ones(4)),
    "wait": lambda: dist.all_reduce(ones(4), async_op=True).wait(),
    "future": lambda: dist.all_reduce(ones(4), async_op=True).get_future().wait(),
}


@pytest.mark.parametrize("way", CALLS)
def test_abort_from_another_thread(ranks: Ranks, tmp_path: Path, way: str) -> None:
    """It ends what waits for a peer, and what the peer calls later."""

    def run(rank: int, size: int) -> None:
        with joined(rank, size, str(tmp_path / "store")) as group:
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

    ranks(2, communicator=False)(run)
