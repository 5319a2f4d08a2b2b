"""Private inputs that peers read again and again come to lie in huge pages, and change no bit by it."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

import alltoallv.numpy
from alltoallv import Communicator
from alltoallv.testing import Ranks

HUGE = 2 << 20
ELEMENTS = 3 << 20  # of 4 bytes: five or six huge pages, the borders in the middle of one
MADV_COLLAPSE = 25


def mapping(length: int, *, may: bool) -> tuple[mmap.mmap, int]:
    """Private memory, whose pages the kernel ``may`` bring together or not, and its address."""
    memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not may:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[:] = b"\1" * length
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def huge_bytes(address: int) -> int:
    """Of the mapping with that address."""
    for entry in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        begin, end = (int(each, 16) for each in entry.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            found = re.search(r"AnonHugePages: +(\d+) kB", entry)
            assert found, entry
            return int(found[1]) << 10
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.fixture(scope="module")
def collapses() -> None:
    """Skips where this kernel does not make huge pages of small ones, or makes them unasked."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists() and "[always]" in enabled.read_text():
        pytest.skip(f"{enabled} is always: there are no small pages to begin with")
    memory, address = mapping(2 * HUGE, may=True)
    block = -(-address // HUGE) * HUGE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(block), ctypes.c_size_t(HUGE), MADV_COLLAPSE) != 0:
        pytest.skip(f"MADV_COLLAPSE: {os.strerror(ctypes.get_errno())}")
    del memory


def exchanges(communicator: Communicator, may: bool) -> list[int]:
    """Of an input between other data, over and over: what of it lay in huge pages after each."""
    size, rank = communicator.size, communicator.rank
    part = ELEMENTS // size
    memory, address = mapping(4 * ELEMENTS + 2 * HUGE, may=may)
    whole = np.frombuffer(memory, np.int32)
    begin = (-(-address // HUGE) * HUGE - address + HUGE // 4) // 4
    x = whole[begin : begin + ELEMENTS]
    found = []
    for call in range(5):
        inputs = [np.arange(ELEMENTS, dtype=np.int32) * (j + 2) + call for j in range(size)]
        x[:] = inputs[rank]
        kept = whole.copy()
        out = np.full(ELEMENTS + 2, -7, np.int32)
        alltoallv.numpy.all_to_all_v(x, [part] * size, [part] * size, out=out[1:-1], group=communicator)
        expected = np.concatenate([each[rank * part : (rank + 1) * part] for each in inputs])
        assert np.array_equal(out[1:-1], expected), f"call {call}"
        assert out[0] == out[-1] == -7
        assert np.array_equal(whole, kept)
        found.append(huge_bytes(address))
    return found


@pytest.mark.usefixtures("collapses")
def test_inputs_that_peers_read_again_come_to_lie_in_huge_pages(ranks: Ranks, cma_permitted: bool) -> None:
    if not cma_permitted:
        pytest.skip("process_vm_readv between processes is not permitted here (Yama, seccomp or capabilities)")
    for found in ranks(2)(exchanges, True):
        assert found[:2] == [0, 0]
        assert found[2] > 0, found  # how many depends on the memory that is free


def test_memory_that_is_to_keep_its_small_pages_keeps_them(ranks: Ranks) -> None:
    for found in ranks(2)(exchanges, False):
        assert found == [0] * 5
