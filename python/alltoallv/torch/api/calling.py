"""Calls of the declared collectives, with arguments as `alltoallv.torch` takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import NO_PARAMETERS, Collective, Parameters, Work
from alltoallv.torch.eager.group import Group, device_of
from alltoallv.torch.eager.observers import check_untimed, is_tracing
from alltoallv.torch.eager.tensors import check_contiguous, check_tensor
from alltoallv.torch.graph import watched
from alltoallv.torch.graph.traced import collective
from alltoallv.torch.graph.watched import is_watched


def call_collective(
    row: Collective,
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    group: Group,
    async_op: bool,
    parameters: Parameters = NO_PARAMETERS,
    timeout: float | None = None,
    *,
    root: tuple[str, int | None, int | None] | None = None,
) -> Work | None:
    """Calls a collective; `rank_in` turns ``root`` into a rank of the group."""
    if not row.strict and timeout is None and not is_dynamo_compiling():  # strict functions ask the core themselves
        shared, resolved = groups.on_shm(group), parameters
        if shared is not None and root is not None:
            resolved = parameters._replace(root=_plain_root(shared, group, *root))
        if shared is not None and row.at_once is not None:
            started = row.at_once(shared.core, outs, ins, resolved, None, async_op)
            if started is not None:
                used = outs, started
                return Work(shared, started[1], used, lambda: row.result(outs)) if async_op else None
    first = next((x for tensors in (ins, outs) if isinstance(tensors, list | tuple) for x in tensors), None)
    if is_tracing(first):
        check_untimed(timeout)
        if root is not None:
            parameters = parameters._replace(root=rank_in(group, *root))
        return collective(row, outs, ins, parameters, group, async_op)
    comm = groups.resolve(group, device_of(first))
    if comm is None:
        return None
    with guard(comm, row.operator, TypeError):  # torch.distributed's wrappers check types on a rank alone
        limit = calls.limit(comm, timeout)
        for name, tensors in ((row.inputs, ins), (row.outputs, outs)):
            if not isinstance(tensors, list | tuple):
                _core.check_list(name, tensors, comm.size)
                raise InvalidTensorError(
                    f"{name} is a {type(tensors).__name__}, expected a list of tensors", 5, id=2104
                )
            for label, tensor in _labelled(name, tensors):
                check_tensor(label, tensor)
        if row.strict:
            for label, out in _labelled(row.outputs, outs):
                check_contiguous(label, out)
        if root is not None:
            parameters = parameters._replace(root=rank_in(group, *root))
        operation = None if (seen := is_watched()) else row.prepare(comm, outs, ins, parameters)
    if seen:
        return watched.collective(comm, row, outs, ins, parameters, limit, async_op)
    assert operation is not None
    if async_op:
        if row.strict:
            operation.result = row.result(outs)
        return operation.submit(limit)
    operation.run(limit)
    return None


def _labelled(name: str, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Returns the tensors of an argument, each with its name for errors."""
    return [(f"{name}[{j}]" if name.endswith("_list") else name, x) for j, x in enumerate(tensors)]


def _plain_root(comm: Communicator, group: Group, name: str, rank: int | None, group_rank: int | None) -> int:
    """Returns `rank_in`; -1, no rank, where that raises."""
    with contextlib.suppress(InvalidParamError):
        return rank_in(group, name, rank, group_rank)
    return -1


def rank_in(group: Group, name: str, rank: int | None, group_rank: int | None) -> int:
    """Returns the rank in the group that the argument called ``name``, or ``group_{name}``, means."""
    if (rank is None) == (group_rank is None):
        raise InvalidParamError(f"{name} is {rank!r} and group_{name} {group_rank!r}, expected one of them", id=1420)
    if group_rank is not None:
        if not is_tracing():  # in a graph the operator raises, on all ranks
            _core.checked_rank(f"group_{name}", group_rank, groups.world_size(group))
        return group_rank
    assert rank is not None
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        if rank not in ranks:
            raise InvalidParamError(f"{name} is {rank!r}, expected one of the group's ranks {ranks}", id=1169)
        return ranks.index(rank)
    return rank
