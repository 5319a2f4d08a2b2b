"""Runs worker processes from the parent that calls functions on them."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from alltoallv.launch.forkserver import Forked, ForkServer
from alltoallv.launch.processes import Guard, describe_exit, kill_group
from alltoallv.testing.outcome import OUTPUT_LIMIT, Outcome, RankExit, RankTimeout
from alltoallv.testing.worker import Reply, Task

EXIT_SECONDS = 30.0  # for a process to end after its last function; torch takes long on a busy machine
DUMP_SECONDS = 2.0  # for a process to write its stacks before it is killed
END_SECONDS = 5.0  # for a process to end when it is asked to

# Arguments: the connection's descriptor, the parent's pid, and its sys.path.
_WORKER = """
import sys
sys.path[:] = sys.argv[3:]
from alltoallv.testing.worker import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


def _start(connection: int, output: int) -> subprocess.Popen[bytes]:
    # The kernel watches the thread that starts a process; other threads may end too early.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    return subprocess.Popen(
        [sys.executable, "-u", "-c", _WORKER, str(connection), str(parent), *sys.path],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[connection],
        start_new_session=True,
    )


class Worker:
    """A process that runs functions, as the parent sees it."""

    def __init__(self, number: int, guard: Guard, server: ForkServer | None = None) -> None:
        self.number = number
        self.healthy = True
        self._guard = guard
        # One description for both processes: the child appends, the parent reads and empties it.
        self._output = os.memfd_create("rank-output")
        ours, theirs = socket.socketpair()
        start = _start if server is None else server.start
        with theirs:
            self.process: subprocess.Popen[bytes] | Forked = start(theirs.fileno(), self._output)
        guard.add(self.process.pid)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self.connection.send_bytes(pickle.dumps(dict(os.environ)))
        self.pidfd = os.pidfd_open(self.process.pid)

    def send(self, task: Task) -> None:
        """Starts a call. If the process has just died, :func:`collect` finds out."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self.connection.send_bytes(pickle.dumps(task))

    def receive(self, outcome: Outcome) -> None:
        """Receives the reply; without one, the process has ended."""
        try:
            if not self.connection.poll(0):
                raise EOFError
            reply: Reply = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.healthy = False
            self.finish(outcome, "before the function returned")
            return
        self.healthy = reply.healthy
        outcome.traceback = reply.traceback
        try:
            value = pickle.loads(reply.value)
        except Exception as error:
            outcome.error = error
            outcome.traceback += f"(the value sent back cannot be read: {error})"
            return
        if reply.failed:
            outcome.error = value
        else:
            outcome.result = value

    def finish(self, outcome: Outcome, when: str = "") -> Outcome:
        """Waits for the process to end; notes what it printed and its exit status, of which a bad one is an error."""
        who = f"rank {outcome.rank} (pid {self.process.pid})"
        try:
            outcome.exit_code = self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.dump_stacks()
            outcome.exit_code = self.end_soon(time.monotonic() + DUMP_SECONDS)
            outcome.error = outcome.error or RankTimeout(f"{who} did not exit within {EXIT_SECONDS:g} s")
        if outcome.error is None and (when or outcome.exit_code != 0):
            text = " ".join(filter(None, [who, describe_exit(outcome.exit_code), when]))
            outcome.error = RankExit(text, outcome.exit_code)
        outcome.output += self.take_output()
        return outcome

    def dump_stacks(self) -> None:
        """Makes the process write its threads' stacks and end."""
        self.process.send_signal(signal.SIGABRT)

    def end_soon(self, deadline: float) -> int:
        """Waits for the process's end, kills it after ``deadline``, and returns its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        kill_group(self.process.pid)
        return self.process.wait()

    def take_output(self) -> str:
        """Returns what the process has printed since the last call; at most a bit more than a report shows."""
        if self._output < 0:
            return ""
        length = os.fstat(self._output).st_size
        data = os.pread(self._output, OUTPUT_LIMIT + 1, max(0, length - OUTPUT_LIMIT - 1))
        os.ftruncate(self._output, 0)
        os.lseek(self._output, 0, os.SEEK_SET)
        return data.decode(errors="replace")

    def kill(self) -> None:
        """Ends the process and all that it started, and frees its resources. Idempotent."""
        if self._output < 0:
            return
        # Whatever writes at a process's end, such as coverage.py, does so on this signal; all others end at once.
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        # This is done even if it has ended by itself: it may have left others behind.
        kill_group(self.process.pid)
        self._guard.remove(self.process.pid)
        self.process.wait()
        self.connection.close()
        os.close(self.pidfd)
        os.close(self._output)
        self._output = -1


def collect(workers: list[Worker], timeout: float) -> list[Outcome]:
    """Waits for every worker's reply or end, and returns the outcomes."""
    outcomes = [Outcome(rank) for rank in range(len(workers))]
    waiting = dict(enumerate(workers))
    end = time.monotonic() + timeout
    while waiting:
        sources: dict[Any, int] = {}
        for rank, worker in waiting.items():
            sources[worker.connection] = sources[worker.pidfd] = rank
        ready = wait(list(sources), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for rank in {sources[source] for source in ready}:
            waiting.pop(rank).receive(outcomes[rank])
    for worker in waiting.values():  # all at once: their stacks then show the same moment
        worker.dump_stacks()
    killing = time.monotonic() + DUMP_SECONDS
    for rank, worker in waiting.items():
        worker.healthy = False
        outcomes[rank].exit_code = worker.end_soon(killing)
        outcomes[rank].error = RankTimeout(
            f"rank {rank} (pid {worker.process.pid}) did not finish within {timeout:g} s and was killed"
        )
    return outcomes
