"""Finds the communicator that carries a group's calls; a group is a ProcessGroup, a Communicator or None."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from alltoallv import communicator
from alltoallv.communicator import BACKENDS, Communicator
from alltoallv.errors import (
    BackendUnavailableError,
    CommTimeoutError,
    InvalidParamError,
    PeerLostError,
    PeerMismatchError,
)
from alltoallv.launch import variables
from alltoallv.torch.engines import device as devices
from alltoallv.torch.engines import rendezvous
from alltoallv.torch.engines.device import DeviceMember, StagedMember
from alltoallv.torch.engines.hccl import HcclGroupMember, HcclMember
from alltoallv.torch.engines.nccl import NcclMember

Group = Any  # ProcessGroup | Communicator | DeviceMember | None
AnyCommunicator = Communicator | DeviceMember

_log = logging.getLogger("alltoallv")
# Communicators by group, then by kind of device and backend. The backend None is the default at the group's first use.
# By default group: the processes of the ranks that have met, by rank.
_met: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[Any, _OfGroup] = weakref.WeakKeyDictionary()


class _OfGroup(dict[tuple[str, str | None], AnyCommunicator]):
    """Holds a group's communicators, whose limit follows the group's.

    Attributes:
        options: The options of the group's engine, where torch writes a new limit; None if there is nothing to follow.
        limit: The limit that the communicators have.
    """

    options: Any = None
    limit: timedelta | None = None

    def follow(self) -> None:
        """Gives the communicators the group's limit."""
        self.limit = self.options._timeout
        for member in self.values():
            on_host(member).core.set_timeout(self.limit.total_seconds())


def device_of(tensor: object) -> str:
    """Returns the kind of device that decides which communicator carries a call: ``"cpu"``, ``"cuda"``, ..."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_cpu or tensor.is_meta:
        return "cpu"
    return tensor.device.type


def resolve(group: Group, device: str = "cpu") -> AnyCommunicator | None:
    """Returns the communicator of ``group`` for tensors on a kind of device.

    The result is None, with a warning, on a rank that is not a member of the group.
    """
    if isinstance(group, Communicator):
        return _of_tensors(group)
    if group is None:
        group = dist.group.WORLD
        if group is None:
            return _of_tensors(communicator.default("hccl" if device == "npu" else "auto"))
    if isinstance(group, dist.ProcessGroup):
        # A communicator that a loss, a timeout or an abort has ended stays: a rank that comes late must not wait anew.
        of_group = _made.get(group)
        if of_group is None or (member := of_group.get((device, None))) is None:
            return from_group(group, device=device)
        if of_group.options is not None and of_group.options._timeout != of_group.limit:
            of_group.follow()
        return member
    if isinstance(group, DeviceMember):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        warnings.warn("this rank is not a member of the group: the call does nothing", stacklevel=3)
        return None
    raise InvalidParamError(
        f"group is a {type(group).__name__}, expected a ProcessGroup, a Communicator or None", id=1428
    )


def on_shm(group: Group) -> Communicator | None:
    """Returns the group's communicator in shared memory if it exists already; tracers also come here."""
    if type(group) is Communicator:
        return group if group.host_core is not None else None
    member: AnyCommunicator | None
    if group is None and (group := dist.group.WORLD) is None:
        member = communicator.defaults.get("auto")
    else:
        of_group = _made.get(group) if isinstance(group, dist.ProcessGroup) else None
        if of_group is None:
            return None
        if of_group.options is not None and of_group.options._timeout != of_group.limit:
            of_group.follow()
        member = of_group.get(("cpu", None))
    return member if isinstance(member, Communicator) and member.host_core is not None and member.core.usable else None


def _of_tensors(comm: Communicator) -> AnyCommunicator:
    """Returns the communicator for tensors: one over HCCL launches on torch's streams."""
    return comm if comm.host_core is not None else HcclMember(comm)


def from_group(
    group: dist.ProcessGroup,
    *,
    timeout: float | None = None,
    device: str = "cpu",
    backend: str | None = None,
    check: str | None = None,
    order: str | None = None,
) -> AnyCommunicator:
    """Returns the communicator over the ranks of a ProcessGroup; the first call makes it and is collective.

    The ranks find each other through the group's store, or its MPI. On one host they share memory; ranks on several
    hosts use TCP between them. Tensors on a GPU or NPU use the group's backend for it, once the ranks have agreed in
    host memory; where that is gloo, or with ``"shm"`` and ``"tcp"``, they travel through host memory. Which one it is,
    is logged once to ``alltoallv``, as information. A group of backend ``alltoallv`` has a communicator already.

    Args:
        group: A ProcessGroup of torch.distributed, made with any backend.
        timeout: Seconds that a rank waits for its peers, here and in every operator. Default: the group's own limit,
            also when that changes later.
        device: Kind of device of the tensors: ``"cpu"``, ``"cuda"``, ``"npu"``. Every kind has its own communicator.
        backend: ``"auto"``, ``"shm"``, ``"tcp"``, ``"nccl"``, ``"hccl"``; the same on all ranks.
            Default: ``ALLTOALLV_TORCH_BACKEND`` at the group's first use, or auto.
        check: ``"always"`` (the default in host memory) compares operator, dtype and counts of all ranks before any
            data move, ``"first"`` (the default on a GPU) for the first 8 calls, ``"off"`` never.
        order: ``"rank"``: from now on the group's reductions of such tensors add in the order of ranks, with the bits
            of host memory; on backend ``alltoallv`` torch.distributed's too. Default: what the `GroupOptions`
            of such a group say, ``ALLTOALLV_ORDER`` at the group's first use, or the engine's own order.

    Raises:
        InvalidParamError: an argument is wrong.
        PeerMismatchError: the ranks use different devices or engines.
        BackendUnavailableError: the backend cannot be used for these ranks or devices.
        CommTimeoutError: ranks did not come; the message names them.
    """
    order = variables.order("order", order)
    wanted = backend or os.environ.get("ALLTOALLV_TORCH_BACKEND") or "auto"
    if (of_group := _made.get(group)) is None:
        of_group = _made[group] = _OfGroup()
    if timeout is not None:
        of_group.options = None
    elif not of_group:
        of_group.options = _options_of(group)
    seconds = timeout or (600.0 if of_group.options is None else of_group.options._timeout.total_seconds() or 600.0)
    own: Communicator | None = getattr(group, "communicator", None)
    member: AnyCommunicator | None = of_group.get((device, wanted))
    if own is not None and device == "cpu" and wanted in ("auto", "shm", "tcp"):
        member = own
    elif member is None or not member.usable:
        if wanted not in BACKENDS:
            name = "backend" if backend else "ALLTOALLV_TORCH_BACKEND"
            raise InvalidParamError(f"{name} is {wanted!r}, expected one of {', '.join(BACKENDS)}", id=1429)
        of_group[device, wanted] = member = _make(group, seconds, device, wanted, check)
        member.order = _order_of(group)
    if order is not None:
        member.order = order
    if backend is None:
        of_group[device, None] = member
    return member


def adds_in_order(group: dist.ProcessGroup, device: str) -> bool:
    """Returns whether a group's reductions on a kind of device add in the order of ranks, unless a call says more."""
    of_group = _made.get(group)
    member = None if of_group is None else of_group.get((device, None))
    return (_order_of(group) if member is None else member.order) == "rank"


def _order_of(group: dist.ProcessGroup) -> str | None:
    """Returns the order of sums that a group was made with."""
    own: Communicator | None = getattr(group, "communicator", None)
    return communicator.default_order() if own is None else own.order


def follow_anew(group: dist.ProcessGroup) -> None:
    """Says that the group's limit stands elsewhere from now on."""
    if (of_group := _made.get(group)) is not None and of_group.options is not None:
        of_group.options = _options_of(group)


def forget(group: dist.ProcessGroup) -> None:
    """Drops the communicators of a group that has other ranks from now on."""
    _made.pop(group, None)


def _options_of(group: dist.ProcessGroup) -> Any:
    """Returns the options of the group's engine, or None if it has none that say a limit."""
    if hasattr(group, "communicator"):
        return group._cpu_options
    for device in sorted(group._device_types, key=lambda each: each.type != "cpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            options = group._get_backend(device).options
            if options._timeout.total_seconds() > 0:
                return options
    return None


def on_host(comm: AnyCommunicator) -> Communicator:
    """Returns the communicator of the same ranks for tensors in host memory."""
    return comm.on_host if isinstance(comm, DeviceMember) else comm


def _make(group: dist.ProcessGroup, timeout: float, device: str, wanted: str, check: str | None) -> AnyCommunicator:
    if check not in (None, "always", "first", "off"):
        raise InvalidParamError(f"check is {check!r}, expected 'always', 'first' or 'off'", id=1430)
    name, rank, size = group.group_name, group.rank(), group.size()
    raw = dist.distributed_c10d._world.pg_map[group][1]
    all_ranks = raw is not None and group is dist.group.WORLD
    if raw is None:  # MPI's own launcher has brought the ranks together
        gather = _gatherer(group)
        peers = rendezvous.meet_over(gather, device=device, backend=wanted)
    else:
        ranks = dist.get_process_group_ranks(group)
        met = _met.setdefault(dist.group.WORLD, {})
        seen = [met.get(each, 0) for each in ranks]
        peers = rendezvous.meet(
            raw, rank, size, name, timeout, seen, all_ranks=all_ranks, device=device, backend=wanted
        )
        met.update(zip(ranks, peers.processes, strict=True))
        gather = rendezvous.gatherer(peers, raw, rank, size, name, timeout)
    who = peers.who
    for j, peer in enumerate(who):
        asked = [f"{each['device']} tensors over backend {each['backend']!r}" for each in (who[0], peer)]
        if asked[0] != asked[1]:
            with contextlib.suppress(PeerLostError, CommTimeoutError):
                gather(b"")  # the process that has the store must not end before all have read this in it
            raise PeerMismatchError(f"group {name!r}: rank 0 has {asked[0]}, rank {j} has {asked[1]}", id=3026)
    chosen = _choose(group, device, wanted, who)
    if chosen != "shm":
        number = f"{peers.hosts} host{'s'[: peers.hosts > 1]}"
        _log.info("group %r: %s tensors of %d ranks on %s go through %s", name, device, size, number, chosen)
    on_host = chosen in ("shm", "tcp")
    checked = "off" if check == "off" and on_host else None
    comm = rendezvous.connect(peers, gather, rank, size, name, timeout, checked, all_ranks=all_ranks)
    if on_host:
        return comm if device == "cpu" else StagedMember(group, comm)
    return HcclGroupMember(group, comm, timeout, check) if chosen == "hccl" else NcclMember(group, chosen, comm, check)


def _gatherer(group: dist.ProcessGroup) -> rendezvous.Gather:
    def gather(own: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, own, group)
        return gathered

    return gather


def _choose(group: dist.ProcessGroup, device: str, wanted: str, who: Sequence[dict[str, Any]]) -> str:
    """Returns the backend that carries the group; it is the same on all ranks."""
    other = next((j for j, peer in enumerate(who) if peer["host"] != who[0]["host"]), None)
    if wanted == "shm" and other is not None:
        raise BackendUnavailableError(
            f"rank 0 and rank {other} of group {group.group_name!r} run on different hosts, "
            "expected all on one: shared memory does not cross hosts",
            id=5054,
        )
    on_host = "shm" if other is None else "tcp"
    if wanted in ("shm", "tcp") or (device == "cpu" and wanted == "auto"):
        return on_host
    if device == "npu" and wanted in ("auto", "hccl"):
        return "hccl"  # over a communicator of alltoallv's own if the group has none
    carrier = None
    with contextlib.suppress(RuntimeError):  # raised where the group has no backend for this device
        carrier = str(group._get_backend(torch.device(device)).name()).lower()
    if (carrier, wanted) == ("gloo", "auto"):
        return on_host  # gloo would also move them through host memory
    if carrier is None or wanted not in ("auto", carrier):
        raise BackendUnavailableError(
            f"group {group.group_name!r} has {repr(carrier) if carrier else 'no backend'} for {device} tensors, "
            f"expected {repr(wanted) if wanted != 'auto' else 'one'}, as in "
            "init_process_group('cpu:gloo,cuda:nccl')",
            id=5055,
        )
    return carrier


def name_of(group: Group) -> str:
    """Returns a name that stands for the group in a compiled graph."""
    if group is None:
        return ""
    if isinstance(group, str):  # it is one already
        return group
    if isinstance(group, Communicator | DeviceMember):
        return group.name
    return f"group:{group.group_name}"


def by_name(name: str, device: str = "cpu") -> AnyCommunicator:
    """Returns the communicator that a name of `name_of` means, for tensors on a kind of device."""
    member: AnyCommunicator | None
    if name.startswith("group:"):
        member = resolve(dist.distributed_c10d._resolve_process_group(name.removeprefix("group:")), device)
    elif name:
        comm = communicator.by_name.get(name)
        member = _of_tensors(comm) if comm is not None else devices.by_name.get(name)
    else:
        member = resolve(None, device)
    if member is None:
        raise InvalidParamError(f"group {name!r} no longer exists, or this rank is not a member of it", id=1431)
    return member


def world_size(group: Group) -> int:
    """Returns the number of ranks in a group, also while a graph is traced."""
    if group is None:
        return _default_size()
    return group.size() if isinstance(group, dist.ProcessGroup) else group.size


def _default_size() -> int:
    if dist.is_initialized():
        return int(dist.get_world_size())
    return by_name("").size


def rank_in(group: Group) -> int:
    """Returns this rank's number in a group, also while a graph is traced."""
    if group is None:
        return _default_rank()
    return group.rank if isinstance(group.rank, int) else group.rank()


def _default_rank() -> int:
    return int(dist.get_rank()) if dist.is_initialized() else by_name("").rank


_default_rank._dynamo_marked_constant = True  # type: ignore[attr-defined]
_default_size._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `assume_constant_result`, without its import
