"""Collectives with a root over regions of host memory: reduce, gather, scatter; see `alltoallv._calls.collectives`."""

from __future__ import annotations

from collections.abc import Sequence

from alltoallv import _core
from alltoallv._calls.collectives import Ready, check_length, check_rank, count_of
from alltoallv._calls.counts import even_parts
from alltoallv._calls.reductions import ReductionPlan, check_reduction
from alltoallv._calls.regions import Region, check_apart, check_outputs_apart, lowest
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError


def reduce(
    comm: Communicator, dtype: str, op: str, output: Region | None, input: Region, shape: Sequence[int], root: int
) -> Ready:
    """Combines all inputs, of that shape, in the root's ``output``, which may be its input; elsewhere it is None."""
    check_rank("root", root, comm.size)
    check_reduction(op, dtype)
    counts = even_parts(count_of(input, dtype), comm.size)
    plan = ReductionPlan(comm.core, "reduce", dtype, op, counts, shape, root)
    return Ready(plan, (input[0], output[0] if output else 0))


def gather(comm: Communicator, dtype: str, outputs: Sequence[Region], input: Region, root: int) -> Ready:
    """Copies rank j's input, of any size, to the root's ``outputs[j]``; other ranks have no outputs."""
    check_rank("root", root, comm.size)
    nothing = [0] * comm.size
    sends = [count_of(input, dtype) if j == root else 0 for j in range(comm.size)]
    recvs, rdispls, target = nothing, nothing, 0
    if comm.rank == root:
        _check_own("gather_list", dtype, outputs, input, comm)
        check_outputs_apart(outputs, "gather_list")
        for region in outputs:
            if region != input:
                check_apart(region, input)
        target, rdispls = lowest(outputs)
        recvs = [count_of(region, dtype) for region in outputs]
    plan = _core.Plan(comm.core, "gather", dtype, sends, nothing, recvs, rdispls, root, byte_displs=True)
    return Ready(plan, (input[0], target))


def scatter(comm: Communicator, dtype: str, output: Region, inputs: Sequence[Region], root: int) -> Ready:
    """Copies the root's ``inputs[j]``, of any size, to rank j's output; other ranks have no inputs."""
    check_rank("root", root, comm.size)
    nothing = [0] * comm.size
    recvs = [count_of(output, dtype) if j == root else 0 for j in range(comm.size)]
    sends, sdispls, source = nothing, nothing, 0
    if comm.rank == root:
        _check_own("scatter_list", dtype, inputs, output, comm)
        for region in inputs:
            if region != output:
                check_apart(output, region)
        source, sdispls = lowest(inputs)
        sends = [count_of(region, dtype) for region in inputs]
    plan = _core.Plan(comm.core, "scatter", dtype, sends, sdispls, recvs, nothing, root, byte_displs=True)
    return Ready(plan, (source, output[0]))


def _check_own(name: str, dtype: str, regions: Sequence[Region], own: Region, comm: Communicator) -> None:
    check_length(name, regions, comm.size)
    if regions[comm.rank][1] != own[1]:
        raise InvalidTensorError(
            f"entry {comm.rank} of {name} has {count_of(regions[comm.rank], dtype)} elements, "
            f"expected {count_of(own, dtype)}, those of this rank's tensor",
            9,
        )
