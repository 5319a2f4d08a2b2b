"""The methods of Paddle's process groups, which all of Paddle's communication ends in, by this package's exchanges.

`alltoallv.paddle.install` puts them into Paddle's class. What they take stands in Paddle's C++, in its order: outputs
first, but for the old forms without ``sync_op``. Ranks are ranks in the group. Calls without ``sync_op``, and with
``sync_op=False``, return at once; those ``_on_calc_stream`` when they are done.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from paddle import Tensor
from paddle.distributed.communication.group import _GroupManager

from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.paddle import collectives, exchange, messages
from alltoallv.paddle.group import resolve
from alltoallv.paddle.tensors import Done, Task, region

_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _communicator(process_group: Any) -> Communicator:
    """Returns the communicator of the group that has this process group."""
    group = _groups.get(process_group)
    if group is None:
        for group in _GroupManager.group_map_by_id.values():
            if group.process_group is process_group:
                _groups[process_group] = group
                break
        else:
            raise InvalidParamError(
                "the process group belongs to no group of paddle.distributed, expected one that init_parallel_env or "
                "new_group has made and destroy_process_group has not ended",
                id=1417,
            )
    member = resolve(group)
    assert member is not None  # a rank outside a group has no process group
    return member


def _apart(inputs: Sequence[Tensor], *outputs: Tensor) -> list[Tensor]:
    """Returns the inputs, copies of those that share memory with an output: Paddle sends lists from a copy."""
    taken = [(at, at + size) for at, size in map(region, outputs)]

    def shares(x: Tensor) -> bool:
        at, size = region(x)
        return any(at < end and begin < at + size for begin, end in taken)

    return [x.clone() if shares(x) else x for x in inputs]


def _part(x: Tensor, number: int, index: int) -> Tensor:
    """Returns part ``index`` of ``number`` equal parts of the elements of a tensor, in its memory."""
    size = x.size // number
    return x.reshape([-1])[size * index : size * (index + 1)]


class Methods:
    """What `install` gives ``core.ProcessGroup``; see the module."""

    def all_gather(self, out: Any, x: Any, sync_op: bool | None = None) -> Task | None:
        """Gathers into a list; without ``sync_op`` the first argument is the input, the second one tensor."""
        if sync_op is None:
            return collectives.all_gather(x, out, _communicator(self), sync_op=False)
        (x,) = _apart([x], *out)
        return collectives.all_gather(out, x, _communicator(self), sync_op)

    def all_gather_on_calc_stream(self, out: list[Tensor], x: Tensor) -> Task | None:
        return Methods.all_gather(self, out, x, True)

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, sync_op: bool) -> Task | None:
        return collectives.all_gather(out, x, _communicator(self), sync_op)

    def all_gather_into_tensor_on_calc_stream(self, out: Tensor, x: Tensor) -> Task | None:
        return collectives.all_gather(out, x, _communicator(self))

    def all_gather_partial(self, out: Tensor, x: Tensor, num: int, id: int) -> Task | None:
        """Gathers part ``id`` of ``num`` of every rank's tensor, which may be the output itself."""
        return collectives.all_gather(out, _part(x, num, id).clone(), _communicator(self))

    all_gather_partial_on_calc_stream = all_gather_partial

    def all_reduce(self, tensor: Tensor, op: Any, sync_op: bool) -> Task | None:
        return collectives.all_reduce(tensor, int(op), _communicator(self), sync_op)

    def all_reduce_on_calc_stream(self, tensor: Tensor, op: Any = 0) -> Task | None:
        return collectives.all_reduce(tensor, int(op), _communicator(self))

    def allreduce(self, tensor: Tensor, op: Any = 0) -> Task | None:
        return collectives.all_reduce(tensor, int(op), _communicator(self), sync_op=False)

    def all_to_all(self, out: list[Tensor], x: Sequence[Tensor], sync_op: bool) -> Task | None:
        return exchange.alltoall(out, _apart(x, *out), _communicator(self), sync_op)

    def all_to_all_on_calc_stream(self, out: list[Tensor], x: Sequence[Tensor]) -> Task | None:
        return Methods.all_to_all(self, out, x, True)

    def all_to_all_tensor(self, out: Tensor, x: Tensor, sync_op: bool) -> Task | None:
        return exchange.alltoall(out, x, _communicator(self), sync_op)

    def all_to_all_tensor_on_calc_stream(self, out: Tensor, x: Tensor) -> Task | None:
        return Methods.all_to_all_tensor(self, out, x, True)

    def alltoall(self, out: Tensor, x: Tensor) -> Task | None:
        return Methods.all_to_all_tensor(self, out, x, False)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], sync_op: bool
    ) -> Task | None:
        return exchange.alltoall_single(out, x, in_sizes or None, out_sizes or None, _communicator(self), sync_op)

    def all_to_all_single_on_calc_stream(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Task | None:
        return Methods.all_to_all_single(self, out, x, out_sizes, in_sizes, True)

    def alltoall_single(self, out: Tensor, x: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int]) -> Task | None:
        return Methods.all_to_all_single(self, out, x, out_sizes, in_sizes, True)

    def barrier(self, device_id: int = -1) -> Task:
        collectives.barrier(_communicator(self))
        return Done(None)

    def broadcast(self, tensor: Tensor, src: int, sync_op: bool = False) -> Task | None:
        return collectives.broadcast(tensor, src, _communicator(self), sync_op)

    def broadcast_on_calc_stream(self, tensor: Tensor, src: int) -> Task | None:
        return collectives.broadcast(tensor, src, _communicator(self))

    def gather(
        self, x: Tensor, out: list[Tensor], dst: int, sync_op: bool, use_calc_stream: bool = False
    ) -> Task | None:
        comm = _communicator(self)
        (x,) = _apart([x], *(out if comm.rank == dst else ()))
        return collectives.gather(x, out, dst, comm, sync_op or use_calc_stream)

    def reduce(self, tensor: Tensor, dst: int, op: Any = 0, sync_op: bool = False) -> Task | None:
        return collectives.reduce(tensor, dst, int(op), _communicator(self), sync_op)

    def reduce_on_calc_stream(self, tensor: Tensor, dst: int, op: Any) -> Task | None:
        return collectives.reduce(tensor, dst, int(op), _communicator(self))

    def reduce_scatter(self, out: Tensor, x: Sequence[Tensor], op: Any, sync_op: bool) -> Task | None:
        return collectives.reduce_scatter(out, _apart(x, out), int(op), _communicator(self), sync_op)

    def reduce_scatter_on_calc_stream(self, out: Tensor, x: Sequence[Tensor], op: Any) -> Task | None:
        return Methods.reduce_scatter(self, out, x, op, True)

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, op: Any, sync_op: bool) -> Task | None:
        return collectives.reduce_scatter(out, x, int(op), _communicator(self), sync_op)

    def reduce_scatter_tensor_on_calc_stream(self, out: Tensor, x: Tensor, op: Any) -> Task | None:
        return collectives.reduce_scatter(out, x, int(op), _communicator(self))

    def scatter(self, out: Tensor, x: Any, src: int, sync_op: bool | None = None) -> Task | None:
        """Scatters a list; without ``sync_op`` the first argument is the input, one tensor, the second the output."""
        if sync_op is None:
            return Methods.scatter_tensor(self, x, out, src, False)
        return collectives.scatter(out, _apart(x, out), src, _communicator(self), sync_op)

    def scatter_on_calc_stream(self, out: Tensor, x: Sequence[Tensor], src: int) -> Task | None:
        return Methods.scatter(self, out, x, src, True)

    def scatter_tensor(self, out: Tensor, x: Tensor, src: int, sync_op: bool) -> Task | None:
        (x,) = _apart([x], out)
        return collectives.scatter(out, x, src, _communicator(self), sync_op)

    def scatter_tensor_on_calc_stream(self, out: Tensor, x: Tensor, src: int) -> Task | None:
        return Methods.scatter_tensor(self, out, x, src, True)

    def send(self, tensor: Tensor, dst: int, sync_op: bool = False) -> Task | None:
        return messages.send(tensor, dst, _communicator(self), sync_op)

    def send_on_calc_stream(self, tensor: Tensor, dst: int) -> Task | None:
        return messages.send(tensor, dst, _communicator(self))

    def send_partial(self, tensor: Tensor, dst: int, num: int, id: int, sync_op: bool = True) -> Task | None:
        return messages.send(_part(tensor, num, id), dst, _communicator(self), sync_op)

    def send_partial_on_calc_stream(self, tensor: Tensor, dst: int, num: int, id: int) -> Task | None:
        return Methods.send_partial(self, tensor, dst, num, id)

    def recv(self, tensor: Tensor, src: int, sync_op: bool = False) -> Task | None:
        return messages.recv(tensor, src, _communicator(self), sync_op)

    def recv_on_calc_stream(self, tensor: Tensor, src: int) -> Task | None:
        return messages.recv(tensor, src, _communicator(self))

    def recv_partial(self, tensor: Tensor, src: int, num: int, id: int, sync_op: bool = True) -> Task | None:
        return messages.recv(_part(tensor, num, id), src, _communicator(self), sync_op)

    def recv_partial_on_calc_stream(self, tensor: Tensor, src: int, num: int, id: int) -> Task | None:
        return Methods.recv_partial(self, tensor, src, num, id)

    def _start_coalescing(self) -> None:
        """Does nothing: messages start one by one."""

    def _end_coalescing(self, tasks: Any = None) -> None:
        """Does nothing."""


class ProcessGroup(Methods):
    """A process group of some of the ranks, which has no other methods.

    Args:
        rank: This process's rank in the group.
        size: The number of its ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "GLOO"  # Paddle's name for host memory
