"""Moves tensors on a GPU over a group's NCCL: nothing is packed, in the tensors' own dtype where NCCL has it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv._calls import collectives
from alltoallv._calls.counts import Layout, packed
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.engines.device import Call, DeviceMember
from alltoallv.torch.engines.reduction import as_bytes, in_bytes

FIRST = 8  # calls that check="first" compares
_FLIGHT_LENGTH = 64
_NATIVE = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}
_FLOATS = frozenset(getattr(torch, name) for name in collectives.FLOATS)
_INTEGERS = frozenset((torch.int8, torch.uint8, torch.int32, torch.int64))
_OWN = _INTEGERS | {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # dtypes of NCCL; others go as bytes


class NcclMember(DeviceMember):
    """This rank's membership in a ProcessGroup, over the group's own engine for a device, such as NCCL.

    Calls that are not compared are only launched and recorded: a mismatch shows as it does in torch.distributed, and a
    rank that fails its own checks ends the communicator for everybody.

    Args:
        group: The ProcessGroup; kept only weakly.
        control: The communicator of the same ranks in host memory; it ends with this one.
        check: ``"always"``, ``"first"`` (None also means that), ``"off"``.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str, control: Communicator, check: str | None = None) -> None:
        super().__init__(control, backend, group)
        self.check = check or "first"
        self._lock = threading.Lock()  # one call at a time
        self._seq = 0
        self._received = f"bytes_{backend}"
        self._stats = dict.fromkeys(("operators", "failed_operators", self._received), 0)
        self._flight: deque[dict[str, Any]] = deque(maxlen=_FLIGHT_LENGTH)

    def stats(self) -> dict[str, int]:
        return dict(self._stats)

    def flight_record(self) -> dict[str, Any]:
        operators = list(self._flight)
        own_record = {"rank": self.rank, "pid": os.getpid(), "left": not self.usable, "operators": operators}
        return {"domain": self.domain, "rank": self.rank, "size": self.size, "ranks": [own_record]}

    def _compares(self) -> bool:
        """Returns whether the ranks compare the call whose turn it is."""
        return self.check == "always" or (self.check == "first" and self._seq <= FIRST)

    def _run(
        self,
        call: Call,
        compare: Callable[[], Any],
        launch: Callable[[Any], tuple[Any, int]],
        learns: bool = False,
    ) -> Any:
        """Compares the call where that is due, and launches it with the result of the comparison.

        Args:
            launch: Returns the result, and the number of bytes that arrive.
        """
        with self._lock:
            self._seq += 1
            entry: dict[str, Any] = {"seq": self._seq, "operator": call.operator, "dtype": call.dtype}
            entry |= {"state": "failed", "start_ns": time.monotonic_ns(), "end_ns": 0}
            self._flight.append(entry)
            self._stats["failed_operators"] += 1
            compared = None
            if learns or self._compares() or not self.communicator.usable:  # the comparison then shows what ended it
                compared = self._compared(compare, learns)
            try:
                result, received = launch(compared)
            except BaseException as error:  # the peers have launched the call, or will
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                self.communicator.abort(f"it interrupted {call.operator}: {text}")
                raise
            self._stats["failed_operators"] -= 1
            self._stats["operators"] += 1
            self._stats[self._received] += received
            entry["state"], entry["end_ns"] = "done", time.monotonic_ns()
            return result

    def _compared(self, compare: Callable[[], Any], learns: bool) -> Any:
        """Returns what the comparison says; a peer's mistake in another call counts as a call, and it is made anew."""
        while True:
            try:
                return compare()
            except AllToAllVError as error:
                if not getattr(error, "unmet", False):
                    raise
            self._seq += 1
            if not (learns or self._compares()):
                return None

    def fail(self, operator: str, error: BaseException) -> None:
        with self._lock:
            self._seq += 1
            self._stats["failed_operators"] += 1
            if self._compares():
                self.communicator.fail(operator, error)
            else:
                self.communicator.abort(f"{operator} failed on it: {error}")

    def _launch_exchange(self, call: Call, output: Tensor, input: Tensor, wait: bool) -> Any:
        plan = self._plan(call)

        def launch(compared: Any) -> tuple[Any, int]:
            if call.operator == "broadcast":
                tensor = self._flat(input if self.rank == call.root else output)
                work = dist.broadcast(tensor, group=self.group, group_src=call.root, async_op=not wait)
            else:
                work = self._move(call.operator, output, input, call.layout, wait)
            return work, sum(call.layout[2]) * input.itemsize

        return self._run(call, plan.compare, launch)

    def _launch_lists(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool) -> Any:
        plan = self._plan(call)

        def launch(compared: Any) -> tuple[Any, int]:
            work = self._exchange_views(list(map(self._flat, outputs)), list(map(self._flat, inputs)), wait)
            return work, sum(call.layout[2]) * inputs[0].itemsize

        return self._run(call, plan.compare, launch)

    def _launch_learning(self, call: Call, input: Tensor, wait: bool) -> tuple[tuple[Tensor, list[int]], Any]:
        plan = self._plan(call)

        def launch(recvs: list[int]) -> tuple[tuple[tuple[Tensor, list[int]], Any], int]:
            output = torch.empty(sum(recvs), dtype=input.dtype, device=input.device)
            work = self._move(call.operator, output, input, (*call.layout[:2], recvs, packed(recvs)), wait)
            return ((output, recvs), work), output.nbytes

        return self._run(call, plan.compare, launch, learns=True)

    def _launch_reduction(
        self, call: Call, output: Tensor, input: Tensor, op: str, counts: Sequence[int], wait: bool
    ) -> tuple[bool, Any]:
        kinds = _FLOATS if op == "avg" else _FLOATS | _INTEGERS
        native = not call.ordered and self.size > 1 and op in _NATIVE and input.dtype in kinds

        def launch(compared: Any) -> tuple[tuple[bool, Any], int]:
            if not native:
                return (False, None), 0
            reduce_op, options = getattr(dist.ReduceOp, _NATIVE[op]), {"group": self.group, "async_op": not wait}
            if call.operator == "all_reduce":
                output.copy_(input)
                work = dist.all_reduce(output, reduce_op, **options)
            elif len(set(counts)) == 1:
                work = dist.reduce_scatter_tensor(output, input, reduce_op, **options)
            else:
                work = dist.reduce_scatter(output, list(input.split(list(counts))), reduce_op, **options)
            return (True, work), output.nbytes

        return self._run(call, lambda: self._compare_reduction(call, op, counts), launch)

    def _compare_quantized(self, request: QuantizedReduction, feeds_back: bool, gather_feeds_back: bool) -> None:
        plan = quantized.plan(self.communicator, request)
        call = Call(request.operator, request.dtype)
        self._run(call, lambda: plan.compare(feeds_back, gather_feeds_back), lambda compared: (None, 0))

    def _flat(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous tensor as NCCL moves it: in its own dtype, which NCCL's checks and profilers show."""
        return tensor.detach().reshape(-1) if tensor.dtype in _OWN and self.backend == "nccl" else as_bytes(tensor)

    def _move(self, operator: str, output: Tensor, input: Tensor, layout: Layout, wait: bool) -> Any:
        """Exchanges regions of contiguous tensors; the layout is in elements."""
        out, x = self._flat(output), self._flat(input)
        sends, sdispls, recvs, rdispls = in_bytes(layout, input.itemsize // x.itemsize)
        if operator == "all_gather_into_tensor" and self.size > 1:
            return dist.all_gather_into_tensor(out, x, group=self.group, async_op=not wait)
        # Only this operator is packed on all ranks, and torch compares the names of what ranks launch.
        if operator == "all_to_all_single" and self.size > 1:
            return dist.all_to_all_single(out, x, recvs, sends, group=self.group, async_op=not wait)
        return self._exchange_views(regions(out, recvs, rdispls), regions(x, sends, sdispls), wait)

    def _exchange_views(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool) -> Any:
        if self.size == 1:
            outputs[0].copy_(inputs[0])
            return None
        return dist.all_to_all(list(outputs), list(inputs), group=self.group, async_op=not wait)


def regions(tensor: Tensor, counts: Sequence[int], displs: Sequence[int]) -> list[Tensor]:
    """Returns one view per peer."""
    return [tensor[displ : displ + count] for count, displ in zip(counts, displs, strict=True)]
