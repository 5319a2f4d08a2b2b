"""Packs numbers of four bits in words of 32, and reads the 64-bit scales of quantized matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import expect, operator

_OFFSET_BIT = 37


def pack(values: Tensor) -> Tensor:
    """Packs eight neighbours of the last dimension, -8 to 7, in an int32: the first in the lowest bits."""
    expect(values.size(-1) % 8 == 0, "input", values, "a last dimension that is a multiple of 8")
    nibbles = (values.long() & 0xF).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return nibbles.sum(-1).to(torch.uint32).view(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Returns the int8 values that `pack` packed."""
    nibbles = (words.long().unsqueeze(-1) >> torch.arange(0, 32, 4)) & 0xF
    return ((nibbles ^ 8) - 8).flatten(-2).to(torch.int8)


def unpack_matrix(matrix: Tensor) -> Tensor:
    """Returns a matrix of int8 as it is, and one of int32 unpacked along its contiguous dimension."""
    if matrix.dtype != torch.int32:
        return matrix
    along_rows = matrix.stride(-2) == 1 and matrix.stride(-1) != 1
    return unpack(matrix.mT).mT if along_rows else unpack(matrix)


def scale_and_offset(scale: Tensor) -> tuple[Tensor, Tensor | float]:
    """Returns the scale and offset that an int64 scale holds; any other dtype is a scale without offset."""
    if scale.dtype != torch.int64:
        return scale.float(), 0.0
    offset = (scale >> _OFFSET_BIT) & 0x1FF
    return (scale & 0xFFFFFFFF).to(torch.uint32).view(torch.float32), ((offset ^ 0x100) - 0x100).float()


@operator("npu_trans_quant_param")
def trans_quant_param(scale: Tensor, offset: Tensor | None) -> Tensor:
    """Packs a float32 without its lowest 13 bits, bit 46, and the offset as 9 bits from bit 37."""
    result = (scale.contiguous().view(torch.int32).long() & 0xFFFFE000) | (1 << 46)
    if offset is not None:
        result = result | ((offset.round().clamp(-256, 255).long() & 0x1FF) << _OFFSET_BIT)
    return result


@operator("npu_convert_weight_to_int4pack")
def convert_weight_to_int4pack(weight: Tensor) -> Tensor:
    expect(weight.dtype == torch.int32, "weight", weight, "int32 values from -8 to 7")
    return pack(weight)
