"""What vllm-ascend prints from a stream, and the shape of a tensor's storage."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alltoallv.npu_ops.layout import get_npu_format
from alltoallv_emulator.host_views import synchronize


def print_text(msg: str) -> None:
    """Prints the text once the current stream has come there."""
    synchronize(torch.device("npu", torch.npu.current_device()))
    print(msg, flush=True)


def print_tensor(tensor: Tensor) -> None:
    """Prints the values that the tensor has once the current stream has come there."""
    print_text(str(tensor.cpu()))


def storage_shape(tensor: Tensor) -> list[int]:
    """Returns the shape of a tensor of format ND that has its storage for itself."""
    dense = tensor.untyped_storage().nbytes() == math.prod(tensor.shape) * tensor.itemsize and tensor.is_contiguous()
    if tensor.device.type != "npu" or not dense or get_npu_format(tensor) not in (-1, 0, 1, 2):
        actual = f"of shape {tuple(tensor.shape)} on {tensor.device}"
        expected = "one of an npu, of format ND, that has its storage for itself"
        raise NotImplementedError(
            f"_C_ascend::get_npu_storage_shape: tensor is {actual}; the emulator expects {expected}"
        )
    return list(tensor.shape)


# By schema.
OPERATORS = {
    "device_print(str msg) -> ()": print_text,
    "device_print_tensor(Tensor tensor) -> ()": print_tensor,
    "get_npu_storage_shape(Tensor tensor) -> int[]": storage_shape,
}
