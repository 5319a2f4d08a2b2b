"""The job and its groups, with the signatures, return values and error classes of ``mindspore.mint.distributed``."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mindspore import log
from mindspore._c_expression import GroupOptions
from mindspore.mint.distributed._utils import _parse_tcp_url_for_ipv4
from mindspore.mint.distributed.distributed import TCPStore

from alltoallv import _core
from alltoallv.errors import InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv.launch.detect import BY_ADDRESS
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.tensors import executor

_VARIABLES = ("ALLTOALLV_RANK", "ALLTOALLV_WORLD_SIZE", "ALLTOALLV_JOB_ID")
_set_here: list[str] = []


def init_process_group(
    backend: str = "hccl",
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: TCPStore | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: int | None = None,
) -> None:
    """Joins all ranks of the job; collective. It works on CPU as on Ascend; MindSpore's own works on Ascend alone.

    Args:
        backend: ``"hccl"``, MindSpore's only backend; on CPU the ranks use shared memory all the same.
        init_method: ``"tcp://ip:port"``, equal on all ranks, instead of a launcher; then ``rank`` and ``world_size``
            are needed. All ranks must be on this host.
        timeout: Time that a rank waits for its peers, here and in every collective; default: 600 s. Once this process
            has joined, it changes nothing.
        world_size: With a launcher, the launcher's number or -1.
        rank: With a launcher ignored, as in MindSpore.
        store: A `TCPStore`, whose address replaces ``init_method``.
        group_name, pg_options, device_id: Accepted for compatibility with MindSpore and ignored.

    Raises:
        TypeError: an argument has another type.
        ValueError: another backend, both ``init_method`` and ``store``, an impossible rank or world size.
        RuntimeError: ``init_method`` has another form.
        CommTimeoutError: ranks did not come; the message names them.
    """
    optional = ("init_method", init_method, str), ("timeout", timeout, timedelta), ("store", store, TCPStore)
    for name, value, kind in optional:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}, expected a {kind.__name__}")
    for name, number in (("world_size", world_size), ("rank", rank)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name} is a {type(number).__name__}, expected an int")
    if not isinstance(group_name, str):
        raise TypeError(f"group_name is a {type(group_name).__name__}, expected a str")
    if backend != "hccl":
        raise ValueError(f"Only support hccl now, please setting backend to hccl, but got {backend!r}")
    if init_method is not None and store is not None:
        raise ValueError("Only one of init_method and store is supported.")
    seconds = 600.0 if timeout is None else timeout.total_seconds()
    if init_method is not None or store is not None:
        _meet_without_launcher(init_method, store, rank, world_size)
    comm = groups.init(timeout=seconds)
    if world_size not in (-1, comm.size):
        raise ValueError(f"world_size is {world_size}, expected -1 or {comm.size}, the number of ranks")


def _meet_without_launcher(init_method: str | None, store: TCPStore | None, rank: int, world_size: int) -> None:
    """Sets the environment variables that our own launcher would set."""
    if world_size <= 0:
        raise ValueError(f"world_size is {world_size}, expected a positive integer with init_method or store")
    if rank < 0:
        raise ValueError(f"rank is {rank}, expected a non-negative integer with init_method or store")
    if store is not None:
        address = f"{store.host}:{store.port}"
    else:
        try:
            address = "{}:{}".format(*_parse_tcp_url_for_ipv4(init_method))
        except Exception as error:
            raise RuntimeError(f"Failed to parse TCP URL from 'init_method': {init_method}") from error
    os.environ.update(zip(_VARIABLES, (str(rank), str(world_size), f"{BY_ADDRESS}{address}"), strict=True))
    _set_here[:] = _VARIABLES


def destroy_process_group(group: str | None = None) -> None:
    """Leaves the group of that name; None means all groups, after which `init_process_group` may be called again."""
    _check_group(group, "destroy_group")
    executor.sync()
    if group is not None and group not in groups.WORLD:
        groups.forget(group)
        return
    groups.forget(None)
    while _set_here:
        os.environ.pop(_set_here.pop(), None)


def is_available() -> bool:
    """Returns True: this module needs nothing of MindSpore's own communication."""
    return True


def is_initialized() -> bool:
    """True if this process has joined its job and not left it."""
    return groups.joined()


def get_rank(group: str | None = None) -> int:
    """Returns this process's rank in the group; -1 if it is not a member, or has not joined the job."""
    return _of_member(group, "get_rank", lambda members, rank: members.index(rank))


def get_world_size(group: str | None = None) -> int:
    """Returns the number of ranks in the group; -1 if this process is not a member, or has not joined the job."""
    return _of_member(group, "get_world_size", lambda members, rank: len(members))


def _of_member(group: str | None, function: str, answer: Callable[[list[int], int], int]) -> int:
    _check_group(group, function)
    if not groups.joined():
        return -1
    try:
        members, rank = groups.members(group), groups.resolve(None).rank
    except InvalidParamError as error:
        log.warning(error)
        return -1
    return answer(members, rank) if rank in members else -1


def new_group(
    ranks: list[int] | None = None,
    timeout: Any = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> str:
    """Returns a name for the group of these ranks of the job, to be passed as ``group``. Does not communicate.

    Args:
        ranks: Different ranks of the job; sorted, a rank's index among them is its rank in the group. None means all.
        backend: ``"hccl"`` (None) or ``"mccl"``; becomes a part of the name. Both move host memory on CPU.
        pg_options: A MindSpore ``GroupOptions``; ignored, like ``timeout``, ``use_local_synchronization`` and
            ``group_desc``.

    Returns:
        The name; ``""`` if this rank is not among ``ranks``, as in MindSpore.

    Raises:
        TypeError: ``ranks`` is not a list, or ``backend`` or ``pg_options`` has another type.
        ValueError: ranks are out of range or repeated.
    """
    if ranks is not None and not isinstance(ranks, list):
        raise TypeError(f"ranks must be list, but got {type(ranks)}")
    if ranks is None:
        return groups.WORLD[0]
    if backend not in (None, "hccl", "mccl"):
        raise TypeError(f"the input backend must be hccl or mccl, but got {backend}")
    if pg_options is not None and not isinstance(pg_options, GroupOptions):
        raise TypeError(f"pg_options must be type GroupOptions, but got {type(pg_options)}")
    if len(set(ranks)) == len(ranks) and launch.detect().rank not in ranks:
        return ""
    return groups.new_group(ranks, prefix=backend or "hccl")


def get_backend(group: str | None = None) -> str:
    """Returns ``"hccl"`` or ``"mccl"``, as in the group's name: MindSpore's word, not what moves the data."""
    _check_group(group, "get_backend")
    return "mccl" if group is not None and "hccl" not in group and "mccl" in group else "hccl"


def get_global_rank(group: str | None, group_rank: int) -> int:
    """Converts the group's rank ``group_rank`` to a rank of the job."""
    if not isinstance(group_rank, int):
        raise TypeError(f"The group_rank argument must be integer, but got {type(group_rank)}.")
    members = get_process_group_ranks(group)
    return members[_core.checked_rank("group_rank", group_rank, len(members))]


def get_group_rank(group: str | None, global_rank: int) -> int:
    """Converts the job's rank ``global_rank`` to a rank of the group; raises KeyError if it is not a member, as
    MindSpore.
    """
    if not isinstance(global_rank, int):
        raise TypeError(f"The global_rank argument must be integer, but got {type(global_rank)}.")
    members = get_process_group_ranks(group)
    if global_rank not in members:
        raise KeyError(f"global_rank is {global_rank}, expected one of the group's ranks {members}")
    return members.index(global_rank)


def get_process_group_ranks(group: str | None = None) -> list[int]:
    """Returns the ranks of the job in the group, in the order of their ranks there."""
    _check_group(group, "get_process_group_ranks")
    return groups.members(group)


def _check_group(group: Any, function: str) -> None:
    if group is not None and not isinstance(group, str):
        raise TypeError(
            f"For '{function}', the argument 'group' must be type of string or None, "
            f"but got 'group' type : {type(group)}."
        )
