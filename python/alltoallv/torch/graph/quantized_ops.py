"""The operators of torch.library for quantized collectives: what autograd, torch.compile and effects see.

Rounding has no useful derivative, so gradients pass straight through: that of a quantized collective is the gradient of
the same collective without quantization, in the gradient's own dtype; that of an all-to-all is quantized too if asked
for. Error feedback is not among the arguments: a state that changes is no function.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import packed
from alltoallv._calls.guard import guard
from alltoallv.quantization import requests
from alltoallv.quantization.spec import Options
from alltoallv.torch.api import calls
from alltoallv.torch.graph import ops
from alltoallv.torch.graph.library import Operator
from alltoallv.torch.graph.ops import carrier
from alltoallv.torch.quantized.adapter import ADAPTER
from alltoallv.torch.quantized.rows import RowExchange

# The fields of `Options`, then the group.
_OPTIONS = (
    "Tensor? scale, Tensor? comm_quant_scale_1, Tensor? comm_quant_scale_2, float? offset, str format, "
    "SymInt? group_size, str gather, str op, str overflow, ScalarType? out_dtype, bool quantize_gradient, "
    "str group"
)
_NONE = (None,) * (len(Options._fields) + 1)  # their gradients


@partial(Operator, schema=f"(Tensor input, {_OPTIONS}) -> Tensor")
def quantized_all_reduce(input: Tensor, *given: Any) -> Tensor:
    """The sum of all ranks' inputs in the input's shape."""
    options, comm = Options(*given[:-1]), carrier(given[-1], input)
    if options.dynamic() and options.out_dtype is None and comm.host_core is not None:
        result: Tensor | None = _core.quantized_all_reduce(comm.host_core, input, None, *options[4:9])
        if result is not None:
            return result
    with guard(comm, "quantized_all_reduce"):
        call = calls.quantized_reduce(comm, requests.all_reduce(ADAPTER, comm, input, options, None, None))
    call.run()
    output: Tensor = call.result
    return output


@quantized_all_reduce.fake
def _(input: Tensor, *given: Any) -> Tensor:
    options = Options(*given[:-1])
    dtype = options.out_dtype or (input.dtype if options.scale is None else torch.float16)
    return torch.empty_like(input, dtype=dtype, memory_format=torch.contiguous_format)


@partial(Operator, schema=f"(Tensor input, SymInt[] rows, SymInt rank, {_OPTIONS}) -> Tensor")
def quantized_reduce_scatter(input: Tensor, rows: list[int], rank: int, *given: Any) -> Tensor:
    """The sum of all ranks' inputs, of which ``rank``, this one, keeps ``rows[rank]`` rows."""
    comm = carrier(given[-1], input)
    with guard(comm, "quantized_reduce_scatter"):
        made = requests.reduce_scatter(ADAPTER, comm, input, rows, Options(*given[:-1]), None, None)
        call = calls.quantized_reduce(comm, made)
    call.run()
    output: Tensor = call.result
    return output


@quantized_reduce_scatter.fake
def _(input: Tensor, rows: list[int], rank: int, *given: Any) -> Tensor:
    return input.new_empty((rows[rank], *input.shape[1:]), dtype=Options(*given[:-1]).out_dtype or input.dtype)


@partial(Operator, schema=f"(Tensor input, Tensor sends, Tensor? recvs, SymInt rows, {_OPTIONS}) -> Tensor[]")
def quantized_all_to_all(input: Tensor, sends: Tensor, recvs: Tensor | None, rows: int, *given: Any) -> list[Tensor]:
    """Rows as codes; ``sends`` and ``recvs`` are int64 ``[W]``, in rows. Returns the rows and their counts.

    ``rows``: how many a graph may rely on; -1 where only the run tells.
    """
    comm = carrier(given[-1], input)
    with guard(comm, "quantized_all_to_all"):
        known = None if recvs is None else recvs.tolist()
        exchange = RowExchange(comm, input, sends.tolist(), known, Options(*given[:-1]))
    out, counts = exchange.run()
    return [out, torch.tensor(counts, dtype=torch.int64, device="cpu")]


@quantized_all_to_all.fake
def _(input: Tensor, sends: Tensor, recvs: Tensor | None, rows: int, *given: Any) -> list[Tensor]:
    if isinstance(rows, int) and rows < 0:
        rows = torch.library.get_ctx().new_dynamic_size()
    made = input.new_empty((rows, *input.shape[1:]), dtype=Options(*given[:-1]).out_dtype or input.dtype)
    return [made, sends.new_empty(sends.shape)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.dtype, ctx.shape, ctx.group = inputs[0].dtype, inputs[0].shape, inputs[-1]
    ctx.average = Options(*inputs[-len(_NONE) : -1]).op == "avg"


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    back = ops.all_reduce(grad.to(ctx.dtype), ctx.group)
    if ctx.average:
        back = back / carrier(ctx.group, grad).size
    return back, *_NONE


def _setup_reduce_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _setup(ctx, inputs, output)
    ctx.rows, ctx.rank = inputs[1:3]


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Everybody's part to everybody."""
    grad = grad.to(ctx.dtype)
    row = ctx.shape[1:].numel()
    counts = [rows * row for rows in ctx.rows]
    own = [counts[ctx.rank]] * len(counts)
    layout = torch.tensor([own, [0] * len(counts), counts, packed(counts)], dtype=torch.int64, device="cpu")
    back = ops.all_to_all_v(grad.reshape(-1), layout, sum(counts), 1, "all_gather", ctx.group)
    if ctx.average:
        back = back / len(counts)
    return back.view(ctx.shape), None, None, *_NONE


def _setup_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _setup(ctx, inputs, output)
    ctx.options = Options(*inputs[-len(_NONE) : -1])
    ctx.save_for_backward(inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _all_to_all_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """The rows' gradients go back where the rows came from."""
    sends, recvs = ctx.saved_tensors
    if ctx.options.quantize_gradient:
        options = ctx.options._replace(out_dtype=ctx.dtype)
        back, _ = quantized_all_to_all(grads[0], recvs, sends, ctx.shape[0], *options, ctx.group)
        return back, None, None, None, *_NONE
    row = max(ctx.shape[1:].numel(), 1)
    places = [torch.cumsum(counts, 0) - counts for counts in (sends, recvs)]
    layout = torch.stack([sends, places[0], recvs, places[1]]) * row
    grad = grads[0].to(ctx.dtype).reshape(-1)
    back = ops.all_to_all_v_transpose(grad, layout, ctx.shape.numel(), row, "all_to_all_v", ctx.group)
    return back.view(ctx.shape), None, None, None, *_NONE


quantized_all_reduce.differentiate(_all_reduce_backward, _setup)
quantized_reduce_scatter.differentiate(_reduce_scatter_backward, _setup_reduce_scatter)
quantized_all_to_all.differentiate(_all_to_all_backward, _setup_all_to_all)
