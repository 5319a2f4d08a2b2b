"""Kills ranks under load and replaces them, round by round: ``python replaced_ranks.py --rounds 20``.

The ranks exchange random bytes that each of them can foretell, and compare all that come. In a round one rank is
killed, in every third round another one while the others meet again. A round ends once all numbers have exchanged in
the new epoch. Prints the counts as JSON. With ``--transport tcp`` the ranks are on two hosts, as
`alltoallv.testing.hosts` makes them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from alltoallv import Communicator
from alltoallv.errors import PeerLostError
from alltoallv.numpy import all_gather, all_reduce, all_to_all_v, broadcast
from alltoallv.testing.hosts import Host, joined_hosts

TIMEOUT = 20.0  # of every wait in the ranks: one that lasts so long has failed
libc = ctypes.CDLL(None, use_errno=True)


def enter(host: Host) -> None:
    """Lets this process, which has one thread, be on a host."""
    namespace = os.open(f"/run/netns/{host.name}", os.O_RDONLY)
    if libc.setns(namespace, 0x40000000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    os.close(namespace)


class Job:
    """Forks the ranks of a job: they start at once, since everything has been imported."""

    def __init__(self, size: int, seed: int, shrinks: bool, hosts: Sequence[Host]) -> None:
        self.size, self.seed, self.shrinks, self.hosts = size, seed, shrinks, hosts
        self.stop = mmap.mmap(-1, 1)
        self.source, self.sink = os.pipe()
        self.pids: dict[int, int] = {}
        self.starts = [0] * size
        self.rest = b""

    def start(self, rank: int) -> None:
        self.starts[rank] += 1
        pid = os.fork()
        if pid == 0:
            os.close(self.source)
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
            for name, value in names.items():
                os.environ[name] = os.environ[f"ALLTOALLV_{name}"] = str(value)
            os.environ |= {"ALLTOALLV_JOB_ID": f"rounds-{os.getppid()}", "ALLTOALLV_RESTART_COUNT": "0"}
            if self.hosts:
                enter(self.hosts[len(self.hosts) * rank // self.size])
                os.environ |= {"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": "29700"}
            os.environ["ALLTOALLV_REPLACEMENT"] = str(self.starts[rank] - 1)
            code = 1
            try:
                Rank(self).run()
                code = 0
            except BaseException as error:
                self.tell(rank, "failed", f"{type(error).__name__}: {error}")
            finally:
                os._exit(code)
        self.pids[rank] = pid

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)
        os.waitpid(self.pids[rank], 0)
        self.start(rank)

    def tell(self, rank: int, what: str, value: Any) -> None:
        os.write(self.sink, (json.dumps([rank, self.starts[rank], what, value]) + "\n").encode())

    def events(self, seconds: float) -> list[list[Any]]:
        """What the ranks have told since, waiting so long for the first."""
        if not select.select([self.source], [], [], seconds)[0]:
            return []
        *lines, self.rest = (self.rest + os.read(self.source, 1 << 16)).split(b"\n")
        return [json.loads(line) for line in lines]


class Rank:
    """The program of a rank."""

    def __init__(self, job: Job) -> None:
        self.job, self.wrong, self.compared = job, 0, 0

    def run(self) -> None:
        began = time.perf_counter()
        comm = Communicator.from_env(backend="tcp" if self.job.hosts else "shm", timeout=TIMEOUT)
        me, step, agreed = comm.rank, 0, False
        note, serves = ("serves", began), True
        while True:
            try:
                if not agreed:
                    step = self.agree(comm, step)
                    agreed = True
                self.exchange(comm, step)
                step += 1
                if serves and comm.size == self.job.size:
                    self.job.tell(me, note[0], 1e3 * (time.perf_counter() - note[1]))
                    starts = all_gather(np.array([self.job.starts[me]]), group=comm)[:, 0].tolist()
                    self.job.tell(me, "met", [comm.epoch, starts])
                    serves = False
                # One decision for all: whether to end, and whether those who shrank may meet the replacements.
                flags = np.array([self.job.stop[0], int(comm.size == self.job.size or comm.replaced())])
                stop, complete = all_reduce(flags, "min", group=comm).tolist()
                if stop:
                    break
                if comm.size < self.job.size and complete:
                    comm, agreed, serves = comm.rejoin(), False, True
            except PeerLostError:
                begin = time.perf_counter()
                if self.job.shrinks:
                    comm = comm.shrink()
                    self.job.tell(me, "shrunk", 1e3 * (time.perf_counter() - begin))
                else:
                    comm = comm.rejoin()
                    self.job.tell(me, "rejoined", 1e3 * (time.perf_counter() - begin))
                note, agreed, serves = ("went on", begin), False, True
        self.job.tell(me, "ended", [step, self.compared, self.wrong])
        comm.destroy()

    @staticmethod
    def agree(comm: Communicator, step: int) -> int:
        """The step of the rank that is farthest: ranks may differ by one, and replacements begin at 0."""
        steps = all_gather(np.array([step]), group=comm)[:, 0]
        state = np.array([step])
        broadcast(state, int(steps.argmax()), group=comm)
        return int(state[0])

    def exchange(self, comm: Communicator, step: int) -> None:
        """An exchange of random bytes: each rank knows what the others send it."""
        sent = [self.bytes(step, comm.rank, to, comm.size) for to in range(comm.size)]
        got = all_to_all_v(np.concatenate(sent), [part.size for part in sent], group=comm)
        expected = np.concatenate([self.bytes(step, source, comm.rank, comm.size) for source in range(comm.size)])
        self.compared += expected.size
        same = got.size == expected.size and bool((got == expected).all())
        if not same:
            self.wrong += 1
            self.job.tell(comm.rank, "wrong", [step, got.size, expected.size])

    def bytes(self, step: int, source: int, target: int, size: int) -> np.ndarray:
        rng = np.random.default_rng([self.job.seed, step, source, target, size])
        most = 40_000 if step % 4 == 0 else 600
        return rng.integers(0, 256, int(rng.integers(0, most)), np.uint8)


def rounds(job: Job, count: int, seed: int) -> dict[str, Any]:
    """Runs them; returns counts and times in milliseconds."""
    rng = np.random.default_rng(seed)
    times: dict[str, list[float]] = {}
    epochs: dict[int, set[tuple[int, ...]]] = {}
    found: dict[str, Any] = {"rounds": 0, "kills": 0, "wrong": 0, "failed": []}
    met: set[tuple[int, int]] = set()  # ranks, with their starts, that have exchanged in the present epoch
    ended: dict[int, list[int]] = {}

    def listen(seconds: float) -> None:
        for rank, start, what, value in job.events(seconds):
            if what == "met":
                epochs.setdefault(value[0], set()).add(tuple(value[1]))
                if value[1] == job.starts:
                    met.add((rank, start))
            elif what == "wrong":
                found["wrong"] += 1
            elif what == "failed":
                found["failed"].append(f"rank {rank}: {value}")
            elif what == "ended":
                ended[rank] = value
            else:
                times.setdefault(what, []).append(value)

    def until(done: Any, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not done() and not found["failed"] and time.monotonic() < end:
            listen(0.2)
        return bool(done())

    for rank in range(job.size):
        job.start(rank)
    whole = until(lambda: len(met) == job.size, 2 * TIMEOUT)
    times.clear()
    while whole and found["rounds"] < count:
        time.sleep(rng.uniform(0, 0.01))  # the ranks are at work: anywhere in their calls
        victims = rng.permutation(job.size)
        met.clear()
        job.kill(int(victims[0]))
        found["kills"] += 1
        if found["rounds"] % 3 == 2:
            time.sleep(rng.uniform(0, 0.02))  # the others meet, or have just met
            met.clear()
            job.kill(int(victims[int(rng.integers(0, 2))]))  # the replacement or another: one at least has the state
            found["kills"] += 1
        whole = until(lambda: met >= set(enumerate(job.starts)), 2 * TIMEOUT)
        found["rounds"] += whole
    job.stop[0] = 1
    until(lambda: len(ended) == job.size, 2 * TIMEOUT if whole else 0.0)
    for pid in job.pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found |= {
        "steps": max((value[0] for value in ended.values()), default=0),
        "bytes_of_those_left": sum(value[1] for value in ended.values()),
        "ended": len(ended),
        "epochs": len(epochs),
        "split_epochs": sum(len(who) > 1 for who in epochs.values()),
        "ms": {
            what: {"count": len(some), "p50": round(float(np.median(some)), 1), "max": round(max(some), 1)}
            for what, some in sorted(times.items())
        },
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--shrink", action="store_true", help="those who live go on until the replacement has come")
    args = parser.parse_args()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # one line for every loss
    begin = time.monotonic()
    with joined_hosts() if args.transport == "tcp" else contextlib.nullcontext([]) as hosts:
        found = rounds(Job(args.size, args.seed, args.shrink, hosts), args.rounds, args.seed)
    print(json.dumps(found | {"seconds": round(time.monotonic() - begin, 1)}, indent=1))
    sys.exit(bool(found["failed"] or found["wrong"] or found["split_epochs"] or found["rounds"] < args.rounds))


if __name__ == "__main__":
    main()
