"""Lost ranks are replaced, and newcomers join: all meet again, and of two halves none goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from started import process_state, run, wait_for

from alltoallv import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.testing import Ranks
from alltoallv_tools.ports import free_port

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.parametrize(
    ("rounds", "option"),
    [
        (20, ""),
        (8, "--shrink"),
        pytest.param(1000, "", marks=pytest.mark.slow),
        pytest.param(1000, "--shrink", marks=pytest.mark.slow),
    ],
)
def test_ranks_are_killed_and_replaced_under_load(rounds: int, option: str) -> None:
    command = [sys.executable, str(SUPPORT / "replaced_ranks.py"), "--rounds", str(rounds), *option.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60 + 2 * rounds, check=False)
    found = json.loads(result.stdout)
    print(result.stdout)
    assert found["failed"] == []
    assert (found["rounds"], found["kills"]) == (rounds, rounds + rounds // 3)
    assert found["wrong"] == 0
    assert found["bytes_of_those_left"] > 0
    assert found["split_epochs"] == 0  # in each epoch all ranks had the same peers
    assert found["epochs"] > rounds
    assert result.returncode == 0


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_the_launcher_replaces_ranks_and_the_program_goes_on(tmp_path: Path, backend: str) -> None:
    """Rank 0 dies first, at which the others meet, then rank 1 with an exception."""
    program = """
import os, signal, sys
import numpy as np
from alltoallv import Communicator
from alltoallv.errors import PeerLostError
from alltoallv.numpy import all_gather, all_reduce, broadcast

comm = Communicator.from_env(backend=sys.argv[1], timeout=30)
state, agreed = np.zeros(2, np.int64), False  # step and sum
while state[0] < 12:
    try:
        if not agreed:
            steps = all_gather(state[:1], group=comm)[:, 0]
            broadcast(state, int(steps.argmax()), group=comm)
            agreed = True
        if (comm.rank, comm.epoch, state[0]) == (0, 0, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        if (comm.rank, comm.epoch, state[0]) == (1, 1, 8):
            raise RuntimeError("its own error")
        state += [1, int(all_reduce(np.array([10**comm.rank]), group=comm)[0])]
    except PeerLostError:
        comm, agreed = comm.rejoin(), False
print(state.tolist(), comm.epoch, os.environ["ALLTOALLV_REPLACEMENT"], flush=True)
"""
    result = run(tmp_path, program, "-n", "2", "--replace", "2", arguments=[backend], text=True)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] [12, 132] 2 1" for rank in range(2)]
    assert "was killed by SIGKILL, and is started again; 1 more may be (--replace)" in result.stderr
    assert "exited with code 1, and is started again; 0 more may be (--replace)" in result.stderr


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_rank_that_meets_anew_does_not_keep_others_that_have_met(tmp_path: Path, backend: str) -> None:
    """As where a rank dies at the end of a meeting, after its last part came to some of the others."""
    program = """
import os, signal, sys
import numpy as np
from alltoallv import Communicator, membership
from alltoallv.errors import PeerLostError
from alltoallv.numpy import all_reduce

comm = Communicator.from_env(backend=sys.argv[1], timeout=30)
gather = membership._gather

def lost_afterwards(*arguments):
    membership._gather = gather
    gather(*arguments)
    raise PeerLostError("as if a rank had died")

called = False
while comm.epoch < 2:
    try:
        if called and (comm.rank, comm.epoch) == (0, 0):  # all have joined: one that joins would meet the new rank
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(np.array([1]), group=comm)
        called = True
    except PeerLostError:
        if (comm.rank, comm.epoch) == (2, 0):
            membership._gather = lost_afterwards
        comm = comm.rejoin()
print(comm.epoch, int(all_reduce(np.array([10**comm.rank]), group=comm)[0]), flush=True)
"""
    result = run(tmp_path, program, "-n", "3", "--replace", "1", arguments=[backend], text=True)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] 2 111" for rank in range(3)]


_HALVES = """
import os, sys
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError, CommTimeoutError, PeerLostError
from alltoallv.numpy import barrier

try:
    comm = Communicator.from_env(timeout=60)
    comm.core.set_timeout(1.0)
    comm._options.timeout = float(sys.argv[1])  # of rejoin()
    print("met", flush=True)
    while True:
        try:
            barrier(group=comm)
            if comm.epoch:
                break
        except (CommTimeoutError, PeerLostError):
            print("late", flush=True)
            comm = comm.rejoin()
    print(f"goes on in epoch {comm.epoch}", flush=True)
except AllToAllVError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[Any]:
    """Starts a process as rank 0 or 1 of 2."""
    script = tmp_path / "program.py"
    script.write_text(_HALVES)
    with ExitStack() as stack:

        def start(rank: int, replacement: int, timeout: float) -> subprocess.Popen[str]:
            variables = {"RANK": rank, "WORLD_SIZE": 2, "JOB_ID": tmp_path, "REPLACEMENT": replacement}
            env = os.environ | {f"ALLTOALLV_{name}": str(value) for name, value in variables.items()}
            command = [sys.executable, str(script), str(timeout)]
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def test_a_number_belongs_to_the_process_that_has_it_while_it_lives(halves: Any) -> None:
    """A stopped rank looks lost to the others. Neither they nor a second process in its place go on without it."""
    first, stopped = halves(0, 0, 1.0), halves(1, 0, 1.0)
    assert line(first) == line(stopped) == "met"
    stopped.send_signal(signal.SIGSTOP)
    wait_for(lambda: process_state(stopped.pid) == "T", "SIGSTOP")
    second = halves(1, 1, 1.0)
    assert line(first) == "late"
    refused = line(second)
    assert refused.startswith("InvalidParamError: rank 1 of job "), refused
    assert f"is process {stopped.pid} already: no other can take its place while it lives; end it [" in refused
    alone = line(first)
    assert alone.startswith("CommTimeoutError: the 2 ranks of the job have not met within 1 s, and none of "), alone
    assert "rank 1" in alone
    stopped.send_signal(signal.SIGCONT)
    late = [line(stopped), line(stopped)]
    assert any("none of them goes on without the others" in text and "rank 0" in text for text in late), late


def test_a_rank_that_was_only_late_meets_the_others_again(halves: Any) -> None:
    first, stopped = halves(0, 0, 30.0), halves(1, 0, 30.0)
    assert line(first) == line(stopped) == "met"
    stopped.send_signal(signal.SIGSTOP)
    assert line(first) == "late"
    stopped.send_signal(signal.SIGCONT)
    assert [text for text in (line(first), line(stopped), line(stopped)) if text != "late"] == [
        "goes on in epoch 1",
        "goes on in epoch 1",
    ]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_grown_job_gets_lost_ranks_back_and_grows_again(tmp_path: Path, backend: str) -> None:
    """One process grows to three, loses one, grows to four, and loses another; rank 0 starts all others."""
    program = """
import os, signal, subprocess, sys
import numpy as np
from alltoallv import Communicator
from alltoallv.errors import PeerLostError
from alltoallv.numpy import all_gather, barrier

children = {}

def start(rank, variables):
    children[rank] = subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], env=os.environ | variables)

def more(comm, n):
    if comm.rank == 0:
        for rank, variables in enumerate(comm.newcomers(n), comm.size):
            start(rank, variables)
    more = comm.grow(n)
    assert comm.usable and comm.rank == more.rank
    assert all_gather(np.array(comm.rank), group=comm).tolist() == list(range(comm.size))
    return more

def lose(comm, victim):
    try:
        while True:  # no rank dies before all are through grow() or from_env()
            barrier(group=comm)
            if comm.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
    except PeerLostError:
        pass
    if comm.rank == 0:
        children[victim].wait()
        start(victim, comm.replacement(victim))
    return comm.rejoin()

comm = Communicator.from_env("serving", backend=sys.argv[1], timeout=30)
came = comm.size, comm.epoch
for size, epoch, step, argument in ((1, 0, more, 2), (3, 0, lose, 2), (3, 1, more, 1), (4, 1, lose, 1)):
    if (comm.size, comm.epoch) == (size, epoch):
        comm = step(comm, argument)
told = all_gather(np.array([comm.rank, comm.epoch, *came]), group=comm).tolist()
assert told == [[0, 2, 1, 0], [1, 2, 4, 2], [2, 2, 3, 1], [3, 2, 4, 1]], told
os.write(1, f"rank {comm.rank} of {comm.size} in epoch {comm.epoch}\\n".encode())
barrier(group=comm)
for rank in (2, 3, 1):  # of rank 0: the others are its children, whose output counts
    if comm.rank == 0:
        children[rank].wait()
"""
    (tmp_path / "program.py").write_text(program)
    variables = {"ALLTOALLV_RANK": 0, "ALLTOALLV_WORLD_SIZE": 1, "ALLTOALLV_JOB_ID": tmp_path}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port() - 1}
    env = os.environ | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, str(tmp_path / "program.py"), backend]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 4 in epoch 2" for rank in range(4)], result.stderr
    assert result.returncode == 0, result.stderr


def test_the_launcher_replaces_a_rank_of_a_job_that_has_grown(tmp_path: Path) -> None:
    program = """
import os, signal, subprocess, sys
import numpy as np
from alltoallv import Communicator
from alltoallv.errors import PeerLostError
from alltoallv.numpy import all_gather, barrier

comm = Communicator.from_env(timeout=30)
came = comm.size, comm.epoch
if comm.size == 2:
    if comm.rank == 0:
        child = subprocess.Popen([sys.executable, __file__], env=os.environ | comm.newcomers(1)[0])
    comm = comm.grow(1)
if comm.epoch == 0:
    try:
        while True:  # no rank dies before all are through grow() or from_env()
            barrier(group=comm)
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except PeerLostError:
        comm = comm.rejoin()
told = all_gather(np.array([comm.rank, *came]), group=comm).tolist()
assert (told, comm.epoch) == ([[0, 2, 0], [1, 3, 1], [2, 3, 0]], 1), told
os.write(1, f"rank {comm.rank} of {comm.size}\\n".encode())
if came == (2, 0):
    child.wait()
"""
    result = run(tmp_path, program, "-n", "2", "--replace", "1", "--no-prefix", text=True)
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 3" for rank in range(3)], result.stderr
    assert result.returncode == 0, result.stderr


def test_what_cannot_grow_or_rejoin_says_so(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(
            BackendUnavailableError, match=r"^grow\(\) of domain .* whose ranks are threads, expected.*A2A-5038"
        ):
            comm.grow(1)
        for call in (comm.rejoin, comm.replaced, lambda: comm.replacement(0)):
            with pytest.raises(
                BackendUnavailableError, match=r"replaces lost ranks \('python -m alltoallv run --rep.*A2A-5035"
            ):
                call()
        assert comm.usable
        comm.host_core = None  # as of one over HCCL
        for call, text in (
            (comm.rejoin, "host memory: start the job again .*--max-restarts"),
            (comm.shrink, "host memory"),
        ):
            with pytest.raises(BackendUnavailableError, match=rf"over backend 'shm', expected one in {text}"):
                call()

    ranks(2, threads=True)(program)


def test_all_must_let_in_the_same_number(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(
            InvalidParamError, match=r"n is \[1, 2\] on ranks 0 to 1, expected one number on all.*A2A-1309"
        ):
            comm.grow(1 + comm.rank)
        with pytest.raises(InvalidParamError, match=r"n is 0, expected 1 to 4094.*A2A-1310"):
            comm.grow(comm.rank)
        assert comm.usable

    ranks(2)(program)


def test_newcomers_that_do_not_come_are_named_and_the_rest_goes_on(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(TimeoutError, match=r"ranks 2, 3 of 4 had not joined domain"):
            comm.grow(2)
        assert comm.usable

    ranks(2, comm_timeout=1.0)(program)
