"""Picklable objects instead of tensors, with the signatures and error classes of ``mindspore.mint.distributed``.

What arrives is unpickled, which runs code of the sender's choosing: the ranks must trust each other. ``src`` and
``dst`` are ranks of the job.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls import messages
from alltoallv._calls.counts import packed
from alltoallv._calls.guard import guard
from alltoallv._calls.objects import ByteExchange, split
from alltoallv._calls.regions import Region
from alltoallv.communicator import Communicator
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.exchange import enter
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.mint.checks import check_rank
from alltoallv.mindspore.mint.messages import check_other

_OPERATOR = "all_to_all_v"  # what the core is asked for


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Entry j of ``object_list``, which has one per rank, becomes rank j's ``obj``."""
    comm = enter(group)
    with guard(comm, _OPERATOR):
        _check_list("object_list", object_list, comm.size)
        data = pickle.dumps(obj)
        exchange = ByteExchange(comm, _OPERATOR, data, [len(data)] * comm.size)
    object_list[:] = map(pickle.loads, exchange.run())


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Group = None, device: Any = None) -> None:
    """The entries of ``object_list`` become those of rank ``src``; as many on all ranks. ``device`` is not used."""
    comm = enter(group)
    with guard(comm, _OPERATOR):
        check_rank("broadcast_object_list", "src", src)
        if not isinstance(object_list, list) or not object_list:
            raise TypeError("The object_list can not be empty.")
        root = groups.rank_in(group, src)
        data = pickle.dumps(object_list) if comm.rank == root else b""
        exchange = ByteExchange(comm, _OPERATOR, data, [len(data)] * comm.size)
    object_list[:] = pickle.loads(exchange.run()[root])


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Group = None) -> None:
    """Entry j of ``object_gather_list`` of rank ``dst``, which has one per rank, becomes rank j's ``obj``."""
    comm = enter(group)
    with guard(comm, _OPERATOR):
        check_rank("gather_object", "dst", dst)
        root = groups.rank_in(group, dst)
        if comm.rank == root:
            _check_list("object_gather_list", object_gather_list, comm.size)
        data = pickle.dumps(obj)
        sends = [len(data) if j == root else 0 for j in range(comm.size)]
        exchange = ByteExchange(comm, _OPERATOR, data, sends)
    arrived = exchange.run()
    if object_gather_list is not None and comm.rank == root:
        object_gather_list[:] = map(pickle.loads, arrived)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None,
    src: int = 0,
    group: Group = None,
) -> None:
    """Entry 0 of the output list of rank j becomes entry j of the input list of rank ``src``."""
    comm = enter(group)
    with guard(comm, _OPERATOR):
        check_rank("scatter_object_list", "src", src)
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise TypeError("The scatter_object_output_list can not be empty.")
        root = groups.rank_in(group, src)
        parts = [b""] * comm.size
        if comm.rank == root:
            _check_list("scatter_object_input_list", scatter_object_input_list, comm.size)
            parts = [pickle.dumps(obj) for obj in scatter_object_input_list or ()]
        sizes = [len(part) for part in parts]
        exchange = ByteExchange(comm, _OPERATOR, b"".join(parts), sizes, packed(sizes))
    scatter_object_output_list[0] = pickle.loads(exchange.run()[root])


def send_object_list(object_list: list[Any], dst: int, group: Group = None, device: Any = None) -> None:
    """Sends the entries of ``object_list`` to rank ``dst``, which calls `recv_object_list`. ``device`` is not used."""
    comm = _messaging("send_object_list", object_list, "dst", dst, group)
    parts = [pickle.dumps(obj) for obj in object_list]
    sizes = np.array([len(part) for part in parts], np.int64)
    peer = groups.rank_in(group, dst)
    for array in (sizes, np.frombuffer(b"".join(parts), np.uint8)):
        messages.send(comm, array.dtype.name, _region(array), peer, 0, waits=True).run()


def recv_object_list(object_list: list[Any], src: int = 0, group: Group = None, device: Any = None) -> int:
    """Fills ``object_list``, of as many entries, with what rank ``src`` sends; returns 0. ``device`` is not used."""
    comm = _messaging("recv_object_list", object_list, "src", src, group)
    peer = groups.rank_in(group, src)
    sizes = np.empty(len(object_list), np.int64)
    messages.recv(comm, "int64", _region(sizes), peer, 0, waits=True).run()
    data = np.empty(sizes.sum(), np.uint8)
    messages.recv(comm, "uint8", _region(data), peer, 0, waits=True).run()
    object_list[:] = map(pickle.loads, split(data.data, sizes.tolist()))
    return 0


def _messaging(operator: str, object_list: Any, name: str, peer: Any, group: Group) -> Communicator:
    check_rank(operator, name, peer)
    comm = enter(group)
    if not isinstance(object_list, list):
        raise TypeError(f"For {operator}, the object_list must be a list, but got {type(object_list)}")
    check_other(operator, name, peer, group)
    return comm


def _check_list(name: str, objects: Any, size: int) -> None:
    if not isinstance(objects, list) or len(objects) != size:
        given = f"{len(objects)} entries" if isinstance(objects, list) else f"a {type(objects).__name__}"
        raise TypeError(f"The len of argument {name} must be equal to group rank size {size}, but got {given}.")


def _region(array: npt.NDArray[Any]) -> Region:
    return _core.buffer_address(array), array.nbytes
