"""Picklable objects instead of tensors, with the signatures of ``paddle.distributed``.

What arrives is unpickled, which can run any code that the sender chooses: the ranks must trust each other. ``src`` and
``dst`` are ranks of the job; with a `Communicator` they are ranks in it. They raise the errors of
`alltoallv.paddle.all_to_all_v`; on a rank outside the group they warn and do nothing.
"""

from __future__ import annotations

from typing import Any

from alltoallv._calls import objects
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.paddle.group import Group, rank_in, resolve


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fills ``object_list`` with every rank's ``obj``, in the order of ranks."""
    comm = resolve(group)
    if comm is None:
        return
    with guard(comm, "all_gather"):
        _check_list("object_list", object_list)
        exchange = objects.all_gather(comm, obj)
    object_list[:] = exchange.run()


def broadcast_object_list(object_list: list[Any], src: int, group: Group = None) -> None:
    """Replaces the entries of ``object_list`` by those of rank ``src``."""
    comm = resolve(group)
    if comm is None:
        return
    with guard(comm, "broadcast"):
        _check_list("object_list", object_list)
        root = rank_in(group, src, "src")
        exchange = objects.broadcast(comm, object_list, root)
    arrived = exchange.run()
    if comm.rank != root:
        object_list[:] = arrived[root]


def scatter_object_list(
    out_object_list: list[Any], in_object_list: list[Any] | None = None, src: int = 0, group: Group = None
) -> None:
    """Sets ``out_object_list`` of rank j to ``[in_object_list[j]]`` of rank ``src``, which has one entry per rank."""
    comm = resolve(group)
    if comm is None:
        return
    with guard(comm, "scatter"):
        _check_list("out_object_list", out_object_list)
        root = rank_in(group, src, "src")
        if comm.rank == root and (not isinstance(in_object_list, list) or len(in_object_list) != comm.size):
            raise InvalidParamError(
                f"in_object_list is {in_object_list!r}, expected a list of {comm.size}, one per rank"
            )
        exchange = objects.scatter(comm, in_object_list, root)
    out_object_list[:] = [exchange.run()[root]]


def send_object_list(
    object_list: list[Any], dst: int | None = None, group: Group = None, dst_in_group: int | None = None
) -> None:
    """Sends the entries of ``object_list`` to rank ``dst`` (``dst_in_group`` in the group)."""
    comm = resolve(group)
    if comm is not None:
        _check_filled(object_list)
        objects.send(comm, object_list, _peer("dst", dst, dst_in_group, group))


def recv_object_list(
    object_list: list[Any], src: int | None = None, group: Group = None, src_in_group: int | None = None
) -> None:
    """Fills ``object_list`` with what rank ``src`` (``src_in_group`` in the group) sends, as many entries."""
    comm = resolve(group)
    if comm is not None:
        _check_filled(object_list)
        object_list[:] = objects.recv(comm, len(object_list), _peer("src", src, src_in_group, group))


def _peer(name: str, rank: int | None, in_group: int | None, group: Group) -> Any:
    if in_group is None:
        return rank_in(group, 0 if rank is None else rank, name)
    if rank is not None:
        raise InvalidParamError(f"Cannot specify both '{name}' and '{name}_in_group' arguments.")
    return in_group


def _check_list(name: str, values: Any) -> None:
    if not isinstance(values, list):
        raise TypeError(f"{name} is a {type(values).__name__}, expected a list")


def _check_filled(values: Any) -> None:
    if not values:
        raise InvalidParamError("object_list cannot be None or empty")
