"""Collectives with a root over regions of host memory: reduce, gather, scatter; see `alltoallv._calls.collectives`.

And the same, and messages, for tensors of any framework that lie there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from alltoallv import _core
from alltoallv._calls import messages
from alltoallv._calls.adapters import Adapter
from alltoallv._calls.collectives import Ready, check_length, check_rank, count_of
from alltoallv._calls.counts import even_parts
from alltoallv._calls.messages import Message
from alltoallv._calls.reductions import ReductionPlan, check_reduction
from alltoallv._calls.regions import Region, check_apart, check_outputs_apart, lowest
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError

A = TypeVar("A")  # a framework's tensor in host memory


def reduce(comm: Communicator, dtype: str, op: str, output: Region | None, input: Region, root: int) -> Ready:
    """The combination of all inputs into the root's ``output``, which may be its input; None elsewhere."""
    check_rank("root", root, comm.size)
    check_reduction(op, dtype)
    counts = even_parts(count_of(input, dtype), comm.size)
    plan = ReductionPlan(comm.core, "reduce", dtype, op, counts, root)
    return Ready(plan, (input[0], output[0] if output else 0))


def gather(comm: Communicator, dtype: str, outputs: Sequence[Region], input: Region, root: int) -> Ready:
    """The root's ``outputs[j]`` becomes rank j's input, of any size; elsewhere there are none."""
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
    """The root's ``inputs[j]`` becomes rank j's output, of any size; elsewhere there are none."""
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


def check_tensors(adapter: Adapter[A], name: str, tensors: Any, like: A | None = None) -> list[A]:
    """What is written or read in place: contiguous tensors, all of one dtype; that of ``like``.

    Raises:
        TypeError: no list or tuple, or an entry that is no tensor.
        InvalidTensorError: an entry of another dtype, or not contiguous.
    """
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"Expected list or tuple, but got {type(tensors)}.")
    for j, x in enumerate(tensors):
        check_output(adapter, f"{name}[{j}]", x, like)
    return list(tensors)


def check_output(adapter: Adapter[A], name: str, x: A, like: A | None = None) -> str:
    """Checks a tensor that is written; its dtype's name."""
    adapter.check(name, x)
    dtype = adapter.dtype(x)
    if like is not None and dtype != adapter.dtype(like):
        raise InvalidTensorError(f"{name} has dtype {dtype}, expected {adapter.dtype(like)}", 13)
    if not adapter.writable(x):
        raise InvalidTensorError(f"{name} is not contiguous, expected a contiguous tensor")
    return dtype


def reduce_tensor(adapter: Adapter[A], comm: Communicator, tensor: A, op: str, root: int) -> tuple[Ready, list[A]]:
    """`reduce` into the root's tensor; the call, and the tensors that it uses, those written first."""
    dtype, mine = check_output(adapter, "tensor", tensor), adapter.region(tensor)
    return reduce(comm, dtype, op, mine if comm.rank == root else None, mine, root), [tensor]


def gather_tensors(
    adapter: Adapter[A], comm: Communicator, tensor: A, gather_list: Any, root: int
) -> tuple[Ready, list[A]]:
    """`gather` into the root's list, likewise."""
    x = adapter.read("tensor", tensor)
    outs = check_tensors(adapter, "gather_list", gather_list, x) if comm.rank == root else []
    call = gather(comm, adapter.dtype(x), [adapter.region(out) for out in outs], adapter.region(x), root)
    return call, [*outs, x]


def scatter_tensors(
    adapter: Adapter[A], comm: Communicator, tensor: A, scatter_list: Any, root: int, name: str = "scatter_list"
) -> tuple[Ready, list[A]]:
    """`scatter` of the root's list, called ``name``, likewise."""
    dtype, parts = check_output(adapter, "tensor", tensor), list[A]()
    if comm.rank == root:
        if not isinstance(scatter_list, list | tuple):
            raise TypeError(f"Expected list or tuple, but got {type(scatter_list)}.")
        parts = [adapter.read(f"{name}[{j}]", x) for j, x in enumerate(scatter_list)]
        check_tensors(adapter, name, parts, tensor)
    return scatter(comm, dtype, adapter.region(tensor), list(map(adapter.region, parts)), root), [tensor, *parts]


def message(
    adapter: Adapter[A], comm: Communicator, operator: str, tensor: A, peer: int | None, tag: int = 0, *, waits: bool
) -> tuple[Message, A]:
    """A ``"send"`` or ``"recv"``, and the tensor that it uses."""
    x = adapter.read("tensor", tensor) if operator == "send" else tensor
    dtype = adapter.dtype(x) if operator == "send" else check_output(adapter, "tensor", x)
    make: Any = getattr(messages, operator)
    return make(comm, dtype, adapter.region(x), peer, tag, waits=waits), x
