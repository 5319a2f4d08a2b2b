"""Prepares quantized collectives over shared memory, for NumPy, MindSpore and Paddle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls.adapters import A, Adapter
from alltoallv._calls.counts import split_layout
from alltoallv._calls.guard import guard
from alltoallv._calls.linear import Map, Transfer, all_reduction, gathering, leaf_reduction
from alltoallv.communicator import Communicator
from alltoallv.errors import ValueOverflowError
from alltoallv.quantization import requests
from alltoallv.quantization.bounds import Bounded
from alltoallv.quantization.requests import Reduction, Rows
from alltoallv.quantization.spec import Quantization

Codes = npt.NDArray[np.uint8]
_address = _core.buffer_address


class ReductionCall(Generic[A]):
    """A quantized reduction that is ready to run; made under the guard."""

    def __init__(self, adapter: Adapter[A], comm: Communicator, reduction: Reduction[A], timeout: float | None) -> None:
        self.reduction, self.plan = reduction, requests.plan(comm, reduction.request)
        self._adapter, self.comm = adapter, comm
        places = [adapter.region(x)[0] for x in (reduction.input, reduction.output)]
        errors = [None if x is None else _address(x) for x in (reduction.error, reduction.gather_error)]
        bounds = 0 if reduction.bounds is None else adapter.region(reduction.bounds)[0]
        self._arguments: Any = (*places, *errors, bounds, _core.read_timeout(timeout))

    def run(self) -> Any:
        """Runs the reduction and returns the output, with its bound where the caller wants it."""
        self.plan.run(*self._arguments)
        return self.reduction.result

    def submit(self) -> tuple[Any, Any]:
        """Submits the reduction; returns what `run` returns, and the framework's handle."""
        reduction = self.reduction
        work = self.plan.submit(*self._arguments)
        return reduction.result, self._adapter.handle(self.comm, work, (reduction,), lambda: reduction.result)


class RowsCall(Generic[A]):
    """A quantized_all_to_all that is ready to run; made under the guard, which quantizes its rows."""

    def __init__(self, adapter: Adapter[A], comm: Communicator, rows: Rows[A], timeout: float | None) -> None:
        self._adapter, self._comm, self.rows = adapter, comm, rows
        self._timeout, self._limit = timeout, _core.read_timeout(timeout)
        quantization, length = rows.quantization, rows.length
        self._tail, count = tuple(rows.input.shape[1:]), rows.input.shape[0]
        self._stride = max(_core.quantized_row_bytes(length, quantization.format, quantization.group_size), 4)
        self._coded = memory.empty((count, self._stride), np.uint8)
        _core.quantize_rows(
            quantization.format,
            quantization.group_size,
            rows.dtype,
            adapter.region(rows.input)[0],
            count,
            length,
            _address(self._coded),
        )
        if rows.must_fit() and not self._decode(self._coded, self._values(count), quantization):
            raise ValueOverflowError(rows.overflow_text(), id=6003)
        layout = rows.layout(self._stride)
        arguments = "quantized_all_to_all", "uint8", *layout, 0, self._stride
        self._plan = _core.Plan(comm.core, *arguments, terms=rows.digest())
        received = 0 if rows.recvs is None else sum(rows.recvs)
        self._arrived = memory.empty((received, self._stride), np.uint8)
        self._output = None if rows.recvs is None else self._allocate(received)

    def run(self) -> Any:
        """Runs the exchange and returns the rows received, with their bound where the caller wants it."""
        return self.run_counted()[0]

    def run_counted(self) -> tuple[Any, list[int]]:
        """Runs the exchange; returns the rows received, and how many came from each rank."""
        source, recvs = _address(self._coded), self.rows.recvs
        if self._output is None or recvs is None:
            return self._learnt(*self._plan.run_learning(source, self._limit))
        self._plan.run(source, _address(self._arrived), self._limit)
        return self._filled(self._arrived, self._output), recvs

    def transfer(self, recvs: Sequence[int]) -> Transfer[A]:
        """Returns the exchange of these rows without quantization, whose transpose is the gradient."""
        row, sends = max(self.rows.length, 1), self.rows.sends
        inner, outer = ((sum(counts), *self._tail) for counts in (sends, recvs))
        layout = split_layout(sends, recvs, self.rows.length)
        return Transfer(self._adapter, self._comm, "all_to_all_v", inner, outer, layout, row)

    def returning(self, recvs: list[int], dtype: Any) -> Callable[[A], RowsCall[A]] | None:
        """Returns a function that makes the gradient's call: the rows go back as codes, to ``dtype``.

        It is None if gradients are not quantized.
        """
        if not self.rows.options.quantize_gradient:
            return None
        adapter, comm, sends, timeout = self._adapter, self._comm, self.rows.sends, self._timeout  # without the rows
        options = self.rows.options._replace(out_dtype=dtype)

        def call(grad: A) -> RowsCall[A]:
            with guard(comm, "quantized_all_to_all"):
                return RowsCall(adapter, comm, requests.rows(adapter, comm, grad, recvs, sends, options), timeout)

        return call

    def submit(self) -> tuple[Any, Any]:
        """Submits it; returns what `run` does (None where counts are learnt) and a handle, whose wait dequantizes."""
        source, handle = _address(self._coded), self._adapter.handle
        output = self._output
        if output is None:
            learning = self._plan.submit_learning(source, self._limit)
            return None, handle(self._comm, learning.work, (self,), lambda: self._learnt(*learning.take())[0])
        work = self._plan.submit(source, _address(self._arrived), self._limit)
        return output, handle(self._comm, work, (self,), lambda: self._filled(self._arrived, output))

    def _learnt(self, block: _core.Block, counts: Sequence[int]) -> tuple[Any, list[int]]:
        recvs = [count // self._stride for count in counts]
        coded = memory.from_block(block, (sum(recvs), self._stride), np.dtype(np.uint8))
        return self._filled(coded, self._allocate(len(coded))), recvs

    def _values(self, rows: int) -> A:
        return self._adapter.allocate((rows, *self._tail), self.rows.out_dtype, self.rows.input)

    def _allocate(self, rows: int) -> Any:
        spec, values = self.rows.quantization, self._values(rows)
        if not self.rows.bound:
            return values
        bounds = self._adapter.allocate((rows, spec.groups(self.rows.length)), "float32", self.rows.input)
        return Bounded(values, bounds, spec.format)

    def _filled(self, coded: Codes, out: Any) -> Any:
        spec = self.rows.received()
        if not isinstance(out, Bounded):
            self._decode(coded, out, spec)
            return out
        self._decode(coded, out.output, spec)
        _core.bound_rows(*self._about(coded), spec.overflow, self._adapter.region(out.bound)[0])
        return out

    def _decode(self, coded: Codes, out: A, quantization: Quantization) -> bool:
        address = self._adapter.region(out)[0]
        return _core.dequantize_rows(*self._about(coded), quantization.overflow, address)

    def _about(self, coded: Codes) -> tuple[str, int, str, int, int, int]:
        rows, spec = self.rows, self.rows.quantization
        return spec.format, spec.group_size, rows.out_dtype, _address(coded), len(coded), rows.length


class StraightReduction(Map[A]):
    """A reduction whose gradient is the sum's (or average's), straight through the rounding, not quantized."""

    def __init__(self, adapter: Adapter[A], call: ReductionCall[A]) -> None:
        self._adapter, self._comm, self._request = adapter, call.comm, call.reduction.request
        self._run = call.run

    def run(self, input: A) -> A:
        self._dtype, self._shape, run = input.dtype, tuple(input.shape), self._run
        del self._run  # also frees the tensors
        result: A = run()
        return result

    def back(self, grad: A, apply: Callable[[A, Map[A]], A]) -> A:
        request, comm, slope = self._request, self._comm, grad.astype(self._dtype)
        if request.leaves:
            back = leaf_reduction(self._adapter, comm, self._shape, request.leaves).back(slope, apply)
            divided: A = back / request.leaves if request.quantization.op == "avg" else back
            return divided
        if request.operator == "quantized_all_reduce":
            return apply(slope, all_reduction(self._adapter, comm, slope.shape, request.quantization.op))
        back = apply(slope, gathering(self._adapter, comm, slope.shape, self._shape, request.counts))
        if request.quantization.op == "avg":
            back = back / comm.size
        return back


class StraightRows(Map[A]):
    """An exchange of rows whose gradients go back where the rows came from, straight through the rounding."""

    def __init__(self, adapter: Adapter[A], call: RowsCall[A]) -> None:
        self._adapter, self._call = adapter, call

    def run(self, input: A) -> A:
        self._dtype, call = input.dtype, self._call
        del self._call  # also frees the tensors
        out: A
        out, recvs = call.run_counted()
        self._transfer, self._returning = call.transfer(recvs), call.returning(recvs, self._dtype)
        return out

    def back(self, grad: A, apply: Callable[[A, Map[A]], A]) -> A:
        if self._returning is not None:
            return apply(grad, StraightRows(self._adapter, self._returning(grad)))
        return apply(grad.astype(self._dtype), self._transfer.transposed())
