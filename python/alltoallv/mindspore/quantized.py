"""Quantized collectives on MindSpore tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops

from alltoallv._calls.adapters import Adapter
from alltoallv.communicator import Communicator
from alltoallv.mindspore import device_quantized
from alltoallv.mindspore.adapter import ADAPTER, learnt, refuse_timeout
from alltoallv.mindspore.autograd import apply
from alltoallv.mindspore.device_codes import Codes
from alltoallv.mindspore.device_quantized import Moves, Rows
from alltoallv.mindspore.front_end import check_async, enter
from alltoallv.mindspore.tensors import in_queue, tracks, wants_gradient
from alltoallv.mindspore.work import CommHandle, Done
from alltoallv.quantization import requests
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.functions import Quantized
from alltoallv.quantization.host import ReductionCall, RowsCall
from alltoallv.quantization.requests import exclude, present


class _QueuedReduction(ReductionCall[Tensor]):
    """A quantized reduction that runs in MindSpore's queue; made under the guard."""

    def __init__(
        self, adapter: Adapter[Tensor], comm: Communicator, made: requests.Reduction[Tensor], timeout: float | None
    ) -> None:
        refuse_timeout(timeout)
        self.made, self.comm = made, comm
        if made.request.scale is None:
            Codes(made.request.quantization, 1)  # refuses formats

    def run(self) -> Tensor:
        made = self.made
        flat = device_quantized.reduce(self.comm, made.request, made.input, made.error, made.gather_error)
        made.output.copy_(flat.reshape(made.output.shape))
        return made.output

    def submit(self) -> tuple[Tensor, CommHandle]:
        out = self.run()
        return out, Done(out)


class _QueuedRows(RowsCall[Tensor]):
    """A quantized_all_to_all that runs in MindSpore's queue; made under the guard, which quantizes its rows."""

    def __init__(
        self, adapter: Adapter[Tensor], comm: Communicator, made: requests.Rows[Tensor], timeout: float | None
    ) -> None:
        refuse_timeout(timeout)
        self._adapter, self._comm, self.rows, self._timeout = adapter, comm, made, timeout
        self._tail = tuple(made.input.shape[1:])
        self._steps = Rows(Moves(comm, digest=made.digest()), made)
        self._pair = self._steps.encode(made.input)

    def run_counted(self) -> tuple[Tensor, list[int]]:
        recvs = self.rows.recvs
        if recvs is None:
            recvs = learnt(self._comm, self.rows.sends)
        return self._steps.exchange(self._pair, recvs).reshape(-1, *self._tail), recvs

    def submit(self) -> tuple[Tensor | None, CommHandle]:
        out = self.run()
        return None if self.rows.recvs is None else out, Done(out)


class _Quantized(Quantized[Tensor]):
    apply = staticmethod(apply)

    def reductions(self) -> type[ReductionCall[Tensor]]:
        return _QueuedReduction if in_queue() else ReductionCall

    def exchanges(self) -> type[RowsCall[Tensor]]:
        return _QueuedRows if in_queue() else RowsCall

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.matmul(x, weight.T)

    def join(self, parts: list[Tensor]) -> Tensor:
        return ops.cat(parts)

    def wants_grad(self, input: Tensor, **given: Any) -> bool:
        """False within a gradient function for a call that cannot have a gradient, unless its input needs one."""
        check_async(given["async_op"])
        if wants_gradient(input):
            exclude("input requires grad", **given)
        return tracks(input) and not present(given)


_functions = _Quantized(ADAPTER, enter)
quantized_all_reduce = _functions.quantized_all_reduce
quantized_reduce_scatter = _functions.quantized_reduce_scatter
quantized_all_to_all = _functions.quantized_all_to_all
quantized_linear_all_reduce = _functions.quantized_linear_all_reduce
