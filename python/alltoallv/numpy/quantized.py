"""Quantized collectives on NumPy arrays; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from alltoallv.communicator import Communicator
from alltoallv.numpy.adapter import ADAPTER
from alltoallv.numpy.arrays import Array, resolve
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.functions import Quantized


class _Quantized(Quantized[Array]):
    adapter = ADAPTER

    def communicator(self, group: Any) -> Communicator:
        return resolve(group)

    def multiply(self, x: Array, weight: Array) -> Array:
        product: Array = x @ weight.T
        return product

    def join(self, parts: list[Array]) -> Array:
        return np.concatenate(parts)


_functions = _Quantized()
quantized_all_reduce = _functions.quantized_all_reduce
quantized_reduce_scatter = _functions.quantized_reduce_scatter
quantized_all_to_all = _functions.quantized_all_to_all
quantized_linear_all_reduce = _functions.quantized_linear_all_reduce
