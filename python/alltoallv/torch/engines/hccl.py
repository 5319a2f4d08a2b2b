"""Moves tensors on an NPU over the core's transport hccl; ranks agree in shared memory, or between hosts over TCP."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.collectives import FLOATS, ReductionPlan, barrier_plan
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import HcclError, InvalidParamError, InvalidTensorError
from alltoallv.quantization import requests
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.engines.device import Call, DeviceCall, DeviceMember
from alltoallv.torch.engines.npu import Streams, StreamWork, handle, npu, synchronizes


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
