"""Vectors as rows of bytes, as engines exchange them: float32 scales, then codes, each aligned to 16 bytes.

So every row begins where an accelerator reads many bytes at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.quantization.spec import Quantization


def record_bytes(how: Quantization, length: int) -> int:
    """Of a row that holds ``length`` elements."""
    return _aligned(4 * how.groups(length)) + _aligned(how.code_bytes(length))


def record_views(records: Tensor, how: Quantization, length: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows of ``length`` elements each, one row per row."""
    scales = 4 * how.groups(length)
    begin = _aligned(scales)
    return records[:, begin : begin + how.code_bytes(length)], records[:, :scales].view(torch.float32)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
