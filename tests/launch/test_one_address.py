"""Jobs that have been given one address, at once or one after the other's launcher was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import clean_environment
from started import children, wait_for, wait_gone

from alltoallv.launch import seat
from alltoallv_tools.ports import free_port

# Rank r waits until the r-th file of its job exists, joins, and adds up the job's number.
RANK = """
import os, sys, time, numpy as np, alltoallv
from alltoallv.numpy import all_reduce, barrier
rank, job, folder = int(os.environ.get("RANK", os.environ.get("RANK_ID"))), sys.argv[1], sys.argv[2]
while not os.path.exists(f"{folder}/{job}.{rank}"):
    time.sleep(0.01)
def say(text):  # at once: the ranks share a pipe
    os.write(1, f"{job}.{rank} {text}\\n".encode())
try:
    comm = alltoallv.Communicator.from_env(timeout=30)
    say(f"sum {all_reduce(np.array([int(job)]), group=comm)[0]}")
    while os.path.exists(f"{folder}/stay"):
        time.sleep(0.01)
    say(f"then {all_reduce(np.array([int(job)]), group=alltoallv.Communicator.from_env('b'))[0]}")
except Exception as error:
    say(f"{type(error).__name__}: {error}")
"""
# Starts two ranks and waits for them.
START = """
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=os.environ | {"RANK": str(j)})
         for j in range(int(os.environ["WORLD_SIZE"]))]
for rank in ranks:
    rank.wait()
"""
LOOP = """for j in 0 1; do RANK=$j "$0" -c "$@" & done; wait"""
BY_HAND = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
MSRUN = {"MS_WORKER_NUM": "2", "RANK_SIZE": "2", "MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "127.0.0.1"}
MSRUN |= {"MS_SCHED_PORT": "8118"}


_sessions: list[int] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Ends the ranks of a test, which may wait for being told to join."""
    yield
    while _sessions:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_sessions.pop(), signal.SIGKILL)


class Jobs:
    """Jobs 1, 100, ... of two ranks; each rank joins once it is told to."""

    def __init__(self, folder: Path, variables: dict[str, str], *starter: str) -> None:
        self.folder, self.starter = folder, starter or (sys.executable, "-c", START)
        self.env = clean_environment() | variables
        self.processes: dict[int, subprocess.Popen] = {}

    def start(self, job: int) -> subprocess.Popen:
        command = [*self.starter, *([sys.executable] if "-c" in self.starter and self.starter[0] == "bash" else [])]
        command += [RANK, str(job), str(self.folder)]
        self.processes[job] = subprocess.Popen(
            command,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _sessions.append(self.processes[job].pid)
        return self.processes[job]

    def join(self, *ranks: str) -> None:
        for name in ranks:
            (self.folder / name).touch()

    def pids(self, job: int) -> list[int]:
        """Of the ranks, once all have been started and while none has ended."""
        starter, size = self.processes[job].pid, int(self.env["WORLD_SIZE"])
        return wait_for(lambda: len(found := children(starter)) == size and found, "all ranks of a job")

    @staticmethod
    def has_place(pid: int) -> bool:
        links = []
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                links.append(os.readlink(one))
        lines = [line for line in Path("/proc/net/unix").read_text().splitlines() if "@alltoallv-seat-" in line]
        return any(f"socket:[{line.split()[6]}]" in links for line in lines)

    def line(self, job: int) -> str:
        return self.processes[job].stdout.readline()

    def lines(self, job: int) -> list[str]:
        return sorted(self.processes[job].communicate(timeout=60)[0].splitlines())


@pytest.mark.parametrize("starter", [(), ("bash", "-c", LOOP)], ids=["program", "shell"])
def test_ranks_of_two_jobs_refuse_each_other(tmp_path, starter):
    jobs = Jobs(tmp_path, BY_HAND, *starter)
    jobs.start(1)
    jobs.start(100)
    jobs.join("1.0", "100.1")
    said = "which has not been started with this rank"
    for process in jobs.processes.values():
        assert any(said in line and "RuntimeWarning" in line for line in process.stderr)
    jobs.join("1.1", "100.0")  # the late ones do not meet, either
    for job in (1, 100):
        lines = jobs.lines(job)
        assert len(lines) == 2
        assert all("InvalidParamError" in line for line in lines)
        assert any(said in line and "two jobs have one address" in line for line in lines)


def test_a_second_job_is_refused(tmp_path):
    jobs = Jobs(tmp_path, BY_HAND)
    jobs.join("stay", "1.0", "1.1")
    jobs.start(1)
    assert {jobs.line(1), jobs.line(1)} == {"1.0 sum 2\n", "1.1 sum 2\n"}
    jobs.join("100.0", "100.1")
    jobs.start(100)
    place = f"torchrun:@127.0.0.1:{BY_HAND['MASTER_PORT']}"
    for rank, line in enumerate(jobs.lines(100)):
        assert line.startswith(f"100.{rank} InvalidParamError: rank {rank} of job '{place}' is process")
        assert "another job has the same address" in line
    (tmp_path / "stay").unlink()
    assert jobs.lines(1) == ["1.0 then 2", "1.1 then 2"]


def test_those_whose_peers_have_been_refused(tmp_path):
    """Ranks that were left out of both jobs have ended when the others meet."""
    jobs = Jobs(tmp_path, BY_HAND | {"WORLD_SIZE": "3"})
    jobs.start(1)
    jobs.start(100)
    jobs.join("1.0", "100.1")
    first, second = jobs.pids(1), jobs.pids(100)
    wait_for(lambda: jobs.has_place(first[0]) and jobs.has_place(second[1]), "a place for one rank of each job")
    jobs.join("1.1", "100.0")
    lines = [jobs.line(1), jobs.line(100)]
    assert all("is process" in line and "another job has the same address" in line for line in lines), lines
    os.kill(second[2], signal.SIGKILL)
    assert wait_gone([first[1], second[0]]) == []
    jobs.join("1.2")
    lines = [*jobs.lines(1), jobs.line(100)]
    assert all("two jobs have one address" in line for line in lines), lines


def test_a_place_that_many_have_asked_for():
    """Whoever holds it accepts no connection: connections of processes that asked before stay in its queue."""
    hold = "import sys; from alltoallv.launch import seat; seat.take(sys.argv[1], 0, 'it'); print('held', flush=True)\n"
    ask = "import sys; from alltoallv.launch import seat; from alltoallv.errors import InvalidParamError\n"
    ask += "for _ in range(150):\n try: seat.take(sys.argv[1], 0, 'it', 0.001); print('taken')\n"
    ask += " except InvalidParamError as error: assert 'it is ' in str(error)"
    name = f"a test of {os.getpid()}"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold + "sys.stdin.read()", name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "held\n"
    asker = subprocess.run([sys.executable, "-c", ask, name], capture_output=True, text=True, timeout=60, check=False)
    assert asker.stdout + asker.stderr == ""
    holder.communicate(timeout=60)


def test_orphans_of_a_killed_launcher(tmp_path):
    jobs = Jobs(tmp_path, BY_HAND)
    jobs.join("stay", "1.0")
    orphans = jobs.start(1)
    pids = jobs.pids(1)
    orphans.kill()
    try:
        jobs.join("1.1")
        assert {jobs.line(1), jobs.line(1)} == {"1.0 sum 2\n", "1.1 sum 2\n"}
        jobs.join("100.0", "100.1")
        jobs.start(100)
        assert all("InvalidParamError" in line for line in jobs.lines(100))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def test_two_jobs_of_a_launcher_on_its_usual_port(tmp_path):
    """Msrun's is 8118; each job has its own ranks, groups made later too, however late these come."""
    msrun = tmp_path / "msrun"
    msrun.write_text(f'#!/bin/sh\nfor j in 0 1; do RANK_ID=$j {sys.executable} -c "$@" & done; wait\n')
    msrun.chmod(0o755)
    jobs = Jobs(tmp_path, MSRUN, str(msrun))
    jobs.start(1)
    jobs.start(100)
    jobs.join("1.0", "100.1", "1.1", "100.0")
    for job in (1, 100):
        sums = [f"{job}.{rank} {what} {2 * job}" for rank in range(2) for what in ("sum", "then")]
        assert jobs.lines(job) == sums


def test_ranks_that_were_started_one_by_one_meet(tmp_path):
    """As in two terminals: nothing but the address joins them."""
    jobs = Jobs(tmp_path, BY_HAND, "bash", "-c", 'RANK=$3 "$0" -c "$1" 1 "$4"; exit $?', sys.executable)
    jobs.join("1.0", "1.1")
    ranks = [
        subprocess.Popen(
            ["bash", "-c", 'RANK=$3 "$0" -c "$1" 1 "$2"; exit $?', sys.executable, RANK, str(tmp_path), str(rank)],
            env=jobs.env, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["1.0 sum 2\n1.0 then 2\n", "1.1 sum 2\n1.1 then 2\n"]


def test_a_process_that_becomes_another_rank_leaves_its_first():
    """As when a job that grows or shrinks numbers its ranks anew."""
    job = f"renumbered {os.getpid()}"
    seat.take(job, 0, "rank 0")
    seat.take(job, 1, "rank 1")
    take = "from alltoallv.launch import ancestry, seat; ancestry.is_ancestor = seat.is_ancestor = lambda pid: False; "
    for rank, message in ((0, ""), (1, f"rank 1 is process {os.getpid()} already")):
        command = [sys.executable, "-c", f"{take} seat.take('{job}', {rank}, 'rank {rank}', 0)"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert message in ended.stderr
        assert (ended.returncode == 0) == (message == "")
