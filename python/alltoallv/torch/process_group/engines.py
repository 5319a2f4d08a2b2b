"""Makes the engines of a group: a communicator in host memory, and torch's own engines for everything else."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import FakeProcessGroup, _DistributedBackendOptions

from alltoallv._calls.collectives import barrier_plan
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError
from alltoallv.torch.engines import rendezvous
from alltoallv.torch.engines.rendezvous import Peers

_LOOK_SECONDS = 0.05
_NATIVE = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}


def meet(options: _DistributedBackendOptions, world: Peers | None, counts: Counter[str], *, all_ranks: bool) -> Peers:
    """Brings the ranks of a group together; no communication is needed if they met in the default group, ``world``.

    Args:
        counts: How many groups of a name and ranks this process has made of ``world``; all ranks count alike.
        all_ranks: Whether it is the group of all ranks of the job.

    Raises:
        CommTimeoutError: ranks did not come; the message names them.
    """
    name, ranks = options.group_id, list(options.global_ranks_in_group)
    if world is None or not ranks:
        position = options.store, options.group_rank, options.group_size
        seconds = options.timeout.total_seconds()
        return rendezvous.meet(*position, name, seconds, all_ranks=all_ranks, first=world is None)
    group = f"{name} of ranks {ranks}"
    counts[group] += 1
    return Peers([world.who[rank] for rank in ranks], f"{world.key}/{group}, {counts[group]}")


def stand_in(options: _DistributedBackendOptions) -> FakeProcessGroup:
    """Returns an engine whose collectives raise RuntimeError, for a group that has none of torch's yet."""
    own = FakeProcessGroup.Options()
    own.error_on_collective = True
    own._timeout = options.timeout
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size, own)


def gloo(
    options: _DistributedBackendOptions, store: dist.Store, timeout: timedelta, communicator: Communicator
) -> dist.ProcessGroupGloo:
    """Returns torch's engine for CPU tensors, whose ranks meet in ``store``; collective.

    The wait ends with the group's communicator, which knows of ranks that have ended.
    """
    if not dist.is_gloo_available():
        raise BackendUnavailableError("this build of torch has no gloo, which backend 'alltoallv' also needs", id=5059)
    position = dist.PrefixStore("gloo", store), options.group_rank, options.group_size
    engines: Future[dist.ProcessGroupGloo] = Future()

    def make() -> None:
        try:
            engines.set_result(dist.ProcessGroupGloo(*position, timeout))
        except BaseException as error:
            engines.set_exception(error)

    threading.Thread(target=make, name="alltoallv-gloo", daemon=True).start()
    while not wait([engines], _LOOK_SECONDS).done:
        if not communicator.usable:
            barrier_plan(communicator).run(0, 0)  # raises what has ended it
    engine = engines.result()
    engine.options.global_ranks_in_group, engine.options.group_name = options.global_ranks_in_group, options.group_id
    _number_calls(engine)
    return engine


def _number_calls(engine: Any) -> None:
    """Lets ranks agree on the number of an engine's first call; since torch 2.14 that is 0, and asking for it warns."""
    if torch.__version__ < (2, 14):
        engine._set_sequence_number_for_group()


def name_for(device: str, asked: str | None) -> str:
    """Returns the engine's name for a device. None, or this backend's own name, means NCCL, HCCL or XCCL."""
    if asked in (None, "alltoallv"):
        return _NATIVE.get(device) or dist.Backend.default_device_backend_map.get(device, "none")
    return str(asked)


def available(device: str, name: str) -> bool:
    """Returns whether this engine can carry tensors of the device here."""
    if name in ("gloo", "nccl", "xccl"):
        is_here: bool = getattr(dist, f"is_{name}_available")()
    else:
        is_here = name.upper() in dist.Backend._plugins
    module = getattr(torch, device, None)
    return is_here and (module is None or module.is_available())


def accelerators() -> list[str]:
    """Returns the kinds of devices that are here with their own engine."""
    return [device for device, name in _NATIVE.items() if available(device, name)]


def accelerator(
    device: str, name: str, options: _DistributedBackendOptions, store: dist.Store, engine_options: Any
) -> tuple[TorchBackend, Any]:
    """Makes the engine called ``name`` for an accelerator's tensors.

    It returns the engine and its ``ProcessGroup.BackendType``.
    """
    if not available(device, name):
        raise BackendUnavailableError(
            f"group {options.group_id!r} has no engine for {device} tensors: {name!r} is not available here; "
            "install the package that brings it, or name another, as in 'cpu:alltoallv,cuda:nccl'",
            id=5060,
        )
    position = dist.PrefixStore(f"{device}/", store), options.group_rank, options.group_size
    kind = dist.Backend.backend_type_map.get(name)
    if name in ("nccl", "xccl"):
        return _with_options(getattr(dist, f"ProcessGroup{name.upper()}"), engine_options, position, options), kind
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(*position, options.timeout), kind
    own = _DistributedBackendOptions()
    own.store, own.group_rank, own.group_size = position
    own.timeout, own.group_id = options.timeout, options.group_id
    own.global_ranks_in_group = options.global_ranks_in_group
    return plugin.creator_fn(own, engine_options), kind


def _with_options(
    engine: Any, options_given: Any, position: tuple[Any, int, int], options: _DistributedBackendOptions
) -> TorchBackend:
    own = options_given if isinstance(options_given, engine.Options) else engine.Options()
    own._timeout = options.timeout
    own.global_ranks_in_group = options.global_ranks_in_group
    own.group_name = options.group_id
    group: TorchBackend = engine(*position, own)
    _number_calls(group)
    return group
