"""The quantized collectives as users call them, for front ends whose tensors lie in shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic

from alltoallv import _core
from alltoallv._calls.adapters import A, Adapter
from alltoallv._calls.counts import Counts
from alltoallv._calls.experts import gathered
from alltoallv._calls.guard import guard, lockstep
from alltoallv._calls.linear import Map, check_shapes
from alltoallv.communicator import Communicator
from alltoallv.quantization import bounds, linear, requests
from alltoallv.quantization.bounds import Accuracy, argument
from alltoallv.quantization.feedback import ErrorFeedback
from alltoallv.quantization.host import ReductionCall, RowsCall, StraightReduction, StraightRows
from alltoallv.quantization.spec import (
    Format,
    Gather,
    GroupSize,
    Options,
    Overflow,
    Quantization,
    SumOp,
    coding,
    grouping,
    grouping_of,
)

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
        options: Options,
        out: A | None,
        error_feedback: ErrorFeedback | None,
        group: Any,
        async_op: bool,
        timeout: float | None,
        accuracy: Accuracy | None = None,
    ) -> Any:
        """Sums vectors that travel as codes; the front ends' functions describe it and its like."""
        comm = self.communicator(group)
        if comm is None:
            return (None, None) if async_op else None
        plain = options.dynamic() and options.out_dtype is options.leaves is timeout is None
        if self.at_once and plain and accuracy is None:
            states = None if error_feedback is None else self.adapter.feedback.states_of(error_feedback)
            result = _core.quantized_all_reduce(comm.core, input, out, *options[4:9], states, bool(async_op))
            if result is not None and not async_op:
                return result
            if result is not None:
                output, work, used = result
                return output, self.adapter.handle(comm, work, (output, used), lambda: output)
        if accuracy is not None:
            options = self.chosen(comm, "quantized_all_reduce", input, options, accuracy, error_feedback)
        with guard(comm, "quantized_all_reduce"):
            excluded = {"out": out, "async_op": async_op, "error_feedback": error_feedback}
            wants_grad = self.wants_grad(input, **excluded, **argument(accuracy))
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
            wants_grad = self.wants_grad(input, **excluded, **argument(accuracy))
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
            wants_grad = self.wants_grad(input, async_op=async_op, **argument(accuracy))
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
        return bounds.chosen(words, options, count, out_dtype, by_rows, self.offers)

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
            return self.quantized_all_reduce(input, options, None, None, group, False, None)
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
            step = linear.chunk_rows(rows, columns, chunks, coded, elements)
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
            parts = [self.quantized_all_reduce(product, options, None, None, comm, False, None)]
        else:
            begins, begun = range(0, rows, step), []
            with lockstep(comm, len(begins)):
                for begin in begins:
                    with guard(comm, "quantized_all_reduce"):
                        part = self._product(flat[begin : begin + step], weight, leaves, comm.size)
                    out = part if leaves is None else None
                    begun.append(self.quantized_all_reduce(part, options, out, None, comm, True, None))
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
