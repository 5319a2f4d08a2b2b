"""The communicator over a group's own engine in torch.distributed: gloo, NCCL, MPI.

For tensors on a GPU, groups of MPI, and where gloo is asked for. Every call has a sequence number and a row that
the ranks compare before any data move (`alltoallv.torch.engines.agreement`):

* ``check="always"``, the default for tensors in host memory: the rows travel through the engine, each rank telling
  every other its row and what it sends it, in one step.
* ``check="first"``, the default on a GPU: rows of the first `FIRST` calls, on all ranks alike, go through the group's
  store, for which the host waits. Later calls are launched and recorded only: a breach shows as it does in
  torch.distributed, and a rank that fails its own checks ends the communicator for everybody.
* ``check="off"``: no call is compared.

Trouble goes through the group's store: who aborted, timed out or left, and who answers when somebody is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alltoallv._calls.counts import Layout, packed
from alltoallv.errors import InvalidParamError
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.engines.agreement import Descriptor
from alltoallv.torch.engines.calls import GroupCall as GroupCall
from alltoallv.torch.engines.membership import FIRST as FIRST
from alltoallv.torch.engines.membership import Membership
from alltoallv.torch.engines.membership import by_name as by_name
from alltoallv.torch.engines.movers import DeviceMover, HostMover, as_bytes, in_bytes
from alltoallv.torch.engines.reduction import check_reduction, reduce_in_order
from alltoallv.torch.quantized.reduction import HostWire, Wire, reduce_quantized


class TorchGroupCommunicator(Membership):
    """This rank's membership in a ProcessGroup, over the group's own engine; made by `alltoallv.torch.from_group`.

    Every method here takes contiguous tensors and returns a call, to run or to submit.
    """

    def exchange(
        self, operator: str, dtype: str, output: Tensor, input: Tensor, layout: Layout, row: int = 1, root: int = 0
    ) -> GroupCall:
        """The exchange of a layout in elements.

        Args:
            row: Elements per unit of the caller's counts, for messages.
            root: What ranks that exchange quantized rows must agree on beside the bytes of a row.
        """

        def move(told: list[int] | None, wait: bool) -> tuple[None, Any]:
            if operator == "all_gather_into_tensor":
                work = self._mover.gather(as_bytes(output), as_bytes(input), wait)
            else:
                work = self._mover.exchange(as_bytes(output), as_bytes(input), in_bytes(layout, input.itemsize), wait)
            self._count(layout[2], input.itemsize)
            return None, work

        return GroupCall(
            self, Descriptor(operator, dtype, layout[0], layout[2], count=row, root=root), move, output, input
        )

    def exchange_lists(
        self, operator: str, dtype: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> GroupCall:
        """``inputs[j]`` to rank j, ``outputs[j]`` from it."""
        sends, recvs = [x.numel() for x in inputs], [out.numel() for out in outputs]

        def move(told: list[int] | None, wait: bool) -> tuple[None, Any]:
            work = self._mover.exchange_lists([as_bytes(x) for x in outputs], [as_bytes(x) for x in inputs], wait)
            self._count(recvs, inputs[0].itemsize)
            return None, work

        return GroupCall(self, Descriptor(operator, dtype, sends, recvs), move, *outputs, *inputs)

    def learn(
        self,
        operator: str,
        dtype: str,
        input: Tensor,
        sends: list[int],
        sdispls: list[int],
        row: int = 1,
        root: int = 0,
    ) -> GroupCall:
        """An exchange whose receive counts the peers tell. Result: the flat output and the counts."""

        def move(told: list[int] | None, wait: bool) -> tuple[tuple[Tensor, list[int]], Any]:
            recvs = self._tell_counts(sends, input.device) if told is None else told
            output = torch.empty(sum(recvs), dtype=input.dtype, device=input.device)
            layout = in_bytes((sends, sdispls, recvs, packed(recvs)), input.itemsize)
            work = self._mover.exchange(as_bytes(output), as_bytes(input), layout, wait)
            self._count(recvs, input.itemsize)
            return (output, recvs), work

        return GroupCall(self, Descriptor(operator, dtype, sends, None, count=row, root=root), move, input)

    def reduce(
        self, operator: str, dtype: str, output: Tensor, input: Tensor, op: str, counts: Sequence[int]
    ) -> GroupCall:
        """``"all_reduce"``, or ``"reduce_scatter"`` whose rank j keeps ``counts[j]`` elements.

        In host memory terms are added in the order of ranks, with the same bits as over shared memory. On a GPU the
        order is the engine's; dtypes that it does not reduce are added in the order of ranks.

        Raises:
            InvalidParamError: ``op`` has no meaning for the dtype.
        """
        try:
            check_reduction(op, input.dtype, dtype)
        except InvalidParamError as error:
            self.fail(operator, error)
            raise
        descriptor = Descriptor(
            operator, dtype, list(counts), [counts[self.rank]] * self.size, reduce_op=op, count=sum(counts)
        )

        def move(told: list[int] | None, wait: bool) -> tuple[None, Any]:
            flat, x = output.view(-1), input.view(-1)
            work = None
            if isinstance(self._mover, DeviceMover) and self.size > 1 and self._mover.reduces(input.dtype, op):
                work = self._mover.reduce(operator, flat, x, op, counts, wait)
            else:
                reduce_in_order(self._mover, self.rank, operator, flat, x, op, counts)
            self._stats[f"bytes_{self.backend}"] += output.nbytes
            return None, work

        return GroupCall(self, descriptor, move, output, input)

    def quantized_reduce(
        self,
        request: QuantizedReduction,
        output: Tensor,
        input: Tensor,
        error: Tensor | None = None,
        gather_error: Tensor | None = None,
    ) -> GroupCall:
        """``request`` on contiguous tensors on one device; the output has been allocated.

        Args:
            output: ``request.out_dtype``; all elements, or this rank's part of a reduce_scatter.
            input: ``request.dtype``, all elements. May be the output of an all-reduce if the dtypes agree.
            error: Error feedback, or None: float32, one per element of the input; replaced.
            gather_error: Error feedback of the second quantization, or None: float32, one per element of
                ``request.quantization.part(request.count, size, rank)``; replaced.

        The call raises ValueOverflowError on every rank if a value does not fit and ``overflow`` is "raise".
        """
        counts = list(request.counts) if request.operator == "quantized_reduce_scatter" else [0] * self.size
        descriptor = Descriptor(
            request.operator,
            request.dtype,
            counts,
            [counts[self.rank]] * self.size,
            reduce_op=request.quantization.op,
            count=request.count,
            terms=request.terms(error is not None, gather_error is not None),
        )

        def move(told: list[int] | None, wait: bool) -> tuple[None, None]:
            flat = [None if x is None else x.detach().view(-1) for x in (output, input, error, gather_error)]
            reduce_quantized(self._wire(input), self.rank, self.size, request, *flat)
            self._stats[f"bytes_{self.backend}"] += output.nbytes
            return None, None

        tensors = [x for x in (output, input, error, gather_error) if x is not None]
        return GroupCall(self, descriptor, move, *tensors)

    def _wire(self, tensor: Tensor) -> Wire:
        if isinstance(self._mover, HostMover) and self.size > 1 and tensor.is_cpu:
            return HostWire(self._engine, self._watch.work, self.backend == "gloo")
        return Wire(self._mover)

    def broadcast(self, dtype: str, tensor: Tensor, root: int) -> GroupCall:
        """The tensor of rank ``root`` on all ranks."""
        mine = self.rank == root
        sends = [tensor.numel() if mine else 0] * self.size
        recvs = [tensor.numel() if j == root else 0 for j in range(self.size)]

        def move(told: list[int] | None, wait: bool) -> tuple[None, Any]:
            work = self._mover.broadcast(as_bytes(tensor), root, wait)
            if not mine:
                self._count(recvs, tensor.itemsize)
            return None, work

        return GroupCall(self, Descriptor("broadcast", dtype, sends, recvs, root=root), move, tensor)

    def barrier(self) -> GroupCall:
        """Returns when all ranks have come. The host waits, also where the engine is a GPU's."""
        nothing = [0] * self.size

        def move(told: list[int] | None, wait: bool) -> tuple[None, None]:
            if self.size > 1:
                # A second step: a rank that comes late must meet the timeout of the others here.
                self._channel.gather("barrier", b"here")
            return None, None

        return GroupCall(self, Descriptor("barrier", "uint8", nothing, nothing), move)
