"""The coordinator: starts a job for each library and lets one of them at a time do something."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alltoallv.launch.processes import Guard, describe_exit, exit_code, kill_group
from alltoallv_tools.bench import environments
from alltoallv_tools.ports import free_port

START_SECONDS = 120.0
ANSWER_SECONDS = 300.0
LEAVE_SECONDS = 2.0

Reply = dict[str, Any]


class LibraryError(Exception):
    """A library failed or could not be started; the text explains why."""


class Job:
    """The ranks of one library."""

    def __init__(self, library: str, size: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.library, self.size = library, size
        self._process, self._log = process, log
        self._links: dict[int, tuple[socket.socket, Any]] = {}

    @property
    def group(self) -> int:
        return self._process.pid

    def welcome(self, listener: socket.socket) -> None:
        """Waits for every rank to identify itself."""
        end = time.monotonic() + START_SECONDS
        listener.settimeout(0.2)
        arrived: list[tuple[socket.socket, Any]] = []
        with contextlib.ExitStack() as undo:
            while len(arrived) < self.size:
                try:
                    link, _ = listener.accept()
                except TimeoutError:
                    self._check_alive()
                    if time.monotonic() > end:
                        raise self._failure(f"only {len(arrived)} of {self.size} ranks came up") from None
                    continue
                undo.callback(link.close)
                arrived.append((link, link.makefile("rw", encoding="utf-8", newline="\n")))
            for link, lines in arrived:
                hello = self._read(link, lines, end)
                if hello.get("size") != self.size:
                    raise self._failure(f"a rank is one of {hello.get('size')}, expected {self.size}")
                self._links[int(hello["rank"])] = (link, lines)
            undo.pop_all()

    def ask(self, **request: Any) -> list[Reply]:
        """Sends a request to all ranks and returns their answers in rank order.

        Raises:
            LibraryError: the library failed; it is of no use from then on.
        """
        text = json.dumps(request) + "\n"
        end = time.monotonic() + ANSWER_SECONDS
        try:
            for rank in range(self.size):
                self._links[rank][1].write(text)
                self._links[rank][1].flush()
            return [self._read(link, lines, end) for _, (link, lines) in sorted(self._links.items())]
        except OSError as error:
            raise self._failure(str(error)) from error

    def _read(self, link: socket.socket, lines: Any, end: float) -> Reply:
        with selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            while not selector.select(0.5):
                self._check_alive()
                if time.monotonic() > end:
                    raise self._failure("no answer in time")
        line = lines.readline()
        if not line:
            time.sleep(0.2)
            self._check_alive()
            raise self._failure("a rank has gone")
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise self._failure(reply["error"])
        return reply

    def _check_alive(self) -> None:
        code = exit_code(self.group)
        if code is not None:
            raise self._failure(f"its job {describe_exit(code)}")

    def _failure(self, what: str) -> LibraryError:
        with contextlib.suppress(OSError):
            tail = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            if tail:
                what += f" ({tail[0][:200]})"
        return LibraryError(f"{self.library}: {what}")

    def stop(self, guard: Guard) -> None:
        """Ends all processes of the job; the guard then forgets them."""
        for link, lines in self._links.values():
            with contextlib.suppress(OSError):
                lines.close()
            link.close()
        self._links.clear()
        end = time.monotonic() + LEAVE_SECONDS
        while exit_code(self.group) is None and time.monotonic() < end:
            time.sleep(0.02)
        kill_group(self.group)
        guard.remove(self.group)
        self._process.wait()


class Jobs:
    """Starts jobs and ends all of them on exit, also after an error."""

    def __init__(self, api: str, *, bind: bool, say: Any) -> None:
        self._api, self._bind, self._say = api, bind, say
        self._jobs: list[Job] = []

    def __enter__(self) -> Jobs:
        self._folder = tempfile.TemporaryDirectory(prefix="alltoallv-bench-")
        self._guard = Guard()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs[:]:
            self.stop(job)
        self._guard.close()
        self._folder.cleanup()

    def start(self, library: str, size: int) -> Job:
        """Starts the library with ``size`` ranks.

        Raises:
            LibraryError: the library cannot be started on this machine.
        """
        try:
            name = environment_of(library, self._api)
            python = environments.find_or_make(name, self._say) if name else Path(sys.executable)
        except environments.Unavailable as error:
            raise LibraryError(f"{library}: {error}") from error
        home = Path(tempfile.mkdtemp(prefix=f"{library}-{size}-", dir=self._folder.name))
        path = home / "coordinator"
        config = {"library": library, "api": self._api, "socket": str(path), "bind": self._bind}
        command, extra = command_of(library, size, python, json.dumps(config), home)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "I_MPI_"))}
        package = environments.own_package(Path(self._folder.name))
        env.setdefault("HOME", str(home))  # Open MPI does not start without one
        env.update(PYTHONPATH=str(package), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **extra)
        log = home / "output"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, open(log, "wb") as output:
            with short(path) as address:
                listener.bind(address)
            listener.listen(size)
            process = subprocess.Popen(
                command,
                env=env,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            job = Job(library, size, process, log)
            self._jobs.append(job)
            self._guard.add(job.group)
            try:
                job.welcome(listener)
            except LibraryError:
                self.stop(job)
                raise
        return job

    def stop(self, job: Job) -> None:
        """Ends one job."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        job.stop(self._guard)


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """Yields a short path of the same file: a socket's address has 107 bytes, and $TMPDIR may be longer."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def environment_of(library: str, api: str) -> str | None:
    """Returns the name of the environment that a library runs in; None is this interpreter."""
    if library == "ours":
        return {"backend": "torch", "torch": "torch", "torch-plan": "torch", "mindspore": "mindspore"}.get(api)
    return "torch" if library == "gloo" else library


def command_of(library: str, size: int, python: Path, config: str, home: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts a library's ranks, and the variables that it adds to the environment.

    Nobody's launcher binds: the ranks of every library bind themselves, all in the same way.
    """
    rank = [str(python), "-m", "alltoallv_tools.bench.rank", config]
    bin_ = python.parent
    if library in ("ours", "gloo"):
        return [str(python), "-m", "alltoallv", "run", "-n", str(size), "--no-prefix", "-m", *rank[2:]], {}
    if library == "mpich":
        return [str(bin_ / "mpiexec"), "-bind-to", "none", "-n", str(size), *rank], {}
    if library == "openmpi":
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        options = ["--oversubscribe", "--bind-to", "none"]
        return [str(bin_ / "mpiexec"), *options, "-n", str(size), *rank], allowed
    if library == "impi":
        return [str(bin_ / "mpiexec"), "-n", str(size), *rank], {"I_MPI_PIN": "0"}
    script = home / "rank.py"
    script.write_text(f"import json\nfrom alltoallv_tools.bench.rank import main\n\nmain(json.loads({config!r}))\n")
    options = [f"--worker_num={size}", f"--local_worker_num={size}", f"--master_port={free_port()}"]
    options += [f"--log_dir={home / 'log'}", "--join=True"]
    return [str(python), str(bin_ / "msrun"), *options, str(script)], {
        "PATH": f"{bin_}{os.pathsep}{os.environ.get('PATH', '')}",
        "GLOG_v": "3",
    }
