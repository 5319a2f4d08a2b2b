"""Operators that change layouts: formats, transposes, casts and the like."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import dtype_of, expect, operator

_ND = 2


# The numbers of CANN's formats. Memory keeps the ND layout here: a format is only a name that a storage bears.
_FORMATS = {0, 1, 2, 3, 4, 27, 29, 30, 32, 33}


@operator("get_npu_format", on_host=False)
def get_npu_format(input: Tensor) -> int:
    """Returns the format's number; on an emulated NPU torch_npu keeps it."""
    if input.device.type == "npu":
        return int(torch.ops.npu.get_npu_format(input))
    return getattr(input.untyped_storage(), "npu_format", _ND)


@operator("_npu_format_cast", on_host=False)
def format_cast(input: Tensor, acl_format: int) -> Tensor:
    expect(acl_format in _FORMATS, "acl_format", acl_format, f"one of {sorted(_FORMATS)}")
    if acl_format == get_npu_format(input):
        return input.view_as(input)
    expect(input.storage_offset() == 0, "input", input, "a tensor at the beginning of its storage, as torch_npu does")
    if input.device.type == "npu":
        options = {"dtype": input.dtype, "device": input.device, "acl_format": acl_format}
        result: Tensor = torch.ops.npu.npu_view_copy(
            torch.ops.npu.empty_with_format(input.size(), **options), input, False
        )
        return result
    result = input.contiguous().clone()
    result.untyped_storage().npu_format = acl_format
    return result


@operator("npu_format_cast", ignores=("customize_dtype", "input_dtype"), on_host=False)
def format_cast_by_number(input: Tensor, acl_format: int) -> Tensor:
    """Casts the format; on an emulated NPU torch_npu's operator does it, which has a gradient there."""
    on_npu = input.device.type == "npu"
    return torch.ops.npu._npu_format_cast(input, acl_format) if on_npu else format_cast(input, acl_format)


@operator("npu_format_cast.Tensor", ignores=("customize_dtype", "input_dtype"), on_host=False)
def format_cast_like(input: Tensor, dst: Tensor) -> Tensor:
    return format_cast_by_number(input, get_npu_format(dst))


@operator("npu_format_cast_.acl_format", ignores=("customize_dtype", "input_dtype"), on_host=False)
def format_cast_(input: Tensor, acl_format: int) -> Tensor:
    return input.set_(format_cast(input, acl_format))


@operator("npu_format_cast_", ignores=("customize_dtype", "input_dtype"), on_host=False)
def format_cast_like_(input: Tensor, src: Tensor) -> Tensor:
    return format_cast_(input.copy_(src), get_npu_format(src))


@operator("npu_dtype_cast", "_npu_dtype_cast")
def dtype_cast(input: Tensor, dtype: int) -> Tensor:
    return input.to(dtype_of(dtype, input.dtype, "dtype"), copy=True)


@operator("npu_dtype_cast_backward", "_npu_dtype_cast_backward", ignores=("grad_dtype", "input_dtype"))
def dtype_cast_backward(grad: Tensor, dtype: int) -> Tensor:
    return grad.to(dtype_of(dtype, grad.dtype, "dtype"), copy=True)


@operator("npu_dtype_cast_")
def dtype_cast_(input: Tensor, src: Tensor) -> Tensor:
    return input.copy_(src)


@operator("one_")
def one_(input: Tensor) -> Tensor:
    return input.fill_(1)


@operator("npu_transpose", ignores=("require_contiguous",))
def transpose(input: Tensor, perm: list[int]) -> Tensor:
    return input.permute(perm).contiguous()


@operator("npu_confusion_transpose")
def confusion_transpose(input: Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> Tensor:
    if transpose_first:
        return input.permute(perm).reshape(shape).clone()
    return input.view(shape).permute(perm).contiguous()


@operator("npu_confusion_transpose_backward")
def confusion_transpose_backward(grad: Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> Tensor:
    """Returns the gradient: ``shape`` is the input's, ``transpose_first`` this operator's, which reverses the order."""
    back = [perm.index(axis) for axis in range(len(perm))]
    if transpose_first:
        return grad.permute(back).reshape(shape).clone()
    return grad.reshape([shape[axis] for axis in perm]).permute(back).contiguous()


@operator("npu_broadcast")
def broadcast(input: Tensor, size: list[int]) -> Tensor:
    return input.expand(size).clone()


@operator("npu_slice")
def slice_(input: Tensor, offsets: list[int], size: list[int]) -> Tensor:
    for axis, (start, length) in enumerate(zip(offsets, size, strict=True)):
        input = input.narrow(axis, start, input.size(axis) - start if length == -1 else length)
    return input.clone()


@operator("npu_view_copy", ignores=("non_blocking",))
def view_copy(input: Tensor, other: Tensor) -> Tensor:
    return input.copy_(other)
