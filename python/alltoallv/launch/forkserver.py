"""Forks ranks from a process that has imported what they need: where an import takes seconds, they start at once."""

from __future__ import annotations

import contextlib
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
from collections.abc import Mapping, Sequence

from alltoallv.launch.processes import die_with_parent, exit_code

# Arguments: the socket's descriptor, and what it shall import and do.
_SERVER = """
import importlib, json, sys
asked = json.loads(sys.argv[2])
sys.path[:] = asked["path"] or sys.path[1:]
from alltoallv.launch.forkserver import serve
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
        return Forked(pid, self)

    def exit_code(self, pid: int) -> int | None:
        """Returns how a process has ended, which is not reaped; None while it runs."""
        return self._ask(f"look {pid}")

    def reap(self, pid: int) -> int:
        """Returns the exit status of a process that has ended."""
        status = self._ask(f"reap {pid}")
        return -signal.SIGKILL if status is None else status  # the server's end kills the process

    def close(self) -> None:
        """Ends the server and all processes that it started."""
        self._socket.close()
        if not self._ready:  # an import may take forever
            self._process.kill()
        self._process.wait()

    def _ask(self, what: str, descriptors: Sequence[int] = ()) -> int | None:
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionError):
            self._ready = self._ready or bool(self._socket.recv(64))
            socket.send_fds(self._socket, [what.encode()], descriptors)
            answer = self._socket.recv(64)
            return int(answer) if answer.strip() else None
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
