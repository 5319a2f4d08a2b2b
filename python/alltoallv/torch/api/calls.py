"""Collectives that have passed this rank's checks, in host memory or over a device's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Layout
from alltoallv._calls.guard import guard
from alltoallv._calls.reductions import ReductionPlan, check_reduction
from alltoallv._calls.regions import lowest
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.requests import Reduction
from alltoallv.torch.api import profile
from alltoallv.torch.api.group import AnyCommunicator as AnyCommunicator
from alltoallv.torch.api.tensors import core_name, empty, from_block, region
from alltoallv.torch.api.work import Work
from alltoallv.torch.engines.device import DeviceCall, DeviceMember

About = tuple[str, int, Sequence[int], Sequence[int]]  # operator, bytes per element, send and receive counts


@dataclass(slots=True)
class SharedCall:
    """Over shared memory: a plan, and the addresses of the tensors it runs on, the first two input and output."""

    communicator: Communicator
    plan: Any  # of the core, or a ReductionPlan
    about: About
    input: Any  # kept alive with the addresses
    output: Any
    addresses: Sequence[int | None]

    def run(self, timeout: float = -1.0) -> None:
        operator, itemsize, sends, recvs = self.about
        with profile.span(operator, self.communicator, itemsize, sends, recvs):
            self.plan.run(*self.addresses, timeout=timeout)

    def submit(self, timeout: float = -1.0) -> Work:
        operator, itemsize, sends, recvs = self.about
        with profile.span(operator, self.communicator, itemsize, sends, recvs, async_op=True):
            core = self.plan.submit(*self.addresses, timeout=timeout)
        return Work(self.communicator, core, (self.input, self.output), lambda: self.output)


@dataclass(slots=True)
class EngineCall:
    """Over the group's own engine, whose timeout counts."""

    communicator: DeviceMember
    call: DeviceCall
    about: About
    input: Any
    output: Any
    cuda: bool

    def run(self, timeout: float = -1.0) -> None:
        operator, itemsize, sends, recvs = self.about
        with profile.span(operator, self.communicator, itemsize, sends, recvs, cuda=self.cuda):
            self.call.run()

    def submit(self, timeout: float = -1.0) -> Work:
        operator, itemsize, sends, recvs = self.about
        with profile.span(operator, self.communicator, itemsize, sends, recvs, async_op=True, cuda=self.cuda):
            pending = self.call.submit()
        return Work(self.communicator, pending, (self.input, self.output), lambda: self.output)


Call = SharedCall | EngineCall


def exchange(
    comm: AnyCommunicator, operator: str, output: Tensor, input: Tensor, layout: Layout, row: int = 1, root: int = 0
) -> Call:
    """The exchange of a checked layout in elements; ``row`` elements make a unit of the caller's counts.

    ``root``: terms that the ranks must agree on, of quantized rows.
    """
    about = (operator, input.itemsize, layout[0], layout[2])
    check_place(comm, input, output)
    if isinstance(comm, Communicator):
        plan = _core.Plan(comm.core, operator, core_name(input.dtype), *layout, root, row)
        return SharedCall(comm, plan, about, input, output, (input.data_ptr(), output.data_ptr()))
    call = comm.exchange(operator, core_name(input.dtype), output, input, layout, row, root)
    return EngineCall(comm, call, about, input, output, input.is_cuda)


def exchange_lists(comm: AnyCommunicator, operator: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
    """``inputs[j]`` to rank j, ``outputs[j]`` from it, from and to where they lie."""
    check_place(comm, *inputs, *outputs)
    sends, recvs = [x.numel() for x in inputs], [out.numel() for out in outputs]
    about = (operator, inputs[0].itemsize, sends, recvs)
    dtype = core_name(inputs[0].dtype)
    if isinstance(comm, Communicator):
        source, sdispls = lowest([region(x) for x in inputs])
        target, rdispls = lowest([region(out) for out in outputs])
        plan = _core.Plan(comm.core, operator, dtype, sends, sdispls, recvs, rdispls, byte_displs=True)
        return SharedCall(comm, plan, about, inputs, list(outputs), (source, target))
    call = comm.exchange_lists(operator, dtype, outputs, inputs)
    return EngineCall(comm, call, about, inputs, list(outputs), inputs[0].is_cuda)


@dataclass(slots=True)
class Learning:
    """An exchange whose receive counts the peers tell."""

    communicator: AnyCommunicator
    call: _core.Plan | DeviceCall
    operator: str
    input: Tensor
    sends: list[int]

    def run(self, timeout: float = -1.0) -> tuple[Tensor, list[int]]:
        """The output, flat, and the receive counts."""
        with self._span(False):
            if isinstance(self.call, DeviceCall):
                output, counts = self.call.run()
                return output, counts
            return self._made(*self.call.run_learning(self.input.data_ptr(), timeout))

    def submit(self, finish: Callable[[Tensor, list[int]], Any], timeout: float = -1.0) -> Work:
        """``finish`` makes the handle's result of what `run` would return."""
        with self._span(True):
            if isinstance(self.call, DeviceCall):
                pending = self.call.submit()
                return Work(self.communicator, pending, (self.input,), lambda: finish(*pending.result))
            learning = self.call.submit_learning(self.input.data_ptr(), timeout)
        return Work(self.communicator, learning.work, (self.input,), lambda: finish(*self._made(*learning.take())))

    def _made(self, block: _core.Block, counts: list[int]) -> tuple[Tensor, list[int]]:
        return from_block(block, (sum(counts),), self.input.dtype), counts

    def _span(self, async_op: bool) -> Any:
        x = self.input
        return profile.span(self.operator, self.communicator, x.itemsize, self.sends, async_op=async_op, cuda=x.is_cuda)


def learn(
    comm: AnyCommunicator,
    operator: str,
    input: Tensor,
    sends: list[int],
    sdispls: list[int],
    row: int = 1,
    root: int = 0,
) -> Learning:
    """An exchange of checked send counts and displacements in elements; for ``root`` see `exchange`."""
    check_place(comm, input)
    dtype = core_name(input.dtype)
    call: _core.Plan | DeviceCall
    if isinstance(comm, Communicator):
        call = _core.Plan(comm.core, operator, dtype, sends, sdispls, [], [], root, row)
    else:
        call = comm.learn(operator, dtype, input, sends, sdispls, row, root)
    return Learning(comm, call, operator, input, sends)


def reduce(comm: AnyCommunicator, operator: str, output: Tensor, input: Tensor, op: str, counts: Sequence[int]) -> Call:
    """``"all_reduce"``, or ``"reduce_scatter"`` whose rank j keeps ``counts[j]`` elements."""
    with guard(comm, operator):
        dtype = core_name(input.dtype)
        check_place(comm, input, output)
        check_reduction(op, dtype)
    about = (operator, input.itemsize, counts, [output.numel()])
    if isinstance(comm, Communicator):
        plan = ReductionPlan(comm.core, operator, dtype, op, counts)
        return SharedCall(comm, plan, about, input, output, (input.data_ptr(), output.data_ptr()))
    call = comm.reduce(operator, dtype, output, input, op, counts)
    return EngineCall(comm, call, about, input, output, input.is_cuda)


def quantized_reduce(comm: AnyCommunicator, made: Reduction[Tensor]) -> Call:
    """A quantized reduction that has passed this rank's checks; to be called under the guard."""
    request, input, output = made.request, made.input, made.output
    errors = (made.error, made.gather_error)
    kept = (input, *(x for x in errors if x is not None))
    check_place(comm, input, output, *kept[1:])
    about = (request.operator, input.itemsize, request.counts, [output.numel()])
    if isinstance(comm, Communicator):
        addresses = [None if x is None else x.data_ptr() for x in (input, output, *errors)]
        return SharedCall(comm, quantized.plan(comm, request), about, kept, output, addresses)
    call = comm.quantized_reduce(request, output, input, *errors)
    return EngineCall(comm, call, about, kept, output, input.is_cuda)


def limit(comm: AnyCommunicator, timeout: float | None) -> float:
    """A call's timeout as `Call.run` takes it; only over shared memory a call has one of its own."""
    if timeout is None:  # where torch.compile looks at it, it must not see a call of the core
        return -1.0
    value = _core.read_timeout(timeout)
    if value > 0 and not isinstance(comm, Communicator):
        raise InvalidParamError(f"timeout is {timeout!r}, expected None: over {comm.backend} the group's counts")
    return value


def new_output(comm: AnyCommunicator, shape: int | Sequence[int], like: Tensor) -> Tensor:
    """Uninitialized, for an exchange of ``like``: in the arena where peers can write to it."""
    if isinstance(comm, Communicator):
        return empty(shape, like.dtype)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def check_place(comm: AnyCommunicator, first: Tensor, *others: Tensor) -> None:
    """Refuses tensors that the communicator cannot reach, and tensors on different devices."""
    if first.is_cpu:
        if not isinstance(comm, Communicator) and not comm.reaches_host:
            raise InvalidTensorError(
                f"the tensors lie on cpu, expected a device of {comm.backend}, the backend of domain '{comm.domain}'"
            )
        apart = next((other for other in others if not other.is_cpu), None)
    else:
        if isinstance(comm, Communicator):
            raise InvalidTensorError(
                f"the tensors lie on {first.device}, expected cpu: domain '{comm.domain}' is one of shared memory"
            )
        apart = next((other for other in others if other.device != first.device), None)
    if apart is not None:
        raise InvalidTensorError(f"tensors lie on {first.device} and {apart.device}, expected one device")
