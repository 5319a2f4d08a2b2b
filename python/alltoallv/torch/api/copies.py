"""Tensors that are not contiguous, or share memory, as a collective can take them: as copies where they must be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alltoallv.torch.api.calls import Copies
from alltoallv.torch.api.tensors import as_input


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def output_of(tensor: Tensor, copies: Copies) -> Tensor:
    """Returns where to receive: the tensor itself, or memory that is copied there afterwards."""
    if _is_plain(tensor):
        return tensor.detach()
    space = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    copies.append((tensor, space))
    return space


def in_place(tensor: Tensor, copies: Copies) -> Tensor:
    """Returns the tensor as input and output at once, or such a copy of it."""
    if _is_plain(tensor):
        return tensor.detach()
    copy = as_input("tensor", tensor)
    copies.append((tensor, copy))
    return copy


def apart(inputs: list[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the inputs, as copies where they share memory with an output."""
    regions = [(out.data_ptr(), out.data_ptr() + out.nbytes) for out in outputs if out.nbytes]
    low, high = min((a for a, _ in regions), default=0), max((b for _, b in regions), default=0)

    def meets(x: Tensor) -> bool:
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        return begin < high and low < end and any(begin < b and a < end for a, b in regions if begin < end)

    return [x.clone() if meets(x) else x for x in inputs]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns the parts one after another in memory; no copy if they lie so, as the chunks of one tensor do."""
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end and part.numel():
            return torch.cat([x.reshape(-1) for x in parts])
        end += part.nbytes
    if any(x.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr() for x in parts):
        return torch.cat([x.reshape(-1) for x in parts])
    return parts[0].as_strided((sum(x.numel() for x in parts),), (1,))
