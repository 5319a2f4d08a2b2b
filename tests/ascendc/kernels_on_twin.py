"""Runs the Ascend C kernels on their twin: addresses in, faults out.

A rank is a thread here, and each of its cores another; windows are arrays that all of them reach.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import alltoallv_emulator

TYPES = {"float32": (np.float32, 0), "float16": (np.float16, 1), "bfloat16": (ml_dtypes.bfloat16, 27)}  # ACL's numbers
MOST_RANKS, FLAGS, DATA_PLACE = 64, slice(4096, 256 << 10), 512 << 10  # op_kernel/ascendc/window.h
STATUSES = ("done", "late", "told", "broken", "overflow", "bad_counts", "mismatch", "unexpected")


def library() -> ctypes.CDLL:
    """The kernels and the twin; built with the emulator, whose libraries lie beside it."""
    return declared(ctypes.CDLL(str(Path(alltoallv_emulator.library_folder()) / "liballtoallv_ascendc.so")))


def declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its function."""
    found.alltoallv_twin_run.argtypes = [
        ctypes.c_char_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_ulonglong,
        ctypes.c_double, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    return found


LIBRARY = library()


class Fault(Exception):
    """What the twin found."""


def run(
    name: str, cores: int, *arguments: np.ndarray[Any, Any] | None, seed: int = 0, mean_delay_us: float = 0.0
) -> None:
    """Runs a kernel; its arguments are arrays, as device memory, or None."""
    addresses = (ctypes.c_void_p * len(arguments))(*(None if a is None else a.ctypes.data for a in arguments))
    text = ctypes.create_string_buffer(1000)
    if LIBRARY.alltoallv_twin_run(name.encode(), cores, addresses, len(arguments), seed, mean_delay_us, text, 1000):
        raise Fault(text.value.decode())


def struct(*fields: tuple[str, Sequence[int]]) -> np.ndarray[Any, Any]:
    """Tiling: values of one type after another, in memory order."""
    return np.frombuffer(b"".join(np.array(values, kind).tobytes() for kind, values in fields), np.uint8).copy()


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Bytes that begin at a cache line, filled with what nobody wrote."""
    raw = np.full(size + 64, 0xA5, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size]


class Windows:
    """The windows of some ranks, and the tiling that describes them.

    With the path of a file, which one process makes, they are memory of all processes that open it.
    """

    def __init__(
        self, size: int, lanes: int, window_bytes: int = DATA_PLACE + (256 << 10), wait_us: int = 20_000_000,
        path: Path | None = None,
    ):  # fmt: skip
        self.size, self.lanes, self.wait_us = size, lanes, wait_us
        self.lane_bytes = (window_bytes - DATA_PLACE) // (2 * lanes) // 512 * 512
        if path is not None:  # a file of zeros
            self.memory = list(np.memmap(path, np.uint8, "r+" if path.exists() else "w+", shape=(size, window_bytes)))
            return
        self.memory = [aligned(window_bytes) for _ in range(size)]
        for window in self.memory:
            window[:DATA_PLACE] = 0  # as the host does before the first call

    def tiling(self, rank: int, wait_us: int | None = None) -> np.ndarray[Any, Any]:
        addresses = [window.ctypes.data for window in self.memory] + [0] * (MOST_RANKS - self.size)
        wait = self.wait_us if wait_us is None else wait_us
        return struct(("u4", [rank, self.size, self.lanes, wait]), ("u8", [self.lane_bytes, *addresses]))

    def sequences(self, rank: int) -> list[int]:
        return self.memory[rank][: 32 * self.lanes].view(np.int32)[::8].tolist()


def on_ranks(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Makes each rank's call in a thread of its own; raises what the first of them raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException | None] = [None] * len(calls)

    def one(rank: int) -> None:
        try:
            results[rank] = calls[rank]()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(r,)) for r in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results
