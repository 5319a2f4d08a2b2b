"""Moves tensors on an NPU over the core's transport hccl; ranks agree in shared memory, or between hosts over TCP."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.collectives import FLOATS, ReductionPlan, barrier_plan
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, BackendUnavailableError, HcclError, InvalidParamError, InvalidTensorError
from alltoallv.quantization import requests
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.engines.device import Call, DeviceCall, DeviceMember

# torch_npu's streams: which one a call uses, what it waits for, and what must outlive it.


_POOL = 32
_left_out = frozenset(os.environ.get("ALLTOALLV_TEST_WITHOUT", "").split(","))


def synchronizes(name: str) -> bool:
    """Returns False for a synchronization that a test leaves out, to show that it is needed.

    Every one has a name of its own, and a scene in tests/npu/test_npu_synchronization.py that goes wrong without it.
    """
    return name not in _left_out


def leave_out_synchronizations(names: str) -> None:
    """Sets the synchronizations to leave out: names, separated by commas.

    A process begins with the names in ALLTOALLV_TEST_WITHOUT.
    """
    global _left_out
    _left_out = frozenset(names.split(","))
    _core.leave_out_synchronizations(names)


def npu() -> Any:
    """Returns the module ``torch.npu``, which torch_npu adds; raises BackendUnavailableError without it."""
    module = getattr(torch, "npu", None)
    if module is None:
        raise BackendUnavailableError("torch has no npu: pip install torch_npu, and import it before", id=5058)
    return module


class Streams:
    """Launches the calls of one communicator on streams; nothing here waits on the host.

    Args:
        core: The communicator; None for calls that are all waited for.
        shared: A stream on which others use the same HcclComm. All launches then go there, behind theirs; otherwise
            calls that are waited for go to the current stream, and the core orders the two.
    """

    def __init__(self, core: _core.Communicator | None = None, shared: Any = None) -> None:
        self._core, self._shared = core, shared

    def launch(
        self, device: torch.device, start: Callable[[int], Any], wait: bool, keep: Callable[[], Iterable[Tensor]]
    ) -> StreamWork | None:
        """Calls ``start`` with the raw handle of a stream, on which it launches.

        Args:
            device: The device of the tensors.
            start: Runs with that stream as torch's current one.
            wait: The current stream waits until the launch is done. Otherwise the returned work lets it wait.
            keep: The tensors in use: their memory is not handed out again before the launch is done.
        """
        with npu().device(device):
            current = npu().current_stream(device)
            if wait and self._shared is None:
                start(handle(current))
                return None
            side = self._shared or _side_of(self._core, device)
            if synchronizes("input-event"):
                side.wait_stream(current)
            with npu().stream(side):
                start(handle(side))
            work = StreamWork(self._core, device, side.record_event())
            if wait:
                work.wait()
                return None
            if synchronizes("record-stream"):
                for tensor in keep():
                    tensor.record_stream(side)
            return work


_sides: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by communicator


def _side_of(core: _core.Communicator | None, device: torch.device) -> Any:
    """Returns the communicator's own stream, which all who launch on it share.

    No other communicator has it, so that none waits for another's peers. But torch_npu hands out the same 32 streams of
    a device in turn: with more communicators than that, some share one.
    """
    if core not in _sides:
        for _ in range(_POOL):
            stream = npu().Stream(device)
            if stream not in _sides.values():
                break
        _sides[core] = stream
    return _sides[core]


_handles: dict[Any, int] = {}


def handle(stream: Any) -> int:
    """Returns the raw handle. Reading it passes torch_npu's queue of launches to the stream first."""
    if synchronizes("task-queue"):
        return int(stream.npu_stream)
    key = (stream.device_index, stream.stream_id)
    if key not in _handles:
        _handles[key] = int(stream.npu_stream)
    return _handles[key]


class StreamWork:
    """A launch on one of alltoallv's streams, with the methods that `DeviceWork` needs of an engine's work."""

    def __init__(self, core: _core.Communicator | None, device: torch.device, done: Any) -> None:
        self._core, self._device, self._done = core, device, done
        self._succeeded = False
        self._failure: AllToAllVError | None = None

    def wait(self) -> None:
        """Makes the current stream wait, not the host. Raises a failure that is known."""
        self.is_completed()
        if synchronizes("output-event"):
            npu().current_stream(self._device).wait_event(self._done)

    def is_completed(self) -> bool:
        """Returns whether the launch is done; raises its failure.

        An event is also complete after a launch that HCCL has given up.
        """
        if self._failure is not None:
            raise self._failure
        if not self._succeeded:
            done = self._query()
            if self._core is not None:
                self._core.check_enqueued(done)
            self._succeeded = done
        return self._succeeded

    def _query(self) -> bool:
        try:
            return bool(self._done.query())
        except RuntimeError as error:  # from torch_npu: it is unknown whether the data have come
            text = f"the NPU cannot report whether an asynchronous call is done: {_first_line(error)}"
        self._failure = HcclError(text, id=7007)
        if self._core is not None:
            self._core.abort(text)
        raise self._failure


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def native(operator: str, dtype: str, op: str, counts: Sequence[int]) -> bool:
    """Returns whether HCCL has this reduction on every family of devices."""
    if operator == "reduce_scatter" and len(set(counts)) > 1:
        return False
    if op == "avg" and dtype not in FLOATS:
        return False
    return _core.dtypes[dtype].hccl_reduces and not (op == "prod" and dtype in ("int16", "bfloat16"))


def handle_of(group: dist.ProcessGroup, device: torch.device) -> int:
    """Returns the HcclComm that torch_npu's ProcessGroupHCCL uses for this device; 0 if there is none."""
    try:
        backend = group._get_backend(torch.device("npu"))
    except RuntimeError:  # the group has no backend for npu
        return 0
    get = getattr(backend, "get_hccl_comm", None)
    if get is None:
        return 0
    with npu().device(device):
        return int(get(device.index or 0))  # it takes a device number, whatever its argument is called


def stream_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the stream on which torch_npu runs the group's own collectives; None if it is unknown."""
    get = getattr(group._get_backend(torch.device("npu")), "_get_stream_id", None)
    if get is None:
        return None
    with npu().device(device):
        current, number = npu().current_stream(device), get()
    if number < 0:
        return None
    return npu().Stream(stream_id=number, device_index=current.device_index, device_type=current.device_type)


class HcclMember(DeviceMember):
    """A `Communicator` over HCCL, which launches on torch's streams."""

    _streams: Streams

    def __init__(self, communicator: Communicator, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(communicator, "hccl", group)
        self._does: dict[str, bool] = {}  # by reduction, once it is known
        if group is None:
            self.name = communicator.name
            self._streams = Streams(communicator.core)
            end_before_torch_npu()

    @property
    def on_host(self) -> Communicator:
        control = self.communicator.core.control
        if control is None or control.backend != "shm":
            raise InvalidParamError(
                f"domain '{self.domain}' has no communicator in host memory, expected npu tensors", id=1437
            )
        return Communicator(control)

    def _launch_exchange(self, call: Call, output: Tensor, input: Tensor, wait: bool) -> StreamWork | None:
        plan = self._plan(call)

        def start(stream: int) -> None:
            plan.run(input.data_ptr(), output.data_ptr(), -1.0, stream)

        return self._streams.launch(input.device, start, wait, lambda: (output, input))

    def _launch_lists(
        self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool
    ) -> StreamWork | None:
        """Exchanges packed buffers: HCCL may register all of the memory between the first and the last region."""
        plan, recvs = self._plan(call), call.layout[2]
        source = torch.cat([x.reshape(-1) for x in inputs])

        def start(stream: int) -> None:
            target = torch.empty(sum(recvs), dtype=source.dtype, device=source.device)
            plan.run(source.data_ptr(), target.data_ptr(), -1.0, stream)
            for out, part in zip(outputs, target.split(recvs), strict=True):
                out.copy_(part.view_as(out))

        return self._streams.launch(inputs[0].device, start, wait, lambda: (*outputs, source))

    def _launch_learning(
        self, call: Call, input: Tensor, wait: bool
    ) -> tuple[tuple[Tensor, list[int]], StreamWork | None]:
        plan = self._plan(call)
        received: list[Any] = []
        current = npu().current_stream(input.device)

        def allocate(counts: Sequence[int]) -> int:
            # The caller's stream uses this memory to the end; memory of the launch stream is reused after any launch.
            with npu().stream(current) if synchronizes("learnt-memory") else contextlib.nullcontext():
                received[:] = [torch.empty(sum(counts), dtype=input.dtype, device=input.device), list(counts)]
            return received[0].data_ptr()

        def start(stream: int) -> None:
            plan.run_learning_into(input.data_ptr(), allocate, -1.0, stream)

        work = self._streams.launch(input.device, start, wait, lambda: (input, received[0]))
        return (received[0], received[1]), work

    def _launch_reduction(
        self, call: Call, output: Tensor, input: Tensor, op: str, counts: Sequence[int], wait: bool
    ) -> tuple[bool, StreamWork | None]:
        """See `DeviceMember`. Some CANN releases return success and do nothing; all ranks find that
        out at the first call.
        """
        core, operator, dtype = self.communicator.core, call.operator, call.dtype
        plan = ReductionPlan(core, operator, dtype, "sum" if op == "avg" else op, list(counts), call.shape)

        def start(stream: int) -> None:
            plan.run(input.data_ptr(), output.data_ptr(), -1.0, stream)
            if op == "avg":
                output.div_(self.size)

        does = not call.ordered and native(operator, dtype, op, counts) and self._does.get(operator, True)
        if not does or op == "avg":
            self._compare_reduction(call, op, counts)
        if not does:
            return False, None
        try:
            work = self._streams.launch(input.device, start, wait, lambda: (output, input))
        except HcclError:
            self._does[operator] = not core.stats()[f"{operator}_falls_back"]
            if self._does[operator]:
                raise
            return False, None
        self._does[operator] = True
        return True, work

    def _launch_quantized(
        self, request: QuantizedReduction, output: Tensor, input: Tensor, feedback: tuple[bool, bool]
    ) -> bool:
        """See `DeviceMember`: the kernel in Ascend C, by the rule `_core.kernels_rule`."""
        plan = requests.plan(self.communicator, request)
        shared: list[Tensor] = []  # scale and offset
        if request.scale is not None:
            offset = torch.tensor([request.offset], dtype=torch.float32, device="cpu")
            shared = [x.to(input.device) for x in (torch.from_numpy(request.scale), offset)]
        launched = False

        def start(stream: int) -> None:
            nonlocal launched
            scale, offset = [x.data_ptr() for x in shared] or [0, 0]
            launched = plan.launch(input.data_ptr(), output.data_ptr(), scale, offset, *feedback, stream)

        self._streams.launch(input.device, start, True, lambda: ())
        return launched

    def exchange_counted(
        self, input: Tensor, row: int, counts: Sequence[Tensor | None], outs: Sequence[Tensor]
    ) -> DeviceCall:
        """See `DeviceMember`: one kernel in Ascend C, or BackendUnavailableError on every rank."""
        rows = [x.numel() // max(row, 1) for x in (input, outs[0])]
        sends, sdispls, expected = [0 if x is None else x.data_ptr() for x in counts]
        target, received, status = [x.data_ptr() for x in outs]

        def launch(wait: bool) -> tuple[None, Any]:
            def start(stream: int) -> None:
                terms = self.communicator.core, str(input.dtype).removeprefix("torch."), row
                read = input.data_ptr(), rows[0], sends, sdispls
                written = target, rows[1], bool(expected), received, status
                _core.exchange_counted_on_device(*terms, *read, *written, stream)

            keep = input, *outs, *(x for x in counts if x is not None)
            return None, self._streams.launch(input.device, start, wait, lambda: keep)

        return self._later(input, "all_to_all_v", launch)


class HcclGroupMember(HcclMember):
    """A member of a ProcessGroup over its own HcclComm where torch_npu gives it, else over one of alltoallv's own.

    Args:
        group: The ProcessGroup; kept only weakly.
        control: The communicator of the same ranks in host memory; it ends with this one.
        check: See `DeviceMember`.
    """

    def __init__(self, group: dist.ProcessGroup, control: Communicator, timeout: float, check: str | None) -> None:
        super().__init__(control, group)  # until it is known which device this rank uses
        self._control, self._timeout, self.check = control, timeout, check or "first"
        self._device: int | None = None  # once HCCL has begun
        self._lock = threading.Lock()

    @property
    def on_host(self) -> Communicator:
        return self._control

    def _enter(self, device: torch.device, operator: str) -> None:
        """Begins HCCL at the first call, which is collective."""
        with self._lock:
            if not hasattr(self, "_streams"):
                barrier_plan(self._control).compare()  # another rank's refusal is announced before HCCL begins
                self._streams = self._begun(self.group, device)
        with guard(self, operator):
            if self.group not in dist.distributed_c10d._world.pg_map:
                raise InvalidParamError("the process group has been destroyed, expected one in use", id=1438)
            if (device.index or 0) != self._device:
                raise InvalidTensorError(
                    f"the tensors lie on {device}, expected npu:{self._device} as in the first call", id=2123
                )

    def _begun(self, group: dist.ProcessGroup, device: torch.device) -> Streams:
        options = _core.HcclOptions()
        options.rank, options.size, options.domain = self.rank, self.size, self.domain
        options.timeout, options.check = self._timeout, self.check
        options.device = self._device = device.index or 0
        options.comm = handle_of(group, device)
        if options.comm and synchronizes("owner-queue"):
            handle(npu().current_stream(device))  # torch_npu's queue comes before the core's self-check
        with npu().device(device):
            shared = stream_of(group, device) if options.comm else None
            core = _core.hccl_communicator(options, self._control.core)
        self.communicator = Communicator(core)
        _cores.add(core)
        end_before_torch_npu()
        return Streams(core, shared)


@lru_cache
def end_before_torch_npu() -> None:
    """Ends HCCL first at exit: torch_npu, imported before this is called, gives the devices back."""
    if synchronizes("end-first"):
        atexit.register(_end_all)


_cores: weakref.WeakSet[_core.Communicator] = weakref.WeakSet()  # of groups; the core itself knows the others


def _end_all() -> None:
    for core in list(_cores):
        core.destroy()
    _core.destroy_all()
