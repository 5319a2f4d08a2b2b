"""The backend ``alltoallv`` of torch.distributed, registered by ``import alltoallv.torch``.

    dist.init_process_group("alltoallv")                      # or "cpu:alltoallv", or "cpu:alltoallv,cuda:nccl"

It carries dense CPU tensors, over shared memory on a host and TCP between hosts, in every collective of
torch.distributed, send and recv with tags and from any source, the coalesced forms, and what is made of them: DDP,
FSDP2, functional collectives, object collectives, pipelines. Sparse tensors, and subclasses that stand for other
tensors, as DTensor does, are passed to gloo, after all ranks have agreed on that.
Tensors of accelerators go to the engine that the group's configuration names for them, NCCL and HCCL if it names none.

The core also checks calls here: ranks that disagree about operator, dtype or sizes all raise
`PeerMismatchError`, late and lost ranks are named, and `alltoallv.torch` functions called with such a group use the
same communicator.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C import _len_torch_dispatch_stack as active
from torch._C._distributed_c10d import AllgatherOptions, BarrierOptions, GatherOptions, _DistributedBackendOptions
from torch._C._distributed_c10d import Work as TorchWork
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, CommTimeoutError, InvalidParamError, InvalidTensorError
from alltoallv.torch.api import collectives as collectives  # declares them
from alltoallv.torch.api import reductions as reductions
from alltoallv.torch.api.p2p import prepare_recv, prepare_send
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import (
    COLLECTIVES,
    NO_PARAMETERS,
    REDUCTIONS,
    Collective,
    Method,
    Operation,
    Parameters,
)
from alltoallv.torch.eager.observers import hide
from alltoallv.torch.eager.tensors import MOVABLE, PLAIN, Copies, as_plain
from alltoallv.torch.engines.device import DeviceMember
from alltoallv.torch.process_group import functions, group
from alltoallv.torch.process_group.group import NAME, EngineGroup, device_kind
from alltoallv.torch.process_group.work import (
    BackendWork,
    CoalescedWork,
    Futures,
    MessageWork,
    WorkList,
    callbacks,
    in_turn,
)

__all__ = ["active", "dispatch"]


# Lets dispatch modes see the collectives of backend ``alltoallv``, as they see the collectives of other backends.
#
# The methods of a group that is written in Python are called without torch's dispatcher. While a mode is active they
# call methods of the group of torch's engines, which dispatch the operators (``c10d::``): first to a mode of ours,
# which names the group itself, then to those that were active, and at last to another mode of ours, which calls the
# group's methods.


# For each operator the group's method, and the class of its options, if it has any.
_METHODS = {
    "allreduce_": ("allreduce", c10d.AllreduceOptions),
    "allreduce_coalesced_": ("allreduce_coalesced", c10d.AllreduceCoalescedOptions),
    "broadcast_": ("broadcast", c10d.BroadcastOptions),
    "reduce_": ("reduce", c10d.ReduceOptions),
    "allgather_": ("allgather", c10d.AllgatherOptions),
    "_allgather_base_": ("_allgather_base", c10d.AllgatherOptions),
    "allgather_coalesced_": ("allgather_coalesced", c10d.AllgatherOptions),
    "allgather_into_tensor_coalesced_": ("allgather_into_tensor_coalesced", c10d.AllgatherOptions),
    "gather_": ("gather", c10d.GatherOptions),
    "scatter_": ("scatter", c10d.ScatterOptions),
    "reduce_scatter_": ("reduce_scatter", c10d.ReduceScatterOptions),
    "_reduce_scatter_base_": ("_reduce_scatter_base", c10d.ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", c10d.ReduceScatterOptions),
    "alltoall_": ("alltoall", c10d.AllToAllOptions),
    "alltoall_base_": ("alltoall_base", c10d.AllToAllOptions),
    "barrier": ("barrier", c10d.BarrierOptions),
    "send": ("send", None),
    "recv_": ("recv", None),
    "recv_any_source_": ("recv_anysource", None),
}
_OPTIONS = {"root_rank": "rootRank", "root_tensor": "rootTensor", "async_op": "asyncOp"}  # arguments, and their fields
_UNUSED = {"sparse_indices", "device_ids", "tensor"}  # `tensor`: what a barrier gives the dispatcher

_made = threading.local()  # the work of the operator that this thread dispatches
_ended = WorkList([])


def dispatch(group: EngineGroup, method: str, *arguments: Any) -> Any:
    """Calls a method of a group as an operator while a mode is `active`; returns the work."""
    _made.work = None
    arguments = tuple(
        x.tolist() if isinstance(x, torch.Tensor) and j > 1 else x for j, x in enumerate(arguments)
    )  # splits
    with _below_all(_Run()), _Of(group):
        work = getattr(group._engines, method)(*arguments)
    produced, _made.work = _made.work, None
    return work if produced is None else produced  # a mode may have kept the operator to itself


@contextlib.contextmanager
def _below_all(mode: TorchDispatchMode) -> Iterator[None]:
    """Puts a mode where operators come to it after all others, but for torch's own, such as FakeTensorMode."""
    others = [each for each in _get_current_dispatch_mode_stack() if getattr(each, "_mode_key", None) is None]
    for _ in others:
        _pop_mode()
    try:
        with mode:
            for each in others:
                _push_mode(each)
            try:
                yield
            finally:
                for _ in others:
                    _pop_mode()
    finally:
        for each in others:
            _push_mode(each)


class _Of(TorchDispatchMode):
    """Names the group itself in place of its engines'."""

    def __init__(self, group: EngineGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            index = _place(func._schema)
            args = (*args[:index], self._group.boxed(), *args[index + 1 :])
        return func(*args, **(kwargs or {}))


class _Run(TorchDispatchMode):
    """Calls the method of the group for which an operator stands, unless one of torch's own modes is to see it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        method, options = _METHODS.get(func._schema.name.removeprefix("c10d::"), ("", None))
        if method and not active():
            group = dist.ProcessGroup.unbox(args[_place(func._schema)])
            if isinstance(group, EngineGroup):
                return _run(group, func._schema, method, options, args)
        return func(*args, **(kwargs or {}))


def _run(group: EngineGroup, schema: Any, method: str, options: Any, args: tuple[Any, ...]) -> Any:
    """Returns what the operator returns."""
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    arguments = defaults | dict(zip(defaults, args, strict=False))
    opts: Any = None if options is None else options()
    own = []
    for name, value in arguments.items():
        if name == "process_group" or name in _UNUSED:
            continue
        if name == "reduce_op":
            opts.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(value.op()))
        elif name == "timeout":
            opts.timeout = timedelta(milliseconds=value)
        elif name not in _OPTIONS:
            own.append(value)
        elif hasattr(opts, _OPTIONS[name]):
            setattr(opts, _OPTIONS[name], value)
    work = getattr(group, method)(*own, *([] if opts is None else [opts]))
    _made.work = work = _ended if work is None else work  # it keeps the work, which the dispatcher would not
    return (args[0], work.boxed()) if len(schema.returns) > 1 else work.boxed()


def _place(schema: Any) -> int:
    return [argument.name for argument in schema.arguments].index("process_group")


Prepare = Callable[..., Operation]  # `prepare_send` or `prepare_recv`


_UNSET = timedelta(0)  # this timeout, or a smaller one, means the group's


class AllToAllVGroup(EngineGroup):
    """Runs a group's CPU collectives over its communicator; see the module. `_add` adds those that are declared."""

    def __init__(self, options: _DistributedBackendOptions, backend_options: Any = None) -> None:
        super().__init__(options, backend_options)
        # The tensors must live until the operator is done, even when nobody holds its work.
        self._pending: set[BackendWork] = set()

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> TorchWork:
        opts = opts or AllgatherOptions()

        def call(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> TorchWork | None:
            return self.allgather([list(outputs)], list(inputs), opts)

        def hand_over() -> TorchWork:
            return self._hand_over("allgather_coalesced", output_lists, input_list, opts)

        if active():
            return dispatch(self, "allgather_coalesced", output_lists, input_list, opts)
        return self._each(COLLECTIVES["all_gather"], output_lists, [input_list], call, hand_over)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork | None:
        """Gathers into one tensor of the root, which has the ranks' tensors one after another (torch 2.14)."""
        opts, lists = opts or GatherOptions(), []
        if self.rank() == opts.rootRank:
            shape = self.size(), input.numel()
            with guard(self.communicator, "gather"):
                if output.numel() != shape[0] * shape[1] or not output.is_contiguous():
                    raise InvalidTensorError(
                        f"gather_tensor has shape {tuple(output.shape)} and strides {output.stride()}, expected "
                        f"{shape[0]} times the {shape[1]} elements of tensor, contiguous",
                        9,
                        id=2125,
                    )
            lists = [[part.view(input.shape) for part in output.detach().view(shape)]]
        return self.gather(lists, [input], opts)  # type: ignore[attr-defined, no-any-return, unused-ignore]

    gather_into_tensor = gather_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        opts = opts or BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        device = opts.device.type if opts.device is not None else "cpu"
        if device == "cpu" and active():
            return dispatch(self, "barrier", opts)
        if device == "cpu":
            return self._run("barrier", COLLECTIVES["barrier"], [], [], opts, ())
        return self._kept(self._engine(device).barrier(opts))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Does a `barrier`. When ranks are late, the error begins as gloo's, on rank 0 with one or all of them."""
        opts = BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = max(timeout, timedelta(milliseconds=1))  # 0 would be the group's
        try:
            self.barrier(opts)
        except CommTimeoutError as error:
            late = re.findall(r"rank (\d+) \(", str(error))
            if self.rank() != 0:
                what = "but received errors while waiting for send/recv from rank 0"
                text = f"Rank {self.rank()} successfully reached monitoredBarrier, {what}"
            elif timeout is not None and timeout <= _UNSET:
                text = "Rank 0 timed out in monitoredBarrier"
            else:
                named = late if wait_all_ranks else late[:1]
                text = f"Rank{'s'[: len(named) > 1]} {', '.join(named)} failed to pass monitoredBarrier"
            raise CommTimeoutError(f"{text}: {error}") from error

    # Messages, which concern only two ranks.

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> TorchWork:
        return self._post("send", prepare_send, tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> TorchWork:
        return self._post("recv", prepare_recv, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> TorchWork:
        return self._post("recv_anysource", prepare_recv, tensors, None, tag)

    def _carried(self, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Returns the tensors as the communicator carries them, or None: every rank must answer alike."""
        for x in tensors:
            if not (x.is_cpu and type(x) in PLAIN and x.layout is torch.strided and x.dtype in MOVABLE):
                break
        else:
            return tensors
        plain = [*map(as_plain, tensors)]
        if any(carried is not x for carried, x in zip(plain, tensors, strict=True)):
            return self._carried(plain)
        return None

    def _run(
        self,
        method: str,
        row: Collective,
        outs: Sequence[Tensor] | None,
        ins: Sequence[Tensor] | None,
        opts: Any,
        arguments: tuple[Any, ...],
        parameters: Parameters = NO_PARAMETERS,
    ) -> TorchWork | None:
        """Runs a collective; if the communicator does not carry it, torch's ``method`` runs with ``arguments``.

        ``outs``, ``ins``: the tensors, None if there are not the tensors of a single collective. Without
        ``opts.asyncOp`` the call is done when this returns, and it returns None.
        """
        if outs is None or ins is None:
            return self._hand_over(method, *arguments, opts)
        if active():
            return dispatch(self, method, *arguments, opts)  # whose kernel comes here again
        if callbacks:
            in_turn()
        comm, timeout, async_op = self.communicator, opts.timeout, opts.asyncOp
        limit = (timeout if timeout > _UNSET else self._cpu_options._timeout).total_seconds()
        try:
            started, root_tensor = None, getattr(opts, "rootTensor", 0)
            if row.at_once is not None and root_tensor == 0:
                started = row.at_once(comm.core, outs, ins, parameters, limit, async_op)
            if started is not None:
                if not async_op:
                    return None
                result = started[0] if type(started[0]) is list else [started[0]]
                work = BackendWork(started[1], result, (outs, started[2]), self._pending, self._futures)
                return self._started(work)
            plain_outs, plain_ins = self._carried(outs), self._carried(ins)
            if plain_outs is None or plain_ins is None:
                member = self._adding_in_order(row, [*outs, *ins])
                if member is None:
                    return self._hand_over(method, *arguments, opts)
                with guard(member, row.operator):
                    operation = row.prepare(member, outs, ins, parameters)
                operation.run()  # on the current stream, which orders what comes after it
                return self._kept(WorkList([])) if async_op else None
            with guard(comm, row.operator):
                if root_tensor != 0:
                    raise InvalidParamError(
                        f"rootTensor is {root_tensor}, expected 0, the index of the only tensor", id=1444
                    )
                operation = row.prepare(comm, plain_outs, plain_ins, parameters)
        except (InvalidParamError, InvalidTensorError) as error:
            raise _named(error, row.operator, comm) from None
        if async_op:
            return self._started(self._begun(BackendWork, operation, limit, self._futures))
        operation.run(limit)
        return None

    def _adding_in_order(self, row: Collective, tensors: Sequence[Tensor]) -> DeviceMember | None:
        """Returns what reduces a device's tensors if this group is to add them in the order of ranks, which no engine
        does.
        """
        device = device_kind(tensors)
        if row.operator not in REDUCTIONS or device == "cpu" or not groups.adds_in_order(self, device):
            return None
        member = groups.resolve(self, device)
        return member if isinstance(member, DeviceMember) else None

    def _post(self, method: str, prepare: Prepare, tensors: list[Tensor], peer: int | None, tag: int) -> TorchWork:
        """Begins a message. Only this rank raises errors of its arguments."""
        if active():
            return dispatch(self, method, tensors, *([] if peer is None else [peer]), tag)
        carried = self._carried(tensors)
        if len(tensors) != 1 or carried is None:
            return self._engine_work(method, tensors, *([] if peer is None else [peer]), tag)
        comm = self.communicator
        try:
            operation = prepare(comm, carried[0], peer, tag, waits=False)
            work = self._begun(MessageWork, operation, self._limit(), self._message_futures)
        except (InvalidParamError, InvalidTensorError) as error:
            raise _named(error, method.removesuffix("_anysource"), comm) from None
        return self._started(work)

    def _begun(self, kind: type[BackendWork], operation: Operation, limit: float, futures: Futures) -> BackendWork:
        finish = operation.finish if operation.copies else None
        return kind(operation.start(limit), operation.result, operation.keep, self._pending, futures, finish)

    def _started(self, work: BackendWork) -> TorchWork:
        for other in tuple(self._pending):  # their works may never have been waited for
            if other.ended():
                self._pending.discard(other)
        self._pending.add(work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _hand_over(self, method: str, *args: Any) -> TorchWork:
        """Calls the base class's method, after all ranks have agreed that gloo does the call."""
        if device_kind(args) == "cpu":
            in_turn()
            self._agree_on_gloo()
        return super()._hand_over(method, *args)

    def _each(
        self,
        row: Collective,
        outs: Sequence[Sequence[Tensor]],
        ins: Sequence[Sequence[Tensor]],
        call: Callable[[Sequence[Tensor], Sequence[Tensor]], TorchWork | None],
        hand_over: Callable[[], TorchWork],
    ) -> TorchWork:
        """Makes a call for each tensor of the lists, or ``hand_over`` for all of them.

        The outputs of several calls are written once all have succeeded. Whatever fails, where and when, the calls take
        as many operators, so that the next ones of all ranks meet.
        """
        lists = [*outs, *ins]
        count, done, carried = max(map(len, lists)), 0, True
        begun: list[TorchWork] = []
        copies: Copies = []
        outer, self._coalescing = self._coalescing, None  # it gets the one work of all

        def space(out: Tensor) -> Tensor:
            if count == 1:
                return out
            like = torch.clone if row.updates else torch.empty_like
            copies.append((out, like(out.detach(), memory_format=torch.contiguous_format)))
            return copies[-1][1]

        try:
            if min(map(len, lists)) < count:
                raise InvalidParamError(f"the lists have {[*map(len, lists)]} tensors, expected equally many", id=1445)
            tensors = [x for each in lists for x in each]
            carried = self._carried(tensors) is not None or self._adding_in_order(row, tensors) is not None
            if not carried:
                done = 1  # by which the ranks agree
                begun.append(hand_over())
            for done, each in enumerate(zip(*lists, strict=True) if carried else (), 1):  # noqa: B007
                targets = [space(out) for out in each[: len(outs)]]
                if (work := call(targets, each[len(outs) :])) is not None:
                    begun.append(work)
        except Exception as error:
            for _ in range(done, count) if carried or isinstance(error, AllToAllVError) else ():
                with contextlib.suppress(AllToAllVError):
                    self.communicator.fail(row.operator, error)
            raise
        finally:
            self._coalescing = outer
        return self._kept(begun[0] if begun and not copies else CoalescedWork(begun, copies))


def _named(error: InvalidParamError | InvalidTensorError, name: str, comm: Communicator) -> AllToAllVError:
    """Returns the error with this rank's name, or a peer's error, which has its name."""
    if str(error).startswith("operator #"):
        return error
    return type(error)(f"{name} on rank {comm.rank}: {error}", error.code)


def _add(row: Collective, method: Method) -> None:
    """Gives the group the methods of a collective. What does not change from call to call is found here."""
    name, options, parameters, flat = method.names[0], method.options, method.parameters, method.flat
    outputs, inputs = _reader(row.outputs, flat), _reader(row.inputs, flat)
    tensors, of_torch = 2 if row.inputs else 1, getattr(dist.ProcessGroup, name)
    expected = tensors + method.arguments

    def call(self: AllToAllVGroup, *arguments: Any, **named: Any) -> TorchWork | None:
        if (
            not named
            and len(arguments) > expected
            and type(arguments[-1]) is options
            and (flat or type(arguments[0]) is list)
        ):
            own, opts = arguments[:-1], arguments[-1]  # as torch.distributed's functions call it
        else:
            own, opts = (arguments[:-1], arguments[-1]) if len(arguments) > expected else (arguments, named.get("opts"))
            opts = options() if opts is None else opts
            bare = not flat and (isinstance(own[0], Tensor) or isinstance(own[-1], Tensor)) if own else True
            if bare or not named.keys() <= {"opts"} or not hasattr(opts, "timeout"):
                return of_torch(
                    self, *arguments, **named
                )  # another way to write it, which torch translates to this one
        outs = [own[0]] if outputs is None else outputs(own[0])
        ins = [] if tensors == 1 else [own[1]] if inputs is None else inputs(own[1])
        return self._run(name, row, outs, ins, opts, own, parameters(opts, *own[tensors:]))

    def call_each(self: AllToAllVGroup, *arguments: Any, opts: Any = None) -> TorchWork:
        if len(arguments) > tensors:
            arguments, opts = arguments[:-1], arguments[-1]
        opts = opts or options()
        if active():
            return dispatch(self, method.coalesced[0], *arguments, opts)

        def single(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> TorchWork | None:
            return call(self, *(x if flat else [x] for x in (*outs, *ins)), opts=opts)

        return self._each(
            row, arguments[:1], arguments[1:], single, lambda: self._hand_over(method.coalesced[0], *arguments, opts)
        )

    for names, function in ((method.names, call), (method.coalesced, call_each)):
        for each in names:
            setattr(AllToAllVGroup, each, function)


def _reader(name: str, flat: bool) -> Callable[[Any], list[Tensor] | None] | None:
    """Returns what finds the tensors of one side in an argument; None: the argument is the one tensor.

    It returns None if the rank has tensors on several devices, which torch's engines take.
    """
    if name.endswith("_list"):  # without entries on ranks other than the root
        return (lambda argument: argument) if flat else lambda argument: _only(argument) if argument else []
    return None if flat else lambda argument: argument if len(argument) == 1 else None


def _only(lists: list[list[Tensor]]) -> list[Tensor] | None:
    return lists[0] if len(lists) == 1 else None


class _Devices(list[str]):
    """Lists the devices whose tensors a group carries, when a group is made: looking at import would fix them."""

    def __iter__(self) -> Iterator[str]:
        return iter(["cpu", *group.accelerators()])


def _register() -> None:
    for row in COLLECTIVES.values():
        if row.method is not None:
            _add(row, row.method)
    hide(AllToAllVGroup, EngineGroup, BackendWork, MessageWork, WorkList)
    dist.Backend.register_backend(NAME, AllToAllVGroup, extended_api=True, devices=["cpu"])
    dist.Backend.backend_capability[NAME] = _Devices()
    functions.install()


_register()
