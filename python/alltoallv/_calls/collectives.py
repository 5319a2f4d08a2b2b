"""What engines of other packages' tensors share with the core: exchanges and checks of lists, layouts, reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alltoallv import _core
from alltoallv._calls.adapters import Region, lowest
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.dtypes import item_size
from alltoallv.errors import InvalidParamError
from alltoallv.launch import variables


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


FLOATS = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic == "floating")
COMPLEX = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic == "complex")
OTHERS = frozenset(name for name, dtype in _core.dtypes.items() if dtype.arithmetic in ("logical", "integer"))


def check_reduction(op: object, dtype: str, shown: object = None) -> None:
    """Raises InvalidParamError for an ``op`` that is none, or is not defined for a dtype, by the core's name.

    It is called under the guard: if the core alone refused it, the peers would wait. ``shown``: the user's dtype.
    """
    _core.check_reduction(op, dtype, shown)


def check_order(comm: Any, operator: str, order: object) -> None:
    """Raises InvalidParamError, on all ranks, for an ``order`` other than None and "rank", that of host memory."""
    with guard(comm, operator):
        variables.order("order", order)


def check_no_order(comm: Any, order: object, leaves: object) -> None:
    """Raises InvalidParamError, on all ranks, for an ``order`` beside ``leaves``, which have one of their own."""
    if order is not None:
        with guard(comm, "all_reduce"):
            raise InvalidParamError(f"order is {order!r} and leaves is {leaves!r}, expected one of them", id=1150)


class ReductionPlan:
    """A reduction whose arguments have passed the checks."""

    __slots__ = ("_arguments", "_core", "_counts", "_more")

    def __init__(
        self,
        core: _core.Communicator,
        operator: str,
        dtype: str,
        op: str,
        counts: Sequence[int],
        shape: Sequence[int] | None,
        root: int = 0,
        leaves: int = 0,
    ) -> None:
        """Plans ``"all_reduce"``, ``"reduce"`` to ``root``, or ``"reduce_scatter"``: rank j keeps ``counts[j]``.

        Ranks that know the ``shape`` of their input compare it. With ``leaves``, of all ranks, the input of an
        all_reduce holds this rank's share of them, and ``counts`` divide the result.
        """
        self._core, self._arguments, self._counts = core, (operator, dtype, op), counts
        self._more: dict[str, Any] = {"root": root, "shape": shape, "leaves": leaves}

    def run(self, input: int, output: int, timeout: float = -1, stream: int = 0) -> None:
        self._core.reduce(*self._arguments, input, output, self._counts, timeout, stream, **self._more)

    def submit(self, input: int, output: int, timeout: float = -1) -> _core.Work:
        return self._core.submit_reduce(*self._arguments, input, output, self._counts, timeout, **self._more)
