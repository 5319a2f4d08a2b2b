"""Tensor parallelism's second layer: a linear layer split by its inputs, whose sum travels quantized."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from alltoallv._calls.guard import guard
from alltoallv._calls.signature import described
from alltoallv.quantization.functions import Quantized
from alltoallv.quantization.linear import check_shapes
from alltoallv.quantization.spec import Format, Gather, GroupSize, Options, Overflow, SumOp, coding, grouping
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.group import Group, device_of
from alltoallv.torch.graph.graphs import is_tracing
from alltoallv.torch.graph.quantized_linear import quantized_linear


@described(Quantized.quantized_linear_all_reduce)
def quantized_linear_all_reduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    chunks: int | None = None,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    gather: Gather = "full",
    op: SumOp = "sum",
    overflow: Overflow = "saturate",
    group: Group = None,
) -> Tensor | None:
    elements: Any = group_size
    if group_size == "token":
        elements = max(weight.shape[0], 1)
    elif group_size == "tensor":
        elements, chunks = max(grouping("tensor", input[..., :1]) * weight.shape[0], 1), 1
    if not is_tracing():
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return None
        with guard(comm, "quantized_all_reduce"):
            check_shapes(input.shape, weight.shape, None if bias is None else bias.shape)
    coded = str(coding(bits, format))
    options = Options(format=coded, group_size=elements, gather=gather, op=op, overflow=overflow)
    result: Tensor = quantized_linear(input, weight, chunks, *options, group)
    return result if bias is None else result + bias
