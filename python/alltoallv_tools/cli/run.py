"""``run``: starts the ranks of a program on this host, streams what they print, leaves none behind."""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from alltoallv.launch.processes import Guard, child_setup, describe_exit, exit_code, kill_group
from alltoallv_tools.cli.streams import OutputClosed, Stream, prefix

FINISH_SECONDS = 5.0  # for the other ranks after one failed, and for all after Ctrl-C
TERMINATE_SECONDS = 1.0  # between SIGTERM and SIGKILL
DRAIN_SECONDS = 1.0  # for output of processes that the ranks have left behind
TIMED_OUT = 124  # exit code, as of timeout(1)

_EPILOG = """\
Every rank gets ALLTOALLV_RANK, ALLTOALLV_WORLD_SIZE, ALLTOALLV_LOCAL_RANK, ALLTOALLV_JOB_ID, and torchrun's
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; OMP_NUM_THREADS unless it is set
already. Its standard input is empty. Its output appears line by line behind "[rank] ".

The exit code is 0 if every rank's is; otherwise that of the first rank that failed (128 + number for a
signal). The other ranks then have 5 seconds to report their own errors before they are ended. Ctrl-C
interrupts all ranks and waits up to 5 seconds; a second Ctrl-C kills them. 124: --timeout has passed.

examples:
  python -m alltoallv run -n 4 train.py --epochs 3
  python -m alltoallv run -n 2 -m package.module
  python -m alltoallv run --emulate-npu -n 4 train_npu.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``run``."""
    parser.usage = (
        "%(prog)s -n N [--timeout SECONDS] [--no-prefix] [--emulate-npu] (script.py | -m module) [argument ...]"
    )
    parser.epilog = _EPILOG
    parser.add_argument("-n", "--nprocs", type=_positive_int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("--timeout", type=_positive_float, metavar="SECONDS", help="end the job after this long")
    parser.add_argument("--no-prefix", action="store_true", help='leave out the "[rank] " before every line')
    parser.add_argument(
        "--emulate-npu", action="store_true", help="run a torch_npu program on emulated devices (docs/emulator.md)"
    )
    parser.add_argument("program", help="Python script, or module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")


def main(args: argparse.Namespace) -> int:
    """Runs the job; returns its exit code."""
    if args.module:
        program = ["-m", args.program, *args.arguments]
    else:
        if not os.path.exists(args.program):
            _say(f"script {args.program!r} does not exist in {os.getcwd()!r}")
            return 2
        program = [args.program, *args.arguments]
    variables = None
    if args.emulate_npu:
        import alltoallv_emulator as emulator  # only then: it asks for libraries that a build may lack

        try:
            variables = emulator.environment(devices=max(args.nprocs, emulator.DEFAULT_DEVICES))
        except FileNotFoundError as error:
            _say(str(error))
            return 2
        program = ["-m", "alltoallv_emulator.program", *program]
    command = [sys.executable, *program]
    return Job(command, args.nprocs, timeout=args.timeout, prefix=not args.no_prefix, variables=variables).run()


@dataclass(eq=False)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    code: int | None = None  # as Popen.returncode; the process itself stays unreaped, so its group number stays its own
    ended_by_us: bool = False
    streams: list[Stream] = field(default_factory=list)  # that are open


class Job:
    """N processes of one command with the environment of N ranks."""

    def __init__(
        self,
        command: list[str],
        size: int,
        *,
        timeout: float | None = None,
        prefix: bool = True,
        variables: Mapping[str, str] | None = None,  # the environment to start from, by default this process's
    ) -> None:
        self._command = command
        self._size = size
        self._timeout = timeout
        self._prefix = prefix
        self._variables = os.environ if variables is None else variables
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._code = 0  # of the job, once one rank has failed
        self._interrupted = False
        self._stage = 0  # 0 running, 1 told to finish, 2 terminated, 3 killed
        self._deadline: float | None = None  # of the present stage

    def run(self) -> int:
        """Starts the ranks, waits for them, and returns the job's exit code."""
        guard = Guard()
        wake, alarm = socket.socketpair()
        try:
            with wake, alarm, _signal_handlers(alarm, self._signals):
                self._selector.register(wake, selectors.EVENT_READ, wake)
                try:
                    self._start(guard)
                    self._supervise()
                except OutputClosed:
                    self._code = 128 + signal.SIGPIPE
                finally:
                    for rank in self._ranks:  # what they left behind goes with them
                        kill_group(rank.process.pid)
                    guard.close()
        finally:
            self._selector.close()
            for rank in self._ranks:
                rank.process.wait()
                os.close(rank.pidfd)
                for pipe in (rank.process.stdout, rank.process.stderr):
                    if pipe is not None:
                        pipe.close()
        return self._code

    def _start(self, guard: Guard) -> None:
        common = self._environment()
        setup = child_setup()
        for rank in range(self._size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=common | place | {f"ALLTOALLV_{name}": value for name, value in place.items()},
                start_new_session=True,
                preexec_fn=setup,
            )
            guard.add(process.pid)
            entry = _Rank(rank, process, os.pidfd_open(process.pid))
            self._ranks.append(entry)
            self._selector.register(entry.pidfd, selectors.EVENT_READ, entry)
            assert process.stdout is not None
            assert process.stderr is not None
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                stream = Stream(source, target.buffer, prefix(rank, target) if self._prefix else b"")
                self._selector.register(source, selectors.EVENT_READ, stream)
                entry.streams.append(stream)

    def _environment(self) -> dict[str, str]:
        # An outer torchrun's store is not for these ranks.
        env = {name: value for name, value in self._variables.items() if not name.startswith("TORCHELASTIC_")}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        size = str(self._size)
        env.update(
            ALLTOALLV_WORLD_SIZE=size,
            ALLTOALLV_LOCAL_WORLD_SIZE=size,
            ALLTOALLV_JOB_ID=uuid.uuid4().hex,
            ALLTOALLV_RESTART_COUNT="0",
            WORLD_SIZE=size,
            LOCAL_WORLD_SIZE=size,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
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
                _say(f"the job has not ended after {self._timeout:g} s (--timeout): {self._unfinished()}")
                self._code = self._code or TIMED_OUT
                self._escalate()
            limits = [drained] if not running else [self._deadline, end if self._stage == 0 else None]
            wait = min((max(0.0, limit - now) for limit in limits if limit is not None), default=None)
            self._step(wait)
        for rank in self._ranks:
            self._pump(rank)
            for stream in rank.streams:
                stream.flush()

    def _step(self, wait: float | None) -> None:
        """Handles what happens within ``wait`` seconds. Output first: it explains a rank's end."""
        ready = [key.data for key, _ in self._selector.select(wait)]
        for rank in self._ranks:
            if any(stream in ready for stream in rank.streams):
                self._pump(rank)
        for rank in self._ranks:
            if rank in ready:
                self._ended(rank)
        for entry in ready:
            if isinstance(entry, socket.socket):
                entry.recv(64)
        while self._signals:
            self._interrupt(self._signals.pop(0))

    def _pump(self, entry: _Rank) -> None:
        """Passes on what a rank has printed."""
        for stream in list(entry.streams):
            if not stream.pump():
                self._selector.unregister(stream.source)
                stream.source.close()
                entry.streams.remove(stream)

    def _ended(self, entry: _Rank) -> None:
        entry.code = exit_code(entry.process.pid)
        if entry.code is None:
            return
        self._selector.unregister(entry.pidfd)
        if entry.code == 0 or entry.ended_by_us:
            return
        others = any(rank.code is None for rank in self._ranks)
        first = self._stage == 0
        hint = f"; the other ranks have {FINISH_SECONDS:g} s to finish" if first and others else ""
        self._pump(entry)
        _say(f"rank {entry.rank} (pid {entry.process.pid}) {describe_exit(entry.code)}{hint}")
        if self._code == 0:
            self._code = entry.code if entry.code > 0 else 128 - entry.code
        if first:
            self._stage, self._deadline = 1, time.monotonic() + FINISH_SECONDS

    def _interrupt(self, number: int) -> None:
        if self._interrupted:
            self._escalate()
            return
        name = signal.Signals(number).name
        _say(f"{name}: interrupting all ranks; they have {FINISH_SECONDS:g} s to finish (again: kill)")
        self._interrupted, self._code = True, 128 + number
        for rank in self._ranks:
            if rank.code is None:
                rank.ended_by_us = True
                kill_group(rank.process.pid, signal.SIGINT)
        # Interrupted ranks have had their chance when the time is up: the next stage kills.
        self._stage, self._deadline = 2, time.monotonic() + FINISH_SECONDS

    def _escalate(self) -> None:
        """SIGTERM to the ranks that still run, or SIGKILL if they have had it."""
        number, seconds = (signal.SIGTERM, TERMINATE_SECONDS) if self._stage < 2 else (signal.SIGKILL, None)
        _say(f"ending {self._unfinished()} with {number.name}")
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


@contextlib.contextmanager
def _signal_handlers(alarm: socket.socket, received: list[int]) -> Iterator[None]:
    """Collects SIGINT, SIGTERM and SIGHUP in ``received`` and writes a byte to ``alarm`` for each."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread, which is someone else's
        return
    alarm.setblocking(False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
        numbers.append(signal.SIGHUP)
    before = [signal.signal(number, lambda n, _: received.append(n)) for number in numbers]
    wakeup = signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"alltoallv run: {text}", file=sys.stderr, flush=True)


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected an integer of at least 1")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text!r}, expected a number of seconds above 0")
    return value
