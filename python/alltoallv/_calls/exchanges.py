"""The all-to-all family as users call it, for front ends whose tensors lie in host memory."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls import collectives, experts
from alltoallv._calls.adapters import A, Adapter, as_bytes
from alltoallv._calls.collectives import CountsUnknown, InFlight, Linear, Map, Transfer
from alltoallv._calls.counts import Counts, Layout, Unit, chunks, integer, packed, read_request
from alltoallv._calls.experts import Matrix
from alltoallv._calls.front_end import FrontEnd, G, H
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError


class Exchanges(FrontEnd[A, G, H]):
    """A front end's exchanges. The methods below are what each framework defines for itself.

    Attributes:
        quick: Tensor types that the core itself may look at, if the call is not asynchronous.
        starts: Whether the core may look at any input, and start asynchronous calls.
    """

    quick: ClassVar[type[Any] | tuple[()]] = ()
    starts: ClassVar[bool] = False

    def all_to_all_v(
        self,
        input: A,
        send_counts: Counts,
        recv_counts: Counts | None = None,
        sdispls: Counts | None = None,
        rdispls: Counts | None = None,
        unit: Unit | None = None,
        out: A | None = None,
        group: G = None,  # type: ignore[assignment]
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Exchanges regions; the front ends' functions of this name describe it, and those that follow."""
        comm = self.enter(group)
        if comm is None:
            return (None, None) if async_op else None
        if self.starts or (async_op is False and isinstance(input, self.quick)):
            result = _core.all_to_all_v(
                comm.core, input, out, send_counts, recv_counts, sdispls, rdispls, unit, async_op, timeout
            )
            if result is not None:
                return self.started(comm, result, input) if async_op else result
        counts = (send_counts, recv_counts, sdispls, rdispls, unit)
        return self.move("all_to_all_v", comm, input, out, counts, async_op, timeout)

    def exchange_counts(self, send_counts: Counts, group: G = None) -> A:  # type: ignore[assignment]
        """Returns what every rank will send to this one."""
        comm = self.enter(group)
        if comm is None:
            return None  # type: ignore[return-value]
        return self.numbers(experts.exchange_counts(self.host(comm), send_counts))

    def all_to_all_single(
        self,
        output: A,
        input: A,
        output_split_sizes: Counts | None = None,
        input_split_sizes: Counts | None = None,
        group: G = None,  # type: ignore[assignment]
        async_op: bool = False,
        timeout: float | None = None,
    ) -> H | None:
        """Exchanges parts of dimension 0."""
        comm = self.enter(group)
        if comm is None:
            return None
        if self.starts or (async_op is False and isinstance(input, self.quick)):
            started = _core.all_to_all_single(
                comm.core, output, input, output_split_sizes, input_split_sizes, async_op, timeout
            )
            if started is not None:
                return self.started(comm, started, input)[1] if async_op else None
        splits = output_split_sizes, input_split_sizes
        result = self.single(comm, output, input, splits, async_op, timeout)
        return result[1] if async_op else None

    def all_gather_into_tensor(
        self,
        output_tensor: A,
        input_tensor: A,
        group: G = None,  # type: ignore[assignment]
        async_op: bool = False,
        timeout: float | None = None,
    ) -> H | None:
        """Concatenates all ranks' inputs."""
        comm = self.enter(group)
        if comm is None:
            return None
        if self.starts or (async_op is False and isinstance(input_tensor, self.quick)):
            started = _core.all_gather_into_tensor(comm.core, output_tensor, input_tensor, async_op, timeout)
            if started is not None:
                return self.started(comm, started, input_tensor)[1] if async_op else None
        arguments = "all_gather_into_tensor", comm, output_tensor, input_tensor, async_op, timeout
        result = self.gather(*arguments, ("output_tensor", "input_tensor"))
        return result[1] if async_op else None

    def all_to_all_nd(
        self,
        input: A,
        scatter_dim: int,
        gather_dim: int,
        group: G,
        scatter_sizes: Sizes,
        gather_sizes: Sizes,
        out: A | None,
        async_op: bool,
    ) -> Any:
        """Exchanges one dimension of the input for another."""
        comm = self.enter(group)
        if comm is None:
            return (None, None) if async_op else None
        dims = scatter_dim, gather_dim, scatter_sizes, gather_sizes
        if self.starts or (async_op is False and isinstance(input, self.quick)):
            result = _core.all_to_all_nd(comm.core, input, out, *dims, async_op)
            if result is not None:
                return self.started(comm, result, input) if async_op else result
        with guard(comm, "all_to_all_nd", self.local):
            self.check_async(async_op)
            x = self.check_strided("input", input)
            swap = read_swap(tuple(x.shape), comm.rank, comm.size, *dims)
            if out is not None:
                if tracked := self.tracks(x):
                    self.check_tracked_output()
                x = self._check_pair("input", x, "out", out, tracked)
                _core.check_shape("out", out.shape, swap.shape_out)
            call = swapped(self.adapter, comm, swap)
        return self.run(x, call, out, "out", async_op)

    def check_strided(self, name: str, x: Any) -> A:
        """Does what `check` does for a call that reads an input with gaps in place."""
        return self.check(name, x)

    def check(self, name: str, x: Any) -> A:
        """Checks an input and returns it; a value that can be made a tensor may become one."""
        self.adapter.check(name, x)
        self.adapter.dtype(x)  # raises for one that the core does not know
        return x  # type: ignore[no-any-return]

    def started(self, comm: Communicator, result: tuple[A | None, Any, Any], input: Any) -> tuple[A | None, H]:
        """Returns the output of an asynchronous call that the core has started, with the front end's handle."""
        raise NotImplementedError

    def tracks(self, *tensors: A) -> bool:
        """Returns whether a gradient may be asked for with respect to one of these tensors."""
        return False

    def check_tracked_output(self) -> None:
        """Raises if the framework cannot have an output for an input that wants a gradient."""

    def apply(self, input: A, call: Map[A]) -> A:
        """Runs ``call`` on ``input`` in the framework's autograd and returns the output."""
        raise NotImplementedError

    def taken(self, x: A, index: npt.NDArray[np.int64]) -> A:
        """Returns elements of the flat tensor. The gradient adds up those that are taken twice."""
        raise NotImplementedError

    def assign(self, name: str, output: A, values: A, kept: npt.NDArray[np.bool_] | None) -> None:
        """Copies values into a caller's tensor, whose gradient then passes through them.

        ``kept`` is true where the tensor keeps its own value; it is None if the tensor keeps none.
        """
        raise NotImplementedError

    def move(
        self,
        operator: str,
        comm: Communicator,
        input: Any,
        out: A | None,
        counts: tuple[Any, Any, Any, Any, Any],
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        """Runs an all_to_all_v whose tensors Python has to check, because the core may not."""
        with guard(comm, operator, self.local):
            self.check_async(async_op)
            limit = _core.read_timeout(timeout)
            x = self.check("input", input)
            wants_grad = self.tracks(x)
            if out is not None and wants_grad:
                self.check_tracked_output()
            if out is not None and counts[1] is not None:
                x = self._check_pair("input", x, "out", out, wants_grad)
            elif out is not None:
                self.adapter.check_output("out", out)
            arguments = comm.size, x.shape, *counts, out, async_op and wants_grad
            shapes = [tuple(a.shape) for a in (x, out) if a is not None]
            request = read_request(*arguments, empty_rows=not self.adapter.queues())
            _core.check_unchanged(shapes == [tuple(a.shape) for a in (x, out) if a is not None])
            layout, shape = request.layout, tuple(x.shape)
            if wants_grad and (index := collectives.packing(*layout[:2])) is not None:
                x = self.taken(x, index)
                layout, shape = (layout[0], packed(layout[0]), *layout[2:]), (len(index),)
        terms = shape, request.shape, layout, request.row
        transfer = Transfer(self.adapter, comm, operator, *terms, timeout=limit, request=request)
        if not request.learns:
            return self.run(x, transfer, out, "out", async_op)
        learning = CountsUnknown(transfer, request)
        if async_op:
            return None, learning.submit(x)
        return self.apply(x, learning) if wants_grad else learning.run(x)

    def run(self, x: A, call: Linear[A], out: A | None, name: str, async_op: bool) -> Any:
        """Runs the call; returns the output, ``out`` if given, and with ``async_op=True`` also the handle."""
        if out is not None and self.tracks(x, out):  # a handle is then already done
            call = replace(call, shape_out=tuple(out.shape))
            self.assign(name, out, self.apply(x, call), call.kept())
            return (out, self.adapter.done(out)) if async_op else out
        if out is not None or not self.tracks(x):
            return call.submit(x, out) if async_op else call.run(x, out)
        if not async_op:
            return self.apply(x, call)
        begun = InFlight(call)
        return self.apply(x, begun), begun.handle

    def _check_pair(self, name: str, x: A, out_name: str, out: Any, tracked: bool = False) -> A:
        """Checks an output against its input, and returns the input, contiguous unless a gradient is tracked."""
        dense: A = self.adapter.contiguous(x)
        self.adapter.check_output(out_name, out, dense)
        if not self.adapter.queues():
            _core.check_apart(self.adapter.region(out), self.adapter.region(dense))
        return x if tracked else dense

    @abstractmethod
    def numbers(self, values: npt.NDArray[np.int64]) -> A:
        """Returns the numbers as a tensor."""

    def single(
        self,
        comm: Communicator,
        output: A,
        input: Any,
        splits: tuple[Counts | None, Counts | None],
        async_op: bool,
        timeout: float | None,
        names: tuple[str, str, str, str] = ("output", "input", "output_split_sizes", "input_split_sizes"),
    ) -> Any:
        """Runs an all_to_all_single of arguments with these ``names``; returns what `run` does."""
        with guard(comm, "all_to_all_single", self.local):
            self.check_async(async_op)
            limit = _core.read_timeout(timeout)
            x = self.check(names[1], input)
            tracked = self.tracks(x, output)
            x = self._check_pair(names[1], x, names[0], output, tracked)
            shape_in, shape_out = tuple(x.shape), tuple(output.shape)
            request = _core.Request.all_to_all_single(comm.size, shape_out, shape_in, *splits, names)
        terms = "all_to_all_single", shape_in, shape_out, request.layout, request.row
        transfer = Transfer(self.adapter, comm, *terms, timeout=limit, request=request)
        return self.run(x, transfer, output, names[0], async_op)

    def gather(
        self,
        operator: str,
        comm: Communicator,
        out: A | None,
        input: Any,
        async_op: bool,
        timeout: float | None,
        names: tuple[str, str],
    ) -> Any:
        """Gathers all ranks' inputs, of one shape, into ``out`` or stacked; returns what `run` does."""
        with guard(comm, operator, self.local):
            self.check_async(async_op)
            limit = _core.read_timeout(timeout)
            x = self.check(names[1], input)
            dense = self.adapter.contiguous(x)
            shape = (comm.size, *x.shape)
            if out is not None or operator == "all_gather_into_tensor":
                self.adapter.check_output(names[0], out, dense)
                shape = tuple(out.shape)  # type: ignore[union-attr]
                _core.Request.all_gather(comm.size, x.shape, math.prod(shape), names[0])
                if not self.adapter.queues():
                    _core.check_gather_apart(self.adapter.region(out), self.adapter.region(dense), comm.rank)
            call = collectives.gathering(self.adapter, comm, x.shape, shape, timeout=limit)
        return self.run(x, replace(call, operator=operator), out, names[0], async_op)


# Paddle's global_scatter and global_gather, whose rows travel by a front end's own `all_to_all_v`.


Order = npt.NDArray[np.int64]


class Permutation(Map[A]):
    """Permutes rows of tensors in host memory: row n of the output is row ``order[n]`` of the input."""

    def __init__(self, adapter: Adapter[A], order: Order) -> None:
        self._adapter, self._order = adapter, order

    def run(self, input: A) -> A:
        adapter, x = self._adapter, self._adapter.contiguous(input)
        out = adapter.new(x.shape, x)
        source, target = (as_bytes(adapter.region(rows)).reshape(len(self._order), -1) for rows in (x, out))
        np.take(source, self._order, axis=0, out=target)
        return out

    def transposed(self) -> Permutation[A]:
        return Permutation(self._adapter, np.argsort(self._order))


class ExpertRows(Exchanges[A, G, H]):
    """A front end's exchanges, also of experts' rows."""

    def global_scatter(
        self,
        x: A,
        local_count: Counts,
        global_count: Counts,
        group: G = None,  # type: ignore[assignment]
    ) -> A:
        """Sends every row to the rank of its expert."""
        comm = self.enter(group)
        if comm is None:
            return None  # type: ignore[return-value]
        x, local, global_ = self._checked("global_scatter", comm, x, local_count, global_count, "local_count")
        arrived = self.all_to_all_v(x, local.sum(1), global_.sum(1), unit="row", group=group)
        return self._transposed(arrived, global_)

    def global_gather(
        self,
        x: A,
        local_count: Counts,
        global_count: Counts,
        group: G = None,  # type: ignore[assignment]
    ) -> A:
        """Reverses `global_scatter`."""
        comm = self.enter(group)
        if comm is None:
            return None  # type: ignore[return-value]
        x, local, global_ = self._checked("global_gather", comm, x, local_count, global_count, "global_count")
        with guard(comm, "all_to_all_v"):
            x = self._transposed(x, global_.T)
        rows: A = self.all_to_all_v(x, global_.sum(1), local.sum(1), unit="row", group=group)
        return rows

    def check_counts(self, counts: dict[str, Counts]) -> None:
        """Raises for counts that the framework does not take."""

    def permuted(self, x: A, order: Order) -> A:
        """Returns the rows in another order: row n of the result is row ``order[n]``."""
        call: Permutation[A] = Permutation(self.adapter, order)
        return self.apply(x, call) if self.tracks(x) else call.run(x)

    def _checked(
        self, operator: str, comm: Communicator, x: A, local_count: Counts, global_count: Counts, rows_of_x: str
    ) -> tuple[A, Matrix, Matrix]:
        """Returns the rows and the counts as [card, expert] matrices, on which all cards agree expert by expert."""
        with guard(comm, operator, self.local):
            self.check_counts({"local_count": local_count, "global_count": global_count})
            x = self.check("x", x)
            shape = tuple(x.shape)
            local, global_ = experts.read(comm.size, shape, local_count, global_count, rows_of_x)
        experts.agree(self.host(comm), operator, local, global_)
        return x, local, global_

    def _transposed(self, x: A, counts: Matrix) -> A:
        order = experts.transposition(counts)
        return x if order is None or 0 in x.shape else self.permuted(x, order)


# all_to_all_nd exchanges one dimension of a tensor for another: what the ranks divide, they put together along the
# other.
#
# For every rank r, along dimensions that are not the same:
#
#     out_r = concatenate(over j, along gather_dim, split(input_j, scatter_sizes, scatter_dim)[r])
#
# What goes to a rank lies in the input as rows with gaps between them, and what comes from it in the output too: the
# core copies from the ones to the others, so nothing is permuted before or after.


Sizes = Sequence[int] | int | None


@dataclass(frozen=True)
class Swap:
    """One rank's exchange of dimension ``scatter`` for ``gather``; sizes are of the ranks' parts."""

    shape_in: tuple[int, ...]
    scatter: int
    gather: int
    scatter_sizes: tuple[int, ...]
    gather_sizes: tuple[int, ...]
    rank: int

    @property
    def shape_out(self) -> tuple[int, ...]:
        """Returns the output's shape."""
        shape = list(self.shape_in)
        shape[self.scatter], shape[self.gather] = self.scatter_sizes[self.rank], sum(self.gather_sizes)
        return tuple(shape)

    def transposed(self) -> Swap:
        """Returns the exchange that brings everything back."""
        sizes = self.gather_sizes, self.scatter_sizes
        return Swap(self.shape_out, self.gather, self.scatter, *sizes, self.rank)

    def boxes(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Returns the shapes of what goes to every rank, and of what comes from it."""

        def of(shape: tuple[int, ...], dim: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
            return [(*shape[:dim], n, *shape[dim + 1 :]) for n in sizes]

        sends = of(self.shape_in, self.scatter, self.scatter_sizes)
        return sends, of(self.shape_out, self.gather, self.gather_sizes)

    def packed(self) -> Layout:
        """Returns the layout, in elements, of boxes that lie one after the other."""
        sends, recvs = ([math.prod(box) for box in boxes] for boxes in self.boxes())
        return sends, packed(sends), recvs, packed(recvs)

    @property
    def terms(self) -> int:
        """Returns what the ranks compare besides counts: the dimensions, and a digest of the lengths of the others."""
        request = self.request()
        assert request is not None  # every box of a contiguous tensor's dimension is in rows
        return request.terms

    def request(self, strides: Sequence[int] = ()) -> _core.Request | None:
        """Returns the core's request, for a contiguous output and an input of these strides, in elements.

        It is None for an input whose boxes do not lie in rows at one distance; without strides it is contiguous.
        """
        dims = self.scatter, self.gather, self.scatter_sizes, self.gather_sizes
        return _core.Request.all_to_all_nd(self.shape_in, strides, *dims, self.rank)

    def plan(self, core: _core.Communicator, dtype: str, strides: Sequence[int] = ()) -> _core.Plan | None:
        """Returns the core's plan, or None as `request` does."""
        request = self.request(strides)
        return None if request is None else request.plan(core, "all_to_all_nd", dtype)


def contiguous(shape: Sequence[int]) -> list[int]:
    """Returns the strides of a contiguous tensor."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def read_swap(
    shape: Sequence[int],
    rank: int,
    size: int,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes: Sizes,
    gather_sizes: Sizes,
) -> Swap:
    """Checks the arguments of an all_to_all_nd.

    Raises:
        InvalidTensorError: the input has less than 2 dimensions.
        InvalidParamError: a dimension or a size is wrong.
    """
    if len(shape) < 2:
        raise InvalidTensorError(f"input has shape {tuple(shape)}, expected at least 2 dimensions", id=2040)
    scatter, gather = (
        _dimension(*each, len(shape)) for each in (("scatter_dim", scatter_dim), ("gather_dim", gather_dim))
    )
    if scatter == gather:
        raise InvalidParamError(f"scatter_dim and gather_dim are both {scatter}, expected two dimensions", id=1123)
    divided = chunks(shape[scatter], size) if scatter_sizes is None else scatter_sizes
    joined = [shape[gather]] * size if gather_sizes is None else gather_sizes
    divided, joined = _sizes("scatter_sizes", divided, size), _sizes("gather_sizes", joined, size)
    if sum(divided) != shape[scatter]:
        raise InvalidParamError(
            f"scatter_sizes is {list(divided)}, expected a sum of {shape[scatter]}, dimension {scatter} of input",
            id=1124,
        )
    if joined[rank] != shape[gather]:
        raise InvalidParamError(
            f"gather_sizes is {list(joined)}, expected {shape[gather]} for rank {rank}, dimension {gather} of input",
            id=1125,
        )
    return Swap(tuple(shape), scatter, gather, tuple(divided), tuple(joined), rank)


def _dimension(name: str, value: Any, dims: int) -> int:
    number = integer(value)
    if number is None or not -dims <= number < dims:
        raise InvalidParamError(f"{name} is {value!r}, expected a dimension of {dims}", id=1126)
    return number % dims


def _sizes(name: str, value: Any, size: int) -> list[int]:
    """Returns one size per rank; a number is the sum of sizes that are as equal as the sizes of `chunks`."""
    if (total := integer(value)) is not None and total >= 0:
        return chunks(total, size)
    try:
        sizes = [integer(each) for each in value]
    except TypeError:
        sizes = [None]
    valid = [each for each in sizes if each is not None and each >= 0]
    if len(valid) != len(sizes) or len(valid) != size:
        raise InvalidParamError(
            f"{name} is {value!r}, expected {size} integers >= 0, one per rank, their sum, or None", id=1127
        )
    return valid


@dataclass(eq=False)
class Swapped(Linear[A]):
    """An all_to_all_nd."""

    swap: Swap

    def plan(self, dtype: str) -> _core.Plan:
        plan = self.swap.plan(self.communicator.core, dtype)
        assert plan is not None  # every box of a contiguous tensor's dimension is in rows
        return plan

    def transposed(self) -> Swapped[A]:
        return swapped(self.adapter, self.communicator, self.swap.transposed())

    def packed(self) -> Transfer[A]:
        """Returns the exchange of the boxes where they lie one after the other, flat."""
        layout = self.swap.packed()
        shapes = (sum(layout[0]),), (sum(layout[2]),)
        return Transfer(self.adapter, self.communicator, self.operator, *shapes, layout, 1, timeout=self.timeout)

    def _prepare(self, input: A, output: A | None) -> tuple[Any, A, A]:
        strides = self.adapter.strides(input)
        if strides is not None and output is None:
            with guard(self.communicator, self.operator):
                dtype = self.adapter.dtype(input)
                plan = self.swap.plan(self.communicator.core, dtype, tuple(strides))
                if plan is not None:
                    return plan, input, self.adapter.new(self.shape_out, input)
        return super()._prepare(input, output)


def swapped(adapter: Any, comm: Communicator, swap: Swap) -> Swapped[Any]:
    """Returns the exchange of two dimensions as a linear map."""
    return Swapped(adapter, comm, "all_to_all_nd", swap.shape_in, swap.shape_out, swap)
