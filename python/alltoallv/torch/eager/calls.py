"""Makes collectives that have passed this rank's checks, in host memory or over a device's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls import collectives
from alltoallv._calls.collectives import CheckedCall, ReductionPlan, check_reduction
from alltoallv._calls.counts import Layout, scaled, split_layout
from alltoallv._calls.exchanges import Swap
from alltoallv._calls.guard import Call, Pending
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError, InvalidTensorError
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.requests import Reduction
from alltoallv.torch.eager import profile
from alltoallv.torch.eager.group import AnyCommunicator as AnyCommunicator
from alltoallv.torch.eager.tensors import Copies, as_input, check_tensor, core_name, empty, from_block, region, wraps
from alltoallv.torch.eager.work import Work
from alltoallv.torch.engines.device import DeviceCall


@dataclass(slots=True)
class Operation:
    """Holds a collective that is ready to run or to submit; a device's engine has its own timeout.

    Attributes:
        like: A tensor with the elements that move.
        sends, recvs: Numbers of elements for and from every rank, for profilers.
        result: What the caller receives.
        keep: Tensors that must live as long as the call, which has their addresses.
        copies: Copies to outputs that are not contiguous, made when the call is done.
    """

    communicator: AnyCommunicator
    name: str
    call: Call
    like: Tensor
    sends: Sequence[int]
    recvs: Sequence[int]
    result: Any
    keep: Any = ()
    copies: Copies = field(default_factory=list)

    def run(self, timeout: float = -1.0) -> Any:
        """Runs the call; it returns when the result is there, or the current stream will wait for it."""
        with self._span():
            ended = self.call.run(timeout)
        self.finish()
        return ended

    def start(self, timeout: float = -1.0) -> Pending:
        """Begins the call; call `finish` when it is done."""
        with self._span(async_op=True):
            return self.call.submit(timeout)

    def submit(self, timeout: float = -1.0) -> Work:
        """Begins the call, and returns a handle whose wait finishes it."""
        return Work(self.communicator, self.start(timeout), (self,), self.finish)

    def finish(self) -> Any:
        """Copies to outputs that are not contiguous; returns the result."""
        for target, source in self.copies:
            target.detach().copy_(source)
        return self.result

    def giving(self, result: Sequence[Any], copies: Copies) -> Operation:
        """Describes what the caller gets, a list as in torch, after these copies.

        Raises:
            InvalidTensorError: torch would refuse a copy, when the peers have finished.
        """
        if any(torch._debug_has_internal_overlap(target) == 1 for target, _ in copies):
            raise InvalidTensorError("an output's elements share memory, as in expand(), expected a clone", 7, id=2107)
        self.result, self.copies = list(result), copies
        return self

    def _span(self, async_op: bool = False) -> Any:
        x = self.like
        arguments = self.name, self.communicator, x.itemsize, self.sends, self.recvs
        return profile.span(*arguments, async_op=async_op, cuda=x.is_cuda)


def exchange(
    comm: AnyCommunicator,
    operator: str,
    output: Tensor,
    input: Tensor,
    layout: Layout,
    row: int = 1,
    root: int = 0,
    terms: int = 0,
) -> Operation:
    """Returns the exchange of a checked layout in elements; ``row`` elements make a unit of the caller's counts.

    ``root``: the root of a broadcast; ``terms``: what ranks that send rows of bytes agree on besides.
    """
    check_place(comm, input, output)
    dtype = core_name(input.dtype)
    call: Call
    if isinstance(comm, Communicator):
        plan = _core.Plan(comm.core, operator, dtype, *layout, root, row, terms=terms)
        call = CheckedCall(plan, (input.data_ptr(), output.data_ptr()))
    else:
        call = comm.exchange(operator, dtype, output, input, layout, row, root, terms)
    return Operation(comm, operator, call, input, layout[0], layout[2], output, (input, output))


def exchange_dimensions(comm: AnyCommunicator, swap: Swap, input: Tensor, out: Tensor | None = None) -> Operation:
    """Returns an all_to_all_nd. A device's engine moves the parts one after the other, as copies."""
    check_tensor("input", input)
    x, operator = input.detach(), "all_to_all_nd"
    sends, _, recvs, _ = layout = swap.packed()
    check_place(comm, *([x] if out is None else [x, out]))
    if isinstance(comm, Communicator):
        if out is not None:
            x = as_input("input", input)
            _core.check_apart(region(out), region(x))
        out = new_output(comm, swap.shape_out, x) if out is None else out
        plain = not (x.is_neg() or x.is_conj() or wraps(x))
        plan = swap.plan(comm.core, core_name(x.dtype), x.stride()) if plain else None
        if plan is None:
            x = as_input("input", input)
            plan = swap.plan(comm.core, core_name(x.dtype))
        call = CheckedCall(plan, (x.data_ptr(), out.data_ptr()))
        return Operation(comm, operator, call, x, sends, recvs, out, (x, out))
    flat = torch.cat([part.reshape(-1) for part in x.split(list(swap.scatter_sizes), swap.scatter)])
    out = new_output(comm, swap.shape_out, x) if out is None else out
    came = new_output(comm, (sum(recvs),), x)
    operation = exchange(comm, operator, came, flat, layout, terms=swap.terms)
    parts = zip(out.split(list(swap.gather_sizes), swap.gather), came.split(recvs), swap.boxes()[1], strict=True)
    operation.copies = [(part, arrived.view(box)) for part, arrived, box in parts]
    operation.result = out
    return operation


def exchange_lists(
    comm: AnyCommunicator, operator: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], root: int = 0
) -> Operation:
    """Sends ``inputs[j]`` to rank j and receives ``outputs[j]`` from it, directly in their memory."""
    check_place(comm, *inputs, *outputs)
    sends, recvs = [x.numel() for x in inputs], [out.numel() for out in outputs]
    dtype = core_name(inputs[0].dtype)
    call: Call
    if isinstance(comm, Communicator):
        regions = list(map(region, outputs)), list(map(region, inputs))
        call = collectives.exchange_lists(comm, operator, dtype, *regions, root)
    else:
        call = comm.exchange_lists(operator, dtype, outputs, inputs)
    return Operation(comm, operator, call, inputs[0], sends, recvs, list(outputs), (inputs, outputs))


def exchange_counted(
    comm: AnyCommunicator, input: Tensor, row: int, counts: Sequence[Tensor | None], outs: list[Tensor]
) -> Operation:
    """Returns an exchange whose counts lie on the device; see `DeviceMember.exchange_counted`."""
    if isinstance(comm, Communicator):
        raise BackendUnavailableError(
            "all_to_all_v with a capacity needs npu tensors, expected input on an npu", id=5053
        )
    check_place(comm, input, *outs, *(x for x in counts if x is not None))
    call = comm.exchange_counted(input, row, counts, outs)
    return Operation(comm, "all_to_all_v", call, input, (), (), outs, (input, counts))


@dataclass(slots=True)
class CountedExchange:
    """Holds an exchange that gives its output and receive counts: those ``known``, or what the peers announce."""

    communicator: AnyCommunicator
    call: Any
    operator: str
    input: Tensor
    sends: list[int]
    known_result: tuple[Tensor, list[int]] | None = None

    def run(self, timeout: float = -1.0) -> tuple[Tensor, list[int]]:
        """Runs the exchange; returns the flat output and the receive counts."""
        with self._span(False):
            if self.known_result is not None:
                self.call.run(timeout)
                return self.known_result
            if isinstance(self.call, DeviceCall):
                output, counts = self.call.run()
                return output, counts
            return self._made(*self.call.run_learning(self.input.data_ptr(), timeout))

    def submit(self, finish: Callable[[Tensor, list[int]], Any], timeout: float = -1.0) -> Work:
        """Submits the exchange; ``finish`` makes the handle's result of what `run` would return."""
        with self._span(True):
            if (known_result := self.known_result) is not None:
                pending = self.call.submit(timeout)
                return Work(self.communicator, pending, (self.input, known_result), lambda: finish(*known_result))
            if isinstance(self.call, DeviceCall):
                pending = self.call.submit()
                return Work(self.communicator, pending, (self.input,), lambda: finish(*pending.result))
            learning = self.call.submit_learning(self.input.data_ptr(), timeout)
        return Work(self.communicator, learning.work, (self.input,), lambda: finish(*self._made(*learning.take())))

    def _made(self, block: _core.Block, counts: list[int]) -> tuple[Tensor, list[int]]:
        return from_block(block, (sum(counts),), self.input.dtype), counts

    def _span(self, async_op: bool) -> Any:
        x, recvs = self.input, None if self.known_result is None else self.known_result[1]
        arguments = self.operator, self.communicator, x.itemsize, self.sends, recvs
        return profile.span(*arguments, async_op=async_op, cuda=x.is_cuda)


def learn(
    comm: AnyCommunicator,
    operator: str,
    input: Tensor,
    sends: list[int],
    sdispls: list[int],
    row: int = 1,
    terms: int = 0,
) -> CountedExchange:
    """Returns an exchange of checked send counts and displacements in elements; for ``terms`` see `exchange`."""
    check_place(comm, input)
    dtype = core_name(input.dtype)
    call: _core.Plan | DeviceCall
    if isinstance(comm, Communicator):
        call = _core.Plan(comm.core, operator, dtype, sends, sdispls, [], [], 0, row, terms=terms)
    else:
        call = comm.learn(operator, dtype, input, sends, sdispls, row, terms)
    return CountedExchange(comm, call, operator, input, sends)


def exchange_rows(
    comm: AnyCommunicator, operator: str, rows: Tensor, sends: list[int], recvs: list[int] | None, terms: int = 0
) -> CountedExchange:
    """Returns the exchange of rows of bytes; None learns ``recvs``, and for ``terms`` see `exchange`."""
    stride, flat = rows.shape[1], rows.view(-1)
    layout = split_layout(sends, recvs or [], stride)
    if recvs is None:
        return learn(comm, operator, flat, *layout[:2], stride, terms)
    output = new_output(comm, sum(layout[2]), flat)
    operation = exchange(comm, operator, output, flat, layout, stride, terms=terms)
    return CountedExchange(comm, operation.call, operator, flat, layout[0], (output, layout[2]))


def reduce(
    comm: AnyCommunicator,
    operator: str,
    output: Tensor,
    input: Tensor,
    op: str,
    counts: Sequence[int],
    shape: Sequence[int] | None,
    order: str | None = None,
    leaves: int = 0,
) -> Operation:
    """Returns an ``"all_reduce"``, or a ``"reduce_scatter"`` whose rank j keeps ``counts[j]`` elements.

    Ranks that know the ``shape`` of their whole input compare it. In host memory ``order`` changes nothing: it is
    always that of the ranks. For ``leaves`` see `ReductionPlan`.
    """
    if input.is_complex() and not isinstance(comm, Communicator):  # engines reduce the parts
        input, output, counts = torch.view_as_real(input), torch.view_as_real(output), scaled(counts, 2)
    dtype = core_name(input.dtype)
    check_place(comm, input, output)
    check_reduction(op, dtype)
    call: Call
    if isinstance(comm, Communicator):
        plan = ReductionPlan(comm.core, operator, dtype, op, counts, shape, leaves=leaves)
        call = CheckedCall(plan, (input.data_ptr(), output.data_ptr()))
    else:
        call = comm.reduce(operator, dtype, output, input, op, counts, shape, order, leaves)
    return Operation(comm, operator, call, input, counts, [output.numel()], output, (input, output))


def quantized_reduce(comm: AnyCommunicator, reduction: Reduction[Tensor]) -> Operation:
    """Returns a quantized reduction that has passed this rank's checks; called under the guard."""
    request, input, output = reduction.request, reduction.input, reduction.output
    errors = (reduction.error, reduction.gather_error)
    kept = (input, *(x for x in (*errors, reduction.bounds) if x is not None))
    check_place(comm, input, output, *kept[1:])
    call: Call
    if isinstance(comm, Communicator):
        addresses = tuple(None if x is None else x.data_ptr() for x in (input, output, *errors))
        bounds = 0 if reduction.bounds is None else reduction.bounds.data_ptr()
        call = CheckedCall(quantized.plan(comm, request), (*addresses, bounds))
    else:
        call = comm.quantized_reduce(request, output, input, *errors, reduction.bounds)
    counts, result = (request.counts, [output.numel()]), reduction.result
    return Operation(comm, request.operator, call, input, *counts, result, (*kept, output))


def started(comm: Communicator, call: tuple[Any, Any, Any], input: Tensor) -> tuple[Tensor | None, Work]:
    """Returns the output, if it is known, and the handle of an asynchronous call that the core has begun."""
    output, pending, used = call
    if output is not None:
        return output, Work(comm, pending, (used, output), lambda: output)
    return None, Work(comm, pending.work, (used,), partial(pending.output, used))


def limit(comm: AnyCommunicator, timeout: float | None) -> float:
    """Returns a call's timeout as `Operation.run` takes it; only calls in host memory have one of their own."""
    if timeout is None:  # torch.compile must not see a call of the core here
        return -1.0
    value = _core.read_timeout(timeout)
    if value > 0 and not isinstance(comm, Communicator):
        raise InvalidParamError(
            f"timeout is {timeout!r}, expected None: over {comm.backend} the group's counts", id=1426
        )
    return value


def new_output(comm: AnyCommunicator, shape: int | Sequence[int], like: Tensor) -> Tensor:
    """Returns an uninitialized output for an exchange of ``like``, in the arena where peers can write to it."""
    if isinstance(comm, Communicator):
        return empty(shape, like.dtype)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def check_place(comm: AnyCommunicator, first: Tensor, *others: Tensor) -> None:
    """Raises InvalidTensorError for tensors on different devices, or that the communicator cannot reach."""
    if isinstance(comm, Communicator) and not first.is_cpu:
        raise InvalidTensorError(
            f"the tensors lie on {first.device}, expected cpu: domain '{comm.domain}' is one of shared memory", id=2108
        )
    if first.is_cpu and not (isinstance(comm, Communicator) or comm.reaches_host):
        raise InvalidTensorError(
            f"the tensors lie on cpu, expected a device of {comm.backend}, the backend of domain '{comm.domain}'",
            id=2109,
        )
    if first.is_cpu and all(other.is_cpu for other in others):
        return
    apart = next((other for other in others if other.device != first.device), None)
    if apart is not None:
        raise InvalidTensorError(f"tensors lie on {first.device} and {apart.device}, expected one device", id=2110)
