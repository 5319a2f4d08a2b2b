"""A rank's membership in a group whose tensors lie on a device: the common part of HCCL and NCCL."""

from __future__ import annotations

import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.collectives import ReductionPlan
from alltoallv._calls.counts import Layout, packed
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, BackendUnavailableError, InvalidParamError
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.engines.reduction import Steps, reduce_in_order, reduce_quantized

_numbers = itertools.count()
before_launch: list[Callable[[str], None]] = []  # get the operator's name; the emulator of NPUs may refuse it
by_name: weakref.WeakValueDictionary[str, DeviceMember] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Call:
    """Describes a collective to the peers.

    Attributes:
        dtype: The core's name of the dtype.
        layout: Of an exchange, in elements; without receive counts they are learnt.
        row: Elements per unit of the caller's counts, for messages.
        root: The root of a broadcast.
        terms: Of rows of bytes: what ranks must agree on besides their length.
        shape: The shape of a reduction's input.
        ordered: Whether a reduction has an order that is not the engine's own: that of ranks, or that of leaves.
        leaves: How many vectors an all_reduce adds in a tree; 0: one of every rank.
    """

    operator: str
    dtype: str
    layout: Layout = ([], [], [], [])
    row: int = 1
    root: int = 0
    terms: int = 0
    shape: Sequence[int] | None = None
    ordered: bool = False
    leaves: int = 0


class DeviceMember(ABC):
    """This rank's membership in a group, for tensors on a device.

    Every collective takes contiguous tensors and returns a call, to run or to submit. Collective calls are made by all
    ranks in the same order; before they are launched the ranks compare what they ask for, over ``on_host``, as often
    as ``check`` says: ``"always"``, ``"first"`` (the first 8 calls), ``"off"``. A disagreement is an error on
    all of them, after which the communicator stays usable. A lost rank, a timeout and an abort end it for good.
    """

    host_core = None  # its calls are not for the core
    reaches_host = False  # whether it takes tensors in host memory
    keep = Communicator.keep  # this process keeps them, for all communicators

    def __init__(self, communicator: Communicator, backend: str, group: Any = None) -> None:
        """Takes ``communicator``, whose life and records this one shares, and ``group``, which is kept only weakly."""
        self.communicator = communicator
        self.rank, self.size, self.domain = communicator.rank, communicator.size, communicator.domain
        self.backend = backend
        self.order = communicator.order  # of reductions that do not name one
        self.name = f"{backend}:{self.domain}:{next(_numbers)}"  # stands for this object in graphs
        self._group = None if group is None else weakref.ref(group)
        by_name[self.name] = self

    # The ranks compare a call, then their engines launch it. With ``wait`` the current stream waits for the data, but
    # not the host. Without it, the returned work has ``wait`` and ``is_completed``.

    @abstractmethod
    def _launch_exchange(self, call: Call, output: Tensor, input: Tensor, wait: bool) -> Any: ...

    @abstractmethod
    def _launch_lists(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool) -> Any: ...

    @abstractmethod
    def _launch_learning(self, call: Call, input: Tensor, wait: bool) -> tuple[tuple[Tensor, list[int]], Any]:
        """Launches an exchange that learns its receive counts; returns the flat output, these counts, and the work."""

    @abstractmethod
    def _launch_reduction(
        self, call: Call, output: Tensor, input: Tensor, op: str, counts: Sequence[int], wait: bool
    ) -> tuple[bool, Any]:
        """Returns whether the engine has this reduction, in the order that the call asks for, and the work.

        If it does not, the ranks have only compared the call.
        """

    def _plan(self, call: Call) -> _core.Plan:
        core = self.communicator.core
        return _core.Plan(core, call.operator, call.dtype, *call.layout, call.root, call.row, terms=call.terms)

    def _compare_reduction(self, call: Call, op: str, counts: Sequence[int]) -> None:
        core = self.communicator.core
        terms: dict[str, Any] = {"ordered": call.ordered, "shape": call.shape, "leaves": call.leaves}
        core.reduce(call.operator, call.dtype, op, 0, 0, list(counts), moves=False, **terms)

    def _launch_quantized(
        self, request: QuantizedReduction, output: Tensor, input: Tensor, feedback: tuple[bool, bool]
    ) -> bool:
        """Compares a quantized reduction with the peers'; ``feedback``: with which states of error feedback.

        Returns whether the engine has a kernel for all of it, which it has launched on the current stream then.
        """
        quantized.plan(self.communicator, request).compare(*feedback)
        return False

    def exchange_counted(self, input: Tensor, row: int, counts: Sequence[Tensor | None], outs: Sequence[Tensor]) -> Any:
        """Returns the all_to_all_v of rows of ``row`` elements whose counts lie on the device; the host reads none.

        Args:
            counts: send_counts, sdispls or None, recv_counts or None: int64, one per rank.
            outs: What is filled: rows as they come, receive counts, status; see `alltoallv.torch.Received`.
        """
        raise BackendUnavailableError(
            f"all_to_all_v with a capacity needs HCCL, but the group is over {self.backend}", id=5056
        )

    def _enter(self, device: torch.device, operator: str) -> None:
        """Prepares for a launch on tensors there.

        A refusal of this rank is announced to the peers as one of ``operator``.
        """
        return

    @property
    def on_host(self) -> Communicator:
        """The communicator of the same ranks for tensors in host memory."""
        return self.communicator

    def fail(self, operator: str, error: BaseException) -> None:
        """Uses up this rank's next operator with a failure, which every peer then raises too.

        Where calls are not compared, the peers cannot be informed in turn: the communicator ends for all of them.
        """
        self.communicator.fail(operator, error)

    def _keeps_its_ranks(self, *arguments: Any) -> NoReturn:
        """Refuses what changes a group's ranks: the framework has made this one."""
        raise BackendUnavailableError(
            f"domain '{self.domain}' is a group of the framework over backend '{self.backend}', whose ranks stay what "
            "they are, expected a Communicator: from_group() of tensors in host memory returns one, or make the group "
            "again",
            id=5057,
        )

    split = shrink = rejoin = replaced = replacement = grow = newcomers = _keeps_its_ranks

    def abort(self, reason: str = "abort() was called") -> None:
        """Makes every rank's present and later calls fail with `PeerLostError`. Callable from any thread."""
        self.communicator.abort(reason)

    def destroy(self) -> None:
        """Leaves the domain, after what is pending; a second call does nothing."""
        self.communicator.destroy()

    @property
    def usable(self) -> bool:
        """False once destroyed or ended by a loss, a timeout or an abort, and in a forked child."""
        return self.communicator.usable

    def stats(self) -> dict[str, int]:
        """Returns the counters ``operators``, ``failed_operators``, and the bytes received: ``bytes_<backend>``."""
        return self.communicator.stats()

    def flight_record(self) -> dict[str, Any]:
        """Returns the last operators: sequence number, name, dtype, state, start and end in nanoseconds."""
        return self.communicator.flight_record()

    @property
    def group(self) -> Any:
        """The ProcessGroup that it was made for."""
        group = None if self._group is None else self._group()
        if group is None:
            raise InvalidParamError(
                f"the process group of domain '{self.domain}' is gone, expected one in use", id=1436
            )
        return group

    def exchange(
        self,
        operator: str,
        dtype: str,
        output: Tensor,
        input: Tensor,
        layout: Layout,
        row: int = 1,
        root: int = 0,
        terms: int = 0,
    ) -> DeviceCall:
        """Returns the exchange of a layout in elements; for the rest see `Call`."""
        call = Call(operator, dtype, layout, row, root, terms)
        return self._later(input, operator, lambda wait: (None, self._launch_exchange(call, output, input, wait)))

    def exchange_lists(
        self, operator: str, dtype: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> DeviceCall:
        """Returns the exchange that sends ``inputs[j]`` to rank j and receives ``outputs[j]`` from it."""
        sends, recvs = [x.numel() for x in inputs], [out.numel() for out in outputs]
        call = Call(operator, dtype, (sends, packed(sends), recvs, packed(recvs)))
        return self._later(inputs[0], operator, lambda wait: (None, self._launch_lists(call, outputs, inputs, wait)))

    def learn(
        self,
        operator: str,
        dtype: str,
        input: Tensor,
        sends: list[int],
        sdispls: list[int],
        row: int = 1,
        terms: int = 0,
    ) -> DeviceCall:
        """Returns an exchange whose receive counts the peers announce; its result is the flat output and the counts."""
        call = Call(operator, dtype, (sends, sdispls, [], []), row, terms=terms)
        return self._later(input, operator, lambda wait: self._launch_learning(call, input, wait))

    def reduce(
        self,
        operator: str,
        dtype: str,
        output: Tensor,
        input: Tensor,
        op: str,
        counts: Sequence[int],
        shape: Sequence[int] | None,
        order: str | None = None,
        leaves: int = 0,
    ) -> DeviceCall:
        """Returns an ``"all_reduce"``, or a ``"reduce_scatter"`` whose rank j keeps ``counts[j]`` elements.

        Without an ``order``, the call's or this member's, the engine chooses that of additions; what it does not reduce
        is added in rank order. For ``leaves`` see `ReductionPlan`.
        """
        ordered = leaves > 0 or (order or self.order) == "rank"
        call = Call(operator, dtype, shape=shape, ordered=ordered, leaves=leaves)

        def launch(wait: bool) -> tuple[None, Any]:
            flat, x = output.view(-1), input.view(-1)
            done, work = self._launch_reduction(call, flat, x, op, counts, wait)
            if not done:
                reduce_in_order(Steps(self, operator), flat, x, op, counts, leaves)
            return None, work

        return self._later(input, operator, launch)

    def quantized_reduce(
        self,
        request: QuantizedReduction,
        output: Tensor,
        input: Tensor,
        error: Tensor | None = None,
        gather_error: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> DeviceCall:
        """Returns the call that runs ``request`` on contiguous tensors of one device, always on the current stream.

        Args:
            output: ``request.out_dtype``, allocated; all elements, or this rank's part of a reduce_scatter.
            input: ``request.dtype``, all elements. May be the output of an all-reduce if the dtypes agree.
            error: Error feedback, or None: float32, one per element of the input; replaced.
            gather_error: Error feedback of the second quantization, or None: float32, one per element of
                ``request.quantization.part(request.count, size, rank)``; replaced.
            bounds: float32, one per group of the output, where ``request.bound`` is true.

        The call raises ValueOverflowError on every rank if a value does not fit and ``overflow`` is "raise".
        """

        def launch(wait: bool) -> tuple[None, None]:
            tensors = output, input, error, gather_error, bounds
            flat: list[Any] = [None if x is None else x.detach().view(-1) for x in tensors]
            fed_back = error is not None, gather_error is not None
            if not self._launch_quantized(request, flat[0], flat[1], fed_back):
                reduce_quantized(Steps(self, request.operator), request, *flat)
            return None, None

        return self._later(input, request.operator, launch)

    def _later(self, like: Tensor, operator: str, launch: Callable[[bool], tuple[Any, Any]]) -> DeviceCall:
        def run(wait: bool) -> tuple[Any, Any]:
            for check in before_launch:
                check(operator)
            self._enter(like.device, operator)
            return launch(wait)

        return DeviceCall(run, like.device.type)

    def __enter__(self) -> DeviceMember:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        fields = f"rank={self.rank}, size={self.size}, domain={self.domain!r}, backend={self.backend!r}"
        return f"{type(self).__name__}({fields})"


class DeviceCall:
    """A collective that is ready to run or to submit; the timeout is the communicator's. ``device``: the kind of it."""

    def __init__(self, run: Callable[[bool], tuple[Any, Any]], device: str) -> None:
        self._run, self._device = run, device

    def run(self, timeout: float = -1.0) -> Any:
        """Launches the call; returns when the current stream will wait for the data, while the host does not."""
        return self._run(True)[0]

    def submit(self, timeout: float = -1.0) -> DeviceWork:
        result, work = self._run(False)
        return DeviceWork(work, result, self._device)


class DeviceWork:
    """A launch whose result is known, but not yet complete."""

    def __init__(self, work: Any, result: Any, device: str) -> None:
        self._work, self.result = work, result
        self._is_captured = getattr(torch.get_device_module(device), "is_current_stream_capturing", bool)

    def wait(self, seconds: float = -1.0) -> bool:
        """Makes the current stream wait; with a number of seconds, the host waits."""
        if self._work is None:
            return True
        if seconds < 0:
            self._work.wait()
            return True
        end = time.monotonic() + seconds
        while not self._work.is_completed():
            if time.monotonic() >= end:
                return False
            time.sleep(0.0005)
        self._work.wait()
        return True

    def done(self) -> bool:
        """Returns True once it is complete or has failed; after a failure the next wait raises it.

        A device must not be asked while the current stream is captured, which would end the capture: it is False then.
        """
        try:
            return self._work is None or (not self._is_captured() and bool(self._work.is_completed()))
        except AllToAllVError:
            return True


# Moves tensors through host memory where devices have no engine, such as one GPU that several ranks share.


class StagedWork:
    """A call of the host's communicator, and the copies that follow it."""

    def __init__(self, pending: _core.Work, finish: Callable[[], None], keep: Any) -> None:
        self._pending, self._finish, self._keep = pending, finish, keep

    def wait(self) -> None:
        self._pending.wait()
        if self._keep is not None:
            self._finish()
            self._keep = None

    def is_completed(self) -> bool:
        return self._pending.done()


class StagedMember(DeviceMember):
    """This rank's membership in a group: tensors are copied to host memory, which ``control`` moves, and back.

    The host waits for the copies, and for the peers unless the call is asynchronous.
    """

    def __init__(self, group: dist.ProcessGroup, control: Communicator) -> None:
        super().__init__(control, control.backend, group)

    def _launch_exchange(self, call: Call, output: Tensor, input: Tensor, wait: bool) -> StagedWork | None:
        return self._run(self._plan(call), [output], [input], wait)

    def _launch_lists(
        self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool
    ) -> StagedWork | None:
        return self._run(self._plan(call), outputs, inputs, wait)

    def _launch_learning(self, call: Call, input: Tensor, wait: bool) -> tuple[tuple[Tensor, list[int]], None]:
        """Runs the exchange and always waits, because the counts must be known."""
        source = _staged([input])
        block, recvs = self._plan(call).run_learning(source.data_ptr())
        received = torch.frombuffer(block, dtype=input.dtype) if sum(recvs) else source[:0]
        return (received.to(input.device), recvs), None

    def _launch_reduction(
        self, call: Call, output: Tensor, input: Tensor, op: str, counts: Sequence[int], wait: bool
    ) -> tuple[bool, StagedWork | None]:
        core = self.communicator.core
        plan = ReductionPlan(core, call.operator, call.dtype, op, list(counts), call.shape, leaves=call.leaves)
        return True, self._run(plan, [output], [input], wait)

    def _run(
        self,
        plan: _core.Plan | ReductionPlan,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        wait: bool,
    ) -> StagedWork | None:
        """Runs on one piece of host memory for all inputs, and one for all outputs, which keeps uncovered elements."""
        source, target = _staged(inputs), _staged(outputs)

        def finish() -> None:
            for out, part in zip(outputs, target.split([out.numel() for out in outputs]), strict=True):
                out.detach().copy_(part.view_as(out))

        if not wait:
            return StagedWork(plan.submit(source.data_ptr(), target.data_ptr()), finish, (source, target))
        plan.run(source.data_ptr(), target.data_ptr())
        finish()
        return None


def _staged(tensors: Sequence[Tensor]) -> Tensor:
    host = torch.empty(sum(x.numel() for x in tensors), dtype=tensors[0].dtype, device="cpu")
    for part, x in zip(host.split([x.numel() for x in tensors]), tensors, strict=True):
        part.copy_(x.detach().reshape(-1))
    return host
