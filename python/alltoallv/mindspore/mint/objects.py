"""Picklable objects instead of tensors, with the signatures and error classes of ``mindspore.mint.distributed``.

What arrives is unpickled, which can run any code that the sender chooses: the ranks must trust each other. ``src`` and
``dst`` are ranks of the job.
"""

from __future__ import annotations

from typing import Any

from alltoallv._calls import objects
from alltoallv.communicator import Communicator
from alltoallv.mindspore.front_end import enter, front_end
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.mint.checks import check_other


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Replaces entry j of ``object_list``, which has one per rank, by rank j's ``obj``."""

    def check(size: int, at_root: bool) -> None:
        _check_list("object_list", object_list, size)

    object_list[:] = front_end.objects("all_gather", group, obj, check=check)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Group = None, device: Any = None) -> None:
    """Replaces the entries of ``object_list``, as many on all ranks, by rank ``src``'s. ``device`` is ignored."""

    def check(size: int, at_root: bool) -> None:
        _check_filled("object_list", object_list)

    object_list[:] = front_end.objects("broadcast", group, object_list, root=("src", src), check=check)


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Group = None) -> None:
    """Replaces entry j of ``object_gather_list`` on rank ``dst``, which has one per rank, by rank j's ``obj``."""

    def check(size: int, at_root: bool) -> None:
        if at_root:
            _check_list("object_gather_list", object_gather_list, size)

    arrived = front_end.objects("gather", group, obj, root=("dst", dst), check=check)
    if object_gather_list is not None and arrived is not None:
        object_gather_list[:] = arrived


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None,
    src: int = 0,
    group: Group = None,
) -> None:
    """Replaces entry 0 of rank j's output list by entry j of rank ``src``'s input list."""
    objects = scatter_object_input_list

    def check(size: int, at_root: bool) -> None:
        _check_filled("scatter_object_output_list", scatter_object_output_list)
        if at_root:
            _check_list("scatter_object_input_list", objects, size)

    scatter_object_output_list[0] = front_end.objects("scatter", group, objects, root=("src", src), check=check)


def send_object_list(object_list: list[Any], dst: int, group: Group = None, device: Any = None) -> None:
    """Sends the entries of ``object_list`` to rank ``dst``, which calls `recv_object_list`. ``device`` is ignored."""
    comm, rank = _messaging("send_object_list", object_list, "dst", dst, group)
    objects.send(comm, object_list, rank)


def recv_object_list(object_list: list[Any], src: int = 0, group: Group = None, device: Any = None) -> int:
    """Fills ``object_list`` with what rank ``src`` sends, as many entries; returns 0. ``device`` is ignored."""
    comm, rank = _messaging("recv_object_list", object_list, "src", src, group)
    object_list[:] = objects.recv(comm, len(object_list), rank)
    return 0


def _messaging(operator: str, object_list: Any, name: str, peer: Any, group: Group) -> tuple[Communicator, int]:
    """Returns the communicator in host memory, where objects travel, and the other rank in it."""
    rank = check_other(operator, name, peer, group)
    if not isinstance(object_list, list):
        raise TypeError(f"For {operator}, the object_list must be a list, but got {type(object_list)}")
    return on_host(enter(group)), rank


def _check_list(name: str, values: Any, size: int) -> None:
    if not isinstance(values, list) or len(values) != size:
        shown = f"{len(values)} entries" if isinstance(values, list) else f"a {type(values).__name__}"
        raise TypeError(f"The len of argument {name} must be equal to group rank size {size}, but got {shown}.")


def _check_filled(name: str, values: Any) -> None:
    if not isinstance(values, list) or not values:
        raise TypeError(f"The {name} can not be empty.")
