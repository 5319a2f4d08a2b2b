"""Groups: from a name or None to the communicator that carries it."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from alltoallv import _core, communicator, launch
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError

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
        made = _made[""] = Communicator.from_env(timeout=timeout)
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
    size = launch.detect().size
    members = sorted(ranks)
    if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= size:
        raise InvalidParamError(f"ranks is {list(ranks)}, expected different ranks below {size}, the world size")
    text = "_".join(map(str, members))
    name = f"alltoallv_{len(members)}_{hashlib.sha1(text.encode()).hexdigest()}"
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
        made = _made[group] = _make(group, _members(group))
    return made


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


def _make(group: str, members: list[int]) -> Communicator:
    job = launch.detect()
    if job.rank not in members:
        raise InvalidParamError(f"group {group!r} has ranks {members}, of which this rank, {job.rank}, is none")
    if job.local_size is not None and job.local_size != job.size:
        raise BackendUnavailableError(
            f"the job has {job.size} ranks, {job.local_size} of them on this host: shared memory needs all on one"
        )
    digest = hashlib.sha1("_".join(map(str, members)).encode()).hexdigest()
    options = communicator.make_options(f"group-{len(members)}-{digest}", _timeout)
    options.rank, options.size = members.index(job.rank), len(members)
    options.job = f"{job.job_id}#{job.restart_count}"
    return Communicator(_core.communicator(options))
