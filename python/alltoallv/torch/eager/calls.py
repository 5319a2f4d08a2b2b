"""Makes collectives that have passed this rank's checks, in host memory or over a device's engine; the handles of those
that are asynchronous, and what is declared of each.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _profiler_enabled

from alltoallv import _core
from alltoallv._calls import collectives
from alltoallv._calls.collectives import CheckedCall, ReductionPlan, check_reduction
from alltoallv._calls.counts import Counts, Layout, scaled, split_layout
from alltoallv._calls.exchanges import Swap
from alltoallv._calls.guard import Call, Ended, Handle, Pending, raise_for
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError, InvalidTensorError
from alltoallv.launch import variables
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.requests import Reduction
from alltoallv.torch.eager import observers
from alltoallv.torch.eager.group import AnyCommunicator
from alltoallv.torch.eager.tensors import Copies, as_input, check_tensor, core_name, empty, from_block, region, wraps
from alltoallv.torch.engines.device import DeviceCall

Future: TypeAlias = torch.futures.Future[Any]
_LONG = 1e9  # seconds


class Work(Handle):
    """An operator under way, with the methods of ``torch.distributed.Work``.

    The tensors it uses stay alive until it is done, also when the handle is dropped.
    """

    _seen = staticmethod(_profiler_enabled)

    def _waiting(self) -> contextlib.AbstractContextManager[Any]:
        return observers.waiting()

    def _seconds(self, timeout: Any) -> float | None:
        if isinstance(timeout, timedelta):
            return timeout.total_seconds() or None  # torch's zero means no limit
        return super()._seconds(timeout)

    def is_success(self) -> bool:
        """Returns True once the operator has succeeded."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """Waits for the operator: its memory is the host's, which has no streams."""
        self.wait()

    def get_future(self) -> Future:
        """Returns a future of the output, completed by a thread that waits for the operator.

        It raises errors as RuntimeError, with their class and text in the message.
        """

        def result() -> Any:
            self.wait(_LONG)  # this thread has no stream of its own that anybody could use
            return self.result()

        outcome, future = promise()
        threading.Thread(target=settle, args=(outcome, result), name="alltoallv-future", daemon=True).start()
        return future


class Done(Ended, Work):
    """The handle of a call in a graph, which is done when it returns."""


def promise() -> tuple[Future, Future]:
    """Returns a future to `settle`, and the one for the caller, which then has the result or raises the error."""
    outcome: Future = torch.futures.Future()
    # torch's C++ would take a value of `set_exception` for a result; it recognizes an error that a callback raises.
    return outcome, outcome.then(_unwrap)


def settle(outcome: Future, result: Callable[[], Any]) -> None:
    """Completes a future of `promise` with what ``result()`` returns or raises."""
    try:
        outcome.set_result((result(), None))
    except Exception as error:
        outcome.set_result((None, error))


def _unwrap(outcome: Future) -> Any:
    result, error = outcome.value()
    if error is not None:
        raise error.with_traceback(None)
    return result


class Received(NamedTuple):
    """The result of an `all_to_all_v` with a capacity: three tensors on the device, filled by the device.

    Attributes:
        output: The input's dtype: ``capacity`` rows, or elements, of which the first are what was received, packed in
            the order of the ranks; zeros behind.
        recv_counts: int64, shape ``[W]``: how many came from each rank.
        status: int32; its column 0 is zeros, or describes what went wrong, the same on all ranks; `check` reads it.
    """

    output: Tensor
    recv_counts: Tensor
    status: Tensor

    def check(self) -> Received:
        """Waits for the device, and returns this result if the exchange was done; may be called when it suits.

        Raises:
            InvalidParamError: On every rank: one receives more than its capacity, or has counts that do not fit its
                input. Nothing was written anywhere, and the communicator stays usable.
            PeerMismatchError: The same for rows of different sizes, or counts that are not the ``recv_counts`` given.
            CommTimeoutError: A rank did not come in time (HCCL_EXEC_TIMEOUT); the group's kernels are of no more use.
        """
        raise_for(self.status.cpu().tolist())
        return self


def counts_on_device(name: str, counts: Counts, device: torch.device, size: int) -> Tensor:
    """Returns counts as int64 on the device; those that lie there are not read by the host."""
    tensor = counts if isinstance(counts, Tensor) else torch.tensor(list(counts), dtype=torch.int64, device="cpu")
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
        raise InvalidParamError(f"{name} has dtype {tensor.dtype}, expected integers", id=1432)
    if tuple(tensor.shape) != (size,):
        raise InvalidParamError(
            f"{name} has shape {tuple(tensor.shape)}, expected ({size},), one entry per rank", id=1433
        )
    return tensor.to(device, torch.int64).contiguous()


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
        return observers.span(*arguments, async_op=async_op, cuda=x.is_cuda)


def exchange(
    comm: AnyCommunicator,
    operator: str,
    output: Tensor,
    input: Tensor,
    layout: Layout,
    row: int = 1,
    root: int = 0,
    terms: int = 0,
    request: _core.Request | None = None,
) -> Operation:
    """Returns the exchange of a checked layout in elements; ``row`` elements make a unit of the caller's counts.

    ``root``: the root of a broadcast; ``terms``: what ranks that send rows of bytes agree on besides; ``request``: of
    this layout, by which ranks in host memory also compare counts of rows that have no elements.
    """
    check_place(comm, input, output)
    dtype = core_name(input.dtype)
    call: Call
    if isinstance(comm, Communicator):
        if request is not None and request.row == 0:
            plan = request.plan(comm.core, operator, dtype)
        else:
            plan = _core.Plan(comm.core, operator, dtype, *layout, root, max(row, 1), terms=terms)
        call = CheckedCall(plan, (input.data_ptr(), output.data_ptr()))
    else:
        call = comm.exchange(operator, dtype, output, input, layout, max(row, 1), root, terms)
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
        return observers.span(*arguments, async_op=async_op, cuda=x.is_cuda)


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


# Declares a collective as a row, from which follow what a graph has in its place (`torch.graph`), and the method of the
# backend (`torch.process_group.backend`). The function that users call stands beside it, in `torch.api`.


Tensors = Sequence[Tensor]


class Parameters(NamedTuple):
    """The arguments of a collective other than its tensors."""

    op: Any = dist.ReduceOp.SUM
    root: int = 0
    counts: Any = (None, None)  # a `Counts` each: split sizes of the output and the input; or an exchange's layout
    unit: Any = "row"  # the unit of the counts that the ranks compare; None: whichever fits
    order: str | None = None  # of a reduction: "rank", or None for the group's


NO_PARAMETERS = Parameters()
Prepare = Callable[[AnyCommunicator, Tensors, Tensors, Parameters], Operation]
# Of the core, outputs, inputs, parameters, timeout and async_op.
AtOnce = Callable[[_core.Communicator, Sequence[Any], Tensors, Parameters, float | None, bool], Any]


class Method(NamedTuple):
    """Describes how the process groups of torch.distributed name a collective and what they call it with.

    Attributes:
        names: The method's names: first the name in torch's engines, then names in newer versions of torch.
        options: The class of its last argument, from which the call's timeout comes.
        parameters: Makes the `Parameters`, of the options and the arguments that follow the tensors.
        arguments: How many arguments follow the tensors.
        flat: Whether tensors are given as such, and not in a list with one entry for each device of the rank.
        coalesced: The names of the method that makes several such calls.
    """

    names: tuple[str, ...]
    options: type
    parameters: Callable[..., Parameters] = lambda options: NO_PARAMETERS
    arguments: int = 0
    flat: bool = False
    coalesced: tuple[str, ...] = ()


COLLECTIVES: dict[str, Collective] = {}  # by name


@dataclass(slots=True, eq=False)
class Collective:
    """Declares a collective: it decorates the function that prepares it, and has its name, without an underscore.

    Attributes:
        prepare: Given communicator, outputs, inputs and terms, checks them and returns what is ready to start.
        outputs, inputs: The public function's arguments; lists if their names say so.
        operator: The name that the ranks compare and errors give; by default the function's name.
        updates: Whether the previous values of the outputs are read, or partly kept.
        strict: Whether the function demands outputs that are contiguous.
        at_once: Makes the call in the core if the core alone can check the tensors, and returns the output, or with
            async_op the pair of it and the pending call; else None.
        method: The form that process groups have, if torch.distributed has the collective.
    """

    prepare: Prepare
    outputs: str = ""
    inputs: str = ""
    operator: str = ""
    updates: bool = False
    strict: bool = False
    at_once: AtOnce | None = None
    method: Method | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.prepare.__name__.removeprefix("_")
        self.operator = self.operator or self.name
        COLLECTIVES[self.name] = self

    def result(self, outs: Tensors) -> Any:
        """Returns the result of a handle: the list of outputs, or the one output of a strict function."""
        return outs[0] if self.strict and not self.outputs.endswith("_list") else list(outs)


# The operations of reductions, in torch's words and in the core's.


REDUCTIONS = frozenset(("all_reduce", "reduce", "reduce_scatter"))  # operators
_NAMES = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
REDUCE_OPS = {getattr(dist.ReduceOp, name.upper()): "prod" if name == "product" else name for name in _NAMES}


def order_for(parameters: Parameters) -> str | None:
    """Returns the call's order of additions; raises InvalidParamError if it is none."""
    return variables.order("order", parameters.order)


def op_for(tensor: Tensor, op: Any) -> str:
    """Returns the core's name of a ``ReduceOp`` that fits the tensor; torch's own if the core has none.

    Raises:
        InvalidParamError: it is no ReduceOp, or does not fit complex tensors, whose parts the engines reduce.
    """
    try:
        kind = op.op if hasattr(op, "op") else dist.ReduceOp(op).op  # isinstance says yes to both
    except TypeError:
        raise InvalidParamError(f"op is {op!r}, expected a torch.distributed.ReduceOp", id=1434) from None
    name = str(REDUCE_OPS.get(kind, kind.name))
    if tensor.is_complex() and name not in ("sum", "avg"):
        raise InvalidParamError(f"op is {op!r}, expected SUM or AVG for dtype {tensor.dtype}", id=1435)
    return name
