"""What there is too little of: limits of this process, and system calls that the kernel refuses."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import resource
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *4 * (ctypes.c_ulong,)]


@contextmanager
def limited(what: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def no_more_descriptors(few: int = 0) -> AbstractContextManager[None]:
    """In the block this process gets none, or so many."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in range(1 << 16) if number not in used)
    return limited(resource.RLIMIT_NOFILE, next(itertools.islice(free, few, None)))


def no_more_memory(room: int = 1 << 20) -> AbstractContextManager[None]:
    """In the block this process gets so many bytes of address space at most.

    A thread that has just begun reserves 128 MiB for its memory and gives half of it back (malloc/arena.c of glibc),
    which must not count as room: the limit is set when the address space has been the same for some time.
    """
    seen: list[int] = []
    while len(seen) < 20 or len(set(seen[-20:])) > 1:
        seen.append(int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())
        time.sleep(0.001)
    return limited(resource.RLIMIT_AS, seen[-1] + room)


def no_room_in_files() -> AbstractContextManager[None]:
    """In the block no file grows beyond a page, those in memory neither."""
    return limited(resource.RLIMIT_FSIZE, 4096)


# Numbers of the architecture and of its system calls (linux/audit.h, asm/unistd.h).
_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {"mmap": 9, "ftruncate": 77, "epoll_create1": 291, "process_vm_readv": 310, "memfd_create": 319},
    ),
    "aarch64": (
        0xC00000B7,
        {"mmap": 222, "ftruncate": 46, "epoll_create1": 20, "process_vm_readv": 270, "memfd_create": 279},
    ),
}
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_LOAD, _IF_EQUAL, _IF_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of BPF
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_FLAGS = 16 + 3 * 8  # where seccomp's data have the flags of mmap


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refused(call: str, error: int, work: Callable[[], Any]) -> Any:
    """Returns what ``work`` returns on a thread for which the kernel refuses a system call with this errno.

    The threads that it starts are also refused the call. Of ``mmap`` only shared mappings are.
    """
    architecture, numbers = _CALLS[platform.machine()]
    tests = [(4, _IF_EQUAL, architecture), (0, _IF_EQUAL, numbers[call])]
    if call == "mmap":
        tests.append((_FLAGS, _IF_BIT, mmap.MAP_SHARED))
    lines = []
    for left, (place, condition, value) in zip(reversed(range(len(tests))), tests, strict=True):
        lines += [(_LOAD, 0, 0, place), (condition, 0, 2 * left + 1, value)]  # else goes to the last line
    lines += [(_RETURN, 0, 0, _ERRNO | error), (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)

    def run() -> Any:
        program = _Program(len(lines), code)
        assert _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        assert _libc.prctl(_SET_SECCOMP, _FILTER, ctypes.addressof(program), 0, 0) == 0, os.strerror(ctypes.get_errno())
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
