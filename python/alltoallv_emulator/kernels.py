"""The Triton kernels on emulated NPUs: interpreted on host views of the tensors, after a wait for the stream.

This offers what `alltoallv_triton.launch` offers if ``TRITON_INTERPRET=1`` and triton is installed. No code for an NPU
runs: it shows that the kernels do the work of the operators that they replace, on tensors of an NPU's form.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from alltoallv_emulator.host_views import synchronize


def available() -> bool:
    """True if the kernels are requested and triton is installed."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def _to_host(value: Any) -> Any:
    """Returns a CPU tensor over an npu tensor's memory, of a storage as large as its own: the interpreter copies it."""
    if not isinstance(value, torch.Tensor) or value.is_cpu:
        return value
    own = value.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(own.data_ptr(), torch.device("cpu"), own.nbytes())
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.size(), value.stride())


class InterpretedKernels:
    """Quantization by interpreted kernels; see `alltoallv.torch.engines.torch_kernels`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from alltoallv_triton import launch  # triton decides at import how kernels run

        kernel = getattr(launch, name)

        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            device = tensors[0].device
            synchronize(device)
            overflows = kernel(*map(_to_host, args), **{name: _to_host(x) for name, x in kwargs.items()})
            return None if overflows is None else overflows.to(device)

        return run
