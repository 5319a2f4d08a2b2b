"""Calls of the operators of vllm-ascend's extension module, on a device and on meta."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_map


def operators() -> Any:
    """``torch.ops._C_ascend`` with the emulator's operators."""
    importlib.import_module("alltoallv_emulator.vllm_ascend_c")
    return sys.modules["torch.ops"]._C_ascend


def moved(values: Any, place: Any) -> Any:
    """Copies of all tensors in ``values``."""
    return tree_map(lambda each: each.to(place, copy=True) if isinstance(each, torch.Tensor) else each, values)


class Calls:
    """Calls operators on a device."""

    def __init__(self, device: torch.device) -> None:
        self.operators, self._device = operators(), device

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        """The results, and what became of the arguments; shapes and dtypes are the meta kernel's, if there is one."""
        there = moved(arguments, self._device)
        operator = getattr(self.operators, name)
        results = operator(*there, **moved(options, self._device))
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"_C_ascend::{name}", "Meta"):
            shapes = operator(*moved(arguments, "meta"), **moved(options, "meta"))
            assert _described(shapes) == _described(results), name
        return moved(results, "cpu"), moved(there, "cpu")


def _described(results: Any) -> list[Any]:
    several = results if isinstance(results, tuple) else (results,)  # None where there are none
    return [None if each is None else (tuple(each.shape), each.dtype) for each in several]


def equal(value: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(value.double(), wanted.double(), rtol=tolerance, atol=tolerance)
