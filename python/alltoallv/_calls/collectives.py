"""Collectives as plans of the core, which engines of other packages' tensors share, and of one tensor as linear maps.

Autograd needs maps that know their transposes: a front end has one autograd function, which runs a map forward and its
transpose backward.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, cast

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.adapters import A, Adapter, Region, lowest
from alltoallv._calls.counts import Layout, even_parts, overlap, packed, rows_of
from alltoallv._calls.guard import Handle, guard
from alltoallv.communicator import Communicator
from alltoallv.dtypes import item_size
from alltoallv.errors import InvalidParamError, InvalidTensorError
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


class Map(ABC, Generic[A]):
    """A call as autograd sees it: a linear map."""

    @abstractmethod
    def run(self, input: A) -> A:
        """Runs the map and returns the output, a new tensor."""

    def transposed(self) -> Map[A]:
        """Returns the map whose inputs are this one's outputs: it computes the gradient."""
        raise NotImplementedError

    def back(self, grad: A, apply: Callable[[A, Map[A]], A]) -> A:
        """Returns the input's gradient from the output's; ``apply`` runs a call in autograd."""
        return apply(grad, self.transposed())


@dataclass(eq=False)
class Linear(Map[A]):
    """A collective from one shape to another whose arguments have passed this rank's checks.

    ``timeout`` is in seconds, below 0 the communicator's; it also holds for the gradient's exchange.
    """

    adapter: Adapter[A]
    communicator: Communicator
    operator: str
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    timeout: float = field(default=-1.0, kw_only=True)

    @abstractmethod
    def plan(self, dtype: str) -> Any:
        """Returns the core's plan for tensors of this dtype, given by the core's name."""

    @abstractmethod
    def transposed(self) -> Linear[A]: ...

    def has_gaps(self) -> bool:
        """Returns whether the output has elements that nothing is written to."""
        return False

    def kept(self) -> npt.NDArray[np.bool_] | None:
        """Returns a flat mask, true where nothing is written to the output; None if all of it is written."""
        return None

    def run(self, input: A, output: A | None = None) -> A:
        """Runs the map and returns the output: ``output``, or a new tensor whose gaps are zero."""
        if self.adapter.queues():
            return self.adapter.enqueue(self, input, output)
        plan, x, out = self._prepare(input, output)
        plan.run(self.adapter.address(x), self.adapter.address(out), self.timeout)
        return out

    def submit(self, input: A, output: A | None = None) -> tuple[A, Handle]:
        """Starts the map; returns the output, which is complete when the handle is done, and the handle."""
        if self.adapter.queues():
            out = self.adapter.enqueue(self, input, output)
            return out, self.adapter.done(out)  # the framework orders what comes after it
        plan, x, out = self._prepare(input, output)
        work = plan.submit(self.adapter.address(x), self.adapter.address(out), self.timeout)
        return out, self.adapter.handle(self.communicator, work, (x, out), lambda: out)

    def _prepare(self, input: A, output: A | None) -> tuple[Any, A, A]:
        with guard(self.communicator, self.operator):
            x = self.adapter.contiguous(input)
            plan = self.plan(self.adapter.dtype(x))
            if output is None:
                output = self.adapter.new(self.shape_out, x, zero=self.has_gaps())
            else:
                self.adapter.writes(output)
            return plan, x, output


@dataclass(eq=False)
class Transfer(Linear[A]):
    """An exchange. Its layout is in elements, of which ``row`` make one unit of the caller's counts."""

    layout: Layout
    row: int
    request: _core.Request | None = field(default=None, kw_only=True)  # of the layout: counts rows without elements

    def transposed(self) -> Transfer[A]:
        """Returns the exchange with sends and receives swapped. The send regions must not overlap."""
        sends, sdispls, recvs, rdispls = self.layout
        back, shape_in, shape_out = (recvs, rdispls, sends, sdispls), self.shape_out, self.shape_in
        return replace(self, layout=back, shape_in=shape_in, shape_out=shape_out, request=None)

    def has_gaps(self) -> bool:
        return sum(self.layout[2]) < math.prod(self.shape_out)

    def kept(self) -> npt.NDArray[np.bool_] | None:
        if not self.has_gaps():
            return None
        kept = np.ones(math.prod(self.shape_out), np.bool_)
        for begin, count in zip(self.layout[3], self.layout[2], strict=True):
            kept[begin : begin + count] = False
        return kept

    def plan(self, dtype: str) -> _core.Plan:
        if self.request is not None and self.request.row == 0:
            return self.request.plan(self.communicator.core, self.operator, dtype)
        return _core.Plan(self.communicator.core, self.operator, dtype, *self.layout, 0, max(self.row, 1))


@dataclass(eq=False)
class Gathering(Linear[A]):
    """Concatenates all ranks' inputs; rank j's has ``counts[j]`` elements."""

    counts: Sequence[int]

    def plan(self, dtype: str) -> _core.Plan:
        own = [math.prod(self.shape_in)] * self.communicator.size
        layout = (own, [0] * len(own), list(self.counts), packed(self.counts))
        return _core.Plan(self.communicator.core, self.operator, dtype, *layout)

    def transposed(self) -> Linear[A]:
        return Reduction(
            self.adapter, self.communicator, "reduce_scatter", self.shape_out, self.shape_in, "sum", self.counts
        )


@dataclass(eq=False)
class Reduction(Linear[A]):
    """Adds up all ranks' inputs; an all_reduce may average them.

    Either every rank gets the whole sum, which is its own transpose, or rank j gets a part of ``counts[j]`` elements.
    """

    op: str
    counts: Sequence[int]

    def plan(self, dtype: str) -> ReductionPlan:
        return ReductionPlan(self.communicator.core, self.operator, dtype, self.op, list(self.counts), self.shape_in)

    def transposed(self) -> Linear[A]:
        if self.operator == "all_reduce":
            return self
        return gathering(self.adapter, self.communicator, self.shape_out, self.shape_in, self.counts)


@dataclass(eq=False)
class LeafReduction(Linear[A]):
    """Adds the ``leaves`` of all ranks, of which each has its share along dimension 0, in a tree."""

    leaves: int

    def plan(self, dtype: str) -> ReductionPlan:
        counts = even_parts(math.prod(self.shape_out), self.communicator.size)
        return ReductionPlan(
            self.communicator.core, self.operator, dtype, "sum", counts, self.shape_in, leaves=self.leaves
        )

    def transposed(self) -> Linear[A]:
        """Returns the sum of the ranks' gradients, ``[1, ...]`` each, in a tree over the ranks."""
        return replace(self, shape_in=(1, *self.shape_out), leaves=self.communicator.size)

    def back(self, grad: A, apply: Callable[[A, Map[A]], A]) -> A:
        of_rank: Any = grad
        total: Any = apply(of_rank.reshape((1, *self.shape_out)), self.transposed())
        shared: A = total.reshape((1, *self.shape_out)).broadcast_to(self.shape_in)
        return shared


def leaf_reduction(adapter: Adapter[A], comm: Communicator, shape: Sequence[int], leaves: object) -> LeafReduction[A]:
    """Returns the all_reduce of leaves, of which a tensor of that shape has this rank's share."""
    number = _core.checked_leaves(leaves, shape, comm.size)
    return LeafReduction(adapter, comm, "all_reduce", tuple(shape), tuple(shape[1:]), number)


def leaf_products(input: A, weight: A, bias: Any, leaves: object, size: int, multiply: Callable[[A, A], A]) -> list[A]:
    """Returns one rank's product with a layer's weight as products over equal parts of its features, to be added.

    Whether there may be so many ``leaves`` is checked where they are added.

    Raises:
        InvalidTensorError: the shapes do not fit, or the features cannot be divided.
    """
    x, w = cast("tuple[Any, Any]", (input, weight))
    check_shapes(x.shape, w.shape, None if bias is None else bias.shape)
    count, features = max(leaves // size, 1) if isinstance(leaves, int) else 1, x.shape[-1]
    if features % count:
        raise InvalidTensorError(
            f"input has {features} features, expected a multiple of {count}: leaves is {leaves} on {size} ranks",
            id=2043,
        )
    ends = [features // count * i for i in range(count + 1)]
    return [multiply(x[..., a:b], w[:, a:b]) for a, b in itertools.pairwise(ends)]


def check_shapes(input: Sequence[int], weight: Sequence[int], bias: Sequence[int] | None = None) -> None:
    """Raises InvalidTensorError, which names the argument, unless the shapes can be multiplied."""
    rows_of(input)
    if len(weight) != 2 or weight[1] != input[-1]:
        raise InvalidTensorError(f"weight has shape {tuple(weight)}, expected [out_features, {input[-1]}]", id=2045)
    if bias is not None and tuple(bias) != (weight[0],):
        raise InvalidTensorError(f"bias has shape {tuple(bias)}, expected ({weight[0]},)", id=2046)


def gathering(
    adapter: Adapter[A],
    comm: Communicator,
    shape_in: Sequence[int],
    shape_out: Sequence[int],
    counts: Sequence[int] | None = None,
    timeout: float = -1.0,
) -> Gathering[A]:
    """Returns the gather of all ranks' inputs, by default of one size."""
    counts = [math.prod(shape_in)] * comm.size if counts is None else counts
    terms = "all_gather_into_tensor", tuple(shape_in), tuple(shape_out), counts
    return Gathering(adapter, comm, *terms, timeout=timeout)


def all_reduction(adapter: Adapter[A], comm: Communicator, shape: Sequence[int], op: str = "sum") -> Reduction[A]:
    """Returns the all_reduce, ``"sum"`` or ``"avg"``, of all ranks' tensors of that shape."""
    full_shape = tuple(shape)
    return Reduction(
        adapter, comm, "all_reduce", full_shape, full_shape, op, even_parts(math.prod(full_shape), comm.size)
    )


class CountsUnknown(Map[A]):
    """An exchange that learns its receive counts from the peers; its transpose is known after it has run."""

    def __init__(self, transfer: Transfer[A], request: _core.Request) -> None:
        self._transfer, self._request = transfer, request

    def run(self, input: A) -> A:
        transfer, adapter = self._transfer, self._transfer.adapter
        if adapter.queues():
            self._received(adapter.learn(transfer, input))
            return self._transfer.run(input)
        plan, x = self._prepare(input)
        block, recv_counts = plan.run_learning(adapter.address(x), transfer.timeout)
        return adapter.from_block(block, self._received(recv_counts), x)

    def submit(self, input: A) -> Handle:
        """Starts the exchange; the handle's result is the output."""
        adapter, comm = self._transfer.adapter, self._transfer.communicator
        if adapter.queues():
            ended: Handle = adapter.done(self.run(input))
            return ended
        plan, x = self._prepare(input)
        learning = plan.submit_learning(adapter.address(x), self._transfer.timeout)

        def finish() -> A:
            block, recv_counts = learning.take()
            return adapter.from_block(block, self._received(recv_counts), x)

        return adapter.handle(comm, learning.work, (x,), finish)

    def transposed(self) -> Transfer[A]:
        return self._transfer.transposed()

    def _prepare(self, input: A) -> tuple[_core.Plan, A]:
        transfer = self._transfer
        with guard(transfer.communicator, transfer.operator):
            x = transfer.adapter.contiguous(input)
            return transfer.plan(transfer.adapter.dtype(x)), x

    def _received(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Takes the receive counts that the peers announced and returns the output's shape."""
        shape = self._request.shape_for(counts)
        sends, sdispls, _, _ = self._transfer.layout
        recvs = [n * bool(self._transfer.row) for n in counts]
        self._transfer = replace(self._transfer, layout=(sends, sdispls, recvs, packed(recvs)), shape_out=shape)
        return shape


class InFlight(Map[A]):
    """An exchange that begins when it runs; ``handle`` reports when it ends."""

    handle: Handle

    def __init__(self, transfer: Linear[A]) -> None:
        self._transfer = transfer

    def run(self, input: A) -> A:
        output, self.handle = self._transfer.submit(input)
        return output

    def transposed(self) -> Linear[A]:
        return self._transfer.transposed()


def packing(counts: Sequence[int], displs: Sequence[int]) -> npt.NDArray[np.int64] | None:
    """Returns the indices of the elements of overlapping regions, one region after the other; None if none overlap.

    The framework's own operator gathers them, and its gradient adds up what overlaps; they are then sent packed.
    """
    if not overlap(counts, displs):
        return None
    return np.concatenate([np.arange(d, d + n, dtype=np.int64) for n, d in zip(counts, displs, strict=True)])
