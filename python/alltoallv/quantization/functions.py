"""The quantized collectives as users call them, for front ends whose tensors lie in shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls.adapters import A, Adapter
from alltoallv._calls.collectives import Map, Transfer, all_reduction, check_shapes, gathering, leaf_reduction
from alltoallv._calls.counts import Counts, split_layout
from alltoallv._calls.experts import gathered
from alltoallv._calls.guard import guard, lockstep
from alltoallv.communicator import Communicator
from alltoallv.errors import ValueOverflowError
from alltoallv.quantization import requests
from alltoallv.quantization.requests import ErrorFeedback, Reduction, Rows
from alltoallv.quantization.spec import (
    Accuracy,
    Bounded,
    Format,
    Gather,
    GroupSize,
    Options,
    Overflow,
    Quantization,
    SumOp,
    accuracy_argument,
    chosen_format,
    coding,
    grouping,
    grouping_of,
)

# What prepares these calls.


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


Call = ReductionCall[A] | RowsCall[A]


class Quantized(Generic[A]):
    """A front end's quantized collectives. The methods below are what each framework defines for itself."""

    at_once = True  # calls that the core can run as they are, are; not where calls return their steps

    def __init__(self, adapter: Adapter[Any], communicator: Callable[[Any], Communicator | None]) -> None:
        """``communicator`` returns a group's communicator, or None on a rank outside of it."""
        self.adapter, self.communicator = adapter, communicator

    def quantized_all_reduce(
        self,
        input: A,
        scales: tuple[Any, Any, Any, Any],
        terms: tuple[Any, Any, Any, Any, Any],
        out_dtype: Any,
        leaves: int | None,
        out: A | None,
        error_feedback: ErrorFeedback | None,
        group: Any,
        async_op: bool,
        timeout: float | None,
        accuracy: Accuracy | None,
    ) -> Any:
        """Sums vectors that travel as codes; the front ends' functions describe it and its like.

        ``scales`` are the fields of `Options` up to the offset, ``terms`` those from the format to the overflow: most
        calls need no `Options`, which take as long to make as a small call takes in the core.
        """
        comm = self.communicator(group)
        if comm is None:
            return (None, None) if async_op else None
        scale, scale_1, scale_2, offset = scales
        plain = scale is scale_1 is scale_2 is offset is out_dtype is leaves is timeout is None
        if plain and accuracy is None and self.at_once:
            states = None if error_feedback is None else self.adapter.feedback.states_of(error_feedback)
            result = _core.quantized_all_reduce(comm.core, input, out, *terms, states, bool(async_op))
            if result is not None and not async_op:
                return result
            if result is not None:
                output, work, used = result
                return output, self.adapter.handle(comm, work, (output, used), lambda: output)
        options = Options(*scales, *terms, out_dtype, leaves=leaves)
        if accuracy is not None:
            options = self.chosen(comm, "quantized_all_reduce", input, options, accuracy, error_feedback)
        with guard(comm, "quantized_all_reduce"):
            excluded = {"out": out, "async_op": async_op, "error_feedback": error_feedback}
            wants_grad = self.wants_grad(input, **excluded, **accuracy_argument(accuracy))
            reduction = requests.all_reduce(
                self.adapter, comm, input, options, out, error_feedback, accuracy is not None
            )
            call = self.reductions()(self.adapter, comm, reduction, timeout)
        return self._run(input, call, wants_grad and reduction.request.dtype != "int8", async_op)

    def quantized_reduce_scatter(
        self,
        input: A,
        recv_counts: Counts | None,
        options: Options,
        out: A | None,
        error_feedback: ErrorFeedback | None,
        group: Any,
        async_op: bool,
        timeout: float | None,
        accuracy: Accuracy | None = None,
    ) -> Any:
        """Sums vectors and gives each rank its part."""
        comm = self.communicator(group)
        if comm is None:
            return (None, None) if async_op else None
        if accuracy is not None:
            options = self.chosen(comm, "quantized_reduce_scatter", input, options, accuracy, error_feedback)
        with guard(comm, "quantized_reduce_scatter"):
            excluded = {"out": out, "async_op": async_op, "error_feedback": error_feedback}
            wants_grad = self.wants_grad(input, **excluded, **accuracy_argument(accuracy))
            reduction = requests.reduce_scatter(
                self.adapter, comm, input, recv_counts, options, out, error_feedback, accuracy is not None
            )
            call = self.reductions()(self.adapter, comm, reduction, timeout)
        return self._run(input, call, wants_grad, async_op)

    def quantized_all_to_all(
        self,
        input: A,
        send_counts: Counts,
        recv_counts: Counts | None,
        options: Options,
        group: Any,
        async_op: bool,
        timeout: float | None,
        accuracy: Accuracy | None = None,
    ) -> Any:
        """Exchanges rows as codes."""
        comm = self.communicator(group)
        if comm is None:
            return (None, None) if async_op else None
        if accuracy is not None:
            options = self.chosen(comm, "quantized_all_to_all", input, options, accuracy, None)
        with guard(comm, "quantized_all_to_all"):
            wants_grad = self.wants_grad(input, async_op=async_op, **accuracy_argument(accuracy))
            rows = requests.rows(self.adapter, comm, input, send_counts, recv_counts, options, accuracy is not None)
            call = self.exchanges()(self.adapter, comm, rows, timeout)
        return self._run(input, call, wants_grad, async_op)

    def chosen(
        self, comm: Communicator, operator: str, input: A, options: Options, accuracy: Accuracy, feedback: Any
    ) -> Options:
        """Returns the options with the format that keeps ``max_error``, on which the ranks agree here."""
        if accuracy.max_error is None:
            return options
        with guard(comm, operator):
            accuracy.check(options, feedback)
            x = self.adapter.read("input", input)
            shape, dtype = tuple(x.shape), self.adapter.dtype(x)
            requests.check_float(dtype)
            word = accuracy.word(self.largest_magnitude(x, dtype))
            out_dtype = requests.output_dtype(self.adapter, options, dtype)
        words = [int(row[0]) for row in gathered(self.host(comm), [word])]
        by_rows = operator == "quantized_all_to_all"
        count = math.prod(shape[1:] if by_rows else shape)
        return chosen_format(words, options, count, out_dtype, by_rows, self.offers)

    def offers(self, spec: Quantization) -> bool:
        """Returns whether calls can have a format, the same on all ranks."""
        return True

    def host(self, comm: Communicator) -> Communicator:
        """Returns what exchanges numbers in host memory with the communicator's ranks."""
        return comm

    def largest_magnitude(self, x: A, dtype: str) -> int:
        """Returns the bits, without sign, of the largest magnitude; NaN is above inf."""
        return _core.largest_magnitude(dtype, self.adapter.region(x)[0], math.prod(x.shape))

    def called(self, operator: str, input: A, arguments: dict[str, Any]) -> Any:
        """Runs a quantized operator with arguments by the names that the front ends' functions have for them."""
        fields = {name: arguments[name] for name in Options._fields if name in arguments}
        fields["format"] = coding(arguments.get("bits", 8), arguments.get("format"))
        fields["group_size"] = grouping(arguments.get("group_size"), input, arguments.get("leaves"))
        options, group = Options(**fields), arguments.get("group")
        if operator == "quantized_all_reduce":
            return self._sum(input, options, None, group, False)
        recvs = arguments.get("recv_counts")
        if operator == "quantized_reduce_scatter":
            return self.quantized_reduce_scatter(input, recvs, options, None, None, group, False, None)
        return self.quantized_all_to_all(input, arguments["send_counts"], recvs, options, group, False, None)

    def quantized_linear_all_reduce(
        self,
        input: A,
        weight: A,
        bias: A | None,
        chunks: int | None,
        bits: int,
        format: Format | None,
        group_size: GroupSize | None,
        gather: Gather,
        op: SumOp,
        overflow: Overflow,
        leaves: int | None,
        group: Any,
    ) -> Any:
        """Runs a linear layer split by its inputs."""
        comm = self.communicator(group)
        if comm is None:
            return None
        options: Any = {"bits": bits, "format": format, "group_size": group_size, "gather": gather, "op": op}
        return self._linear(comm, input, weight, bias, chunks, overflow=overflow, leaves=leaves, **options)

    def reductions(self) -> type[ReductionCall[A]]:
        """Returns the class of a reduction that is ready to run."""
        return ReductionCall

    def exchanges(self) -> type[RowsCall[A]]:
        """Returns the class of an exchange of rows that is ready to run."""
        return RowsCall

    def wants_grad(self, input: A, **excluded: Any) -> bool:
        """Returns whether `apply` runs the call. ``excluded`` holds arguments that exclude a gradient."""
        return False

    def apply(self, input: A, call: Map[A]) -> A:
        """Runs ``call`` on ``input`` in the framework's autograd and returns the output."""
        raise NotImplementedError

    def multiply(self, x: A, weight: A) -> A:
        """Returns ``x @ weight.T``, contiguous."""
        raise NotImplementedError

    def join(self, parts: list[A]) -> A:
        """Concatenates the rows of all parts."""
        raise NotImplementedError

    def products(self, x: A, weight: A, leaves: int, size: int) -> A:
        """Returns this rank's share of the leaves of ``x @ weight.T``, as `row_parallel_linear` computes them."""
        raise NotImplementedError

    def _product(self, x: A, weight: A, leaves: int | None, size: int) -> A:
        return self.multiply(x, weight) if leaves is None else self.products(x, weight, leaves, size)

    def _sum(self, input: A, options: Options, out: A | None, group: Any, async_op: bool) -> Any:
        rest = options.out_dtype, options.leaves, out, None, group, async_op, None, None
        return self.quantized_all_reduce(input, options[:4], options[4:9], *rest)

    def _linear(
        self, comm: Communicator, input: A, weight: A, bias: A | None, chunks: int | None, **settings: Any
    ) -> Any:
        """Runs `quantized_linear_all_reduce`; ``settings`` holds the options of `quantized_all_reduce`."""
        tensors: Any = {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})
        with guard(comm, "quantized_all_reduce"):
            for name, x in tensors.items():
                self.adapter.check(name, x)
            shapes = [tuple(x.shape) for x in tensors.values()]
            check_shapes(*shapes)
            rows, columns = math.prod(shapes[0][:-1]), shapes[1][0]
            chunks = 1 if settings["group_size"] == "tensor" else chunks
            settings["group_size"] = grouping_of(settings["group_size"], rows, columns)
            coded, elements = coding(settings["bits"], settings["format"]), settings["group_size"]
            step = requests.chunk_rows(rows, columns, chunks, coded, elements)
            options = Options(
                format=coded,
                group_size=elements,
                gather=settings["gather"],
                op=settings["op"],
                overflow=settings["overflow"],
                leaves=settings["leaves"],
            )
            flat = tensors["input"].reshape((rows, shapes[0][-1]))
            # Chunks travel in place, without a gradient.
            undivided = step >= rows or any(self.wants_grad(x, async_op=False) for x in (input, weight))
            leaves = settings["leaves"]
            product = self._product(flat, weight, leaves, comm.size) if undivided else None
        if product is not None:
            parts = [self._sum(product, options, None, comm, False)]
        else:
            begins, begun = range(0, rows, step), []
            with lockstep(comm, len(begins)):
                for begin in begins:
                    with guard(comm, "quantized_all_reduce"):
                        part = self._product(flat[begin : begin + step], weight, leaves, comm.size)
                    out = part if leaves is None else None
                    begun.append(self._sum(part, options, out, comm, True))
                for _, handle in begun:
                    handle.wait()
            parts = [part for part, _ in begun]
        total: Any = parts[0] if len(parts) == 1 else self.join(parts)
        total = total.reshape((*shapes[0][:-1], columns))
        return total if bias is None else total + bias

    def _run(self, input: A, call: Call[A], wants_grad: bool, async_op: bool) -> Any:
        if wants_grad:
            straight: Any = StraightReduction if isinstance(call, ReductionCall) else StraightRows
            return self.apply(input, straight(self.adapter, call))
        return call.submit() if async_op else call.run()
