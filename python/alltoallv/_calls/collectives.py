"""What engines of other packages' tensors share with the core: exchanges of lists, layouts, checks of lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alltoallv import _core
from alltoallv._calls.regions import Region, lowest
from alltoallv.communicator import Communicator
from alltoallv.dtypes import item_size


@dataclass(slots=True)
class CheckedCall:
    """Holds a collective whose arguments have passed this rank's checks."""

    plan: Any  # a plan of the core, or a `ReductionPlan`
    addresses: tuple[int | None, ...]  # of the input and the output
    keep: object = None  # memory that the call reads beside the caller's

    def run(self, timeout: float = -1.0, stream: int = 0) -> None:
        """Runs the collective; on a device it is enqueued on ``stream``."""
        if stream:
            self.plan.run(*self.addresses, timeout=timeout, stream=stream)
        else:  # other plans than exchanges and reductions have no streams
            self.plan.run(*self.addresses, timeout=timeout)

    def submit(self, timeout: float = -1.0) -> _core.Work:
        work: _core.Work = self.plan.submit(*self.addresses, timeout=timeout)
        return work


def exchange_lists(
    comm: Communicator, operator: str, dtype: str, outputs: Sequence[Region], inputs: Sequence[Region], root: int = 0
) -> CheckedCall:
    """Sends ``inputs[j]`` to rank j and receives ``outputs[j]`` from it, where they lie. The caller checks them."""
    source, sdispls = lowest(inputs)
    target, rdispls = lowest(outputs)
    itemsize = item_size(dtype)
    sends, recvs = [nbytes // itemsize for _, nbytes in inputs], [nbytes // itemsize for _, nbytes in outputs]
    plan = _core.Plan(comm.core, operator, dtype, sends, sdispls, recvs, rdispls, root, byte_displs=True)
    return CheckedCall(plan, (source, target))


def broadcast_layout(rank: int, size: int, n: int, root: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns the layout of ``n`` elements that go from ``root``, if it is a rank, to every other one."""
    root = _core.checked_rank("root", root, size)
    nothing = [0] * size
    moved = [n if rank == root else 0] * size
    moved[root] = 0 if rank == root else n
    return (moved, nothing, nothing, nothing) if rank == root else (nothing, nothing, moved, nothing)


def barrier_plan(comm: Communicator) -> _core.Plan:
    """Returns a plan that moves no data."""
    none = [0] * comm.size
    return _core.Plan(comm.core, "barrier", "uint8", none, none, none, none)


def shape_of_list(tensors: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the shape of a list's tensors stacked; None if their shapes differ."""
    shapes = {tuple(x.shape) for x in tensors}
    return (len(tensors), *shapes.pop()) if len(shapes) == 1 else None


def count_of(region: Region, dtype: str) -> int:
    """Returns the number of elements in a region."""
    return region[1] // item_size(dtype)
