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


@dataclass(slots=True)
class Ready:
    """Holds a collective whose arguments have passed this rank's checks."""

    plan: Any  # a plan of the core, or a `ReductionPlan`
    addresses: tuple[int | None, ...]  # of the input and the output
    keep: object = None  # memory that the call reads beside the caller's
    timeout: float = -1.0  # seconds; below 0 the communicator's timeout holds

    def run(self, timeout: float | None = None, stream: int = 0) -> None:
        """Runs the collective; on a device it is enqueued on ``stream``."""
        limit = self.timeout if timeout is None else timeout
        if stream:
            self.plan.run(*self.addresses, timeout=limit, stream=stream)
        else:  # other plans than exchanges and reductions have no streams
            self.plan.run(*self.addresses, timeout=limit)

    def submit(self, timeout: float | None = None) -> _core.Work:
        work: _core.Work = self.plan.submit(*self.addresses, timeout=self.timeout if timeout is None else timeout)
        return work


def all_reduce(comm: Communicator, dtype: str, op: str, tensor: Region, shape: Sequence[int]) -> Ready:
    """Combines all ranks' tensors of that shape, in place; ``dtype`` is the core's name."""
    check_reduction(op, dtype)
    counts = even_parts(count_of(tensor, dtype), comm.size)
    return Ready(ReductionPlan(comm.core, "all_reduce", dtype, op, counts, shape), (tensor[0], tensor[0]))


def reduce_scatter(
    comm: Communicator, dtype: str, op: str, output: Region, inputs: Sequence[Region], shape: Sequence[int] | None
) -> Ready:
    """Combines all ranks' inputs: ``inputs[j]`` is rank j's part of this one; a single region has W equal parts.

    Ranks that know the ``shape`` of the whole input compare it.
    """
    check_reduction(op, dtype)
    if len(inputs) == 1:
        if inputs[0][1] != comm.size * output[1]:
            raise InvalidTensorError(
                f"the input has {count_of(inputs[0], dtype)} elements, "
                f"expected {comm.size} times the {count_of(output, dtype)} of the output",
                9,
            )
        inputs = [(inputs[0][0] + j * output[1], output[1]) for j in range(comm.size)]
    check_length("the list", inputs, comm.size)
    if inputs[comm.rank][1] != output[1]:
        raise InvalidTensorError(
            f"the output has {count_of(output, dtype)} elements, "
            f"expected the {count_of(inputs[comm.rank], dtype)} of entry {comm.rank} of the inputs",
            9,
        )
    for region in inputs:
        check_apart(output, region)
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
        if outputs[0][1] != comm.size * input[1]:
            raise InvalidTensorError(
                f"the output has {count_of(outputs[0], dtype)} elements, "
                f"expected {comm.size} times the {count_of(input, dtype)} of the input",
                9,
            )
        check_gather_apart(outputs[0], input, comm.rank)
        layout = _core.Request.all_gather(comm.size, [count_of(input, dtype)]).layout
        return Ready(_core.Plan(comm.core, "all_gather_into_tensor", dtype, *layout), (input[0], outputs[0][0]))
    check_length("the list", outputs, comm.size)
    check_outputs_apart(outputs, "tensor_list")
    if outputs[comm.rank][1] != input[1]:
        raise InvalidTensorError(
            f"the input has {count_of(input, dtype)} elements, "
            f"expected the {count_of(outputs[comm.rank], dtype)} of entry {comm.rank} of the outputs",
            9,
        )
    for region in outputs:
        check_apart(region, input)
    target, rdispls = lowest(outputs)
    sends, recvs = [count_of(input, dtype)] * comm.size, [count_of(region, dtype) for region in outputs]
    plan = _core.Plan(comm.core, "all_gather", dtype, sends, [0] * comm.size, recvs, rdispls, byte_displs=True)
    return Ready(plan, (input[0], target))


def all_to_all(
    comm: Communicator,
    dtype: str,
    outputs: Sequence[Region],
    inputs: Sequence[Region],
    timeout: float = -1.0,
    name: str = "output_tensor_list",
) -> Ready:
    """Sends ``inputs[j]`` to rank j and receives ``outputs[j]``, of the list ``name``, from it; sizes may differ."""
    check_lists_apart(outputs, inputs, name)
    source, sdispls = lowest(inputs)
    target, rdispls = lowest(outputs)
    sends, recvs = ([count_of(region, dtype) for region in regions] for regions in (inputs, outputs))
    plan = _core.Plan(comm.core, "all_to_all", dtype, sends, sdispls, recvs, rdispls, byte_displs=True)
    return Ready(plan, (source, target), timeout=timeout)


def broadcast(comm: Communicator, dtype: str, tensor: Region, root: int) -> Ready:
    """Copies the tensor of ``root``, a rank of the communicator, into all others, in place."""
    layout = broadcast_layout(comm.rank, comm.size, count_of(tensor, dtype), root)
    return Ready(_core.Plan(comm.core, "broadcast", dtype, *layout, root), (tensor[0], tensor[0]))


def broadcast_layout(rank: int, size: int, n: int, root: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns the layout of ``n`` elements that go from ``root`` to every other rank.

    Raises:
        InvalidParamError: ``root`` is no rank.
    """
    check_rank("root", root, size)
    nothing = [0] * size
    moved = [n if rank == root else 0] * size
    moved[root] = 0 if rank == root else n
    return (moved, nothing, nothing, nothing) if rank == root else (nothing, nothing, moved, nothing)


def check_rank(name: str, rank: int, size: int) -> None:
    """Raises InvalidParamError unless ``rank`` is one of ``size`` ranks."""
    try:
        known = 0 <= integer(rank) < size
    except TypeError:
        known = False
    if not known:
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
