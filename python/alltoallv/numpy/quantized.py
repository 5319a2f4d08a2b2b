"""Quantized collectives on NumPy arrays; docs/quantization.md has the rules."""

from __future__ import annotations

import numpy as np

from alltoallv.numpy.arrays import ADAPTER, Array, resolve
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.functions import Quantized


class _Quantized(Quantized[Array]):
    def multiply(self, x: Array, weight: Array) -> Array:
        product: Array = x @ weight.T
        return product

    def join(self, parts: list[Array]) -> Array:
        return np.concatenate(parts)


_functions = _Quantized(ADAPTER, resolve)
quantized_all_reduce = _functions.quantized_all_reduce
quantized_reduce_scatter = _functions.quantized_reduce_scatter
quantized_all_to_all = _functions.quantized_all_to_all
quantized_linear_all_reduce = _functions.quantized_linear_all_reduce
