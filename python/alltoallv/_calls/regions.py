"""Regions of host memory: finds which of them overlap, and where they lie from a common base."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv.errors import InvalidParamError

Region = tuple[int, int]  # address of the first byte, number of bytes


def check_apart(region: Region, *others: Region) -> None:
    """Raises InvalidParamError if an output of an exchange overlaps an input; ``region`` may be either of them."""
    begin, nbytes = region
    for other, other_bytes in others:
        if nbytes and other_bytes and begin < other + other_bytes and other < begin + nbytes:
            raise InvalidParamError("output and input overlap in memory, expected separate memory", id=1085)


def check_untracked(tracked: bool, value: Any, name: str = "input", argument: str = "out") -> None:
    """Raises InvalidParamError for an argument that nobody may give for an input of which autograd keeps track."""
    if tracked and value is not None:
        raise InvalidParamError(
            f"{argument} is given for {name}, which wants a gradient, expected one or the other", id=1151
        )


def check_gather_apart(output: Region, input: Region, rank: int) -> None:
    """Raises InvalidParamError if a gather's input overlaps the output elsewhere than in its own part."""
    if input[0] != output[0] + rank * input[1]:
        check_apart(output, input)


def check_lists_apart(outputs: Sequence[Region], inputs: Sequence[Region], name: str = "output_tensor_list") -> None:
    """Raises if an output of an all_to_all overlaps an input or another output; ``name`` is the list's."""
    for output in outputs:
        check_apart(output, *inputs)
    check_outputs_apart(outputs, name)


def check_outputs_apart(outputs: Sequence[Region], name: str = "output_tensor_list") -> None:
    """Raises InvalidParamError if two outputs of a list overlap."""
    regions = sorted((begin, nbytes, j) for j, (begin, nbytes) in enumerate(outputs) if nbytes)
    for (begin, nbytes, j), (following, _, k) in pairwise(regions):
        if following < begin + nbytes:
            raise InvalidParamError(f"{name}[{j}] and {name}[{k}] overlap in memory", id=1152)


def lowest(regions: Sequence[Region]) -> tuple[int, list[int]]:
    """Returns the lowest address of any byte, and each region's offset from there in bytes; 0 for empty ones."""
    base = min([address for address, nbytes in regions if nbytes], default=0)
    return base, [address - base if nbytes else 0 for address, nbytes in regions]


def as_bytes(region: Region) -> npt.NDArray[Any]:
    """Returns the region as an array over its memory, which the caller keeps alive."""
    address, nbytes = region
    if not nbytes:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)
