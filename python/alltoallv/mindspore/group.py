"""Finds or makes the communicator of a group, which is given by a name or None."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from mindspore.communication import _comm_helper as mindspore_groups  # its public functions may be replaced by ours

from alltoallv._calls import subgroups
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv.launch import hccl
from alltoallv.launch.options import make_options
from alltoallv.mindspore.tensors import in_queue, target

__all__ = ["init", "new_group"]

Group = Any  # str | Communicator | None

WORLD = ("hccl_world_group", "nccl_world_group", "mccl_world_group")  # MindSpore's names, by device

_ranks: dict[str, list[int]] = {}
_made: dict[str, Communicator] = {}
_timeout = 600.0


def init(*, timeout: float = 600.0) -> Communicator:
    """Joins all ranks of the job, which the launcher's environment describes; collective.

    Works with and without ``mindspore.communication.init()``, which comes first if the program calls it, and in one
    process without a launcher. In msrun's scheduler, which runs the same script, it ends the process;
    ``mindspore.communication.init()`` instead runs the scheduler there and does not return.

    Args:
        timeout: Seconds that a rank waits for its peers, here and in every operator.

    Returns:
        The communicator that ``group=None`` means. A second call returns the same one while it is usable; after a loss,
        a timeout or an abort it joins anew. Other calls do not: they raise.

    Raises:
        InvalidParamError, CommTimeoutError: see `alltoallv.Communicator.from_env`.
    """
    global _timeout
    _leave_scheduler()
    for name in [name for name, each in _made.items() if not each.usable]:
        _made.pop(name).destroy()
    world = _made.get(WORLD[0])
    if world is None:
        _timeout = timeout  # also for sub-groups
        backend = "hccl" if target() == "Ascend" else "auto"
        world = _made[WORLD[0]] = Communicator.from_env(backend=backend, timeout=timeout)
    return world


def _leave_scheduler() -> None:
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        sys.exit(0)


def joined() -> bool:
    """True if this process has joined its job and not left it; what has ended a communicator does not change that."""
    return WORLD[0] in _made


def _unknown(group: str, why: str = "") -> InvalidParamError:
    return InvalidParamError(f"group is {group!r}, expected a name made by new_group(){why}", id=1336)


def forget(group: str | None) -> None:
    """Closes the communicator of a group that `new_group` made, or of all groups; they can be made again."""
    if group is not None and group not in _ranks:
        raise _unknown(group)
    for name in list(_made) if group is None else [group]:
        member = _made.pop(name, None)
        if member is not None:
            member.destroy()
    if group is None:
        _ranks.clear()
    else:
        del _ranks[group]


def new_group(ranks: Sequence[int] | None = None, *, prefix: str = "alltoallv", name: str | None = None) -> str:
    """Returns a name for the group of these ranks of the job, to be passed as ``group``. Does not communicate.

    Args:
        ranks: Different ranks of the job; sorted, a rank's index among them is its rank in the group. None means all.
        prefix: The beginning of the name.
        name: The whole name, instead of one made of the ranks.

    Raises:
        TypeError: ``ranks`` is not a list.
        InvalidParamError: ranks are out of range or repeated, or other ranks have the name.
    """
    if ranks is None:
        return WORLD[0]
    if not isinstance(ranks, list | tuple):
        raise TypeError(f"ranks must be list, but got {type(ranks)}")
    _leave_scheduler()
    checked = subgroups.check_ranks(ranks, launch.detect().size)
    name = f"{prefix}_{len(checked)}_{subgroups.digest(checked)}" if name is None else name
    if name in ("", *WORLD):
        raise InvalidParamError(
            f"the group's name is {name!r}, expected another: this name means all ranks or none", id=1337
        )
    earlier = _ranks.setdefault(name, checked)
    if earlier != checked:
        raise InvalidParamError(
            f"group {name!r} has ranks {earlier}, expected another name for ranks {checked}", id=1338
        )
    return name


def resolve(group: Group) -> Communicator:
    """Returns the communicator of ``group``. The first call makes it, which is collective among its ranks.

    One that a loss, a timeout or an abort has ended stays until `init` or `forget`, so that calls raise at once.
    """
    if isinstance(group, Communicator):
        return group if group.host_core is not None or in_queue() else subgroups.of_host(group)
    if group is None or (isinstance(group, str) and group in WORLD):
        return member if (member := _made.get(WORLD[0])) is not None else init()
    if not isinstance(group, str):
        raise TypeError(f"The argument 'group' must be type of string, but got 'group' type : {type(group)}.")
    member = _made.get(group)
    if member is None:
        ranks = members(group)
        domain = f"group-{len(ranks)}-{subgroups.digest([group, *ranks])}"  # groups of equal ranks stay apart
        member = subgroups.connect(group, domain, ranks, _timeout)
        if target() == "Ascend":
            member = Communicator(hccl.over(member.core, make_options(domain, _timeout)))
        _made[group] = member
    return member


def rank_in(group: Group, rank: int, name: str) -> int:
    """Converts the argument ``name`` from a rank of the job to one of the group, as it is with a `Communicator`."""
    if not isinstance(rank, int):
        raise TypeError(f"The {name} must be int, but got {type(rank)}")
    if not isinstance(group, str) or group in WORLD:
        return rank
    return subgroups.place_of(rank, members(group), name)


def on_host(comm: Communicator) -> Communicator:
    """Returns the communicator of the same ranks in host memory."""
    if comm.host_core is not None:
        return comm
    control = comm.core.control
    if control is None or control.backend != "shm":
        raise BackendUnavailableError(
            "the ranks are on several hosts, expected one: counts that are learnt, objects and messages of NPUs go "
            "through host memory",
            id=5042,
        )
    return Communicator(control)


def members(group: str | None) -> list[int]:
    """Returns the ranks of the job in a group, in the order of their ranks there."""
    if group is None or group in WORLD:
        return list(range(launch.detect().size))
    if group in _ranks:
        return list(_ranks[group])
    if group == "":
        raise InvalidParamError("group is '', which new_group() returns on a rank outside of the group", id=1339)
    try:
        if not mindspore_groups._is_initialized():
            raise RuntimeError("mindspore.communication.init() has not been called")
        return [int(rank) for rank in mindspore_groups._get_group_ranks(group)]
    except (RuntimeError, ValueError, TypeError) as error:
        raise _unknown(group, f" ({str(error).strip().splitlines()[0]})") from error
