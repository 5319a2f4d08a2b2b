"""Reductions, gathers, broadcast and barrier with the signatures of ``paddle.distributed``.

They write into the caller's tensors, have no gradients, as in Paddle, and return a task, also with ``sync_op=True``; on
a rank outside the group None, with a warning. ``tensor`` and what a list holds are contiguous. All raise as
`alltoallv.paddle.all_to_all_v`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed import ReduceOp

from alltoallv import _core
from alltoallv._calls import collectives
from alltoallv._calls.collectives import Ready
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.paddle.group import Group, rank_in, resolve
from alltoallv.paddle.tensors import as_input, check_output, check_tensor, core_name, region
from alltoallv.paddle.work import Done, Task

_OPS = {getattr(ReduceOp, name): name.lower() for name in ("SUM", "AVG", "MIN", "MAX", "PROD")}


def all_reduce(tensor: Tensor, op: int = ReduceOp.SUM, group: Group = None, sync_op: bool = True) -> Task | None:
    """Replaces ``tensor``, of one shape and dtype on all ranks, by the combination of all ranks' tensors.

    All ranks get the same bits: the terms are combined in the order of ranks, 16-bit floats in float32, rounded once.

    Args:
        op: ``ReduceOp.SUM``, ``PROD``, ``MIN``, ``MAX``, and for floats ``AVG``.
    """

    def prepare(comm: Communicator) -> Ready:
        check_output("tensor", tensor)
        return collectives.all_reduce(comm, core_name(tensor.dtype), reduction(op), region(tensor))

    return run("all_reduce", group, sync_op, prepare, [tensor])


def reduce_scatter(
    tensor: Tensor,
    tensor_list: Sequence[Tensor] | Tensor,
    op: int = ReduceOp.SUM,
    group: Group = None,
    sync_op: bool = True,
) -> Task | None:
    """Combines ``tensor_list[j]`` of all ranks into rank j's ``tensor``.

    ``tensor_list`` has one tensor per rank, of any sizes, which are equal on all ranks, or is one tensor of W equal
    parts. ``op`` as for `all_reduce`.
    """
    kept: list[Tensor] = []

    def prepare(comm: Communicator) -> Ready:
        check_output("tensor", tensor)
        kept.extend(as_input("tensor_list", x) for x in _tensors("tensor_list", tensor_list, comm.size))
        for x in kept:
            check_output("tensor_list", x, tensor.dtype)
        name, regions = core_name(tensor.dtype), [region(x) for x in kept]
        return collectives.reduce_scatter(comm, name, reduction(op), region(tensor), regions)

    return run("reduce_scatter", group, sync_op, prepare, [tensor], kept)


def all_gather(
    tensor_list: list[Tensor] | Tensor,
    tensor: Tensor,
    group: Group = None,
    sync_op: bool = True,
    *,
    timeout: float | None = None,
) -> Task | None:
    """Copies the ``tensor`` of rank j into ``tensor_list[j]`` of every rank.

    ``tensor_list`` has one tensor per rank, of that rank's size; empty, it is filled with tensors of the shape of
    ``tensor``; or it is one tensor, of W times the elements of ``tensor``, for all one behind the other. ``timeout``:
    seconds to wait for the peers; default: the communicator's.
    """
    kept: list[Tensor] = []
    outs: list[Tensor] = []

    def prepare(comm: Communicator) -> Ready:
        kept.append(as_input("tensor", tensor))
        fills = isinstance(tensor_list, list) and not tensor_list
        made = [paddle.empty_like(kept[0]) for _ in range(comm.size)] if fills else None
        outs.extend(made or _tensors("tensor_list", tensor_list, comm.size))
        for out in outs:
            check_output("tensor_list", out, tensor.dtype)
        if isinstance(tensor_list, Tensor):
            _core.Request.all_gather(comm.size, tensor.shape, tensor_list.size, "tensor_list")
        ready = collectives.all_gather(comm, core_name(tensor.dtype), [region(x) for x in outs], region(kept[0]))
        ready.timeout = _core.read_timeout(timeout)
        if made:
            tensor_list.extend(made)
        return ready

    return run("all_gather", group, sync_op, prepare, outs, kept)


def broadcast(tensor: Tensor, src: int, group: Group = None, sync_op: bool = True) -> Task | None:
    """Copies the ``tensor`` of one rank into the tensors of all others, of one size and dtype.

    ``src`` is that rank's number in the job; for a `Communicator`, in it.
    """

    def prepare(comm: Communicator) -> Ready:
        check_output("tensor", tensor)
        return collectives.broadcast(comm, core_name(tensor.dtype), region(tensor), rank_in(group, src, "src"))

    return run("broadcast", group, sync_op, prepare, [tensor])


def barrier(group: Group = None) -> None:
    """Returns when every rank has called it; late ranks are named, in a warning and in the timeout's error."""
    run("barrier", group, True, collectives.barrier, [])


def run(
    name: str,
    group: Group,
    sync_op: bool,
    prepare: Callable[[Communicator], Ready],
    outs: list[Tensor],
    kept: list[Tensor] | None = None,
) -> Task | None:
    """``prepare`` may fill ``outs``, which are written, and ``kept``, which are read."""
    comm = resolve(group)
    if comm is None:
        return None
    with guard(comm, name):
        ready = prepare(comm)
        for out in outs:
            out._bump_inplace_version()  # a backward that needs the old values shall say so
    if not sync_op:
        return Task(comm, ready.submit(), (ready, outs, kept), lambda: outs)
    ready.run()
    return Done(outs)


def reduction(op: object) -> str:
    if type(op) is not int or op not in _OPS:
        raise InvalidParamError(f"op is {op!r}, expected a paddle.distributed.ReduceOp")
    return _OPS[op]


def _tensors(name: str, tensors: Any, size: int) -> list[Tensor]:
    """Of a list with one per rank, or the one for all."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"{name} is a {type(tensors).__name__}, expected a list of tensors")
    collectives.check_length(name, tensors, size)
    for tensor in tensors:
        check_tensor(name, tensor)
    return list(tensors)
