"""Forks ranks from a process that has imported what they need: where an import takes seconds, they start at once."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait

# Arguments: the socket's descriptor, how many modules follow, those, and the parent's sys.path.
_SERVER = """
import sys
count = int(sys.argv[2])
sys.path[:] = sys.argv[3 + count:]
from alltoallv.testing.forkserver import serve
from alltoallv.testing.worker import main
main(serve(int(sys.argv[1]), sys.argv[3:3 + count]), 0)
"""


class ForkServer:
    """Starts processes, each the leader of a session of its own, and reports how they ended."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _SERVER, str(theirs.fileno()), str(len(modules)), *modules, *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, connection: int, output: int) -> Forked:
        """Returns a new process that serves ``connection`` and prints to ``output``.

        Raises:
            RuntimeError: the server has ended; an import may have ended it.
        """
        pid = self._ask("fork", [connection, output])
        if pid is None:
            raise RuntimeError("the process that starts ranks has ended: see what it printed")
        return Forked(pid, self)

    def reap(self, pid: int) -> int:
        """Returns the exit status of a process that has ended."""
        status = self._ask(f"reap {pid}", [])
        return -signal.SIGKILL if status is None else status  # the server's end kills the process

    def close(self) -> None:
        """Ends the server and all processes that it started."""
        self._socket.close()
        self._process.wait()

    def _ask(self, what: str, descriptors: list[int]) -> int | None:
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionError):
            socket.send_fds(self._socket, [what.encode()], descriptors)
            answer = self._socket.recv(64)
            return int(answer) if answer else None
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
            if not wait([self._pidfd], timeout):
                raise subprocess.TimeoutExpired(f"rank (pid {self.pid})", timeout or 0)
            self.returncode = self._server.reap(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


def serve(descriptor: int, modules: Sequence[str]) -> int:
    """Forks and reaps until the other end closes; returns in each child, with the connection that it will serve."""
    for module in modules:
        importlib.import_module(module)
    server = os.getpid()
    with socket.socket(fileno=descriptor) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, 64, 2)
            if not message:
                os._exit(0)
            verb, _, number = message.decode().partition(" ")
            if verb == "reap":
                answer = os.waitstatus_to_exitcode(os.waitpid(int(number), 0)[1])
            elif (answer := os.fork()) == 0:
                break
            for each in descriptors:
                os.close(each)
            requests.send(str(answer).encode())
    return _become_a_rank(server, *descriptors)


def _become_a_rank(server: int, connection: int, output: int) -> int:
    from alltoallv.launch.processes import die_with_parent

    os.setsid()
    die_with_parent(server)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    if "numpy" in sys.modules:  # otherwise every rank would draw the same numbers
        import numpy as np

        np.random.seed()
    return connection
