"""What the tests of failures share: errors as values, new communicators, what a process holds.

The test modules import it, and so do the ranks that run their functions.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from started import process_state, wait_for

from alltoallv import Communicator
from alltoallv.numpy import all_gather, all_reduce, all_to_all_v, barrier
from alltoallv.testing.data_path import data_path

# From a cause to its error: milliseconds on an idle machine. Less than the timeouts, which end what was not told.
LIMIT = 20.0

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.signal.restype = ctypes.c_void_p


@dataclass(frozen=True)
class Failure:
    """An exception that can be compared and sent; ``at`` is when it came, ``began`` when the call was made."""

    name: str
    text: str
    code: int | None
    began: float
    at: float


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Failure:
    """Calls and returns the error; none is an error."""
    began = time.monotonic()
    try:
        call(*args, **kwargs)
    except Exception as error:
        return Failure(type(error).__name__, str(error), getattr(error, "code", None), began, time.monotonic())
    raise AssertionError("the call succeeded, expected an error")


def join(rank: int, size: int, suffix: str = "", domain: str = "default", **options: Any) -> Communicator:
    """A communicator of ranks chosen here, such as the survivors of a loss.

    ``suffix`` sets their job apart from others of the same test.
    """
    job = os.environ["ALLTOALLV_JOB_ID"].partition("/")[0]
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({f"ALLTOALLV_{name}": str(value) for name, value in place.items()})
    os.environ["ALLTOALLV_JOB_ID"] = f"{job}/{suffix}"
    with data_path(options.pop("path", None)):
        return Communicator.from_env(domain, **{"timeout": 40.0} | options)


def pids_of(comm: Communicator) -> list[int]:
    return all_gather(np.array([os.getpid()]), group=comm).ravel().tolist()


def check_works(comm: Communicator) -> None:
    """Moves data of a small and of a larger size, and compares them."""
    for rows in (3, 20_000):
        x = np.arange(comm.size * rows, dtype=np.int64) + comm.rank * 10**9
        y = all_to_all_v(x, [rows] * comm.size, group=comm)
        mine = np.arange(rows) + comm.rank * rows
        expected = np.concatenate([mine + source * 10**9 for source in range(comm.size)])
        np.testing.assert_array_equal(y, expected)
    total = all_reduce(np.full(7, comm.rank + 1, np.int32), group=comm)
    assert total.tolist() == [comm.size * (comm.size + 1) // 2] * 7
    barrier(group=comm)


def on_threads(work: Callable[[Any], object], arguments: Sequence[Any]) -> None:
    """Calls ``work`` with every argument, each on a thread of its own, and raises what one of them raises."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(work, arguments))


def last_seq(comm: Communicator) -> int:
    """Sequence number of this rank's last operator."""
    operators = comm.flight_record()["ranks"][comm.rank]["operators"]
    return operators[-1]["seq"] if operators else 0


def wait_until_in(comm: Communicator, seq: int, *ranks: int) -> None:
    """Waits until these ranks, or all others, have begun their operator number ``seq``."""
    named = ranks or [rank for rank in range(comm.size) if rank != comm.rank]

    def begun() -> bool:
        told = [comm.flight_record()["ranks"][rank]["operators"] for rank in named]
        return all(operators and operators[-1]["seq"] >= seq for operators in told)

    wait_for(begun, f"operator #{seq} on ranks {named}")


def once_asleep(act: Callable[[], object]) -> None:
    """Acts on another thread when this one has slept for a while: in its next call, which nobody else lets go on."""
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    def look() -> None:
        looks = 0
        while looks < 10:
            time.sleep(0.02)
            looks = looks + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        act()

    threading.Thread(target=look).start()


def stamp(file: Path) -> None:
    """Notes the moment of a cause in a file, for other processes to read."""
    file.write_text(repr(time.monotonic()))


def stamped(file: Path) -> float:
    return float(file.read_text())


def stop(pid: int) -> None:
    """Stops a process and returns once it stands still."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: process_state(pid) == "T", f"SIGSTOP of pid {pid}")


@contextmanager
def watching(condition: Callable[[], bool], action: Callable[[], None]) -> Iterator[None]:
    """Runs ``action`` on a thread beside the block, once ``condition`` holds; not any more after the block."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if condition():
                action()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def mapped(size: int) -> np.ndarray:
    """Bytes in pages of their own, as `trap` needs them."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


@dataclass(frozen=True)
class Place:
    """An address in shared memory that every process which maps it can find: inode of the memfd, and offset."""

    inode: str
    offset: int

    @classmethod
    def of(cls, address: int) -> Place:
        for begin, end, offset, inode in _shared_mappings():
            if begin <= address < end:
                return cls(inode, offset + address - begin)
        raise AssertionError(f"{address:#x} does not lie in shared memory")

    def here(self) -> int:
        for begin, end, offset, inode in _shared_mappings():
            if inode == self.inode and offset <= self.offset < offset + end - begin:
                return begin + self.offset - offset
        raise AssertionError(f"{self} is not mapped here")


def shared_bytes(address: int, length: int) -> np.ndarray:
    """The shared pages at an address, mapped once more: peers write here, whatever becomes of these."""
    place = Place.of(address)
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if str(os.stat(f"/proc/self/fd/{fd}").st_ino) != place.inode:
                continue
            start = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
            skipped = place.offset - start
            pages = mmap.mmap(int(fd), length + skipped, offset=start)
            return np.frombuffer(pages, np.uint8)[skipped:]
    raise AssertionError(f"no descriptor of the segment at {address:#x}")


def _shared_mappings() -> Iterator[tuple[int, int, int, str]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *name = line.split(maxsplit=5)
        if name and name[0].startswith("/memfd:alltoallv"):
            begin, end = (int(part, 16) for part in span.split("-"))
            yield begin, end, int(offset, 16), inode


@contextmanager
def trap(address: int, action: Callable[[], None]) -> Iterator[None]:
    """Runs ``action`` when this process is about to touch the page of ``address``: in the middle of a copy, that is.

    The page is made inaccessible; the handler of the fault, on the thread that copies, makes it accessible again.
    """
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    calls = []

    def handle(number: int) -> None:
        if calls:  # a fault that is not ours
            os.abort()
        calls.append(number)
        assert _libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        action()

    handler = _HANDLER(handle)
    before = _libc.signal(signal.SIGSEGV, ctypes.cast(handler, ctypes.c_void_p))
    assert _libc.mprotect(page, mmap.PAGESIZE, 0) == 0
    try:
        yield
    finally:
        _libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
        _libc.signal(signal.SIGSEGV, before)
    assert calls, "nobody touched the byte"


def stop_myself() -> None:
    """Stands still until somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def held() -> dict[str, list[str]]:
    """What this process, and this user's shared places, hold on behalf of alltoallv; sorted, to be compared."""
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.append(os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0])
        except OSError:
            continue  # the descriptor of the listing itself
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ours = [m for m in maps if len(m) == 6 and "alltoallv" in m[5] and "memfd" in m[5]]
    # Pages that were private for a time are mapped anew, and the kernel may show a mapping in parts from then on.
    ends = {(m[0].partition("-")[2], m[4]) for m in ours}  # with inodes
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
        except OSError:
            continue
    found = [file for folder in ("/dev/shm", "/tmp") for file in Path(folder).glob("*alltoallv*")]
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return {
        "descriptors": sorted(fds),
        "mappings": sorted(m[5] for m in ours if (m[0].partition("-")[0], m[4]) not in ends),
        "threads": sorted(name for name in names if name.startswith("alltoallv")),
        # A benchmark or a fuzzer that runs beside this process has files as well.
        "files": sorted(
            str(file) for file in found if not file.name.startswith(("alltoallv-bench-", "alltoallv-fuzz-"))
        ),
        "children": sorted(children.read_text().split()) if children.exists() else [],
    }
