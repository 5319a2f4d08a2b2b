"""The collectives that write into tensors of the caller, each declared once for the front ends of host memory.

A declaration has the name that the ranks compare. It takes a front end's adapter, the communicator and the collective's
own arguments, checks them, and returns the call, ready to start, with its tensors. It is called under the guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from alltoallv import _core
from alltoallv._calls import collectives
from alltoallv._calls.adapters import Adapter
from alltoallv._calls.collectives import Ready, check_length, check_one_dtype, shape_of_list
from alltoallv._calls.regions import Region
from alltoallv.communicator import Communicator
from alltoallv.dtypes import item_size


class Made(NamedTuple):
    """Holds a call that is ready to start, and the tensors that it uses."""

    call: Ready
    result: Any = None  # what it writes: a tensor, or a list
    inputs: Sequence[Any] = ()
    name: str = "tensor"  # the argument that holds the outputs
    counts: Sequence[int] | None = None  # elements of each rank, where the caller gave them

    @property
    def outputs(self) -> Sequence[Any]:
        """The tensors that the call writes."""
        if isinstance(self.result, list):
            return self.result
        return [] if self.result is None else [self.result]


Tensors = Adapter[Any]


def all_reduce(tensors: Tensors, comm: Communicator, tensor: Any, op: str) -> Made:
    """Combines all ranks' tensors in place."""
    dtype = tensors.check_output("tensor", tensor)
    return Made(collectives.all_reduce(comm, dtype, op, tensors.region(tensor), tensor.shape), tensor)


def reduce(tensors: Tensors, comm: Communicator, tensor: Any, op: str, root: int) -> Made:
    """Combines all ranks' tensors in the root's tensor."""
    dtype, mine = tensors.check_output("tensor", tensor), tensors.region(tensor)
    out = mine if comm.rank == root else None
    return Made(collectives.reduce(comm, dtype, op, out, mine, tensor.shape, root), tensor)


def broadcast(tensors: Tensors, comm: Communicator, tensor: Any, root: int, name: str = "tensor") -> Made:
    """Copies the root's tensor to all ranks, in place."""
    dtype = tensors.check_output(name, tensor)
    return Made(collectives.broadcast(comm, dtype, tensors.region(tensor), root), tensor, name=name)


def gather(tensors: Tensors, comm: Communicator, tensor: Any, gather_list: Any, root: int) -> Made:
    """Copies all ranks' tensors into the root's list."""
    x, outs = tensors.read("tensor", tensor), list[Any]()
    if comm.rank == root:
        outs = outputs_of(tensors, comm, "gather_list", gather_list, x)
    call = collectives.gather(comm, tensors.dtype(x), list(map(tensors.region, outs)), tensors.region(x), root)
    return Made(call, outs, [x], "gather_list")


def scatter(
    tensors: Tensors, comm: Communicator, tensor: Any, given: Any, root: int, name: str = "scatter_list"
) -> Made:
    """Sends each rank its tensor of the root's list, which the argument ``name`` holds."""
    dtype, parts = tensors.check_output("tensor", tensor), list[Any]()
    if comm.rank == root:
        parts = inputs_of(tensors, comm, name, given, tensor)
    call = collectives.scatter(comm, dtype, tensors.region(tensor), list(map(tensors.region, parts)), root)
    return Made(call, tensor, parts)


def reduce_scatter(
    tensors: Tensors,
    comm: Communicator,
    output: Any,
    given: Any,
    op: str,
    counts: Sequence[int] | None = None,
    names: tuple[str, str] = ("output", "input_list"),
) -> Made:
    """Combines all ranks' tensors and gives each rank its part.

    ``given`` is a list of the parts, or one tensor of equal parts, or of ``counts`` elements for each rank.
    """
    dtype = tensors.check_output(names[0], output)
    whole = isinstance(given, tensors.tensor)
    parts = [tensors.read(names[1], given)] if whole else inputs_of(tensors, comm, names[1], given, output)
    for x in parts:
        tensors.check_output(names[1], x, output)
    regions = list(map(tensors.region, parts))
    if counts is not None:
        regions = cut(regions[0], counts, item_size(dtype))
    shape = parts[0].shape if whole else shape_of_list(parts)
    call = collectives.reduce_scatter(comm, dtype, op, tensors.region(output), regions, shape)
    return Made(call, output, parts, names[0], counts)


def all_gather(
    tensors: Tensors,
    comm: Communicator,
    given: Any,
    tensor: Any,
    counts: Sequence[int] | None = None,
    names: tuple[str, str] = ("tensor_list", "tensor"),
) -> Made:
    """Copies all ranks' tensors into a list, or into one tensor in equal parts or in parts of ``counts`` elements."""
    x = tensors.read(names[1], tensor)
    if isinstance(given, tensors.tensor):
        dtype, outputs = tensors.check_output(names[0], given, x), given
        regions = [tensors.region(given)]
        if counts is None:
            _core.Request.all_gather(comm.size, x.shape, given.size, names[0])
        else:
            regions = cut(regions[0], counts, item_size(dtype))
    else:
        dtype, outputs = tensors.dtype(x), outputs_of(tensors, comm, names[0], given, x)
        regions = list(map(tensors.region, outputs))
    return Made(collectives.all_gather(comm, dtype, regions, tensors.region(x)), outputs, [x], names[0], counts)


def all_to_all(
    tensors: Tensors,
    comm: Communicator,
    outputs: Any,
    inputs: Any,
    names: tuple[str, str] = ("output_tensor_list", "input_tensor_list"),
) -> Made:
    """Sends ``inputs[j]`` to rank j and receives ``outputs[j]`` from it."""
    xs, outs = inputs_of(tensors, comm, names[1], inputs), outputs_of(tensors, comm, names[0], outputs)
    check_one_dtype(tensors.dtype(x) for x in (*xs, *outs))
    regions = list(map(tensors.region, outs)), list(map(tensors.region, xs))
    return Made(collectives.all_to_all(comm, tensors.dtype(xs[0]), *regions, name=names[0]), outs, xs, names[0])


def barrier(tensors: Tensors, comm: Communicator) -> Made:
    """Waits for all ranks and moves no data."""
    return Made(collectives.barrier(comm))


def inputs_of(tensors: Tensors, comm: Communicator, name: str, given: Any, like: Any = None) -> list[Any]:
    """Checks that ``given`` is a list of one tensor per rank, all of the dtype of ``like``; returns them contiguous."""
    listed = tensors.listed(name, given)
    check_length(name, listed, comm.size)
    xs = [tensors.read(f"{name}[{j}]", x) for j, x in enumerate(listed)]
    if like is not None:
        for j, x in enumerate(xs):
            tensors.check_output(f"{name}[{j}]", x, like)
    return xs


def outputs_of(tensors: Tensors, comm: Communicator, name: str, given: Any, like: Any = None) -> list[Any]:
    """Checks that ``given`` is a list of one writable tensor per rank, all of the dtype of ``like``; returns it."""
    outs = tensors.listed(name, given)
    check_length(name, outs, comm.size)
    for j, out in enumerate(outs):
        tensors.check_output(f"{name}[{j}]", out, like)
    return list(outs)


def cut(whole: Region, counts: Sequence[int], itemsize: int) -> list[Region]:
    """Returns consecutive regions of ``counts`` elements, from the beginning of ``whole`` on."""
    at, regions = whole[0], []
    for count in counts:
        regions.append((at, count * itemsize))
        at += count * itemsize
    return regions
