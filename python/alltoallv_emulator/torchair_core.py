"""Stands for the extension modules of torchair, which need CANN's graph engine (GE).

With it torchair imports, and its mode "reduce-overhead" compiles to an NPUGraph. Graphs of GE, its default, are refused
by name.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

TorchDataType = enum.Enum(
    "TorchDataType",
    "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 BF16 FLOAT16 FLOAT32 FLOAT64 COMPLEX64 COMPLEX128",
)


def FinalizeGraphEngine() -> None:
    """Ends nothing: there is no engine."""


class TorchNpuGraphBase:
    """A graph of GE, which cannot be made."""

    def __init__(self, *given: object) -> None:
        raise _refusal("TorchNpuGraph")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*given: object, **options: object) -> None:
        raise _refusal(name)

    return refuse


def _refusal(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"torchair's {name} is of CANN's graph engine, which the emulator has not, expected "
        'CompilerConfig().mode = "reduce-overhead", which compiles to an NPUGraph'
    )
