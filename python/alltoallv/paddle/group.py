"""Finds or makes the communicator of a group: a Paddle group, a Communicator or None."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from paddle.distributed.communication.group import Group as PaddleGroup

from alltoallv import communicator
from alltoallv._calls import subgroups
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.launch import detect as launch

Group = Any  # paddle's Group | Communicator | None

_TIMEOUT = 600.0  # seconds, as everywhere
_numbers = itertools.count()
_made: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


def new_group(ranks: Sequence[int] | None = None) -> PaddleGroup:
    """Returns the group of these ranks, where ``paddle.distributed.new_group`` cannot make one. Does not communicate.

    All ranks of the job make their groups in the same order, members or not, as in Paddle.

    Args:
        ranks: Different ranks of the job; sorted, a rank's index among them is its rank in the group. None means all.

    Raises:
        InvalidParamError: ranks are out of range or repeated.
    """
    job = launch.detect()
    members = subgroups.check_ranks(range(job.size) if ranks is None else ranks, job.size)
    number = next(_numbers)
    rank = members.index(job.rank) if job.rank in members else -1
    return PaddleGroup(rank, -1 - number, members, name=f"alltoallv_{number}")


def resolve(group: Group) -> Communicator | None:
    """Returns the communicator of ``group``. The first call makes it, which is collective among its ranks.

    One that a loss, a timeout or an abort has ended stays, so that calls raise at once; another group makes another.
    A rank that is not a member of the group gets None and a warning.
    """
    if isinstance(group, Communicator):
        return subgroups.of_host(group)
    if group is None:
        return communicator.default()
    if not isinstance(group, PaddleGroup):
        raise InvalidParamError(f"group is a {type(group).__name__}, expected a Paddle group, a Communicator or None")
    if group.id == 0:  # Paddle's number for all ranks
        return communicator.default()
    comm = _made.get(group)
    if comm is not None:
        return comm
    rank = launch.detect().rank
    if rank not in group.ranks:
        warnings.warn(f"Current global rank {rank} is not in group {group.name}", stacklevel=3)
        return None
    # Groups of the same ranks differ in Paddle's group number, which is equal on all of them.
    domain = f"paddle-{group.id}-{subgroups.digest(group.ranks)}"
    comm = _made[group] = subgroups.connect(str(group.name), domain, sorted(group.ranks), _TIMEOUT)
    return comm


def rank_in(group: Group, rank: Any, name: str) -> Any:
    """Converts the argument ``name`` from a rank of the job to one of the group, as it is with a `Communicator`."""
    if not isinstance(group, PaddleGroup):
        return rank
    return subgroups.place_of(rank, group.ranks, name)
