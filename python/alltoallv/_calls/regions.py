"""Regions of host memory: finds which of them overlap, and where they lie from a common base."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv.errors import InvalidParamError

Region = tuple[int, int]  # address of the first byte, number of bytes


def check_untracked(tracked: bool, value: Any, name: str = "input", argument: str = "out") -> None:
    """Raises InvalidParamError for an argument that nobody may give for an input of which autograd keeps track."""
    if tracked and value is not None:
        raise InvalidParamError(
            f"{argument} is given for {name}, which wants a gradient, expected one or the other", id=1151
        )


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
