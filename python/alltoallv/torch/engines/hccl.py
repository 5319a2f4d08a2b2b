"""Tensors on an NPU over the core's transport hccl.

Two ways lead here. A ProcessGroup gets a `TorchGroupCommunicator` with an `HcclMover`: the ranks agree through the
group's store. A `Communicator` over HCCL (``Communicator.from_env(backend="hccl")``) gets a `DeviceMember`: its ranks
agree over shared memory, or between hosts over TCP.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Layout, packed
from alltoallv._calls.reductions import FLOATS
from alltoallv.communicator import Communicator
from alltoallv.errors import HcclError, InvalidParamError, InvalidTensorError
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.engines.calls import DeviceWork
from alltoallv.torch.engines.movers import DeviceMover
from alltoallv.torch.engines.npu import Streams, StreamWork, handle, npu, synchronizes
from alltoallv.torch.engines.reduction import reduce_in_order
from alltoallv.torch.quantized.reduction import Wire, reduce_quantized


class Launches:
    """Collectives of one communicator of the core on torch's streams. ``shared``, ``wait``: see `Streams`."""

    def __init__(self, core: _core.Communicator, shared: Any = None) -> None:
        self.core = core
        self._streams = Streams(core, shared)
        self._does: dict[str, bool] = {}  # by reduction, once it is known

    def exchange(
        self,
        operator: str,
        dtype: str,
        output: Tensor,
        input: Tensor,
        layout: Layout,
        row: int,
        wait: bool,
        root: int = 0,
    ) -> StreamWork | None:
        plan = _core.Plan(self.core, operator, dtype, *layout, root, row)

        def start(stream: int) -> None:
            plan.run(input.data_ptr(), output.data_ptr(), -1.0, stream)

        return self._streams.launch(input.device, start, wait, lambda: (output, input))

    def exchange_lists(
        self, operator: str, dtype: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool
    ) -> StreamWork | None:
        """Through packed buffers: HCCL may register all of the memory between the first and the last region."""
        sends, recvs = [x.numel() for x in inputs], [out.numel() for out in outputs]
        plan = _core.Plan(self.core, operator, dtype, sends, packed(sends), recvs, packed(recvs))

        source = torch.cat([x.reshape(-1) for x in inputs])

        def start(stream: int) -> None:
            target = torch.empty(sum(recvs), dtype=source.dtype, device=source.device)
            plan.run(source.data_ptr(), target.data_ptr(), -1.0, stream)
            for out, part in zip(outputs, target.split(recvs), strict=True):
                out.copy_(part.view_as(out))

        return self._streams.launch(inputs[0].device, start, wait, lambda: (*outputs, source))

    def learn(
        self,
        operator: str,
        dtype: str,
        input: Tensor,
        sends: list[int],
        sdispls: list[int],
        row: int,
        wait: bool,
        root: int = 0,
    ) -> tuple[tuple[Tensor, list[int]], StreamWork | None]:
        plan = _core.Plan(self.core, operator, dtype, sends, sdispls, [], [], root, row)
        made: list[Any] = []
        current = npu().current_stream(input.device)

        def allocate(counts: Sequence[int]) -> int:
            # Whose memory it is to the end; what is the launches' own is handed out again behind any of them.
            with npu().stream(current) if synchronizes("learnt-memory") else contextlib.nullcontext():
                made[:] = [torch.empty(sum(counts), dtype=input.dtype, device=input.device), list(counts)]
            address: int = made[0].data_ptr()
            return address

        def start(stream: int) -> None:
            plan.run_learning_into(input.data_ptr(), allocate, -1.0, stream)

        work = self._streams.launch(input.device, start, wait, lambda: (input, made[0]))
        return (made[0], made[1]), work

    def reduce(
        self, operator: str, dtype: str, output: Tensor, input: Tensor, op: str, counts: Sequence[int], wait: bool
    ) -> tuple[bool, StreamWork | None]:
        """HCCL's own reduction, in its own order of additions; see `native`.

        Returns:
            Whether it does it: some CANN releases return success and do nothing, which all ranks find out at the first
            call. And the work.
        """

        def start(stream: int) -> None:
            native_op = "sum" if op == "avg" else op
            self.core.reduce(
                operator, dtype, native_op, input.data_ptr(), output.data_ptr(), list(counts), -1.0, stream
            )
            if op == "avg":
                output.div_(self.core.size)

        if not self._does.get(operator, True):
            return False, None
        try:
            work = self._streams.launch(input.device, start, wait, lambda: (output, input))
        except HcclError:
            self._does[operator] = not self.core.stats()[f"{operator}_falls_back"]
            if self._does[operator]:
                raise
            return False, None
        self._does[operator] = True
        return True, work


def native(operator: str, dtype: str, op: str, counts: Sequence[int]) -> bool:
    """Whether HCCL has this reduction on every family of devices."""
    if operator == "reduce_scatter" and len(set(counts)) > 1:
        return False
    if op == "avg" and dtype not in FLOATS:
        return False
    return _core.dtypes[dtype].hccl_reduces and not (op == "prod" and dtype in ("int16", "bfloat16"))


class HcclMover(DeviceMover):
    """Moves bytes for a ProcessGroup: over its own HcclComm where torch_npu gives it, else over one of ours.

    Args:
        share: Collective: every rank's bytes, of one length; carries rank 0's root info.
        domain, timeout: Of the communicator.
        look: Raises what has become of the peers; called while HCCL waits for them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        size: int,
        share: Callable[[str, bytes], list[bytes]],
        domain: str,
        timeout: float,
        look: Callable[[], None],
    ) -> None:
        super().__init__(group, size)
        self._rank, self._share, self._domain, self._timeout = rank, share, domain, timeout
        self._look = look
        self._launches: Launches | None = None
        self._device: int | None = None

    def close(self) -> None:
        if self._launches is not None:
            self._launches.core.destroy()

    def abandon(self) -> None:
        if self._launches is not None:
            self._launches.core.abort("the group's communicator has ended")

    def launches(self, device: torch.device) -> Launches:
        """Made at the first call, which is collective: only then is it known which device this rank uses."""
        group = self.group()
        if group not in dist.distributed_c10d._world.pg_map:
            raise InvalidParamError("the process group has been destroyed, expected one in use")
        if self._launches is None:
            options = _core.HcclOptions()
            options.rank, options.size, options.domain = self._rank, self._size, self._domain
            options.timeout, options.check = self._timeout, "off"  # the membership has compared the calls
            options.poll = self._look
            options.device = self._device = device.index or 0
            options.comm = handle_of(group, device)
            if options.comm and synchronizes("owner-queue"):
                handle(npu().current_stream(device))  # torch_npu's queue comes before the core's self-check
            with npu().device(device):
                if not options.comm and self._size > 1:
                    mine = _core.hccl_root_info(options.device) if self._rank == 0 else bytes(_core.root_info_bytes)
                    options.root_info = self._share("hccl", mine)[0]
                shared = stream_of(group, device) if options.comm else None
                self._launches = Launches(_core.hccl_communicator(options), shared)
            _cores.add(self._launches.core)
            end_before_torch_npu()
        if (device.index or 0) != self._device:
            raise InvalidTensorError(f"the tensors lie on {device}, expected npu:{self._device} as in the first call")
        return self._launches

    def exchange(self, output: Tensor, input: Tensor, layout: Layout, wait: bool = True) -> Any:
        return self.launches(input.device).exchange("all_to_all_v", "uint8", output, input, layout, 1, wait)

    def exchange_lists(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool = True) -> Any:
        return self.launches(inputs[0].device).exchange_lists("all_to_all", "uint8", outputs, inputs, wait)

    def gather(self, output: Tensor, input: Tensor, wait: bool = True) -> Any:
        layout = _core.Request.all_gather(self._size, input.shape).layout
        return self.launches(input.device).exchange("all_gather_into_tensor", "uint8", output, input, layout, 1, wait)

    def broadcast(self, tensor: Tensor, root: int, wait: bool = True) -> Any:
        n, places = tensor.numel(), [0] * self._size
        mine = self._rank == root
        sends = [n if mine and j != root else 0 for j in range(self._size)]
        recvs = [n if j == root and not mine else 0 for j in range(self._size)]
        nothing = tensor.new_empty(0)
        output, input = (nothing, tensor) if mine else (tensor, nothing)
        return self.launches(tensor.device).exchange(
            "broadcast", "uint8", output, input, (sends, places, recvs, places), 1, wait
        )

    def reduce(self, operator: str, output: Tensor, input: Tensor, op: str, counts: Sequence[int], wait: bool) -> Any:
        name = str(input.dtype).removeprefix("torch.")
        if native(operator, name, op, counts):
            done, work = self.launches(input.device).reduce(operator, name, output, input, op, counts, wait)
            if done:
                return work
        reduce_in_order(self, self._rank, operator, output, input, op, counts)
        return None

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        return True  # with `reduce_in_order` for what HCCL lacks


def handle_of(group: dist.ProcessGroup, device: torch.device) -> int:
    """The HcclComm that torch_npu's ProcessGroupHCCL uses for this device; 0 where there is none to be had."""
    try:
        backend = group._get_backend(torch.device("npu"))
    except RuntimeError:  # the group has no backend for npu
        return 0
    get = getattr(backend, "get_hccl_comm", None)
    if get is None:
        return 0
    with npu().device(device):
        return int(get(device.index or 0))  # it takes the number of a device, whatever its argument is called


def stream_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The stream on which torch_npu runs the group's own collectives; None where it does not tell."""
    get = getattr(group._get_backend(torch.device("npu")), "_get_stream_id", None)
    if get is None:
        return None
    with npu().device(device):
        current, number = npu().current_stream(device), get()
    if number < 0:
        return None
    return npu().Stream(stream_id=number, device_index=current.device_index, device_type=current.device_type)


class DeviceMember:
    """A `Communicator` over HCCL as the torch front end uses it; see `Member` for what the methods mean."""

    reaches_host = False
    host_core = None  # its calls are not the core's

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.domain, self.backend, self.name = communicator.domain, communicator.backend, communicator.name
        self.fail, self.keep, self.abort = communicator.fail, communicator.keep, communicator.abort
        self.stats, self.flight_record, self.destroy = (
            communicator.stats,
            communicator.flight_record,
            communicator.destroy,
        )
        self._launches = Launches(communicator.core)
        end_before_torch_npu()

    @property
    def usable(self) -> bool:
        return self.communicator.usable

    @cached_property
    def on_host(self) -> Communicator:
        """The communicator of the same ranks for tensors in host memory."""
        control = self.communicator.core.control
        if control is None or control.backend != "shm":
            raise InvalidParamError(f"domain '{self.domain}' has no communicator in host memory, expected npu tensors")
        return Communicator(control)

    def exchange(
        self, operator: str, dtype: str, output: Tensor, input: Tensor, layout: Layout, row: int = 1, root: int = 0
    ) -> DeviceCall:
        return DeviceCall(
            lambda wait: (None, self._launches.exchange(operator, dtype, output, input, layout, row, wait, root))
        )

    def exchange_lists(
        self, operator: str, dtype: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> DeviceCall:
        return DeviceCall(lambda wait: (None, self._launches.exchange_lists(operator, dtype, outputs, inputs, wait)))

    def learn(
        self,
        operator: str,
        dtype: str,
        input: Tensor,
        sends: list[int],
        sdispls: list[int],
        row: int = 1,
        root: int = 0,
    ) -> DeviceCall:
        return DeviceCall(lambda wait: self._launches.learn(operator, dtype, input, sends, sdispls, row, wait, root))

    def reduce(
        self, operator: str, dtype: str, output: Tensor, input: Tensor, op: str, counts: Sequence[int]
    ) -> DeviceCall:
        def run(wait: bool) -> tuple[None, Any]:
            flat, x = output.view(-1), input.view(-1)
            if native(operator, dtype, op, counts):
                done, work = self._launches.reduce(operator, dtype, flat, x, op, counts, wait)
                if done:
                    return None, work
            reduce_in_order(_MemberMover(self, operator), self.rank, operator, flat, x, op, counts)
            return None, None

        return DeviceCall(run)

    def quantized_reduce(
        self,
        request: QuantizedReduction,
        output: Tensor,
        input: Tensor,
        error: Tensor | None = None,
        gather_error: Tensor | None = None,
    ) -> DeviceCall:
        """As that of `TorchGroupCommunicator`. Always on the current stream."""
        plan = quantized.plan(self.communicator, request)

        def run(wait: bool) -> tuple[None, None]:
            plan.compare(error is not None, gather_error is not None)
            flat = [None if x is None else x.detach().view(-1) for x in (output, input, error, gather_error)]
            wire = Wire(_MemberMover(self, request.operator))
            reduce_quantized(wire, self.rank, self.size, request, *flat)
            return None, None

        return DeviceCall(run)


class DeviceCall:
    """A collective ready to run, or to submit."""

    def __init__(self, run: Callable[[bool], tuple[Any, Any]]) -> None:
        self._run = run

    def run(self) -> Any:
        """Returns when the current stream will wait for the data; the host does not wait."""
        return self._run(True)[0]

    def submit(self) -> DeviceWork:
        result, work = self._run(False)
        return DeviceWork(work, result)


class _MemberMover(DeviceMover):
    """What `reduce_in_order` needs of a mover, under the reduction's name."""

    def __init__(self, member: DeviceMember, operator: str) -> None:
        self._member, self._operator = member, operator

    def exchange(self, output: Tensor, input: Tensor, layout: Layout, wait: bool = True) -> Any:
        return self._member.exchange(self._operator, "uint8", output, input, layout).run()

    def gather(self, output: Tensor, input: Tensor, wait: bool = True) -> Any:
        layout = _core.Request.all_gather(self._member.size, input.shape).layout
        return self._member.exchange("all_gather_into_tensor", "uint8", output, input, layout).run()


@lru_cache
def end_before_torch_npu() -> None:
    """At exit HCCL goes first: torch_npu, imported before this is called, gives the devices back."""
    if synchronizes("end-first"):
        atexit.register(_end_all)


_cores: weakref.WeakSet[_core.Communicator] = weakref.WeakSet()  # of groups; the core itself knows the others


def _end_all() -> None:
    for core in list(_cores):
        core.destroy()
    _core.destroy_all()
