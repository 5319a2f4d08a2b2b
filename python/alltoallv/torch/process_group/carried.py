"""Runs what a group's communicator carries, and prepares calls that are passed to torch's engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork
from torch._C._distributed_c10d import _DistributedBackendOptions

from alltoallv import _core
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.eager.calls import Operation
from alltoallv.torch.eager.collectives import MOVABLE
from alltoallv.torch.eager.declaration import NO_PARAMETERS, Collective, Parameters
from alltoallv.torch.eager.tensors import PLAIN
from alltoallv.torch.process_group.group import EngineGroup, device_kind
from alltoallv.torch.process_group.work import BackendWork, Futures, MessageWork, WorkList, callbacks, in_turn

_UNSET = timedelta(0)  # this timeout, or a smaller one, means the group's


class BackendParamError(InvalidParamError, RuntimeError):
    """Reports an argument that the collective does not accept."""


class BackendTensorError(InvalidTensorError, RuntimeError):
    """Reports a tensor that the collective does not accept."""


class CarriedGroup(EngineGroup):
    """A group that runs collectives over its communicator."""

    def __init__(self, options: _DistributedBackendOptions, engine_options: Any = None) -> None:
        super().__init__(options, engine_options)
        # The tensors must live until the operator is done, even when nobody holds its work.
        self._pending: set[BackendWork] = set()

    def _carries(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the communicator carries these tensors: every rank must answer alike."""
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
        parameters: Parameters = NO_PARAMETERS,
    ) -> TorchWork | None:
        """Runs a collective; if the communicator does not carry it, torch's ``method`` runs with ``given``.

        ``outs``, ``ins``: the tensors, None if there are not those of a single collective. Without
        ``opts.asyncOp`` the call is done when this returns, and it returns None.
        """
        if outs is None or ins is None:
            return self._hand_over(method, *given, opts)
        if callbacks:
            in_turn()
        comm, timeout, async_op = self.communicator, opts.timeout, opts.asyncOp
        limit = timeout.total_seconds() if timeout > _UNSET else self._limit()
        try:
            made = row.at_once(comm.core, outs, ins, parameters, limit, async_op) if row.at_once is not None else None
            if made is not None:
                if not async_op:
                    return None
                work = BackendWork(made[1], [made[0]], (outs, ins), self._pending, self._futures)
                return self._started(work)
            if not (self._carries(outs) and self._carries(ins)):
                return self._hand_over(method, *given, opts)
            with guard(comm, row.operator):
                operation = row.prepare(comm, outs, ins, parameters)
        except (InvalidParamError, InvalidTensorError) as error:
            raise _as_torch(error, row.operator, comm) from None
        if async_op:
            return self._started(self._begun(BackendWork, operation, limit, self._futures))
        operation.run(limit)
        return None

    def _post(self, name: str, prepare: Callable[[Communicator], Operation]) -> TorchWork:
        """Begins a message. Only this rank raises errors of its arguments."""
        comm = self.communicator
        try:
            work = self._begun(MessageWork, prepare(comm), self._limit(), self._message_futures)
        except (InvalidParamError, InvalidTensorError) as error:
            raise _as_torch(error, name, comm) from None
        return self._started(work)

    def _begun(self, kind: type[BackendWork], operation: Operation, limit: float, futures: Futures) -> BackendWork:
        finish = operation.finish if operation.copies else None
        return kind(operation.start(limit), operation.result, operation.keep, self._pending, futures, finish)

    def _started(self, work: BackendWork) -> TorchWork:
        for other in tuple(self._pending):  # their works may never have been waited for
            if other.ended():
                self._pending.discard(other)
        self._pending.add(work)
        return self._kept(work)

    def _limit(self) -> float:
        seconds: float = self._cpu_options._timeout.total_seconds()
        return seconds

    def _hand_over(self, method: str, *args: Any) -> TorchWork:
        """Calls the base class's method, after all ranks have agreed that gloo does the call."""
        comm = self.communicator
        if device_kind(args) == "cpu":
            in_turn()
            none = [0] * comm.size
            _core.Plan(comm.core, "handed_to_gloo", "uint8", none, none, none, none).run(0, 0, self._limit())
        return super()._hand_over(method, *args)

    def _all(self, works: list[TorchWork | None]) -> TorchWork:
        begun = [work for work in works if work is not None]
        return begun[0] if len(begun) == 1 else WorkList(begun)


def _as_torch(error: InvalidParamError | InvalidTensorError, name: str, comm: Communicator) -> Exception:
    """Returns the error with this rank's name, as an error that is also torch's RuntimeError."""
    if str(error).startswith("operator #"):  # it is a peer's error, which has its name
        return error
    kind = BackendParamError if isinstance(error, InvalidParamError) else BackendTensorError
    return kind(f"{name} on rank {comm.rank}: {error}", error.code)
