"""A process group that has torch's engines: gloo, and one for each kind of accelerator, made when first used."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.utils._pytree import tree_leaves

from alltoallv import _core
from alltoallv.launch import variables
from alltoallv.torch.eager.group import follow_anew
from alltoallv.torch.engines import rendezvous
from alltoallv.torch.process_group import engines as engines
from alltoallv.torch.process_group.work import Futures, WorkList, in_turn

NAME = "alltoallv"
_CPU = torch.device("cpu")
_DEFAULT = ("0", "default_pg")  # torch's names for the default group; others may be of several programs


@dataclass(frozen=True)
class GroupOptions:
    """The options of a process group of backend ``alltoallv``, given as ``pg_options``.

    ::

        dist.init_process_group("alltoallv", pg_options=alltoallv.torch.GroupOptions(order="rank"))

    Also of ``dist.new_group``, ``split_group`` and ``shrink_group``; the last two give a group its parent's order where
    they get none.

    Attributes:
        order: ``"rank"``: reductions of torch.distributed and of alltoallv.torch in this group add in the order of
            ranks on devices too, with the bits of host memory. The same on all ranks. Default: ``ALLTOALLV_ORDER``, or
            the engine's own order.
        engine: What ``pg_options`` is otherwise: the options of an accelerator's engine, such as those of NCCL.

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

    def __init__(self, options: _DistributedBackendOptions, given: Any = None) -> None:
        """Takes ``given``: `GroupOptions`, or the options of an accelerator's engine."""
        own = given if isinstance(given, GroupOptions) else GroupOptions(engine=given)
        rank, size, name = options.group_rank, options.group_size, options.group_id
        super().__init__(rank, size)
        self._options, self._engine_options = options, own.engine
        self._engines = dist.ProcessGroup(options.store, rank, size)
        self._engines._set_group_name(name)
        self._lock = threading.Lock()
        self._made: set[str] = set()  # devices that have an engine
        self._gloo: dist.ProcessGroupGloo | None = None
        self._futures = Futures(f"alltoallv-futures-{name}")
        self._message_futures = Futures(f"alltoallv-messages-{name}")
        self._coalescing: list[TorchWork] | None = None
        self._splits = 0
        self._groups: Counter[str] = Counter()
        world = dist.group.WORLD
        met = (world.meeting, world._groups) if isinstance(world, EngineGroup) else (None, self._groups)
        is_default = world is None and name in _DEFAULT
        self.meeting: rendezvous.Meeting = engines.meet(options, *met, all_ranks=is_default)
        # A place of this group alone: the group's own store may hold values of an earlier group.
        self._place = dist.PrefixStore(f"alltoallv/{self.meeting.key}", options.store)
        seconds = options.timeout.total_seconds()
        gather = rendezvous.gatherer(self.meeting, options.store, rank, size, name, seconds)
        self.communicator = rendezvous.connect(self.meeting, gather, rank, size, name, seconds, all_ranks=is_default)
        self.communicator.order = own.order or self.communicator.order
        # Holds the group's name and timeout while there is no gloo.
        stand_in = engines.stand_in(options)
        self._cpu_options = stand_in.options  # all ways to set the group's timeout end here
        dist.ProcessGroup._register_backend(self, _CPU, dist.ProcessGroup.BackendType.UNDEFINED, stand_in)
        self._set_group_name(name)
        if world is None and all(peer["first"] for peer in self.meeting.who):
            try:
                # All ranks are here now.
                self._gloo = engines.gloo(options, self._place, self.timeout, self.communicator)
                self._engine("cpu")
            except BaseException:
                self.communicator.destroy()
                raise

    # The methods by which torch asks about the group.

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def get_group_store(self) -> dist.Store:
        return self._options.store

    @property
    def _device_types(self) -> list[torch.device]:  # type: ignore[override]
        usable = [
            device
            for device, asked in self._configured().items()
            if device == "cpu" or engines.available(device, engines.name_for(device, asked))
        ]
        return [torch.device(device) for device in usable] or [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        """Returns torch's engine for the device; for CPU tensors gloo, which carries what shared memory does not.

        Where no call of all ranks has needed gloo yet, what is returned has the group's name and timeout, and no calls.
        """
        if device.type != "cpu":
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
                name = "gloo" if device == "cpu" else engines.name_for(device, configured.get(device))
                if name == "gloo":
                    if self._gloo is None:
                        self._agree_on_gloo()  # a rank alone would wait for the others until the timeout
                        self._gloo = engines.gloo(self._options, self._place, self.timeout, self.communicator)
                    engine = self._gloo
                    self._cpu_options, kind = engine.options, dist.ProcessGroup.BackendType.GLOO
                    follow_anew(self)
                else:
                    engine, kind = engines.accelerator(device, name, self._options, self._place, self._engine_options)
                named = self.group_name
                for group in (self, self._engines):
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
        self.communicator.destroy()
        self._futures.close()
        self._message_futures.close()
        self._engines.shutdown()

    def abort(self) -> None:
        """Makes every rank's present and later collectives fail."""
        self.communicator.abort("the process group was aborted")
        self._futures.close()
        self._message_futures.close()
        self._engines.abort()

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

    def options_for(self, given: Any) -> GroupOptions:
        """Returns the options of a group of some of these ranks, from its ``pg_options``."""
        own = given if isinstance(given, GroupOptions) else GroupOptions(engine=given)
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
