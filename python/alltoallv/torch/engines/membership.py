"""A rank's membership in a group over the group's own engine: agreement, order, failure, records."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, BackendUnavailableError, InvalidParamError, ValueOverflowError
from alltoallv.torch.engines.agreement import Agreement, Descriptor, announcement
from alltoallv.torch.engines.call_queue import CallQueue, QueuedCall
from alltoallv.torch.engines.calls import DeviceWork, Move, PendingResult
from alltoallv.torch.engines.channels import Channel, EngineChannel, StoreChannel
from alltoallv.torch.engines.movers import DeviceMover, HostMover, Mover, as_bytes
from alltoallv.torch.engines.rendezvous import GroupStore
from alltoallv.torch.engines.watch import Watch

FIRST = 8  # calls that check="first" compares
HOST_ENGINES = ("gloo", "mpi")
LARGE = 1 << 20  # bytes from which gloo moves a message by itself: below, the step costs more than it gains
_FLIGHT_LENGTH = 64
_EXIT_SECONDS = 2.0  # for calls that are pending when the process ends

_all: weakref.WeakSet[Membership] = weakref.WeakSet()
_numbers = itertools.count()
by_name: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class Membership:
    """This rank's membership in a ProcessGroup, over the group's own engine; made by `alltoallv.torch.from_group`.

    Collective calls are made by all ranks in the same order. What the ranks disagree about is an error on all of them,
    after which the communicator stays usable. A lost rank, a timeout and an abort end it for good.

    Args:
        group: Its ranks; kept only weakly.
        backend: ``"gloo"``: a gloo of its own over the group's store, so that its calls and the program's own never
            meet; ``"mpi"``: the group's; any other: the group's backend for tensors on a GPU.
        store: The communicator's part of the group's store; None if the group has none.
        who: What the ranks said of themselves.
        domain: Name in messages.
        timeout: Seconds that a rank waits for its peers.
        check: ``"always"``, ``"first"``, ``"off"``; None: as the engine does by default.
        warn_after: Seconds of waiting until a warning names the late ranks.
    """

    host_core = None  # its calls are not the core's

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        store: GroupStore | None,
        who: Sequence[dict[str, Any]],
        *,
        domain: str,
        timeout: float,
        check: str | None = None,
        warn_after: float = 10.0,
    ) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.domain, self.backend, self.timeout = domain, backend, timeout
        self.check = check or ("always" if backend in HOST_ENGINES else "first")
        self._group, self._store, self._pid = weakref.ref(group), store, os.getpid()
        self._watch = Watch(store, self.rank, domain, who, timeout, warn_after)
        self._engine = self._connect(group) if self.size > 1 else None
        if self._engine is not None and backend == "gloo":
            self._watch.on_poison = functools.partial(_leak, self._engine)
        self._mover: Mover
        self._channel: Channel
        if backend in HOST_ENGINES:
            large = LARGE if backend == "gloo" else None
            self._mover = HostMover(self._engine, self.rank, self.size, self._watch, large)
            self._channel = EngineChannel(self._engine, self.size, self._watch.work)
        else:
            if store is None:
                raise BackendUnavailableError(f"the group has no store, expected one for backend {backend!r}")
            self._channel = StoreChannel(store, self._watch.wait)
            self._mover = mover = self._device_mover(group)
            self._watch.on_poison = mover.abandon
        self._agreement = Agreement(self.rank, self.size, domain)
        self._queue = CallQueue(domain)
        self._seq = 0
        self._destroyed = False
        self._stats = dict.fromkeys(("operators", "failed_operators", "bytes_self", f"bytes_{backend}"), 0)
        self._flight: deque[dict[str, Any]] = deque(maxlen=_FLIGHT_LENGTH)
        self.name = f"{backend}:{domain}:{next(_numbers)}"  # of this object, for graphs that cannot hold it
        by_name[self.name] = self
        self._finalizer = weakref.finalize(self, _say_farewell, store, self._pid)
        self._finalizer.atexit = False  # `_settle_all` comes first
        _all.add(self)

    def _connect(self, group: dist.ProcessGroup) -> Any:
        if self.backend == "mpi":
            return group._get_backend(torch.device("cpu"))
        if self.backend != "gloo":
            return None
        if self._store is None:
            raise BackendUnavailableError("the group has no store, expected one for backend 'gloo'")
        own = dist.PrefixStore("gloo", self._store.store)
        try:
            # Its time is up after ours, so that a late rank meets our words and not a broken connection.
            return dist.ProcessGroupGloo(own, self.rank, self.size, timedelta(seconds=self.timeout + 60))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise BackendUnavailableError(
                f"gloo does not connect the ranks of domain '{self.domain}': {reason}; "
                "GLOO_SOCKET_IFNAME chooses the network interface"
            ) from error

    def _device_mover(self, group: dist.ProcessGroup) -> DeviceMover:
        if self.backend != "hccl":
            return DeviceMover(group, self.size)
        look = self._watch.look_for_losses
        from alltoallv.torch.engines.hccl import HcclMover  # torch_npu is there only where this is needed

        return HcclMover(group, self.rank, self.size, self._channel.gather, self.domain, self.timeout, look)

    # --- order and agreement ----------------------------------------------------------------------------------------

    def run(self, descriptor: Descriptor, move: Move) -> Any:
        self._check_usable()
        result, _ = self._queue.run(lambda: self._operate(descriptor, move, True))
        return result

    def submit(self, descriptor: Descriptor, move: Move, tensors: Sequence[Tensor]) -> PendingResult:
        self._check_usable()
        if isinstance(self._mover, DeviceMover):
            result, work = self._queue.run(lambda: self._operate(descriptor, move, False))
            return DeviceWork(work, result)
        device = next((x.device for x in tensors if x.device.type != "cpu"), None)
        ready = None if device is None else torch.cuda.current_stream(device).record_event()

        def call() -> Any:
            if ready is None:
                return self._operate(descriptor, move, True)[0]
            with torch.cuda.device(device):
                ready.synchronize()
                result, _ = self._operate(descriptor, move, True)
                torch.cuda.current_stream(device).synchronize()
                return result

        if self.backend == "gloo":
            return self._queue.submit(call)
        done = QueuedCall(lambda: self._queue.run(call))  # MPI's calls must keep the order of the program's own
        done.run()
        return done

    def _operate(self, descriptor: Descriptor, move: Move, wait: bool) -> tuple[Any, Any]:
        self._check_usable()
        self._seq += 1
        entry = self._record(descriptor)
        agreed = False
        try:
            self._watch.begin(self._seq, descriptor.operator)
            told = self._agree(descriptor)
            agreed = True
            outcome = move(told, wait)
        except AllToAllVError as error:
            self._stats["failed_operators"] += 1
            if agreed and not isinstance(error, ValueOverflowError):  # the peers move their data, or will
                self._watch.poison("lost", f"{descriptor.operator} failed on rank {self.rank}: {error}")
            raise
        except BaseException as error:
            self._stats["failed_operators"] += 1
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._watch.poison("aborted", f"rank {self.rank} broke off {descriptor.operator}: {text}")
            raise
        if descriptor.failure is not None:
            self._stats["failed_operators"] += 1
            return outcome
        self._stats["operators"] += 1
        entry["state"], entry["end_ns"] = "done", time.monotonic_ns()
        return outcome

    def _checks(self) -> bool:
        return self.check == "always" or (self.check == "first" and self._seq <= FIRST)

    def _agree(self, descriptor: Descriptor) -> list[int] | None:
        """Raises what the ranks disagree about; returns the receive counts if it has heard them."""
        if not self._checks():
            if descriptor.failure is not None:
                self._watch.poison("lost", f"{descriptor.operator} failed on rank {self.rank}: {descriptor.failure[2]}")
            return None
        row = self._agreement.row(self._seq, descriptor)
        told: list[int] | None
        if self.size == 1:
            rows, told, gather = row[None], list(descriptor.send_counts), _alone
        elif descriptor.failure is not None and isinstance(self._channel, StoreChannel):
            self._channel.announce(row, descriptor)
            return None
        else:
            rows, told, gather = *self._channel.rows(row, descriptor), self._channel.gather
        mixed = self.check == "always" and told is not None
        self._agreement.judge(self._seq, descriptor, rows, gather, mixed_learning=mixed)
        return told

    def _tell_counts(self, sends: list[int], device: torch.device) -> list[int]:
        told = torch.tensor(sends, dtype=torch.int64, device="cpu" if self._mover.blocks else device)
        heard = torch.empty_like(told)
        ones, places = [8] * self.size, [8 * j for j in range(self.size)]
        self._mover.exchange(as_bytes(heard), as_bytes(told), (ones, places, ones, places))
        counts: list[int] = heard.tolist()
        return counts

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise BackendUnavailableError(
                f"the communicator of domain '{self.domain}' was made before fork and belongs to the parent process; "
                "make a new one in the child"
            )
        if self._destroyed:
            raise InvalidParamError(
                f"the communicator of domain '{self.domain}' has been destroyed; make a new one", 28
            )

    # --- failure, life, records -------------------------------------------------------------------------------------

    def fail(self, operator: str, error: BaseException) -> None:
        """Uses up this rank's next operator with a failure, which every peer then raises too. On MPI it waits.

        Where the call is not checked, the peers cannot be told in turn: the communicator ends for all of them.
        """
        self._check_usable()
        descriptor = announcement(operator, self.size, error)

        def announce() -> None:
            with contextlib.suppress(AllToAllVError):  # its own error, or nobody is left to tell
                self._operate(descriptor, lambda told, wait: (None, None), True)

        if self.size > 1 and self.backend == "gloo":
            self._queue.submit(announce)
        else:
            self._queue.run(announce)

    def abort(self, reason: str = "abort() was called") -> None:
        """Makes every rank's present and later calls fail with `PeerLostError`. Callable from any thread."""
        if os.getpid() == self._pid and not self._destroyed:
            self._watch.poison("aborted", f"rank {self.rank} aborted: {reason}")

    def destroy(self) -> None:
        """Leaves the domain, after what is pending; a second call does nothing."""
        if os.getpid() == self._pid:
            self._queue.run(self._leave)

    def _leave(self) -> None:
        if not self._destroyed:
            self._destroyed = True
            self._queue.close()
            self._finalizer()
            self._watch.on_poison = _nothing
            if isinstance(self._mover, DeviceMover):
                self._mover.close()
            self._engine = self._mover = self._channel = None  # type: ignore[assignment]  # closes its connections

    def settle(self, seconds: float) -> None:
        """Before the process ends: what is pending gets a last chance, an engine that is stuck is left as it is."""
        if os.getpid() != self._pid or self._destroyed:
            return
        if self._queue.drain(seconds) and self.usable:
            self._leave()
        elif self._engine is not None:
            _leak(self._engine)

    @property
    def usable(self) -> bool:
        """False once destroyed or ended by a loss, a timeout or an abort, and in a forked child."""
        return os.getpid() == self._pid and not self._destroyed and not self._watch.poisoned

    @property
    def group(self) -> dist.ProcessGroup:
        """The ProcessGroup it was made for."""
        group = self._group()
        if group is None:
            raise InvalidParamError(f"the process group of domain '{self.domain}' is gone, expected one in use")
        return group

    @property
    def reaches_host(self) -> bool:
        """Whether it takes tensors in host memory."""
        return self.backend in HOST_ENGINES

    keep = Communicator.keep  # of the process, for all communicators

    def stats(self) -> dict[str, int]:
        """Counters: ``operators``, ``failed_operators``, and bytes received: ``bytes_<backend>``, ``bytes_self``."""
        return dict(self._stats)

    def _count(self, recvs: Sequence[int], itemsize: int) -> None:
        own = recvs[self.rank] * itemsize
        self._stats["bytes_self"] += own
        self._stats[f"bytes_{self.backend}"] += sum(recvs) * itemsize - own

    def flight_record(self) -> dict[str, Any]:
        """The last operators of this rank: sequence number, name, dtype, state, start and end in nanoseconds."""
        mine = {"rank": self.rank, "pid": self._pid, "left": self._destroyed, "operators": list(self._flight)}
        return {"domain": self.domain, "rank": self.rank, "size": self.size, "ranks": [mine]}

    def _record(self, descriptor: Descriptor) -> dict[str, Any]:
        entry = {
            "seq": self._seq,
            "operator": descriptor.operator,
            "dtype": descriptor.dtype,
            "state": "failed" if descriptor.failure else "running",
            "start_ns": time.monotonic_ns(),
            "end_ns": 0,
        }
        self._flight.append(entry)
        return entry

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        about = f"rank={self.rank}, size={self.size}, domain={self.domain!r}, backend={self.backend!r}"
        return f"{type(self).__name__}({about})"


def _nothing() -> None:
    pass


def _alone(tag: str, data: bytes) -> list[bytes]:
    return [data]


def _leak(engine: Any) -> None:
    """Keeps an engine for good: the destructor of one with a call under way would wait for that call."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


def _say_farewell(store: GroupStore | None, pid: int) -> None:
    if store is not None and os.getpid() == pid:
        with contextlib.suppress(AllToAllVError):  # the store has gone first
            store.post(f"left/{store.rank}", "")


def _settle_all() -> None:
    for communicator in list(_all):
        communicator.settle(_EXIT_SECONDS)


atexit.register(_settle_all)
