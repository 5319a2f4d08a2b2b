"""A process group that has torch's engines: gloo, and one for each kind of accelerator, made when first used."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import FakeProcessGroup, _DistributedBackendOptions
from torch._C._distributed_c10d import Work as TorchWork
from torch.utils._pytree import tree_leaves

from alltoallv import _core
from alltoallv._calls.collectives import barrier_plan
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.launch import variables
from alltoallv.torch.eager.group import follow_anew, forget
from alltoallv.torch.engines import rendezvous
from alltoallv.torch.engines.rendezvous import Peers
from alltoallv.torch.process_group.work import Futures, WorkList, in_turn

# Makes the engines of a group: a communicator in host memory, and torch's own engines for everything else.


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


NAME = "alltoallv"
_CPU = torch.device("cpu")
_DEFAULT = ("0", "default_pg")  # torch's names for the default group; others may be of several programs


@dataclass(frozen=True)
class GroupOptions:
    """The options of a process group of backend ``alltoallv``, given as ``pg_options``.

        dist.init_process_group("alltoallv", pg_options=alltoallv.torch.GroupOptions(order="rank"))

    Also of ``dist.new_group``, ``split_group`` and ``shrink_group``; the last two give a group its parent's order where
    they get none.

    Attributes:
        order: ``"rank"``: reductions of torch.distributed and of alltoallv.torch in this group add in the order of
            ranks on devices too, with the bits of host memory. The same on all ranks. Default: ``ALLTOALLV_ORDER``, or
            the engine's own order.
        engine: What ``pg_options`` is otherwise: the options of an accelerator's engine, such as NCCL's.

    Raises:
        InvalidParamError: ``order`` is another value.
    """

    order: str | None = None
    engine: Any = None

    def __post_init__(self) -> None:
        variables.order("order", self.order)


class EngineGroup(dist.ProcessGroup):
    """A group with a communicator and torch's engines, to which it passes calls that it does not carry.

    A Python group replaces torch's own with all its devices, so it holds one (``_engines``) for what it does not carry.
    A group that is the first one on all its ranks, as the default group of a job, has gloo from the beginning. Others
    make it, all ranks together, when they first need it: most never do, and it would take as long as all the rest of a
    group. Nothing that a rank may do alone makes it.
    """

    def __init__(self, options: _DistributedBackendOptions, backend_options: Any = None) -> None:
        """``backend_options``: `GroupOptions`, or the options of an accelerator's engine."""
        own = backend_options if isinstance(backend_options, GroupOptions) else GroupOptions(engine=backend_options)
        super().__init__(options.group_rank, options.group_size)
        self._first, self._order, self._engine_options = options, own.order, own.engine
        self._gloo: dist.ProcessGroupGloo | None
        self._lock = threading.Lock()
        self._splits = 0
        self._handle = f"{options.group_id}/{uuid.uuid4().hex}"
        self._uuids: set[int] = set()  # of reconfigurations
        # Holds the group's name and timeout while there is no gloo.
        self._stand_in = stand_in(options)
        dist.ProcessGroup._register_backend(self, _CPU, dist.ProcessGroup.BackendType.UNDEFINED, self._stand_in)
        self._set_group_name(options.group_id)
        self._begin(options)
        if getattr(options, "enable_reconfigure", False):  # of torch 2.14 and newer
            return
        world = dist.group.WORLD
        met = (world.peers, world._groups) if isinstance(world, EngineGroup) else (None, self._groups)
        is_default = world is None and options.group_id in _DEFAULT
        self._join(meet(options, *met, all_ranks=is_default), is_default)
        if world is None and all(peer["first"] for peer in self.peers.who):
            try:
                # All ranks are here now.
                self._gloo = gloo(options, self._place, self.timeout, self.communicator)
                self._engine("cpu")
            except BaseException:
                self.communicator.destroy()
                raise

    def _begin(self, options: _DistributedBackendOptions) -> None:
        """Takes its place among the ranks of ``options``, before they have met."""
        name = options.group_id
        self._options, self._rank, self._size = options, -1, -1
        self._engines = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        self._engines._set_group_name(name)
        self._made: set[str] = set()  # devices that have an engine
        self._gloo = None
        self._cpu_options = self._stand_in.options  # all ways to set the group's timeout end here
        self._futures = Futures(f"alltoallv-futures-{name}")
        self._message_futures = Futures(f"alltoallv-messages-{name}")
        self._coalescing: list[TorchWork] | None = None
        self._groups: Counter[str] = Counter()

    def _join(self, peers: rendezvous.Peers, is_default: bool = False) -> None:
        """Connects the ranks, which have met."""
        options = self._options
        rank, size, name = options.group_rank, options.group_size, options.group_id
        # A place of this group alone: the group's own store may hold values of an earlier group.
        self._place = dist.PrefixStore(f"alltoallv/{peers.key}", options.store)
        seconds = options.timeout.total_seconds()
        gather = rendezvous.gatherer(peers, options.store, rank, size, name, seconds)
        self.peers = peers
        self.communicator = rendezvous.connect(peers, gather, rank, size, name, seconds, all_ranks=is_default)
        self.communicator.order = self._order or self.communicator.order
        self._rank, self._size = rank, size

    # The methods by which torch asks about the group.

    def getBackendName(self) -> str:
        return NAME

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # what C++ looks for

    def __getattr__(self, name: str) -> Any:
        if name in ("communicator", "peers"):
            raise BackendUnavailableError(
                f"group {self._first.group_id!r} has no ranks: after init_process_group(enable_reconfigure=True), or "
                "a reconfigure() that failed, expected a call of reconfigure() first",
                id=5061,
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def name(self) -> str:
        return NAME

    def get_group_store(self) -> dist.Store:
        return self._options.store

    @property
    def _device_types(self) -> list[torch.device]:  # type: ignore[override]
        usable = [
            device
            for device, asked in self._configured().items()
            if device == "cpu" or available(device, name_for(device, asked))
        ]
        return [torch.device(device) for device in usable] or [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        """Returns torch's engine for the device; for CPU tensors gloo, which carries what shared memory does not.

        Where no call of all ranks has needed gloo yet, what is returned has the group's name and timeout, and no calls.
        """
        if device.type == "cpu":
            return self._gloo if "cpu" in self._made else self._stand_in
        self._engine(device.type)
        return super()._get_backend(device)

    def _configured(self) -> dict[str, str]:
        """Returns the engines' names by device, as the caller asked; empty while the group is being made."""
        config = dist.distributed_c10d._world.pg_backend_config.get(self, "")
        return dict(pair.split(":") for pair in config.split(",") if pair)

    def _engine(self, device: str) -> dist.ProcessGroup:
        """Returns the group of torch's engines, with one for ``device``."""
        with self._lock:
            if device not in self._made:
                configured = self._configured()
                if device != "cpu" and configured and device not in configured:
                    return self._engines  # it raises the error
                name = "gloo" if device == "cpu" else name_for(device, configured.get(device))
                if name == "gloo":
                    if self._gloo is None:
                        self._agree_on_gloo()  # a rank alone would wait for the others until the timeout
                        self._gloo = gloo(self._options, self._place, self.timeout, self.communicator)
                    engine = self._gloo
                    self._cpu_options, kind = engine.options, dist.ProcessGroup.BackendType.GLOO
                    follow_anew(self)
                else:
                    engine, kind = accelerator(device, name, self._options, self._place, self._engine_options)
                named = self.group_name
                # Torch's class takes one engine of a kind for ever: `_get_backend` knows the newest.
                for group in (self._engines,) if self._uuids else (self, self._engines):
                    dist.ProcessGroup._register_backend(group, torch.device(device), kind, engine)
                    group._set_group_name(named)
                    if kind == dist.ProcessGroup.BackendType.GLOO:
                        group._set_default_backend(kind)
                self._made.add(device)
        return self._engines

    def _agree_on_gloo(self) -> None:
        """Waits until all ranks do this; raises an error that names them if they do something else."""
        none = [0] * self.size()
        core = self.communicator.core
        _core.Plan(core, "handed_to_gloo", "uint8", none, none, none, none).run(0, 0, self._limit())

    def _limit(self) -> float:
        return self._cpu_options._timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """Returns the time that a rank waits for its peers."""
        return self._cpu_options._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._cpu_options._timeout = timeout
        self._engines.set_timeout(timeout)
        self.communicator.core.set_timeout(timeout.total_seconds())  # for the functions of alltoallv.torch

    def shutdown(self) -> None:
        """Leaves the group; peers that still wait for this rank get an error."""
        if self._rank >= 0:
            self.communicator.destroy()
        self._futures.close()
        self._message_futures.close()
        self._engines.shutdown()

    def abort(self) -> None:
        """Makes every rank's present and later collectives fail."""
        if self._rank >= 0:
            self.communicator.abort("the process group was aborted")
        self._futures.close()
        self._message_futures.close()
        self._engines.abort()

    # Torch 2.14's way to go on with other processes.

    @property
    def supports_reconfigure(self) -> bool:
        return dist.group.WORLD is None or dist.group.WORLD is self

    def get_reconfigure_handle(self) -> str:
        return self._handle

    def reconfigure(self, opts: Any) -> TorchWork:
        """Makes this the group of those processes whose handles are given, all of which call this.

        Args:
            opts: Torch's ReconfigureOptions. ``handles`` in the order of the ranks; a set is sorted. ``uuid``: equal on
                all ranks, and used once. ``timeout``: for the ranks to meet, at the store of the first group; default:
                the group's. ``hints`` change nothing.

        Returns:
            A work that is done. Calls of before raise PeerLostError, on ranks that are left out too.

        Raises:
            InvalidParamError: an argument is wrong; the group stays as it was.
            BackendUnavailableError: it is not the default group, or has engines for devices.
            CommTimeoutError: ranks did not come; the message names them. The group has no ranks then.
        """
        handles, name = opts.handles if isinstance(opts.handles, list) else sorted(opts.handles), self._first.group_id
        if not self.supports_reconfigure or self._made - {"cpu"}:
            what = f"with engines for {sorted(self._made)}" if self.supports_reconfigure else "made by another"
            raise BackendUnavailableError(
                f"reconfigure() of group {name!r}, {what}, expected the default group, and tensors in host memory",
                id=5062,
            )
        if handles.count(self._handle) != 1 or len(set(handles)) < len(handles):
            raise InvalidParamError(
                f"handles are {handles}, expected each once, and this rank's, {self._handle!r}", id=1448
            )
        if opts.uuid in self._uuids:
            raise InvalidParamError(
                f"uuid is {opts.uuid}, already used: expected one that this group has not had", id=1449
            )
        self._uuids.add(opts.uuid)
        own, limit = _DistributedBackendOptions(), self.timeout
        own.store = dist.PrefixStore(f"alltoallv/reconfigured/{opts.uuid}", self._first.store)
        own.group_rank, own.group_size, own.group_id = handles.index(self._handle), len(handles), name
        own.timeout = opts.timeout if opts.timeout and opts.timeout > timedelta(0) else limit
        self.shutdown()
        self.__dict__.pop("communicator", None)
        self._stand_in.options._timeout = limit
        self._begin(own)
        peers = meet(own, None, self._groups, all_ranks=False)
        own.timeout = limit
        self._join(peers)
        forget(self)
        dist.distributed_c10d._world.pg_group_ranks[self] = {rank: rank for rank in range(own.group_size)}
        return WorkList([])

    # What torch 2.14 offers beside it.

    supports_window = False

    def new_window(self, tensor: Tensor | None = None) -> Any:
        raise BackendUnavailableError(
            f"new_window({'' if tensor is None else 'tensor'}) of group {self._first.group_id!r}: backend 'alltoallv' "
            "has no windows; "
            "torch.distributed._symmetric_memory serves (alltoallv.torch.symm_mem)",
            id=5063,
        )

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        """Raises BackendUnavailableError: no hook would be called."""
        raise BackendUnavailableError(
            f"{hook} as hook {hook_id} of group {self._first.group_id!r}: backend 'alltoallv' calls none "
            "(TORCH_DIST_NAN_CHECK sets one)",
            id=5064,
        )

    register_post_hook = register_abort_hook = register_pre_hook

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """Returns a group of some of this group's ranks, all of which call this; None on the others."""
        self._splits += 1
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}:split:{self._splits}:{min(new_ranks)}"
        own = _DistributedBackendOptions()
        own.store = dist.PrefixStore(f"{name}/", self._options.store)
        own.group_rank, own.group_size = new_ranks.index(self.rank()), len(new_ranks)
        own.timeout, own.group_id = timeout or self._options.timeout, name
        parents = list(self._options.global_ranks_in_group) or list(range(self.size()))
        own.global_ranks_in_group = [parents[rank] for rank in new_ranks]
        child = type(self)(own, self.options_for(opts))
        child._set_group_name(name)
        child._set_group_desc(group_desc or f"{self.group_desc}:split:{self._splits}")
        return child

    def options_for(self, backend_options: Any) -> GroupOptions:
        """Returns the options of a group of some of these ranks, from its ``pg_options``."""
        own = backend_options if isinstance(backend_options, GroupOptions) else GroupOptions(engine=backend_options)
        return replace(own, order=own.order or self.communicator.order)

    # The methods that torch's engines implement.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._engine(device.type)._start_coalescing(device)
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        works, self._coalescing = self._coalescing or [], None
        if device.type != "cpu":
            return self._engine(device.type)._end_coalescing(device)
        return WorkList(works)

    def _hand_over(self, method: str, *args: Any) -> TorchWork:
        """Passes a collective to torch's engines."""
        in_turn()
        return self._engine_work(method, *args)

    def _engine_work(self, method: str, *args: Any) -> TorchWork:
        return self._kept(getattr(self._engine(device_kind(args)), method)(*args))

    def _kept(self, work: TorchWork) -> TorchWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


def device_kind(lists: Any) -> str:
    """Returns the kind of device of the tensors in lists of lists; the host's if there are none."""
    return next((x.device.type for x in tree_leaves(lists) if isinstance(x, Tensor)), "cpu")
