"""Groups: from a name or None to the communicator that carries it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from alltoallv._calls import subgroups
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv.mindspore.tensors import target

Group = Any  # str | Communicator | None

WORLD = ("hccl_world_group", "nccl_world_group", "mccl_world_group")  # MindSpore's names by device

_ranks: dict[str, list[int]] = {}
_made: dict[str, Communicator] = {}
_timeout = 600.0


def init(*, timeout: float = 600.0) -> Communicator:
    """Joins all ranks of the job, which the launcher's environment describes; collective.

    Works with and without ``mindspore.communication.init()``, which comes first if the program calls it, and in one
    process without a launcher. In msrun's scheduler, which runs the same script, it ends the process: only
    ``mindspore.communication.init()`` has a use for it, and does not return there.

    Args:
        timeout: Seconds that a rank waits for its peers, here and in every operator.

    Returns:
        The communicator that ``group=None`` means. Called again while that is usable, returns it.

    Raises:
        InvalidParamError, CommTimeoutError: see `alltoallv.Communicator.from_env`.
    """
    global _timeout
    _leave_scheduler()
    made = _made.get("")
    if made is None or not made.usable:
        _timeout = timeout  # of sub-groups too
        made = _made[""] = Communicator.from_env(backend="hccl" if target() == "Ascend" else "auto", timeout=timeout)
    return made


def _leave_scheduler() -> None:
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        sys.exit(0)


def new_group(ranks: Sequence[int] | None = None) -> str:
    """The name of the group of these ranks of the job, for ``group``. Talks to no peer.

    Args:
        ranks: Different ranks of the job; a rank's place among them, sorted, is its rank in the group. None: all.

    Raises:
        TypeError: ``ranks`` is no list.
        InvalidParamError: ranks out of range or repeated.
    """
    if ranks is None:
        return WORLD[0]
    if not isinstance(ranks, list | tuple):
        raise TypeError(f"ranks must be list, but got {type(ranks)}")
    _leave_scheduler()
    members = subgroups.check_ranks(ranks, launch.detect().size)
    name = f"alltoallv_{len(members)}_{subgroups.digest(members)}"
    _ranks[name] = members
    return name


def resolve(group: Group) -> Communicator:
    """The communicator of ``group``, made at the first call, which is collective among its ranks.

    Raises:
        TypeError: ``group`` is of another type.
        InvalidParamError: nobody made this name, or this rank is not a member.
    """
    if isinstance(group, Communicator):
        return group
    if group is None or (isinstance(group, str) and group in WORLD):
        return init()
    if not isinstance(group, str):
        raise TypeError(f"The argument 'group' must be type of string, but got 'group' type : {type(group)}.")
    made = _made.get(group)
    if made is None or not made.usable:
        members = _members(group)
        if target() == "Ascend":
            raise BackendUnavailableError(f"group is {group!r}, expected that of all ranks on Ascend")
        domain = f"group-{len(members)}-{subgroups.digest(members)}"
        made = _made[group] = subgroups.connect(group, domain, members, _timeout)
    return made


def rank_in(group: Group, rank: int) -> int:
    """The number in a group of a rank of the job; for a `Communicator` it is that already.

    Raises:
        InvalidParamError: it is not a member.
    """
    if not isinstance(group, str) or group in WORLD:
        return rank
    members = _members(group)
    if rank not in members:
        raise InvalidParamError(f"src is {rank!r}, expected one of the group's ranks {members}")
    return members.index(rank)


def on_host(comm: Communicator) -> Communicator:
    """The communicator of the same ranks in host memory."""
    if comm.backend == "shm":
        return comm
    control = comm.core.control
    if control is None or control.backend != "shm":
        raise BackendUnavailableError("recv_counts is None, expected counts where the ranks are on several hosts")
    return Communicator(control)


def _members(group: str) -> list[int]:
    if group in _ranks:
        return _ranks[group]
    from mindspore.mint.distributed import get_process_group_ranks, is_initialized

    try:
        if not is_initialized():
            raise RuntimeError("mindspore.communication.init() has not been called")
        return [int(rank) for rank in get_process_group_ranks(group)]
    except (RuntimeError, ValueError, TypeError) as error:
        raise InvalidParamError(
            f"group is {group!r}, expected a name made by new_group() ({str(error).strip().splitlines()[0]})"
        ) from error
