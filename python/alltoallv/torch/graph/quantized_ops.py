"""The operators of torch.library for quantized collectives: what autograd, torch.compile and effects see.

Rounding has no useful derivative, so gradients pass straight through: that of a quantized collective is the gradient of
the same collective without quantization, in the gradient's own dtype, not quantized. Error feedback is not among the
arguments: a state that changes is no function.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from alltoallv._calls.counts import packed
from alltoallv._calls.guard import guard
from alltoallv.quantization.spec import Gather, Overflow, SumOp
from alltoallv.torch.api.ready import remember
from alltoallv.torch.api.tensors import as_input
from alltoallv.torch.graph import ops
from alltoallv.torch.graph.library import Operator
from alltoallv.torch.graph.ops import carrier
from alltoallv.torch.quantized import calls as quantized_calls
from alltoallv.torch.quantized.rows import RowExchange


@Operator
def quantized_all_reduce(
    input: Tensor,
    scale: Tensor | None,
    offset: float | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
    bits: int,
    group_size: int,
    gather: str,
    op: str,
    out_dtype: torch.dtype | None,
    overflow: str,
    group: str,
) -> Tensor:
    """The sum of all ranks' inputs in the input's shape."""
    comm = carrier(group, input)
    what = None
    if scale is None and offset is None and scale_1 is None and scale_2 is None:
        what = "quantized_all_reduce", bits, group_size, gather, op, out_dtype, overflow
        if (made := comm.repeats.run(what, input, None)) is not None:
            return made
    with guard(comm, "quantized_all_reduce"):
        call = quantized_calls.all_reduce(
            comm,
            as_input("input", input),
            None,
            scale=scale,
            offset=offset,
            comm_quant_scale_1=scale_1,
            comm_quant_scale_2=scale_2,
            bits=bits,
            group_size=group_size,
            gather=cast(Gather, gather),
            op=cast(SumOp, op),
            out_dtype=out_dtype,
            overflow=cast(Overflow, overflow),
            feedback=None,
        )
        if what:
            remember(call, what, input, None)
    call.run()
    return cast(Tensor, call.output)


@quantized_all_reduce.fake
def _(
    input: Tensor,
    scale: Tensor | None,
    offset: float | None,
    scale_1: Tensor | None,
    scale_2: Tensor | None,
    bits: int,
    group_size: int,
    gather: str,
    op: str,
    out_dtype: torch.dtype | None,
    overflow: str,
    group: str,
) -> Tensor:
    default = torch.float16 if scale is not None else input.dtype
    return torch.empty_like(input, dtype=out_dtype or default, memory_format=torch.contiguous_format)


@Operator
def quantized_reduce_scatter(
    input: Tensor,
    rows: list[int],
    rank: int,
    bits: int,
    group_size: int,
    op: str,
    out_dtype: torch.dtype | None,
    overflow: str,
    group: str,
) -> Tensor:
    """The sum of all ranks' inputs, of which ``rank``, this one, keeps ``rows[rank]`` rows."""
    comm = carrier(group, input)
    with guard(comm, "quantized_reduce_scatter"):
        call = quantized_calls.reduce_scatter(
            comm,
            as_input("input", input),
            rows,
            None,
            bits=bits,
            group_size=group_size,
            op=cast(SumOp, op),
            out_dtype=out_dtype,
            overflow=cast(Overflow, overflow),
            feedback=None,
        )
    call.run()
    return cast(Tensor, call.output)


@quantized_reduce_scatter.fake
def _(
    input: Tensor,
    rows: list[int],
    rank: int,
    bits: int,
    group_size: int,
    op: str,
    out_dtype: torch.dtype | None,
    overflow: str,
    group: str,
) -> Tensor:
    return input.new_empty((rows[rank], *input.shape[1:]), dtype=out_dtype or input.dtype)


@Operator
def quantized_all_to_all(
    input: Tensor,
    sends: Tensor,
    recvs: Tensor | None,
    bits: int,
    group_size: int | None,
    out_dtype: torch.dtype | None,
    overflow: str,
    group: str,
) -> list[Tensor]:
    """Rows as codes; ``sends`` and ``recvs`` are int64 ``[W]``, in rows. Returns the rows and their counts."""
    comm = carrier(group, input)
    with guard(comm, "quantized_all_to_all"):
        known = None if recvs is None else recvs.tolist()
        exchange = RowExchange(
            comm, as_input("input", input), sends.tolist(), known, bits, group_size, out_dtype, cast(Overflow, overflow)
        )
    out, counts = exchange.run()
    return [out, torch.tensor(counts, dtype=torch.int64, device="cpu")]


@quantized_all_to_all.fake
def _(
    input: Tensor,
    sends: Tensor,
    recvs: Tensor | None,
    bits: int,
    group_size: int | None,
    out_dtype: torch.dtype | None,
    overflow: str,
    group: str,
) -> list[Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return [input.new_empty((rows, *input.shape[1:]), dtype=out_dtype or input.dtype), sends.new_empty(sends.shape)]


def _setup_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype, ctx.average, ctx.group = inputs[0].dtype, inputs[8] == "avg", inputs[11]


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    back = ops.all_reduce(grad.to(ctx.dtype), ctx.group)
    if ctx.average:
        back = back / carrier(ctx.group, grad).size
    return back, *[None] * 11


def _setup_reduce_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype, ctx.rows, ctx.rank, ctx.average, ctx.group = inputs[0].dtype, *inputs[1:3], inputs[5] == "avg", inputs[8]


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Everybody's part to everybody."""
    grad = grad.to(ctx.dtype)
    row = grad[:0].new_empty(grad.shape[1:]).numel()
    counts = [rows * row for rows in ctx.rows]
    own = [counts[ctx.rank]] * len(counts)
    layout = torch.tensor([own, [0] * len(counts), counts, packed(counts)], dtype=torch.int64, device="cpu")
    flat = grad.reshape(-1)
    back = ops.all_to_all_v(flat, layout, sum(counts), 1, "all_gather", ctx.group)
    if ctx.average:
        back = back / len(counts)
    return back.view(sum(ctx.rows), *grad.shape[1:]), *[None] * 8


def _setup_all_to_all(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[1], output[1])
    ctx.dtype, ctx.shape, ctx.group = inputs[0].dtype, inputs[0].shape, inputs[7]
    ctx.mark_non_differentiable(output[1])


def _all_to_all_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """The rows' gradients go back where the rows came from."""
    sends, recvs = ctx.saved_tensors
    row = max(ctx.shape[1:].numel(), 1)
    places = [torch.cumsum(counts, 0) - counts for counts in (sends, recvs)]
    layout = torch.stack([sends, places[0], recvs, places[1]]) * row
    grad = grads[0].to(ctx.dtype).reshape(-1)
    back = ops.all_to_all_v_transpose(grad, layout, ctx.shape.numel(), row, "all_to_all_v", ctx.group)
    return back.view(ctx.shape), *[None] * 7


quantized_all_reduce.differentiate(_all_reduce_backward, _setup_all_reduce)
quantized_reduce_scatter.differentiate(_reduce_scatter_backward, _setup_reduce_scatter)
quantized_all_to_all.differentiate(_all_to_all_backward, _setup_all_to_all)
