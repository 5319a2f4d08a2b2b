"""Exchanges one dimension of a tensor for another: what the ranks divide, they put together along the other.

For every rank r, along dimensions that are not the same:

    out_r = concatenate(over j, along gather_dim, split(input_j, scatter_sizes, scatter_dim)[r])

What goes to a rank lies in the input as rows with gaps between them, and what comes from it in the output too: the core
copies from the ones to the others, so nothing is permuted before or after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alltoallv import _core
from alltoallv._calls.adapters import A
from alltoallv._calls.collectives import Linear, Transfer
from alltoallv._calls.counts import Layout, chunks, integer, packed
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError

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
