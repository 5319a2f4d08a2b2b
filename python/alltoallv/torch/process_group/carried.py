"""How a group of the backend runs what its communicator carries, and what it does before it hands anything over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork
from torch._C._distributed_c10d import _DistributedBackendOptions

from alltoallv import _core
from alltoallv._calls.guard import guard
from alltoallv._calls.protocol import Pending
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.api.calls import Operation
from alltoallv.torch.api.collectives import MOVABLE
from alltoallv.torch.api.declaration import NO_TERMS, Collective, Terms
from alltoallv.torch.api.tensors import PLAIN
from alltoallv.torch.process_group.group import EngineGroup, device_kind
from alltoallv.torch.process_group.work import BackendWork, Futures, MessageWork, WorkList, in_turn


class BackendParamError(InvalidParamError, RuntimeError):
    """An argument that the collective does not accept."""


class BackendTensorError(InvalidTensorError, RuntimeError):
    """A tensor that the collective does not accept."""


class CarriedGroup(EngineGroup):
    """A group with a way for collectives over its communicator."""

    def __init__(self, options: _DistributedBackendOptions, engine_options: Any = None) -> None:
        super().__init__(options, engine_options)
        self._pending: list[BackendWork] = []

    def _carries(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the communicator does: every rank must answer alike."""
        for x in tensors:  # noqa: SIM110 - a generator takes longer than the rest
            if not (x.is_cpu and type(x) in PLAIN and x.layout is torch.strided and x.dtype in MOVABLE):
                return False
        return True

    def _run(
        self,
        method: str,
        row: Collective,
        outs: Sequence[Tensor] | None,
        ins: Sequence[Tensor] | None,
        opts: Any,
        given: tuple[Any, ...],
        terms: Terms = NO_TERMS,
    ) -> TorchWork:
        """One collective; the engines' ``method`` with what was given where the communicator does not carry it.

        ``outs``, ``ins``: the tensors, None where there are others than a collective of one has.
        """
        if outs is None or ins is None or not (self._carries(outs) and self._carries(ins)):
            return self._hand_over(method, *given, opts)
        comm, name = self.communicator, row.operator
        in_turn()
        limit = opts.timeout.total_seconds()
        if limit <= 0:
            limit = self._limit()
        async_op = getattr(opts, "asyncOp", True)
        try:
            made = row.at_once(comm.core, outs, ins, terms, limit, async_op) if row.at_once is not None else None
            if made is None:
                with guard(comm, name):
                    operation = row.prepare(comm, outs, ins, terms)
        except (InvalidParamError, InvalidTensorError) as error:
            raise _as_torch(error, name, comm) from None
        if made is not None and async_op:
            return self._started(BackendWork((made[1],), [made[0]], None, (outs, ins), self._futures))
        if made is not None:
            return self._kept(BackendWork((), [made]))
        if async_op:
            return self._started(_work(BackendWork, operation, operation.start(limit), self._futures))
        operation.run(limit)
        return self._kept(BackendWork((), operation.result))

    def _post(self, name: str, prepare: Callable[[Communicator], Operation]) -> TorchWork:
        """Begins a message. Errors of its arguments are this rank's alone."""
        comm = self.communicator
        try:
            operation = prepare(comm)
            call = operation.start(self._limit())
        except (InvalidParamError, InvalidTensorError) as error:
            raise _as_torch(error, name, comm) from None
        return self._started(_work(MessageWork, operation, call, self._message_futures))

    def _started(self, work: BackendWork) -> TorchWork:
        with self._lock:  # the tensors must live until the operator is done, also when nobody holds the work
            self._pending = [other for other in self._pending if not other.ended()]
            self._pending.append(work)
        return self._kept(work)

    def _limit(self) -> float:
        return self._gloo.options._timeout.total_seconds()  # what all ways to set a group's timeout reach

    def _hand_over(self, method: str, *args: Any) -> TorchWork:
        """As the base class; all ranks agree first that gloo does it, and in what."""
        comm = self.communicator
        if device_kind(args) == "cpu":
            in_turn()
            none = [0] * comm.size
            _core.Plan(comm.core, "handed_to_gloo", "uint8", none, none, none, none).run(0, 0, self._limit())
        return super()._hand_over(method, *args)

    def _each(
        self, method: str, call: Callable[..., TorchWork], outs: list[Tensor], ins: list[Tensor], opts: Any
    ) -> TorchWork:
        """A coalesced form: one call for every pair."""
        if self._carries([*outs, *ins]):
            return self._all([call(*pair, opts) for pair in zip(outs, ins, strict=True)])
        return self._hand_over(method, outs, ins, opts)

    def _all(self, works: list[TorchWork]) -> TorchWork:
        return works[0] if len(works) == 1 else WorkList(works)


def _work(kind: type[BackendWork], operation: Operation, call: Pending, futures: Futures) -> BackendWork:
    finish = operation.finish if operation.copies else None
    return kind((call,), operation.result, finish, operation.keep, futures)


def _as_torch(error: InvalidParamError | InvalidTensorError, name: str, comm: Communicator) -> Exception:
    """Errors of the arguments name this rank, and are also the RuntimeError that torch's own engines raise."""
    if str(error).startswith("operator #"):  # a peer's, which it has named
        return error
    kind = BackendParamError if isinstance(error, InvalidParamError) else BackendTensorError
    return kind(f"{name} on rank {comm.rank}: {error}", error.code)
