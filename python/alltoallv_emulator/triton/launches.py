"""A launch of a Triton kernel as an operator of torch: on the current stream, and in the NPUGraph that is captured."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alltoallv_emulator import graphs
from alltoallv_emulator.host_views import on_host

__all__ = ["launch"]

_library = torch.library.Library("alltoallv_emulator", "DEF")
_library.define("triton_launch(int number, Tensor(a!)[] tensors) -> ()")
_operator = torch.ops.alltoallv_emulator.triton_launch.default
_numbers = itertools.count()
_launches: dict[int, Callable[[], None]] = {}  # that run, or are in a graph


def _run(number: int, tensors: Sequence[torch.Tensor]) -> None:
    _launches[number]()


_library.impl("triton_launch", on_host(_operator, _run), "PrivateUse1")


def launch(name: str, program: Any, grid: tuple[int, int, int], arguments: Sequence[Any], stream: int) -> None:
    """Runs a program for all places of the grid, after the work of the stream.

    Raises:
        ValueError: A tensor is not on an NPU.
    """
    tensors = []
    for index, argument in enumerate(arguments):
        tensor = getattr(argument, "base", argument)  # of a descriptor or a wrapper
        tensor = tensor if isinstance(tensor, torch.Tensor) else argument
        if isinstance(tensor, torch.Tensor):
            if tensor.device.type != "npu":
                raise ValueError(
                    f"argument {index} of the Triton kernel {name} is a tensor on {tensor.device}, expected on an NPU"
                )
            tensors.append(tensor.detach())
    if not tensors:
        tensors.append(torch.empty(0, device="npu"))
    if stream != torch.npu.current_stream().npu_stream:
        torch.npu.synchronize()
    number = next(_numbers)
    _launches[number] = functools.partial(_call, name, program, grid, program.values(arguments))
    try:
        _operator(number, tensors)
    finally:
        if not graphs.recording():
            del _launches[number]


def _call(name: str, program: Any, grid: tuple[int, int, int], values: list[Any]) -> None:
    try:
        program.run(grid, values)
    except Exception as error:
        error.add_note(f"in the Triton kernel {name}")
        raise
