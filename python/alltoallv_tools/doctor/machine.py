"""Checks the kernel, the processors, and what a process may do here."""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import platform
import resource
import secrets
import select
import socket
import struct
import subprocess
import sys
from pathlib import Path

from alltoallv_tools.doctor import Check

KERNEL = (5, 6)  # pidfd_getfd and other calls that the transport uses
OUTPUT_MB = 200  # largest shared memory per rank and domain, unless the domain sets another limit
DESCRIPTORS = 1024  # soft limit that serves some hundred peers
SECONDS = 20.0  # time limit of a child process

_PYTHON = (sys.executable, "-I", "-S", "-c")  # starts in a few hundredths of a second
_READABLE = """
import ctypes, sys
word = ctypes.create_string_buffer(b"alltoallv")
print(ctypes.addressof(word), flush=True)
sys.stdin.read()
"""
_READER = """
import ctypes, os, sys
class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
pid, address = int(sys.argv[1]), int(sys.argv[2])
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
read.restype = ctypes.c_ssize_t
read.argtypes = [ctypes.c_int, ctypes.POINTER(Iovec), ctypes.c_ulong, ctypes.POINTER(Iovec), *[ctypes.c_ulong] * 2]
word = ctypes.create_string_buffer(9)
count = read(pid, Iovec(ctypes.addressof(word), 9), 1, Iovec(address, 9), 1, 0)
print("read" if count == 9 and word.raw == b"alltoallv" else os.strerror(ctypes.get_errno()))
"""


def _child(program: str) -> subprocess.Popen[str]:
    """Starts a process that waits for its input; Ctrl-C in a terminal ends it as well, without a word."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*_PYTHON, program], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


def read_text(path: str) -> str:
    """Reads a small file of /proc or /sys without its last newline; "" if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def kernel() -> Check:
    """Reports the kernel's version and architecture."""
    release, machine = platform.release(), platform.machine()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    good = platform.system() == "Linux" and numbers >= KERNEL
    return Check(
        "versions",
        "kernel",
        "ok" if good else "no",
        f"{platform.system()} {release} on {machine}",
        "" if good else f"shared memory needs Linux {KERNEL[0]}.{KERNEL[1]} or newer",
        required=True,
    )


def processors() -> Check:
    """Counts the processors that ranks may use: the affinity mask, limited by the control group's quota."""
    online, affinity = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota, _, period = read_text("/sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:  # version 1 of cgroups
        quota, period = (read_text(f"/sys/fs/cgroup/cpu/cpu.cfs_{what}_us") for what in ("quota", "period"))
    usable, limit = affinity, "no quota"
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        share = int(quota) / int(period)
        usable, limit = min(affinity, max(1, math.ceil(share))), f"quota {share:g} of its control group"
    return Check("machine", "processors", "ok", f"{usable} usable ({online} online, affinity mask {affinity}, {limit})")


def memory() -> Check:
    """Reports how far shared memory can grow: memfds count as ordinary memory, /dev/shm's size does not matter."""
    lines = dict(line.split(":", 1) for line in read_text("/proc/meminfo").splitlines() if ":" in line)
    available = int(lines.get("MemAvailable", "0 kB").split()[0]) << 10
    names = ("max", "current") if read_text("/sys/fs/cgroup/memory.max") else ("limit_in_bytes", "usage_in_bytes")
    folder = "/sys/fs/cgroup" if names[0] == "max" else "/sys/fs/cgroup/memory"  # version 1 of cgroups
    limit, used = (read_text(f"{folder}/memory.{name}") for name in names)
    if limit.isdecimal() and used.isdecimal():
        available = min(available, max(0, int(limit) - int(used)))
    good = available >= 2 * OUTPUT_MB << 20
    return Check(
        "machine",
        "memory",
        "ok" if good else "no",
        f"{available / 2**30:.1f} GiB available, a rank takes up to {OUTPUT_MB} MB per domain for its outputs",
        "" if good else "free some, or raise the container's limit",
    )


def memfd() -> Check:
    """Checks for anonymous shared memory whose size can be fixed."""
    try:
        with contextlib.ExitStack() as stack:
            fd = os.memfd_create("alltoallv-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            stack.callback(os.close, fd)
            os.ftruncate(fd, mmap.PAGESIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with mmap.mmap(fd, mmap.PAGESIZE) as pages:
                pages[0] = 1
            try:
                os.ftruncate(fd, 2 * mmap.PAGESIZE)
            except PermissionError:
                return Check("kernel", "memfd", "ok", "created, sealed against shrinking and growing", required=True)
            raise OSError("a sealed memfd could be resized")
    except (OSError, AttributeError) as error:
        advice = "the container's seccomp profile must allow memfd_create"
        return Check("kernel", "memfd", "no", str(error), advice, required=True)


def pidfd() -> Check:
    """Checks that a descriptor shows when a process ends."""
    try:
        with _child("input()") as child, contextlib.ExitStack() as stack:
            stack.callback(child.kill)
            fd = os.pidfd_open(child.pid)
            stack.callback(os.close, fd)
            child.kill()
            if not select.select([fd], [], [], SECONDS)[0]:
                raise OSError("the end of a process was not reported")
    except (OSError, AttributeError) as error:
        advice = "the container's seccomp profile must allow pidfd_open"
        return Check("kernel", "pidfd", "no", str(error), advice, required=True)
    return Check("kernel", "pidfd", "ok", "the end of a process is seen at once", required=True)


def abstract_sockets() -> Check:
    """Checks that ranks can find each other without files and prove their identity."""
    name = f"\0alltoallv-doctor-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            listener.bind(name)
            listener.listen()
            client.connect(name)
            served, _ = listener.accept()
            with served:
                size = struct.calcsize("3i")
                pid, uid, _ = struct.unpack("3i", served.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
                if (pid, uid) != (os.getpid(), os.getuid()):
                    raise OSError(f"SO_PEERCRED says pid {pid}, uid {uid}")
                socket.send_fds(client, [b"fd"], [client.fileno()])
                _, fds, _, _ = socket.recv_fds(served, 2, 1)
                for fd in fds:
                    os.close(fd)
                if len(fds) != 1:
                    raise OSError("a descriptor sent over it did not arrive")
    except OSError as error:
        advice = "ranks find each other over abstract Unix sockets: the sandbox must allow them"
        return Check("kernel", "abstract sockets", "no", str(error), advice, required=True)
    detail = "peers identified, descriptors passed"
    return Check("kernel", "abstract sockets", "ok", detail, required=True)


def process_vm_readv() -> Check:
    """Checks that a process may read the memory of another one that is not its child, as ranks do."""
    scope = read_text("/proc/sys/kernel/yama/ptrace_scope")
    yama = f"Yama ptrace_scope {scope}" if scope else "no Yama"
    answer = ""
    try:
        with _child(_READABLE) as peer:
            try:
                assert peer.stdout is not None
                address = peer.stdout.readline().strip()
                command = [*_PYTHON, _READER, str(peer.pid), address]
                reader = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
                answer = reader.stdout.strip() or (reader.stderr.strip().splitlines() or ["no answer"])[-1]
            finally:
                peer.kill()
    except (OSError, subprocess.TimeoutExpired) as error:
        answer = str(error)
    if answer == "read":
        return Check("kernel", "process_vm_readv", "ok", f"between two processes ({yama})")
    advice = "private arrays take the staged path; for the direct one "
    advice += "sysctl kernel.yama.ptrace_scope=0" if scope not in ("", "0") else "give the container CAP_SYS_PTRACE"
    return Check("kernel", "process_vm_readv", "no", f"{answer} ({yama})", advice)


def descriptors() -> Check:
    """Reports RLIMIT_NOFILE: every peer needs a socket, a pidfd and the segments' memfds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    good = soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS
    detail = f"{_limit(soft)} (hard limit {_limit(hard)}), a rank needs a few per peer and domain"
    return Check("limits", "open files", "ok" if good else "no", detail, "" if good else f"ulimit -n {DESCRIPTORS}")


def locked_memory() -> Check:
    """Reports RLIMIT_MEMLOCK, which only matters to network transports."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = _limit(soft) if soft == resource.RLIM_INFINITY else f"{soft / 2**20:g} MiB"
    return Check("limits", "locked memory", "-", f"{text}; shared memory needs none, RDMA between hosts does")


def huge_pages() -> Check:
    """Checks that the kernel may back shared memory with huge pages when asked."""
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    setting = read_text(path)
    chosen = setting.partition("[")[2].partition("]")[0]
    if not chosen:
        return Check("limits", "huge pages", "-", "the kernel has none for shared memory")
    if chosen in ("advise", "always", "within_size", "force"):
        return Check("limits", "huge pages", "ok", f"{chosen!r} for shared memory")
    advice = f"large exchanges gain from: echo advise > {path}"
    return Check("limits", "huge pages", "-", f"{chosen!r} for shared memory", advice)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def checks() -> list[Check]:
    """Runs all checks of this module except `kernel`, which is printed with the versions."""
    machine = [processors(), memory()]
    return [
        *machine,
        memfd(),
        pidfd(),
        abstract_sockets(),
        process_vm_readv(),
        descriptors(),
        locked_memory(),
        huge_pages(),
    ]
