"""Starts children that never outlive their parent, and reports how one ended; or forks them from a process that has
imported what they need: where an import takes seconds, they start at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

# Runs in its own small process: once the pipe from the parent closes, for whatever reason, it kills every
# process group on its list. Lines are "+group" and "-group".
_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Kills registered process groups, with all that their processes started, however this process ends.

    A parent-death signal alone would reach the children but not the grandchildren.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Registers a process group."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Takes a group off the list; call it before its leader is reaped and its number is free again."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Kills the groups that are still registered and ends the guard."""
        if os.getpid() != self._owner or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when the thread that started it in process ``parent`` ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def child_setup() -> Callable[[], None]:
    """Returns a ``preexec_fn``: the child dies with the thread that started it, and Ctrl-C works in it.

    Only for processes with one thread, which lives as long as the children should.
    """
    parent = os.getpid()

    def setup() -> None:
        die_with_parent(parent)
        # A launcher in the background of a shell script inherits an ignored SIGINT; its ranks must not.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return setup


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process group; one that has gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def exit_code(pid: int) -> int | None:
    """Returns how a child has ended, negative for a signal; None while it runs.

    It is not reaped, so that no other process gets its number.
    """
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def describe_exit(code: int) -> str:
    """Returns an exit status in words: "exited with code 3" or, for -9, "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


# Arguments: the socket's descriptor, and what it shall import and do.
_SERVER = """
import importlib, json, sys
asked = json.loads(sys.argv[2])
sys.path[:] = asked["path"] or sys.path[1:]
from alltoallv.launch.processes import serve
descriptors = serve(int(sys.argv[1]), asked["modules"])
getattr(importlib.import_module(asked["module"]), asked["function"])(descriptors, *asked["arguments"])
"""


class ServerEnded(RuntimeError):
    """The process that starts ranks has ended."""


class ForkServer:
    """Starts processes, each the leader of a session of its own, and reports how they ended.

    Args:
        modules: what is imported once.
        become_a_rank: "module.function", which a new process calls with the descriptors that `start` is given and with
            ``arguments``; it ends when the function returns.
        python: the interpreter and its flags.
        env: the environment of the imports, and what new processes begin with; by default this process's.
        path: where the process looks for modules; by default, where ``python`` does.
    """

    _KILLED = -signal.SIGKILL  # the server's end kills its processes

    def __init__(
        self,
        modules: Sequence[str],
        become_a_rank: str,
        *arguments: str,
        python: Sequence[str] = (sys.executable, "-u"),
        env: Mapping[str, str] | None = None,
        path: Sequence[str] = (),
    ) -> None:
        self._lock = threading.Lock()
        module, _, function = become_a_rank.rpartition(".")
        asked = {"path": path, "modules": modules, "module": module, "function": function, "arguments": arguments}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*python, "-c", _SERVER, str(theirs.fileno()), json.dumps(asked)],
                stdin=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

        self._ready = False

    def fileno(self) -> int:
        """Returns what can be read once all has been imported, or cannot be, until the first `start`."""
        return self._socket.fileno()

    def start(self, *descriptors: int) -> Forked:
        """Returns a new process that has copies of these descriptors.

        Raises:
            ServerEnded: an import may have ended it.
        """
        pid = self._ask("fork", descriptors)
        if pid is None:
            raise ServerEnded("the process that starts ranks has ended: see what it printed")
        return Forked(int(pid), self)

    def exit_code(self, pid: int) -> int | None:
        """Returns how a process has ended, which is not reaped; None while it runs."""
        status = self._ask(f"look {pid}")
        return self._KILLED if status is None else int(status) if status.strip() else None

    def reap(self, pid: int) -> int:
        """Returns the exit status of a process that has ended."""
        status = self._ask(f"reap {pid}")
        return self._KILLED if status is None else int(status)

    def close(self) -> None:
        """Ends the server and all processes that it started."""
        self._socket.close()
        if not self._ready:  # an import may take forever
            self._process.kill()
        self._process.wait()

    def _ask(self, what: str, descriptors: Sequence[int] = ()) -> str | None:
        """Returns the server's answer, or None once it has ended."""
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionError):
            self._ready = self._ready or bool(self._socket.recv(64))
            socket.send_fds(self._socket, [what.encode()], descriptors)
            return self._socket.recv(64).decode() or None
        return None


class Forked:
    """A process of the server, with the part of `subprocess.Popen` that is used here."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            end = select.poll()
            end.register(self._pidfd, select.POLLIN)
            if not end.poll(None if timeout is None else max(timeout, 0) * 1000):
                raise subprocess.TimeoutExpired(f"rank (pid {self.pid})", timeout or 0)
            self.returncode = self._server.reap(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


def serve(descriptor: int, modules: Sequence[str]) -> list[int]:
    """Forks and reaps until the other end closes; returns in each child, with the descriptors that it was given."""
    try:
        for module in modules:
            importlib.import_module(module)
        if len(threading.enumerate()) > 1:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:])
            sys.exit(f"{' '.join(modules)}: importing started threads, which forked ranks would lack: {names}")
    except BaseException:  # told, and then the end: Python's own would wait for such threads
        traceback.print_exc()
        os._exit(1)
    gc.collect()
    gc.freeze()  # ranks do not visit, and so copy, what was imported
    with socket.socket(fileno=descriptor) as requests:
        requests.send(b"ready")
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 64, 8)
            if not message:
                os._exit(0)
            verb, _, number = message.decode().partition(" ")
            if verb == "reap":
                answer = str(os.waitstatus_to_exitcode(os.waitpid(int(number), 0)[1]))
            elif verb == "look":
                answer = str(" " if (code := exit_code(int(number))) is None else code)
            elif (pid := _fork()) == 0:
                return descriptors
            else:
                answer = str(pid)
            for each in descriptors:
                os.close(each)
            requests.send(answer.encode())


def _fork() -> int:
    """Returns once the child leads a session, so that signals for its group reach it."""
    server = os.getpid()
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        os.read(read, 1)
        os.close(read)
        return pid
    os.close(read)
    os.setsid()
    die_with_parent(server)
    os.close(write)
    if "numpy" in sys.modules:  # otherwise every rank would draw the same numbers
        import numpy as np

        np.random.seed()
    return 0
