"""Chooses the format that keeps an error, for torch tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls import experts
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.quantization import bounds, requests
from alltoallv.quantization.bounds import Accuracy
from alltoallv.quantization.spec import Options, Quantization
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.engines.kernels import kernels_for, offers_format
from alltoallv.torch.quantized.adapter import ADAPTER


def chosen(
    comm: Any, operator: str, input: Tensor, options: Options, accuracy: Accuracy | None, feedback: Any = None
) -> Options:
    """Returns the options with the format that keeps ``max_error``, on which the ranks agree here."""
    if accuracy is None or accuracy.max_error is None:
        return options
    with guard(comm, operator):
        accuracy.check(options, feedback)
        x = ADAPTER.read("input", input)
        requests.check_float(ADAPTER.dtype(x))
        out_dtype = requests.output_dtype(ADAPTER, options, ADAPTER.dtype(x))
        word = accuracy.word(_largest_magnitude(x))
        words = torch.full((comm.size,), word, dtype=torch.int64, device="cpu")
        received = torch.empty_like(words)
        layout = experts.layout(words.numpy().reshape(-1, 1))
        call = calls.exchange(groups.on_host(comm), "exchange_counts", received, words, layout)
    call.run()
    by_rows = operator == "quantized_all_to_all"
    count = math.prod(x.shape[1:] if by_rows else x.shape)
    in_host_memory = isinstance(comm, Communicator) or (by_rows and x.is_cpu)

    def offers(spec: Quantization) -> bool:
        return in_host_memory or offers_format(spec, kernels_for(x.device.type), not by_rows)

    return bounds.chosen(received.tolist(), options, count, out_dtype, by_rows, offers)


def _largest_magnitude(x: Tensor) -> int:
    """Returns the bits, without sign, of the largest magnitude; NaN is above inf. Waits for tensors of a device."""
    if x.is_cpu or not x.numel():
        return _core.largest_magnitude(ADAPTER.dtype(x), x.data_ptr(), x.numel())
    return int(x.detach().abs().amax().float().view(torch.int32).item()) & 0x7FFFFFFF
