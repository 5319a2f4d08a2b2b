"""Moves tensors through host memory where devices have no engine, such as one GPU that several ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.collectives import ReductionPlan
from alltoallv.communicator import Communicator
from alltoallv.torch.engines.device import Call, DeviceMember


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
