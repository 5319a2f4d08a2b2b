"""Collectives over regions of host memory, for front ends whose tensors the core reads by their addresses.

A front end checks its tensors (dtype, contiguity) and passes the regions where they lie; conditions on several of them
are checked here. These functions are called under the guard. The caller keeps the memory alive until a call is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from alltoallv import _core
from alltoallv._calls.counts import even_parts, integer
from alltoallv._calls.protocol import Member
from alltoallv._calls.reductions import ReductionPlan, check_reduction
from alltoallv._calls.regions import (
    Region,
    as_bytes,
    check_apart,
    check_gather_apart,
    check_lists_apart,
    check_outputs_apart,
    lowest,
)
from alltoallv.communicator import Communicator
from alltoallv.dtypes import item_size
from alltoallv.errors import InvalidParamError, InvalidTensorError

_NOTHING: Region = (0, 0)


@dataclass(slots=True)
class Ready:
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


def all_reduce(comm: Communicator, dtype: str, op: str, tensor: Region, shape: Sequence[int]) -> Ready:
    """Combines all ranks' tensors of that shape, in place; ``dtype`` is the core's name."""
    check_reduction(op, dtype)
    counts = even_parts(count_of(tensor, dtype), comm.size)
    return Ready(ReductionPlan(comm.core, "all_reduce", dtype, op, counts, shape), (tensor[0], tensor[0]))


def reduce(
    comm: Communicator, dtype: str, op: str, output: Region | None, input: Region, shape: Sequence[int], root: int
) -> Ready:
    """Combines all inputs, of that shape, in the root's ``output``, which may be its input; elsewhere it is None."""
    check_rank("root", root, comm.size)
    check_reduction(op, dtype)
    counts = even_parts(count_of(input, dtype), comm.size)
    plan = ReductionPlan(comm.core, "reduce", dtype, op, counts, shape, root)
    return Ready(plan, (input[0], output[0] if output else 0))


def reduce_scatter(
    comm: Communicator, dtype: str, op: str, output: Region, inputs: Sequence[Region], shape: Sequence[int] | None
) -> Ready:
    """Combines all ranks' inputs: ``inputs[j]`` is rank j's part of this one; a single region has W equal parts.

    Ranks that know the ``shape`` of the whole input compare it.
    """
    check_reduction(op, dtype)
    if len(inputs) == 1:
        _check_whole(dtype, "input", inputs[0], "output", output, comm.size)
        inputs = [(inputs[0][0] + j * output[1], output[1]) for j in range(comm.size)]
    _check_part(dtype, "output", output, "inputs", inputs, comm.rank)
    check_apart(output, *inputs)
    given = [region for region in inputs if region[1]]
    source, kept = lowest(given)[0], None
    if any(begin + nbytes != following for (begin, nbytes), (following, _) in pairwise(given)):
        kept = np.concatenate([as_bytes(region) for region in given])
        source = kept.ctypes.data
    counts = [count_of(region, dtype) for region in inputs]
    plan = ReductionPlan(comm.core, "reduce_scatter", dtype, op, counts, shape)
    return Ready(plan, (source, output[0]), kept)


def all_gather(comm: Communicator, dtype: str, outputs: Sequence[Region], input: Region) -> Ready:
    """Copies rank j's input, of any size, to ``outputs[j]``; a single output region holds all inputs, of one size."""
    if len(outputs) == 1:
        _check_whole(dtype, "output", outputs[0], "input", input, comm.size)
        check_gather_apart(outputs[0], input, comm.rank)
        layout = _core.Request.all_gather(comm.size, [count_of(input, dtype)]).layout
        return Ready(_core.Plan(comm.core, "all_gather_into_tensor", dtype, *layout), (input[0], outputs[0][0]))
    check_outputs_apart(outputs, "tensor_list")
    _check_part(dtype, "input", input, "outputs", outputs, comm.rank)
    check_apart(input, *outputs)
    return exchange_lists(comm, "all_gather", dtype, outputs, [input] * comm.size)


def all_to_all(comm: Communicator, dtype: str, outputs: Sequence[Region], inputs: Sequence[Region], name: str) -> Ready:
    """Sends ``inputs[j]`` to rank j and receives ``outputs[j]``, of the list ``name``, from it; sizes may differ."""
    check_lists_apart(outputs, inputs, name)
    return exchange_lists(comm, "all_to_all", dtype, outputs, inputs)


def gather(comm: Communicator, dtype: str, outputs: Sequence[Region], input: Region, root: int) -> Ready:
    """Copies rank j's input, of any size, to the root's ``outputs[j]``; other ranks have no outputs."""
    check_rank("root", root, comm.size)
    if comm.rank == root:
        check_own("gather_list", dtype, outputs, input, comm)
        check_outputs_apart(outputs, "gather_list")
        check_apart(input, *(region for region in outputs if region != input))
    else:
        outputs = [_NOTHING] * comm.size
    return exchange_lists(comm, "gather", dtype, outputs, _only(root, input, comm.size), root)


def scatter(comm: Communicator, dtype: str, output: Region, inputs: Sequence[Region], root: int) -> Ready:
    """Copies the root's ``inputs[j]``, of any size, to rank j's output; other ranks have no inputs."""
    check_rank("root", root, comm.size)
    if comm.rank == root:
        check_own("scatter_list", dtype, inputs, output, comm)
        check_apart(output, *(region for region in inputs if region != output))
    else:
        inputs = [_NOTHING] * comm.size
    return exchange_lists(comm, "scatter", dtype, _only(root, output, comm.size), inputs, root)


def exchange_lists(
    comm: Communicator, operator: str, dtype: str, outputs: Sequence[Region], inputs: Sequence[Region], root: int = 0
) -> Ready:
    """Sends ``inputs[j]`` to rank j and receives ``outputs[j]`` from it, where they lie. The caller checks them."""
    source, sdispls = lowest(inputs)
    target, rdispls = lowest(outputs)
    itemsize = item_size(dtype)
    sends, recvs = [nbytes // itemsize for _, nbytes in inputs], [nbytes // itemsize for _, nbytes in outputs]
    plan = _core.Plan(comm.core, operator, dtype, sends, sdispls, recvs, rdispls, root, byte_displs=True)
    return Ready(plan, (source, target))


def _only(rank: int, region: Region, size: int) -> list[Region]:
    """Returns the list of an exchange with one rank alone."""
    return [region if j == rank else _NOTHING for j in range(size)]


def broadcast(comm: Communicator, dtype: str, tensor: Region, root: int) -> Ready:
    """Copies the tensor of ``root``, a rank of the communicator, into all others, in place."""
    layout = broadcast_layout(comm.rank, comm.size, count_of(tensor, dtype), root)
    return Ready(_core.Plan(comm.core, "broadcast", dtype, *layout, root), (tensor[0], tensor[0]))


def broadcast_layout(rank: int, size: int, n: int, root: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns the layout of ``n`` elements that go from ``root``, if it is a rank, to every other one."""
    check_rank("root", root, size)
    nothing = [0] * size
    moved = [n if rank == root else 0] * size
    moved[root] = 0 if rank == root else n
    return (moved, nothing, nothing, nothing) if rank == root else (nothing, nothing, moved, nothing)


def check_rank(name: str, rank: object, size: int) -> None:
    """Raises InvalidParamError unless ``rank`` is one of ``size`` ranks."""
    number = integer(rank)
    if number is None or not 0 <= number < size:
        raise InvalidParamError(f"{name} is {rank!r}, expected 0 <= {name} < {size}")


def barrier(comm: Communicator) -> Ready:
    """Returns a call that is done when all ranks have made it."""
    return Ready(barrier_plan(comm), (0, 0))


def barrier_plan(comm: Communicator) -> _core.Plan:
    """Returns a plan that moves no data."""
    none = [0] * comm.size
    return _core.Plan(comm.core, "barrier", "uint8", none, none, none, none)


def check_length(name: str, tensors: Sized, size: int) -> None:
    """Raises InvalidParamError unless there is one tensor per rank."""
    if not hasattr(tensors, "__len__"):
        raise InvalidParamError(f"{name} is {tensors!r}, expected {size} tensors, one per rank")
    if len(tensors) != size:
        raise InvalidParamError(f"{name} has {len(tensors)} tensors, expected {size}, one per rank")


def check_own(name: str, dtype: str, regions: Sequence[Region], own: Region, comm: Member) -> None:
    """Raises unless a root's list has a region for every rank, its own as long as this rank's tensor."""
    check_length(name, regions, comm.size)
    if regions[comm.rank][1] != own[1]:
        raise InvalidTensorError(
            f"entry {comm.rank} of {name} has {count_of(regions[comm.rank], dtype)} elements, "
            f"expected {count_of(own, dtype)}, those of this rank's tensor",
            9,
        )


def _check_whole(dtype: str, name: str, whole: Region, other: str, part: Region, size: int) -> None:
    if whole[1] != size * part[1]:
        found, expected = count_of(whole, dtype), count_of(part, dtype)
        raise InvalidTensorError(
            f"the {name} has {found} elements, expected {size} times the {expected} of the {other}", 9
        )


def _check_part(dtype: str, name: str, part: Region, others: str, regions: Sequence[Region], rank: int) -> None:
    if part[1] != regions[rank][1]:
        found, expected = count_of(part, dtype), count_of(regions[rank], dtype)
        raise InvalidTensorError(
            f"the {name} has {found} elements, expected the {expected} of entry {rank} of the {others}", 9
        )


def check_one_dtype(dtypes: Iterable[str]) -> None:
    """Raises InvalidTensorError if the dtypes, given by the core's names, differ."""
    several = sorted(set(dtypes))
    if len(several) > 1:
        raise InvalidTensorError(f"Invalid usage of tensors with different dtypes: {', '.join(several)}", 13)


def shape_of_list(tensors: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the shape of a list's tensors stacked; None if their shapes differ."""
    shapes = {tuple(x.shape) for x in tensors}
    return (len(tensors), *shapes.pop()) if len(shapes) == 1 else None


def count_of(region: Region, dtype: str) -> int:
    """Returns the number of elements in a region."""
    return region[1] // item_size(dtype)
