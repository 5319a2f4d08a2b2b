"""The operators of torch.library for quantized collectives, as autograd, torch.compile and effects see them.

Rounding has no useful derivative, so gradients pass straight through: a quantized collective's gradient is the one of
the same collective without quantization, in the gradient's own dtype. That of an all-to-all is also quantized if asked
for. Error feedback is not among the arguments: an operator that changes a state would not be a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.collectives import check_shapes, leaf_products
from alltoallv._calls.counts import Counts, packed
from alltoallv._calls.guard import guard, lockstep
from alltoallv.errors import ValueOverflowError
from alltoallv.quantization import requests
from alltoallv.quantization.requests import chunk_rows
from alltoallv.quantization.spec import Bounded, Options, Overflow, Quantization
from alltoallv.torch.eager import calls
from alltoallv.torch.eager.calls import Work
from alltoallv.torch.eager.group import AnyCommunicator
from alltoallv.torch.eager.tensors import core_name
from alltoallv.torch.engines import torch_kernels
from alltoallv.torch.engines.kernels import check_format, kernels_for, record_bytes, record_views
from alltoallv.torch.graph import ops
from alltoallv.torch.graph.ops import Operator, communicator_of, known_size
from alltoallv.torch.quantized.adapter import ADAPTER

# Quantized rows that have passed this rank's checks, and the layout of a row of codes.


class HostRows:
    """Lays out rows for the C++ kernels: ``length`` elements each, in ``stride`` bytes of scales and codes."""

    def __init__(self, quantization: Quantization, length: int) -> None:
        self._quantization, self._length = quantization, length
        self.stride = max(_core.quantized_row_bytes(length, quantization.format, quantization.group_size), 4)

    def encode(self, x: Tensor, coded: Tensor) -> None:
        """Encodes all rows."""
        _core.quantize_rows(*self._about(x), x.data_ptr(), len(coded), self._length, coded.data_ptr())

    def decode(self, coded: Tensor, out: Tensor, overflow: Overflow) -> bool:
        """Decodes rows; returns False if a value does not fit and ``overflow`` is "raise"."""
        count = len(coded), self._length
        return _core.dequantize_rows(*self._about(out), coded.data_ptr(), *count, overflow, out.data_ptr())

    def bound(self, coded: Tensor, out: Tensor, overflow: Overflow) -> Tensor:
        """Returns what the elements of ``out``, decoded from these rows, can be wrong by: [rows, groups]."""
        result = torch.empty((len(coded), self._quantization.groups(self._length)), dtype=torch.float32, device="cpu")
        count = len(coded), self._length
        _core.bound_rows(*self._about(out), coded.data_ptr(), *count, overflow, result.data_ptr())
        return result

    def _about(self, values: Tensor) -> tuple[int | str, int, str]:
        return self._quantization.format, self._quantization.group_size, core_name(values.dtype)


class DeviceRows(HostRows):
    """Lays out rows for the device's kernels, one launch for all; the host waits only if ``overflow`` is "raise"."""

    def __init__(self, quantization: Quantization, length: int, device: torch.device) -> None:
        self._quantization, self._length = quantization, length
        self._kernels = kernels_for(device.type)
        check_format(quantization, self._kernels)
        self.stride = max(record_bytes(quantization, length), 16)

    def encode(self, x: Tensor, coded: Tensor) -> None:
        if x.numel():
            views = record_views(coded, self._quantization, self._length)
            self._kernels.quantize(x.view(-1), self._quantization, *views, part=self._length)

    def decode(self, coded: Tensor, out: Tensor, overflow: Overflow) -> bool:
        if not out.numel():
            return True
        quantization = replace(self._quantization, overflow=overflow)
        views = record_views(coded, self._quantization, self._length)
        overflows = self._kernels.dequantize(*views, quantization, out.view(-1), part=self._length)
        return overflows is None or not overflows.any()

    def bound(self, coded: Tensor, out: Tensor, overflow: Overflow) -> Tensor:
        spec, length, rows = self._quantization, self._length, len(coded)
        if not rows * length:
            return torch.empty((rows, spec.groups(length)), dtype=torch.float32, device=coded.device)
        views = record_views(coded, spec, length)
        values = torch.empty((rows, length), dtype=torch.float32, device=coded.device)
        self._kernels.dequantize(*views, replace(spec, overflow="infinity"), values.view(-1), part=length)
        return torch_kernels.bounds(torch_kernels.errors(*views, spec, length, 1), values, spec, 1, out.dtype, overflow)


class RowExchange:
    """A quantized_all_to_all of a contiguous tensor; made under the guard, which quantizes it."""

    operator = "quantized_all_to_all"

    def __init__(
        self,
        comm: AnyCommunicator,
        input: Tensor,
        send_counts: Counts,
        recv_counts: Counts | None,
        options: Options,
        bound: bool = False,
    ) -> None:
        rows = requests.rows(ADAPTER, comm, input, send_counts, recv_counts, options, bound)
        x = rows.input
        calls.check_place(comm, x)
        self._comm, self._tail = comm, x.shape[1:]
        self._like = x.new_empty(0, dtype=getattr(torch, rows.out_dtype))
        self._rows = (
            HostRows(rows.quantization, rows.length)
            if x.is_cpu
            else DeviceRows(rows.quantization, rows.length, x.device)
        )
        self._stride = stride = self._rows.stride
        coded = calls.new_output(comm, (x.shape[0], stride), x.new_empty(0, dtype=torch.uint8))
        self._rows.encode(x, coded)
        if rows.must_fit() and not self._rows.decode(coded, torch.empty_like(x, dtype=self._like.dtype), "raise"):
            raise ValueOverflowError(rows.overflow_text(), id=6003)
        self._overflow = rows.received().overflow
        self._call = calls.exchange_rows(comm, self.operator, coded, rows.sends, rows.recvs, rows.digest())
        self._out = None if rows.recvs is None else self._new_rows(sum(rows.recvs))
        self._format, self._bounds = rows.quantization.format, None
        if bound and self._out is not None:
            shape = sum(rows.recvs or ()), rows.quantization.groups(rows.length)
            self._bounds = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._tells_bound = bound

    @property
    def output(self) -> Any:
        """The rows received, with their bound where the caller wants it; None where counts are learnt."""
        if self._out is None or self._bounds is None:
            return self._out
        return Bounded(self._out, self._bounds, self._format)

    def run(self, timeout: float = -1.0) -> tuple[Any, list[int]]:
        """Returns the rows received, with their bound where the caller wants it, and how many came from each rank."""
        flat, counts = self._call.run(timeout)
        return self._decoded(flat, counts), [count // self._stride for count in counts]

    def submit(self, timeout: float = -1.0) -> Work:
        """Begins the exchange and returns its handle, whose wait dequantizes the rows."""
        return self._call.submit(self._decoded, timeout)

    def _new_rows(self, rows: int) -> Tensor:
        return calls.new_output(self._comm, (rows, *self._tail), self._like)

    def _decoded(self, flat: Tensor, counts: Sequence[int]) -> Any:
        rows = flat.view(-1, self._stride)
        out = self._new_rows(len(rows)) if self._out is None else self._out
        self._rows.decode(rows, out, self._overflow)
        if not self._tells_bound:
            return out
        row_bounds = self._rows.bound(rows, out, self._overflow)
        kept = row_bounds if self._bounds is None else self._bounds.copy_(row_bounds)
        return Bounded(out, kept, self._format)


# The fields of `Options`, then the group.
_OPTIONS = (
    "Tensor? scale, Tensor? comm_quant_scale_1, Tensor? comm_quant_scale_2, float? offset, str format, "
    "SymInt? group_size, str gather, str op, str overflow, ScalarType? out_dtype, bool quantize_gradient, "
    "SymInt? leaves, str group"
)


def _gradient_of_sum(call: Any, grad: Tensor) -> Tensor:
    """Returns the gradient of a quantized all-reduce, or of each of its leaves."""
    slope, size = grad.to(call.input.dtype), communicator_of(call.group, grad).size
    back: Tensor
    if call.leaves is None:
        back = ops.all_reduce(slope, "", call.group)
    else:
        back = ops.all_reduce_leaves(slope.unsqueeze(0), size, call.group)
    return back / (call.leaves or size) if call.op == "avg" else back


def _gradient_of_reduction(call: Any, grad: Tensor) -> Tensor:
    return _gradient_of_sum(call, grad).expand(call.input.shape)


def _summed(input: Tensor, *arguments: Any) -> Tensor:
    options = Options(*arguments[:-1])
    dtype = options.out_dtype or (input.dtype if options.scale is None else torch.float16)
    return input.new_empty(input.shape[options.leaves is not None :], dtype=dtype)


@partial(Operator, schema=f"(Tensor input, {_OPTIONS}) -> Tensor", fake=_summed, gradient=_gradient_of_reduction)
def quantized_all_reduce(input: Tensor, *arguments: Any) -> Tensor:
    """Sums all ranks' inputs; the result has the input's shape."""
    options, comm = Options(*arguments[:-1]), communicator_of(arguments[-1], input)
    if options.dynamic() and options.out_dtype is options.leaves is None and comm.host_core is not None:
        result: Tensor | None = _core.quantized_all_reduce(comm.host_core, input, None, *options[4:9])
        if result is not None:
            return result
    return _reduced(comm, requests.all_reduce, input, options)


def _gathered(call: Any, grad: Tensor) -> Tensor:
    """Gathers all ranks' parts of the gradient on every rank."""
    row = call.input.shape[1:].numel()
    counts = [rows * row for rows in call.rows]
    own = [counts[call.rank]] * len(counts)
    layout = torch.tensor([own, [0] * len(counts), counts, packed(counts)], dtype=torch.int64, device="cpu")
    flat = grad.to(call.input.dtype).reshape(-1)
    back: Tensor = ops.all_to_all_v(flat, layout, sum(counts), 1, "all_gather", call.group)
    return (back / len(counts) if call.op == "avg" else back).view(call.input.shape)


@partial(
    Operator,
    schema=f"(Tensor input, SymInt[] rows, SymInt rank, {_OPTIONS}) -> Tensor",
    fake=lambda input, rows, rank, *arguments: _rows_like(input, rows[rank], arguments),
    gradient=_gathered,
)
def quantized_reduce_scatter(input: Tensor, rows: list[int], rank: int, *arguments: Any) -> Tensor:
    """Sums all ranks' inputs; ``rank``, this one, keeps ``rows[rank]`` rows."""
    return _reduced(
        communicator_of(arguments[-1], input), requests.reduce_scatter, input, rows, Options(*arguments[:-1])
    )


def _reduced(comm: AnyCommunicator, request: Callable[..., Any], input: Tensor, *arguments: Any) -> Tensor:
    """Runs a quantized reduction into a new tensor, without error feedback."""
    with guard(comm, f"quantized_{request.__name__}"):
        call = calls.quantized_reduce(comm, request(ADAPTER, comm, input, *arguments, None, None))
    call.run()
    return call.result


def _rows_like(input: Tensor, rows: int, arguments: tuple[Any, ...]) -> Tensor:
    return input.new_empty(
        (known_size(rows), *input.shape[1:]), dtype=Options(*arguments[:-1]).out_dtype or input.dtype
    )


def _returned(call: Any, grads: list[Tensor], sends: Tensor, recvs: Tensor) -> Tensor:
    """Sends the rows' gradients back to the ranks that the rows came from."""
    shape, dtype = call.input
    if call.quantize_gradient:
        options = Options(*call[4:-1])._replace(out_dtype=dtype)
        return quantized_all_to_all(grads[0], recvs, sends, shape[0], *options, call.group)[0]
    row = max(shape[1:].numel(), 1)
    places = [torch.cumsum(counts, 0) - counts for counts in (sends, recvs)]
    layout = torch.stack([sends, places[0], recvs, places[1]]) * shape[1:].numel()
    flat = grads[0].to(dtype).reshape(-1)
    return ops.all_to_all_v_transpose(flat, layout, math.prod(shape), row, "all_to_all_v", call.group).view(shape)


@partial(
    Operator,
    schema=f"(Tensor input, Tensor sends, Tensor? recvs, SymInt rows, {_OPTIONS}) -> Tensor[]",
    fake=lambda input, sends, recvs, rows, *arguments: [
        _rows_like(input, rows, arguments),
        sends.new_empty(sends.shape),
    ],
    gradient=_returned,
    saves=("sends", 1),
    sized_by_values=lambda args: args[2] is None,
)
def quantized_all_to_all(
    input: Tensor, sends: Tensor, recvs: Tensor | None, rows: int, *arguments: Any
) -> list[Tensor]:
    """Sends rows as codes; ``sends`` and ``recvs`` are int64 ``[W]``, in rows. Returns the rows and their counts.

    ``rows``: the number of rows that a graph may rely on; -1 where it is known only when the graph runs.
    """
    comm = communicator_of(arguments[-1], input)
    with guard(comm, "quantized_all_to_all"):
        learnt = None if recvs is None else recvs.tolist()
        exchange = RowExchange(comm, input, sends.tolist(), learnt, Options(*arguments[:-1]))
    out, counts = exchange.run()
    return [out, torch.tensor(counts, dtype=torch.int64, device="cpu")]


def _through_products(call: Any, grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients through the products; the gradient of their sum is not quantized."""
    back = _gradient_of_sum(call, grad.contiguous())
    rows, features = input.shape[:-1].numel(), input.shape[-1]
    slope, flat = back.reshape(rows, weight.shape[0]), input.reshape(rows, features)
    if call.leaves is None:
        return (slope @ weight).view(input.shape), slope.t() @ flat
    count = call.leaves // communicator_of(call.group, grad).size
    parts = zip(flat.tensor_split(count, 1), weight.tensor_split(count, 1), strict=True)
    of_leaves = [(slope @ w.contiguous(), slope.t() @ x.contiguous()) for x, w in parts]
    of_input, of_weight = (torch.cat(each, 1) for each in zip(*of_leaves, strict=True))
    return of_input.view(input.shape), of_weight


@partial(
    Operator,
    schema=f"(Tensor input, Tensor weight, SymInt? chunks, {_OPTIONS}) -> Tensor",
    followed=2,
    fake=lambda input, weight, *arguments: input.new_empty((*input.shape[:-1], weight.shape[0])),
    gradient=_through_products,
    saves=("input", "weight"),
)
def quantized_linear(input: Tensor, weight: Tensor, chunks: int | None, *arguments: Any) -> Tensor:
    """Sums ``input @ weight.T`` over the ranks. While a chunk of rows travels, the next is computed."""
    options, comm = Options(*arguments[:-1]), communicator_of(arguments[-1], input)
    name, works = "quantized_all_reduce", []
    with guard(comm, name):
        check_shapes(input.shape, weight.shape, None)
        rows, columns = input.shape[:-1].numel(), len(weight)
        step = chunk_rows(rows, columns, chunks, options.format, options.group_size)
        output = ADAPTER.allocate((rows, columns), str(input.dtype).removeprefix("torch."), input)
    flat, factor = input.reshape(rows, input.shape[-1]), weight.t()
    begins = range(0, max(rows, 1), step)
    with lockstep(comm, len(begins)):
        for begin in begins:
            part = output[begin : begin + step]
            with guard(comm, name):
                x = part
                if options.leaves is not None:
                    its = flat[begin : begin + step]
                    x = torch.stack(leaf_products(its, weight, None, options.leaves, comm.size, ops.multiply))
                elif input.dtype == weight.dtype:
                    torch.mm(flat[begin : begin + step], factor, out=part)
                else:
                    part.copy_(flat[begin : begin + step] @ factor)
                call = calls.quantized_reduce(comm, requests.all_reduce(ADAPTER, comm, x, options, part, None))
            works.append(call.submit(-1.0))
        for work in works:
            work.wait()
    return output.view(*input.shape[:-1], columns)
