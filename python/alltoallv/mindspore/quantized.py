"""Quantized collectives on MindSpore tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops

from alltoallv._calls.linear import Map
from alltoallv.communicator import Communicator
from alltoallv.mindspore.adapter import ADAPTER
from alltoallv.mindspore.autograd import apply, tracks
from alltoallv.mindspore.front_end import check_async, enter
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.functions import Quantized
from alltoallv.quantization.requests import exclude, present


class _Quantized(Quantized[Tensor]):
    adapter = ADAPTER

    def communicator(self, group: Any) -> Communicator:
        return enter(group)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.matmul(x, weight.T)

    def join(self, parts: list[Tensor]) -> Tensor:
        return ops.cat(parts)

    def wants_grad(self, input: Tensor, **given: Any) -> bool:
        """False within a gradient function for a call that cannot have a gradient, unless its input needs one."""
        check_async(given["async_op"])
        if tracks(input) and getattr(input, "_requires_grad", False):
            exclude("input requires grad", **given)
        return tracks(input) and not present(given)

    def apply(self, input: Tensor, call: Map[Tensor]) -> Tensor:
        return apply(input, call)


_functions = _Quantized()
quantized_all_reduce = _functions.quantized_all_reduce
quantized_reduce_scatter = _functions.quantized_reduce_scatter
quantized_all_to_all = _functions.quantized_all_to_all
quantized_linear_all_reduce = _functions.quantized_linear_all_reduce
