"""Makes communicators of some of the ranks of a job."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from alltoallv import communicator, membership
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv.launch.options import make_options, on_this_host


def digest(ranks: Sequence[object]) -> str:
    """Returns a short text that identifies these ranks, or a name and its ranks."""
    return hashlib.sha1("_".join(map(str, ranks)).encode()).hexdigest()


def check_ranks(ranks: Sequence[int], size: int) -> list[int]:
    """Checks and sorts the members of a group: they must be different ranks of a job of that size."""
    members = sorted(ranks)
    if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= size:
        raise InvalidParamError(
            f"ranks is {list(ranks)}, expected different ranks below {size}, the world size", id=1168
        )
    return members


def place_of(rank: object, members: Sequence[int], name: str) -> int:
    """Returns the place among ``members``, ranks of the job, of ``rank``, which the argument ``name`` holds."""
    if rank not in members:
        raise InvalidParamError(f"{name} is {rank!r}, expected one of the group's ranks {list(members)}", id=1169)
    return sorted(members).index(rank)  # type: ignore[arg-type]


def of_host(group: Communicator) -> Communicator:
    """Returns a communicator given for tensors in host memory; refuses HCCL's, which reads them as a device's."""
    if group.host_core is None:
        raise InvalidParamError(
            f"group has backend {group.backend!r}, expected one for tensors in host memory", id=1170
        )
    return group


def connect(name: str, domain: str, members: Sequence[int], timeout: float) -> Communicator:
    """Returns a new communicator of these ranks of the job; collective among them.

    Args:
        name: What the caller calls the group, for errors.
        domain: Equal on all members, different from other groups'.
        members: Sorted ranks of the job; a rank's place among them is its rank in the group.
        timeout: Seconds that a rank waits for its peers, here and in every operator.

    Raises:
        InvalidParamError: this rank is not a member.
        BackendUnavailableError: the job is on several hosts, and there is no communicator of all its ranks yet.
        CommTimeoutError: ranks did not come; the message names them.
    """
    job = launch.detect()
    if job.rank not in members:
        raise InvalidParamError(
            f"this rank, {job.rank}, is not in group {name!r}, which has ranks {list(members)}", id=1171
        )
    options = make_options(domain, timeout)
    if job.several_hosts:
        world = communicator.of_all_hosts()
        if world is None:
            raise BackendUnavailableError(
                f"group {name!r} of a job on several hosts needs the communicator of all ranks, which this rank has "
                "not made yet: call Communicator.from_env() on all of them before",
                id=5026,
            )
        options.job = "group"
        return Communicator(membership.connect(options, world.core, members), options)
    options.rank, options.size = members.index(job.rank), len(members)
    return Communicator(on_this_host(job, options, members), options)
