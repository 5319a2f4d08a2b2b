"""Starts processes: commands, ranks with the local launcher, and forked children; names which of them live."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ALLTOALLV = [sys.executable, "-m", "alltoallv"]
RUN = [*ALLTOALLV, "run"]
CHILD_SECONDS = 20


def alltoallv(*arguments: str, limit: float = 120, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user gives it."""
    return subprocess.run(
        [*ALLTOALLV, *arguments], capture_output=True, text=True, timeout=limit, check=False, **kwargs
    )


def check_grown_groups(*arguments: str) -> None:
    """Runs grown_groups.py."""
    program = Path(__file__).with_name("grown_groups.py")
    done = alltoallv("run", "-n", "1", "--no-prefix", str(program), *arguments)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["grown"]), done.stdout + done.stderr


def run(
    folder: Path, program: str, *options: str, arguments: Sequence[str] = (), limit: float = 60, **kwargs: Any
) -> subprocess.CompletedProcess:
    """Runs ``program`` on ranks with these arguments; output as bytes unless ``text=True``."""
    command = _command(folder, program, options, arguments)
    return subprocess.run(command, capture_output=True, timeout=limit, check=False, **kwargs)


def start(folder: Path, program: str, *options: str) -> subprocess.Popen:
    return subprocess.Popen(_command(folder, program, options), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _command(folder: Path, program: str, options: Sequence[str], arguments: Sequence[str] = ()) -> list[str]:
    script = folder / "program.py"
    script.write_text(program)
    return [*RUN, *options, str(script), *arguments]


def read_lines(process: subprocess.Popen, count: int) -> list[bytes]:
    return [process.stdout.readline() for _ in range(count)]


class Terminal:
    """A job whose output, and for one rank its input, is a terminal."""

    def __init__(self, folder: Path, program: str, *options: str, colour: bool = False) -> None:
        self.controller, terminal = pty.openpty()
        env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        env |= {} if colour else {"NO_COLOR": "1"}
        command = _command(folder, program, options)
        self.process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env)
        os.close(terminal)
        self.text = b""

    def read_until(self, text: bytes, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while text not in self.text and self._read(end - time.monotonic()):
            pass
        assert text in self.text, self.text

    def close(self) -> int:
        """Returns the exit code, once all has been read."""
        while self._read(30):
            pass
        os.close(self.controller)
        return self.process.wait(30)

    def _read(self, seconds: float) -> bool:
        """Whether there may be more to come."""
        if not select.select([self.controller], [], [], seconds)[0]:
            return False
        try:
            self.text += os.read(self.controller, 1000)
        except OSError:  # the terminal's other end is closed
            return False
        return True


def process_state(pid: int) -> str:
    """The kernel's letter: R and S run, T is stopped, Z has ended; "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return process_state(pid) not in ("Z", "X", "")


def children(pid: int) -> list[int]:
    """Processes that the main thread of a process has started, the oldest first, until they are reaped."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 40.0) -> Any:
    """Polls until the condition holds, and returns its value; the limit is for what never comes."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.002)
    return value


def wait_for_ranks(file: str, rank: int, *ranks: int) -> None:
    """Waits until all of these ranks, of which this is one, have come here, without a collective."""
    Path(f"{file}-{rank}").touch()
    wait_for(lambda: all(Path(f"{file}-{other}").exists() for other in ranks), f"ranks {ranks}")


def wait_gone(pids: Iterable[int], seconds: float = 60) -> list[int]:
    """Waits for processes to end; returns those that have not."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def forked(function: Callable[[], object]) -> str:
    """What the function says in a forked child; a child that hangs or dies says so."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        signal.alarm(CHILD_SECONDS)
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    chunks = []
    while chunk := os.read(read, 65536):
        chunks.append(chunk)
    os.close(read)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status} after {chunks}"
    return b"".join(chunks).decode()
