"""The memory of emulated NPUs as a kernel reads and writes it: arrays of addresses, checked before they are used."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from alltoallv_emulator import pyacl
from alltoallv_emulator.triton.ir import Type
from alltoallv_emulator.triton.operators import bits_of, dtype_of, from_bits, rounded, unsigned, width_of

__all__ = ["Memory"]

_LOWEST = 64  # an address below every tensor's, and aligned for every dtype
_UPDATES: dict[str, Any] = {
    "fadd": np.add, "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "max": np.maximum, "min": np.minimum, "umax": lambda a, b: np.where(unsigned(a) > unsigned(b), a, b),
    "umin": lambda a, b: np.where(unsigned(a) < unsigned(b), a, b), "exch": lambda a, b: b,
}  # fmt: skip


@functools.cache
def _all(bytes_: int) -> Any:
    """Returns integers of this size over all addresses from _LOWEST on."""
    everything: Any = (ctypes.c_char * 2**62).from_address(_LOWEST)
    return np.frombuffer(everything, f"i{bytes_}")


class Memory:
    """What one launch may reach: all memory of devices."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # known to be memory of a device

    def _places(self, what: str, addresses: Any, width: int) -> Any:
        """Returns the indices of elements in `_all`."""
        low, high = int(addresses.min()), int(addresses.max())
        if not any(begin <= low and high + width <= end for begin, end in self._ranges):
            for address in np.unique(addresses).tolist() if high - low > width else (low, high):
                self._check(what, address, width)
        if width > 1 and (addresses & (width - 1)).any():
            wrong = int(addresses[addresses & (width - 1) != 0][0])
            raise RuntimeError(f"{what} has the address {wrong:#x}, expected a multiple of {width}")
        return (addresses - _LOWEST) // width

    def _check(self, what: str, address: int, width: int) -> None:
        if any(begin <= address and address + width <= end for begin, end in self._ranges):
            return
        begin, size = ctypes.c_void_p(), ctypes.c_size_t()
        find = pyacl.library().aclrtMemGetAddressRange
        if find(ctypes.c_void_p(address), ctypes.byref(begin), ctypes.byref(size)) == 0:
            self._ranges.insert(0, (begin.value or 0, (begin.value or 0) + size.value))
            if address + width <= self._ranges[0][1]:
                return
        raise RuntimeError(f"{what} has the address {address:#x}, which is not in the memory of a device")

    def load(self, addresses: Any, mask: Any, other: Any, kind: Type) -> Any:
        """Reads elements; where the mask is false, the result is ``other`` or zero."""
        addresses, width = np.asarray(addresses), width_of(kind)
        everything = _all(width)
        if mask is None or np.all(mask):
            return from_bits(everything[self._places("tl.load", addresses.reshape(-1), width)], kind.element).reshape(
                addresses.shape
            )
        values = np.zeros(addresses.shape, dtype_of(kind)) if other is None else np.array(other, dtype_of(kind))
        if np.any(mask):
            places = self._places("tl.load", addresses[mask], width)
            values[mask] = from_bits(everything[places], kind.element)
        return values

    def store(self, addresses: Any, values: Any, mask: Any, kind: Type) -> None:
        """Writes elements where the mask is true."""
        addresses, width = np.asarray(addresses), width_of(kind)
        bits = np.asarray(bits_of(values, kind.element)).view(f"i{width}")
        if mask is not None and not np.all(mask):
            addresses, bits = addresses[mask], bits[mask]
        if addresses.size:
            _all(width)[self._places("tl.store", addresses.reshape(-1), width)] = bits.reshape(-1)

    def update(self, operator: str, addresses: Any, values: Any, mask: Any, kind: Type) -> Any:
        """Does an atomic operation for every element, in their order, and returns what memory held before."""
        if operator not in _UPDATES:
            raise NotImplementedError(f"atomic {operator} is not among what the emulator has of Triton")
        addresses, values = np.asarray(addresses), np.asarray(values)
        before = np.zeros(addresses.shape, dtype_of(kind))
        for index in np.ndindex(addresses.shape):
            if mask is None or np.asarray(mask)[index]:
                before[index] = self.load(addresses[index], None, None, kind)
                after = rounded(_UPDATES[operator](before[index], values[index]), kind.element)
                self.store(addresses[index], after, None, kind)
        return before

    def compare_and_swap(self, addresses: Any, expected: Any, values: Any, kind: Type) -> Any:
        """Writes the value where memory holds what is expected; returns what memory held before."""
        addresses, expected, values = np.asarray(addresses), np.asarray(expected), np.asarray(values)
        before = np.zeros(addresses.shape, dtype_of(kind))
        for index in np.ndindex(addresses.shape):
            before[index] = self.load(addresses[index], None, None, kind)
            if before[index] == expected[index]:
                self.store(addresses[index], values[index], None, kind)
        return before
