"""Runs one command as N ranks on this host, from their start to the end of the last."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from alltoallv.launch.detect import BY_ADDRESS
from alltoallv.launch.processes import Forked, ForkServer, Guard, child_setup, describe_exit, exit_code, kill_group
from alltoallv_tools import numbers
from alltoallv_tools.cli.preloaded import variables_file
from alltoallv_tools.cli.streams import LINGER_SECONDS, OutputClosed, Screen, Stream, prefix
from alltoallv_tools.ports import free_port

FINISH_SECONDS = 5.0  # for the other ranks after one has failed, and for all ranks after Ctrl-C
TERMINATE_SECONDS = 1.0  # between SIGTERM and SIGKILL
DRAIN_SECONDS = 1.0  # for output of processes that the ranks have left running
LONGEST_WAIT = 86400.0  # seconds; epoll takes no more than 24 days
TIMED_OUT = 124  # exit code, as of timeout(1)
# The number of ranks, as other launchers and `bench` name it.
NUMBER_OF_RANKS = ("-n", "-np", "--np", "--nprocs", "--nproc-per-node", "--nproc_per_node")
MOST_RANKS = 4096  # of a communicator
DESCRIPTORS = 4  # of this process for a rank: its pidfd, its two outputs and its log
OTHER_DESCRIPTORS = 32


@dataclass(frozen=True)
class Nodes:
    """The place of this host's ranks in a job on several hosts, with the same number of ranks on each.

    Attributes:
        count: Number of hosts.
        index: This host's number, 0 <= index < count; rank 0 is on host 0.
        address: Host 0, as the others reach it.
        port: A port of host 0, for torch's store; alltoallv takes the next one.
    """

    count: int
    index: int
    address: str
    port: int


@dataclass(eq=False)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes] | Forked
    pidfd: int
    replacement: int = 0  # how often the rank has been started again
    code: int | None = None  # like Popen.returncode; the process stays unreaped, so its group number stays its own
    ended_by_us: bool = False
    streams: list[Stream] = field(default_factory=list)  # those that are still open


class Job:
    """N processes that run one command, each with the environment of one rank."""

    def __init__(
        self,
        command: list[str],
        size: int,
        *,
        timeout: float | None = None,
        prefix: bool = True,
        variables: Mapping[str, str] | None = None,  # the environment to start from, by default this process's
        stdin: int | None = None,  # the rank that reads this process's standard input
        log_dir: Path | None = None,  # also write each rank's output here
        bind: bool = False,  # bind each rank to its own processors
        keep_going: bool = False,  # ranks run on after one has failed
        allowed_losses: int = 0,  # so many ranks may fail, and the others decide what the job's exit code is
        replacements: int = 0,  # so often a rank that fails is started again, while the others run on
        restart: int = 0,  # how often the job has been started before
        nodes: Nodes | None = None,  # the hosts, if there are several
        interrupt: signal.Signals = signal.SIGINT,  # what ranks get at Ctrl-C
        server: Callable[..., ForkServer] | None = None,  # makes, with env, what ranks are forked from
    ) -> None:
        self._command = command
        self._size = size
        self._timeout = timeout
        self._prefix = prefix
        self._variables = os.environ if variables is None else variables
        self._stdin = stdin
        self._log_dir = log_dir
        self._bind = bind
        self._keep_going = keep_going
        self._allowed_losses = allowed_losses
        self._replacements, self._replaces = replacements, replacements > 0
        self._restart = restart
        self._nodes = nodes
        self._first = 0 if nodes is None else nodes.index * size  # the lowest rank here
        self._interrupt_signal = interrupt
        self._make_server = server
        self._server: ForkServer | None = None
        self._ranks: list[_Rank] = []
        self._guard: Guard
        self._common: dict[str, str]  # the environment of all ranks
        self._screens: dict[TextIO, Screen] = {}
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._code = 0  # the job's exit code, once one rank has failed
        self.interrupted = False
        self._stage = 0  # 0 running, 1 asked to finish, 2 terminated, 3 killed
        self._deadline: float | None = None  # end of the present stage

    def run(self) -> int:
        """Starts the ranks, waits for them, and returns the job's exit code."""
        guard = self._guard = Guard()
        wake, alarm = socket.socketpair()
        try:
            with wake, alarm, _signal_handlers(alarm, self._signals):
                self._selector.register(wake, selectors.EVENT_READ, wake)
                try:
                    self._start()
                    self._supervise()
                except OutputClosed:
                    self._code = 128 + signal.SIGPIPE
                finally:
                    for rank in self._ranks:  # also end the processes that they have left running
                        kill_group(rank.process.pid)
                    guard.close()
        finally:
            self._selector.close()
            for rank in self._ranks:
                self._release(rank)
            if self._server is not None:
                self._server.close()
        return self._code

    def _start(self) -> None:
        self._common = self._environment()
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        self._screens = {file: Screen(file) for file in (sys.stdout, sys.stderr)}
        if self._make_server is not None:
            self._server = self._make_server(env=self._common)
            self._selector.register(self._server, selectors.EVENT_READ, self._server)
            while self._server not in [key.data for key, _ in self._selector.select()]:
                if self._signals:
                    self.interrupted, self._code = True, 128 + self._signals[0]
                    return
            self._selector.unregister(self._server)
        for local_rank in range(self._size):
            if self._ranks and self._signals:  # it takes a while to start hundreds
                break
            self._launch(local_rank)

    def _launch(self, local_rank: int, replacement: int = 0) -> None:
        rank = self._first + local_rank
        variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        variables |= {f"ALLTOALLV_{name}": value for name, value in variables.items()}
        if self._replaces:
            variables["ALLTOALLV_REPLACEMENT"] = str(replacement)
        processors = processors_of(local_rank, self._size) if self._bind else ()
        process, *sources = self._process(self._common | variables, processors, rank == self._stdin)
        self._guard.add(process.pid)
        entry = _Rank(rank, process, os.pidfd_open(process.pid), replacement)
        self._ranks.append(entry)
        self._selector.register(entry.pidfd, selectors.EVENT_READ, entry)
        mode = "ab" if self._restart or replacement else "wb"
        log = None if self._log_dir is None else (self._log_dir / f"rank{rank}.log").open(mode, buffering=0)
        for source, target in zip(sources, (sys.stdout, sys.stderr), strict=True):
            stream = Stream(source, self._screens[target], prefix(rank, target) if self._prefix else b"", log)
            self._selector.register(source, selectors.EVENT_READ, stream)
            entry.streams.append(stream)

    def _process(
        self, variables: dict[str, str], processors: Sequence[int], reads: bool
    ) -> tuple[subprocess.Popen[bytes] | Forked, BinaryIO, BinaryIO]:
        """Starts a rank, which ``reads`` the standard input or none; returns it, its output and its errors."""
        with contextlib.ExitStack() as stack:  # of what the rank has copies of
            stdin = 0 if reads else stack.enter_context(open(os.devnull)).fileno()
            (out, stdout), (err, stderr) = os.pipe(), os.pipe()
            for each in (stdout, stderr):
                stack.callback(os.close, each)
            sources = os.fdopen(out, "rb", buffering=0), os.fdopen(err, "rb", buffering=0)
            if self._server is not None:
                file = variables_file(variables, processors)
                stack.callback(os.close, file)
                return self._server.start(stdin, stdout, stderr, file), *sources
            process = subprocess.Popen(
                self._command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=variables,
                start_new_session=True,
                preexec_fn=bound(child_setup(), processors),
            )
            return process, *sources

    def _replace(self, lost: _Rank) -> None:
        """Starts a lost rank again, once all that its process has left running has been ended."""
        self._replacements -= 1
        left = f"{self._replacements} more may be"
        exit_text = describe_exit(lost.code or 0)
        say(f"rank {lost.rank} (pid {lost.process.pid}) {exit_text}, and is started again; {left} (--replace)")
        kill_group(lost.process.pid)
        self._launch(lost.rank - self._first, lost.replacement + 1)
        self._pump(lost)
        for stream in lost.streams:
            stream.flush()
            self._selector.unregister(stream.source)
        self._guard.remove(lost.process.pid)
        self._ranks.remove(lost)
        self._release(lost)

    @staticmethod
    def _release(entry: _Rank) -> None:
        entry.process.wait()
        os.close(entry.pidfd)
        for stream in entry.streams:
            stream.source.close()

    def _environment(self) -> dict[str, str]:
        # These ranks must not use the store of an outer torchrun.
        env = {name: value for name, value in self._variables.items() if not name.startswith("TORCHELASTIC_")}
        nodes = self._nodes
        size, here = str(self._size if nodes is None else nodes.count * self._size), str(self._size)
        env.update(
            ALLTOALLV_WORLD_SIZE=size,
            ALLTOALLV_LOCAL_WORLD_SIZE=here,
            ALLTOALLV_RESTART_COUNT=str(self._restart),
            WORLD_SIZE=size,
            LOCAL_WORLD_SIZE=here,
        )
        if nodes is None:
            env.update(
                ALLTOALLV_JOB_ID=uuid.uuid4().hex,
                ALLTOALLV_JOB_SECRET=secrets.token_hex(32),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(free_port()),
            )
        else:  # what all hosts know: the secret is the user's
            job = f"{BY_ADDRESS}{nodes.address}:{nodes.port}"
            env.update(ALLTOALLV_JOB_ID=job, MASTER_ADDR=nodes.address, MASTER_PORT=str(nodes.port))
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self._size)))
        env.setdefault("PYTHONUNBUFFERED", "1")
        return env

    def _supervise(self) -> None:
        end = None if self._timeout is None else time.monotonic() + self._timeout
        drained: float | None = None  # when to stop waiting for output after the last rank has ended
        while True:
            running = any(rank.code is None for rank in self._ranks)
            now = time.monotonic()
            if not running:
                if drained is None:
                    drained = now + DRAIN_SECONDS
                if self._stage == 3 or now >= drained or not any(rank.streams for rank in self._ranks):
                    break
            elif self._deadline is not None and now >= self._deadline:
                self._escalate()
            elif end is not None and now >= end and self._stage == 0:
                say(f"the job has not ended after {self._timeout:.3g} s (--timeout): {self._unfinished()}")
                self._code = self._code or TIMED_OUT
                self._escalate()
            limits = [drained] if not running else [self._deadline, end if self._stage == 0 else None]
            self._step(min([LONGEST_WAIT, *(max(0.0, limit - now) for limit in limits if limit is not None)]))
        for rank in self._ranks:
            self._pump(rank)
            for stream in rank.streams:
                stream.flush()
        for screen in self._screens.values():
            screen.end_line()
        if self._code and any(screen.lacks_cann for screen in self._screens.values()):
            say("torch_npu finds no CANN: --emulate-npu emulates NPUs; TORCH_DEVICE_BACKEND_AUTOLOAD=0 is for CPU only")

    def _step(self, wait: float) -> None:
        """Handles what happens within ``wait`` seconds. Output comes first, because it explains why a rank ended."""
        streams = [stream for rank in self._ranks for stream in rank.streams]
        if any(stream.lingers for stream in streams):
            wait = min(LINGER_SECONDS, wait)
        ready = [key.data for key, _ in self._selector.select(wait)]
        for rank in self._ranks:
            if any(stream in ready for stream in rank.streams):
                self._pump(rank)
        for stream in streams:
            if stream.lingers and stream not in ready:
                stream.flush()
        for entry in ready:  # ranks in the order in which they ended: others may have failed because the first did
            if isinstance(entry, _Rank):
                self._ended(entry)
            elif isinstance(entry, socket.socket):
                entry.recv(64)
        while self._signals:
            self._interrupt(self._signals.pop(0))

    def _pump(self, entry: _Rank) -> None:
        """Passes on the output of a rank."""
        for stream in list(entry.streams):
            if not stream.pump():
                self._selector.unregister(stream.source)
                stream.source.close()
                entry.streams.remove(stream)

    def _ended(self, entry: _Rank) -> None:
        entry.code = (exit_code if self._server is None else self._server.exit_code)(entry.process.pid)
        if entry.code is None:
            return
        self._selector.unregister(entry.pidfd)
        if entry.code == 0 or entry.ended_by_us:
            return
        others = any(rank.code is None for rank in self._ranks)
        # A rank that has ended well does not come back, so that the others could not meet again.
        if self._replacements > 0 and self._stage == 0 and all(rank.code != 0 for rank in self._ranks):
            self._pump(entry)
            self._replace(entry)
            return
        if self._allowed_losses > 0 and self._stage == 0:
            self._allowed_losses -= 1
            self._pump(entry)
            left = f"; {self._allowed_losses} more may fail" if others else ""
            say(f"rank {entry.rank} (pid {entry.process.pid}) {describe_exit(entry.code)}{left} (--allow-loss)")
            return
        first = self._stage == 0 and not self._keep_going
        hint = f"; the other ranks have {FINISH_SECONDS:g} s to finish" if first and others else ""
        self._pump(entry)
        say(f"rank {entry.rank} (pid {entry.process.pid}) {describe_exit(entry.code)}{hint}")
        if self._code == 0:
            self._code = entry.code if entry.code > 0 else 128 - entry.code
        if first:
            self._stage, self._deadline = 1, time.monotonic() + FINISH_SECONDS

    def _interrupt(self, number: int) -> None:
        if self.interrupted:
            self._escalate()
            return
        name = signal.Signals(number).name
        say(f"{name}: interrupting all ranks; they have {FINISH_SECONDS:g} s to finish (again: kill)")
        self.interrupted, self._code = True, 128 + number
        for rank in self._ranks:
            if rank.code is None:
                rank.ended_by_us = True
                kill_group(rank.process.pid, self._interrupt_signal)
        # Interrupted ranks have had time to finish when this stage ends: the next one kills.
        self._stage, self._deadline = 2, time.monotonic() + FINISH_SECONDS

    def _escalate(self) -> None:
        """Sends SIGTERM to the ranks that still run, or SIGKILL if they have had SIGTERM."""
        number, seconds = (signal.SIGTERM, TERMINATE_SECONDS) if self._stage < 2 else (signal.SIGKILL, None)
        say(f"ending {self._unfinished()} with {number.name}")
        for rank in self._ranks:
            if rank.code is None:
                rank.ended_by_us = True
                kill_group(rank.process.pid, number)
        self._stage = 2 if number == signal.SIGTERM else 3
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def _unfinished(self) -> str:
        running = [rank for rank in self._ranks if rank.code is None]
        names = ", ".join(f"{rank.rank} (pid {rank.process.pid})" for rank in running)
        return f"rank{'s' if len(running) > 1 else ''} {names}"


def reason_against(ranks: int) -> str | None:
    """Returns why this process cannot start so many ranks, as "expected at most ..."; None if it can."""
    if ranks > MOST_RANKS:
        return f"expected at most {MOST_RANKS}, the most ranks of a communicator"
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max((files - OTHER_DESCRIPTORS) // DESCRIPTORS, 1)
    if files != resource.RLIM_INFINITY and ranks > most:
        return f"expected at most {most}: each takes {DESCRIPTORS} of the {files} files that may be open (ulimit -n)"
    return None


def ranks(text: str) -> int:
    """Parses a number of ranks that this process can start, for argparse."""
    number = numbers.count(text)
    if reason := reason_against(number):
        raise argparse.ArgumentTypeError(f"is {number}, {reason}")
    return number


def processors_of(rank: int, size: int) -> Sequence[int]:
    """Returns the processors of a rank that is bound; surplus ranks share one each."""
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // size
    return cpus[rank * share : (rank + 1) * share] or [cpus[rank % len(cpus)]]


def bound(setup: Callable[[], None], processors: Sequence[int]) -> Callable[[], None]:
    """Returns a function that calls ``setup`` and binds the process to these processors, if there are any."""

    def bind() -> None:
        setup()
        if processors:
            os.sched_setaffinity(0, processors)

    return bind


@contextlib.contextmanager
def _signal_handlers(alarm: socket.socket, received: list[int]) -> Iterator[None]:
    """Collects SIGINT, SIGTERM and SIGHUP in ``received`` and writes a byte to ``alarm`` for each."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals, and this is another one
        return
    alarm.setblocking(False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup sets SIG_IGN
        numbers.append(signal.SIGHUP)
    before = [signal.signal(number, lambda n, _: received.append(n)) for number in numbers]
    wakeup = signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def say(text: str) -> None:
    """Prints a message about the job on standard error."""
    with contextlib.suppress(BrokenPipeError):
        print(f"alltoallv run: {text}", file=sys.stderr, flush=True)
