"""Chooses the kernels that quantize on an accelerator: Triton's or torch operators. Lays out the records of engines."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from alltoallv.errors import InvalidParamError
from alltoallv.quantization.spec import Quantization, providers
from alltoallv.torch.engines import torch_kernels

_log = logging.getLogger("alltoallv")


@lru_cache(None)
def kernels_for(device: str) -> Any:
    """Returns the kernels for a kind of device: they have the functions of `alltoallv.torch.engines.torch_kernels`."""
    provided = providers[device]() if device in providers else None
    if provided is not None:
        return provided
    if _has_triton(device):
        from alltoallv_triton import launch

        return launch
    _log.info("quantized collectives on %s use torch operators; Triton for it makes them faster", device)
    return torch_kernels


def offers_format(spec: Quantization, kernels: Any, pieces: bool = False) -> bool:
    """Returns whether the kernels know a format; for ``pieces`` see `check_format`."""
    row = spec.row
    plain = row.bits in (8, 4) and not (row.rotated or row.spikes)
    supported = row.mantissa < 0 if kernels is torch_kernels else plain
    return supported and not (pieces and spec.has_tensor_scale)


def check_format(spec: Quantization, kernels: Any, pieces: bool = False) -> None:
    """Raises InvalidParamError for a format that the kernels do not know yet.

    Args:
        pieces: Whether they get a vector in pieces, where one scale for all would have to be found first.

    Raises:
        InvalidParamError: the format is unknown; the message names it.
    """
    if not offers_format(spec, kernels, pieces):
        raise InvalidParamError(
            f"format is {spec.format}, which this engine does not offer; shared memory and tcp do", id=1439
        )


def _has_triton(device: str) -> bool:
    needed = {"cuda": "triton", "npu": "triton.backends.ascend"}.get(device)  # triton-ascend takes triton's name
    try:
        if needed is None or importlib.util.find_spec(needed) is None:
            return False
    except ModuleNotFoundError:
        return False
    compiles = device != "cuda" or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiles:
        _log.warning("Triton finds no C compiler, which it needs to launch a kernel: install gcc, or set CC")
    return bool(compiles)


def record_bytes(spec: Quantization, length: int) -> int:
    """Returns the bytes of a record: ``length`` elements as engines exchange them.

    Scales, float32, lie before the codes, each aligned to 16 bytes, so that every record begins where an accelerator
    reads many bytes at once.
    """
    return _aligned(spec.scale_bytes(length)) + _aligned(spec.code_bytes(length))


def record_views(records: Tensor, spec: Quantization, length: int) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of records of ``length`` elements each, one row per record."""
    size = spec.scale_bytes(length)
    begin, scales = _aligned(size), records[:, :size]
    codes = records[:, begin : begin + spec.code_bytes(length)]
    return codes, scales.view(torch.float32) if spec.has_floats else scales


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
