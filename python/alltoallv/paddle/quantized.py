"""Quantized collectives on Paddle tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from alltoallv.paddle.front_end import apply
from alltoallv.paddle.group import resolve
from alltoallv.paddle.tensors import ADAPTER, check_tensor
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.functions import Quantized
from alltoallv.quantization.requests import exclude


class _Quantized(Quantized[Tensor]):
    apply = staticmethod(apply)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return paddle.matmul(x, weight, transpose_y=True)

    def join(self, parts: list[Tensor]) -> Tensor:
        return paddle.concat(parts)

    def wants_grad(self, input: Tensor, **given: Any) -> bool:
        check_tensor("input", input)
        if given.get("out") is not None:
            check_tensor("out", given["out"])
            given["out"]._bump_inplace_version()  # a backward pass that needs the old values then raises an error
        if input.stop_gradient or not paddle.is_grad_enabled():
            return False
        exclude("input wants a gradient", **given)
        return True


_functions = _Quantized(ADAPTER, resolve)
quantized_all_reduce = _functions.quantized_all_reduce
quantized_reduce_scatter = _functions.quantized_reduce_scatter
quantized_all_to_all = _functions.quantized_all_to_all
quantized_linear_all_reduce = _functions.quantized_linear_all_reduce
