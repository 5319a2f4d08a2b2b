"""Moves tensors through host memory where devices have no engine, such as one GPU that several ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Layout
from alltoallv.communicator import Communicator
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.engines.device import Call, DeviceMember, list_layout


class StagedMember(DeviceMember):
    """This rank's membership in a group: tensors are copied to host memory, which ``control`` moves, and back.

    The host waits for the copies, and for the peers unless the call is asynchronous.
    """

    def __init__(self, group: dist.ProcessGroup, control: Communicator) -> None:
        super().__init__(control, control.backend, group)
        self._launches = StagedLaunches(control)


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


class StagedLaunches:
    """Launches calls on host memory; see `Launches`."""

    def __init__(self, control: Communicator) -> None:
        self._core, self._control = control.core, control

    def exchange(self, call: Call, output: Tensor, input: Tensor, layout: Layout, wait: bool) -> StagedWork | None:
        plan = call.plan(self._core, layout)
        return self._run(plan.run, plan.submit, [output], [input], wait)

    def exchange_lists(
        self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool
    ) -> StagedWork | None:
        plan = call.plan(self._core, list_layout(outputs, inputs))
        return self._run(plan.run, plan.submit, outputs, inputs, wait)

    def learn(
        self, call: Call, input: Tensor, sends: list[int], sdispls: list[int], wait: bool
    ) -> tuple[tuple[Tensor, list[int]], None]:
        """Runs the exchange and always waits, because the counts must be known."""
        plan = call.plan(self._core, (sends, sdispls, [], []))
        source = _staged([input])
        made: list[Any] = []

        def allocate(counts: Sequence[int]) -> int:
            made[:] = [torch.empty(sum(counts), dtype=input.dtype, device="cpu"), list(counts)]
            return int(made[0].data_ptr())

        plan.run_learning_into(source.data_ptr(), allocate)
        return (made[0].to(input.device), made[1]), None

    def reduce(
        self, call: Call, output: Tensor, input: Tensor, op: str, counts: Sequence[int], wait: bool
    ) -> tuple[bool, StagedWork | None]:
        about = call.operator, call.dtype, op

        def run(source: int, target: int) -> None:
            self._core.reduce(*about, source, target, list(counts), shape=call.shape)

        def submit(source: int, target: int) -> _core.Work:
            return self._core.submit_reduce(*about, source, target, list(counts), shape=call.shape)

        return True, self._run(run, submit, [output], [input], wait)

    def compare(self, request: QuantizedReduction, feeds_back: bool, gather_feeds_back: bool) -> None:
        quantized.plan(self._control, request).compare(feeds_back, gather_feeds_back)

    def _run(
        self,
        run: Callable[[int, int], None],
        submit: Callable[[int, int], _core.Work],
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
            return StagedWork(submit(source.data_ptr(), target.data_ptr()), finish, (source, target))
        run(source.data_ptr(), target.data_ptr())
        finish()
        return None


def _staged(tensors: Sequence[Tensor]) -> Tensor:
    host = torch.empty(sum(x.numel() for x in tensors), dtype=tensors[0].dtype, device="cpu")
    for part, x in zip(host.split([x.numel() for x in tensors]), tensors, strict=True):
        part.copy_(x.detach().reshape(-1))
    return host
