"""The operator of torch.library for the row-parallel linear layer with a quantized sum."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from alltoallv._calls.guard import guard
from alltoallv.quantization import requests
from alltoallv.quantization.linear import check_shapes, chunk_rows
from alltoallv.quantization.spec import Options
from alltoallv.torch.api import calls
from alltoallv.torch.graph import ops
from alltoallv.torch.graph.library import Operator
from alltoallv.torch.graph.ops import carrier
from alltoallv.torch.graph.quantized_ops import _NONE, _OPTIONS
from alltoallv.torch.quantized.adapter import ADAPTER


@partial(Operator, schema=f"(Tensor input, Tensor weight, SymInt? chunks, {_OPTIONS}) -> Tensor", followed=2)
def quantized_linear(input: Tensor, weight: Tensor, chunks: int | None, *given: Any) -> Tensor:
    """The sum over the ranks of ``input @ weight.T``. While a chunk of rows travels, the next is computed."""
    options, comm = Options(*given[:-1]), carrier(given[-1], input)
    name, works = "quantized_all_reduce", []
    with guard(comm, name):
        check_shapes(input.shape, weight.shape, None)
        rows, columns = input.shape[:-1].numel(), len(weight)
        step = chunk_rows(rows, columns, chunks, options.format, options.group_size)
        output = ADAPTER.allocate((rows, columns), str(input.dtype).removeprefix("torch."), input)
    flat, factor = input.reshape(rows, input.shape[-1]), weight.t()
    for begin in range(0, max(rows, 1), step):
        part = output[begin : begin + step]
        with guard(comm, name):
            if input.dtype == weight.dtype:
                torch.mm(flat[begin : begin + step], factor, out=part)
            else:
                part.copy_(flat[begin : begin + step] @ factor)
            call = calls.quantized_reduce(comm, requests.all_reduce(ADAPTER, comm, part, options, part, None))
        works.append(call.submit(-1.0))
    for work in works:
        work.wait()
    return output.view(*input.shape[:-1], columns)


@quantized_linear.fake
def _(input: Tensor, weight: Tensor, *given: Any) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.group, ctx.average = inputs[-1], Options(*inputs[3:-1]).op == "avg"


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """That of a sum, not quantized, through the products."""
    input, weight = ctx.saved_tensors
    back = ops.all_reduce(grad.contiguous(), ctx.group)
    if ctx.average:
        back = back / carrier(ctx.group, grad).size
    flat = back.reshape(-1, weight.shape[0])
    of_input = (flat @ weight).view(input.shape)
    return of_input, flat.t() @ input.reshape(-1, input.shape[-1]), None, *_NONE


quantized_linear.differentiate(_backward, _setup)
