"""What ranks on several hosts do in the tests: ``python programs.py NAME [ARGUMENT ...]`` calls a function below."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

import alltoallv.numpy as an
from alltoallv import Communicator, membership
from alltoallv.errors import (
    AllToAllVError,
    CommTimeoutError,
    DeadlockError,
    PeerLostError,
    PeerMismatchError,
    ResourceError,
)


def lost(how: str, *ranks: str) -> None:
    """Ranks leave at once, by "kill" or "exit"; the others name who it was, and after how long."""
    comms = [Communicator.from_env(domain, timeout=60) for domain in ("first", "second")]
    x = np.ones(1_000_000, np.float32)
    for comm in comms * 2:
        an.all_reduce(x, group=comm)
        an.barrier(group=comm)
    if str(comms[0].rank) in ranks:
        for other in range(comms[0].size):  # all who stay have come out of the barrier, which a leader has to pass on
            if str(other) not in ranks:
                an.recv(np.empty(1), other, group=comms[0])
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit()
    told = [an.isend(np.ones(1), int(rank), group=comms[0]) for rank in ranks]
    begin = time.monotonic()
    for comm in comms:
        try:
            while True:
                an.all_reduce(x, group=comm)
        except AllToAllVError as error:
            print(f"{type(error).__name__} after {time.monotonic() - begin:.3f} s: {error}", flush=True)
    del told


def grows() -> None:
    """Rank 1 starts a newcomer, which ends in the first epoch, and one in its place."""

    def start(variables: dict[str, str]) -> None:
        children.append(subprocess.Popen([sys.executable, *sys.argv], env=os.environ | variables, stdout=-3))

    children: list[subprocess.Popen[bytes]] = []
    comm = Communicator.from_env(timeout=30)
    if comm.size == 2:
        if comm.rank == 1:
            start(*comm.newcomers(1))
        comm = comm.grow(1)
    while True:
        assert an.all_gather(np.array([comm.rank]), group=comm)[:, 0].tolist() == [0, 1, 2]
        print(f"{comm.backend}: {comm.size} ranks in epoch {comm.epoch}", flush=True)
        an.barrier(group=comm)
        if comm.epoch == 1:
            break
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(PeerLostError):
            an.recv(np.empty(1), 2, group=comm)
        for child in [*children]:
            child.wait()
            start(comm.replacement(2))
        comm = comm.rejoin()
    for child in children:
        child.wait()


def ended(meet: str, victim: str, folder: str) -> None:
    """A rank's program ends while the others join another domain, or some of them a part of this one."""
    comm = Communicator.from_env(timeout=60)
    an.barrier(group=comm)
    if str(comm.rank) == victim:
        if meet == "split":  # once the ranks have agreed on the parent
            membership.connect = lambda *_: sys.exit()
            comm.split(0)
        sys.exit()
    begin = time.monotonic()
    try:
        comm.split(0) if meet == "split" else Communicator.from_env("other", timeout=60)
    except AllToAllVError as error:
        print(f"{type(error).__name__} after {time.monotonic() - begin:.3f} s: {error}", flush=True)
    wait_for_the_rest(comm, folder)


def wait_for_the_rest(comm: Communicator, folder: str) -> None:
    """All ranks but one have told their error: nobody misses one that has ended by now. They may have been killed."""
    open(f"{folder}/{comm.rank}", "w").close()
    end = time.monotonic() + 20
    while len(os.listdir(folder)) < comm.size - 1 and time.monotonic() < end:
        time.sleep(0.05)


def lost_at_any_time(victim: str, after: str) -> None:
    """A rank dies some time after the others have begun to exchange much; they tell whom they miss, and go on."""
    comm = Communicator.from_env(timeout=30)
    an.barrier(group=comm)
    if str(comm.rank) == victim:
        threading.Timer(float(after), os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            an.all_to_all_v(np.full(4 * 300_000, comm.rank), [300_000] * 4, [300_000] * 4, group=comm)
    except AllToAllVError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    assert comm.shrink().size == comm.size - 1


def lost_over_mpi(how: str, victim: str, after: str, folder: str) -> None:
    """The same where MPI carries what goes between hosts; the rank is killed, exits, or raises an error."""
    from mpi4py import MPI

    comm = Communicator.from_mpi(MPI.COMM_WORLD, timeout=30)
    an.barrier(group=comm)
    ends = time.monotonic() + float(after)
    mine = str(comm.rank) == victim
    if mine and how == "kill":
        threading.Timer(float(after), os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            if mine and how != "kill" and time.monotonic() >= ends:
                if how == "exit":
                    os._exit(0)
                raise ValueError(f"rank {victim} has an error of its own")
            an.all_to_all_v(np.full(4 * 300_000, comm.rank), [300_000] * 4, [300_000] * 4, group=comm)
    except AllToAllVError as error:
        print(f"rank {comm.rank} tells: {type(error).__name__}: {error}", flush=True)
    wait_for_the_rest(comm, folder)
    os._exit(0)  # MPI's own end waits for the rank that is lost


def silent(how: str, victim: str, folder: str) -> None:
    """A rank is stopped, or comes too late; the others tell for whom they have waited."""
    comm = Communicator.from_env(timeout=60)
    pids = [one["pid"] for one in comm.flight_record()["ranks"]]
    an.barrier(group=comm)
    if str(comm.rank) == victim:
        for other in range(comm.size):  # all others have come out of the barrier, which this rank may have to pass on
            if other != comm.rank:
                an.recv(np.empty(1), other, group=comm)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while comm.usable:
            time.sleep(0.05)
        return
    told = an.isend(np.ones(1), int(victim), group=comm)
    try:
        an.all_reduce(np.ones(3), group=comm, timeout=3)
    except AllToAllVError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    del told
    wait_for_the_rest(comm, folder)
    if how == "stop" and comm.rank == 3:
        os.kill(pids[int(victim)], signal.SIGKILL)


def leaves_unheard() -> None:
    """Rank 3 leaves while the rank that would tell the other host of it, rank 2, is stopped."""
    comm = Communicator.from_env(timeout=60)
    pids = [one["pid"] for one in comm.flight_record()["ranks"]]
    an.barrier(group=comm)
    if comm.rank == 0:
        for other in (1, 2, 3):  # they have come out of the barrier
            an.recv(np.empty(1), other, group=comm)
        os.kill(pids[2], signal.SIGSTOP)
        an.send(np.ones(1), 3, group=comm)
        try:
            an.recv(np.empty(1), 3, group=comm)
        except AllToAllVError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os.kill(pids[2], signal.SIGCONT)
        return
    an.send(np.ones(1), 0, group=comm)
    if comm.rank == 3:
        an.recv(np.empty(1), 0, group=comm)
        comm.destroy()
    while comm.usable:  # until rank 0 has told it
        time.sleep(0.05)


def meet() -> None:
    """Joins, or explains why it cannot; in time for those that come a little later."""
    try:
        Communicator.from_env(timeout=60)
    except AllToAllVError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def settings_differ() -> None:
    try:
        Communicator.from_env(timeout=30, check="off" if os.environ["RANK"] == "1" else "always")
    except AllToAllVError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def shrink(*ranks: str) -> None:
    """Ranks die; the others shrink their communicator, go on, and state how long that took."""
    comm = Communicator.from_env(timeout=30)
    x = np.ones(1_000_000, np.float32)
    under_way = an.isend(x, (comm.rank + 1) % comm.size, group=comm)  # large, and half way when the others die
    try:
        while True:  # the others may not be through the first one when a rank that is dies
            an.all_reduce(x, group=comm)
            if str(comm.rank) in ranks:
                os.kill(os.getpid(), signal.SIGKILL)
    except PeerLostError:
        pass
    begin = time.monotonic()
    left = comm.shrink()
    seconds = time.monotonic() - begin
    comm.destroy()
    del under_way
    survivors = [rank for rank in range(comm.size) if str(rank) not in ranks]
    assert left.size == len(survivors)
    assert left.rank == survivors.index(comm.rank)
    for n in (3, 300_000):
        assert an.all_reduce(np.full(n, comm.rank), group=left)[-1] == sum(survivors)
        assert an.all_gather(np.full(n, comm.rank), group=left)[:, 0].tolist() == survivors
    half = left.split(left.rank % 2)
    assert half is not None
    assert an.all_reduce(np.ones(2), group=half)[0] == half.size
    print(f"{left.backend} after {seconds:.3f} s", flush=True)


def few_descriptors(victim: str) -> None:
    """One rank has few descriptors, then more: all tell if they have joined."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(len(used) + 40) if number not in used]
    for few in range(0, 30, 3):
        begin = time.monotonic()
        if os.environ["RANK"] == victim:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[few], before[1]))
        try:
            with Communicator.from_env(f"few{few}", timeout=30):
                text = "joined"
        except AllToAllVError as error:
            text = f"{type(error).__name__}: {error}"
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        print(f"{few}: {'at once' if time.monotonic() - begin < 20 else 'late'}: {text}", flush=True)


def starved(victim: str) -> None:
    """One rank has no descriptor when it joins: all report what they hear, and when; with descriptors they meet."""
    begin = time.monotonic()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if os.environ["RANK"] == victim:
        used = set(map(int, os.listdir("/proc/self/fd")))
        lowest = next(number for number in range(len(used) + 1) if number not in used)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        Communicator.from_env("starved", timeout=60)
    except ResourceError as error:
        print(f"after {time.monotonic() - begin:.3f} s: {error}")
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    an.barrier(group=Communicator.from_env("fed", timeout=60))
    print("met")


def crossed() -> None:
    """Ranks on different hosts call two groups in opposite order; tells the error, and after how long it came."""
    first, second = (Communicator.from_env(domain, timeout=30) for domain in ("first", "second"))
    for comm in (first, second):
        an.barrier(group=comm)
    time.sleep(0.6 * (first.rank == 0))  # the others wait for long, and nobody is told anything
    for comm in (first, second):
        an.barrier(group=comm)
    begin = time.monotonic()
    try:
        an.barrier(group=(first, second)[first.rank % 2])
        an.barrier(group=(second, first)[first.rank % 2])
    except DeadlockError as error:
        print(f"after {time.monotonic() - begin:.3f} s: {error}", flush=True)


def crossed_messages() -> None:
    """Two ranks wait for messages that nobody sends or takes; tells the errors, and how long they took."""
    small, large = np.ones(2), np.ones(1 << 20)
    with Communicator.from_env("late-a", timeout=30) as first, Communicator.from_env("late-b", timeout=30) as second:
        if first.rank == 0:  # the peer takes late what this one sends without waiting for it, which is no deadlock
            sent = an.isend(large, 1, group=first)
            an.barrier(group=second)
            sent.wait()
            an.recv(np.empty(2), 1, group=first)
        else:
            time.sleep(1.5)
            an.barrier(group=second)
            time.sleep(1.5)
            an.recv(np.empty_like(large), 0, group=first)
            an.send(small, 0, group=first)
        an.barrier(group=first)
    for name, calls in {"recv": ("recv", "barrier"), "send": ("send", "barrier"), "both": ("send", "send")}.items():
        begin = time.monotonic()
        domains = f"{name}-a", f"{name}-b"
        with (
            Communicator.from_env(domains[0], timeout=30) as first,
            Communicator.from_env(domains[1], timeout=30) as second,
        ):
            call, peer = calls[first.rank], 1 - first.rank
            try:
                if call == "recv":
                    an.recv(np.empty(2), peer, group=first)
                elif call == "send":
                    an.send(large, peer, group=first)
                else:
                    an.barrier(group=second)
            except DeadlockError as error:
                print(f"{name} {time.monotonic() - begin:.3f} {error}", flush=True)


def offered() -> None:
    """Messages that nobody takes yet: how much memory of the receiver they take, and then their values."""
    comm = Communicator.from_env(timeout=60)
    words, count = 8192, 1000  # of 64 KiB each, which is the most that travels with an offer

    def used() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    an.barrier(group=comm)
    if comm.rank == 0:
        data = np.arange(count * words, dtype=np.int64).reshape(count, words)
        sent = [an.isend(row, 1, tag=5, group=comm) for row in data]
        an.send(np.ones(1), 1, tag=6, group=comm)  # arrives behind all of them
        for work in sent:
            work.wait()
        return
    got, before = np.zeros(words, np.int64), used()
    an.recv(np.empty(1), 0, tag=6, group=comm)
    print(f"{(used() - before) / (1 << 20):.1f} MiB")
    for number in range(count):
        an.recv(got, 0, tag=5, group=comm)
        assert np.array_equal(got, np.arange(number * words, (number + 1) * words)), number


def leaving() -> None:
    """Every rank ends as soon as its own last operator has ended."""
    comm = Communicator.from_env(timeout=60)
    counts = [2_000_000] * comm.size
    x = np.full(sum(counts), comm.rank, np.float32)
    for _ in range(3):
        y = an.all_to_all_v(x, counts, counts, group=comm)
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
    comm.destroy()
    assert np.array_equal(y, np.repeat(np.arange(comm.size, dtype=np.float32), counts[0]))


def within(path: str) -> None:
    """Large messages between two ranks of a host, which must not use its network, not even the loopback."""
    os.environ["ALLTOALLV_PATH"] = path
    comm = Communicator.from_env(timeout=60)
    words = 2_000_000  # 16 MB
    me, away = comm.rank, comm.size - 1  # the last rank is on another host

    def values(sender: int, number: int) -> np.ndarray:
        return np.arange(words, dtype=np.int64) * 7 + 1000 * sender + number

    if me < 2:
        before, peer = _sent_bytes(), 1 - me
        for number in range(2):
            sent = [an.isend(values(me, 2 * number + i), peer, tag=i, group=comm) for i in range(2)]
            got = [np.zeros(words, np.int64) for _ in range(2)]
            received = [an.irecv(got[i], peer if number == 0 else None, tag=i, group=comm) for i in (1, 0)]
            for work in [*sent, *received]:
                work.wait()
            for i in range(2):
                assert np.array_equal(got[i], values(peer, 2 * number + i)), (number, i)
            assert [work.source for work in received] == [peer, peer]
        moved = _sent_bytes() - before
        assert moved < 1_000_000, moved
        print(f"{moved} bytes over the network")
        try:
            if me == 0:
                an.send(values(0, 9), 1, group=comm)
            else:
                an.recv(got[0][1:], 0, group=comm)
        except PeerMismatchError:
            pass
        else:
            raise AssertionError("one element less is not refused")
    an.barrier(group=comm)

    # From any rank, one of which is on another host.
    if me == 0:
        from_others = set()
        for _ in range(away):
            work = an.irecv(out := np.zeros(words, np.int64), None, tag=5, group=comm)
            work.wait()
            assert np.array_equal(out, values(work.source, 5))
            from_others.add(work.source)
        assert from_others == set(range(1, comm.size)), from_others
    else:
        an.send(values(me, 5), 0, tag=5, group=comm)
    an.barrier(group=comm)
    comm.destroy()


def _sent_bytes() -> int:
    """What this host has sent over all its interfaces."""
    with open("/proc/self/net/dev") as file:
        lines = file.read().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def within_lost(rank: str) -> None:
    """A rank is killed while large messages move between the two ranks of a host."""
    comm = Communicator.from_env(timeout=60)
    data = np.ones(4_000_000)
    an.barrier(group=comm)
    end = time.monotonic() + 30
    try:
        for number in range(1_000_000):
            if comm.rank == int(rank) and number == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            if comm.rank < 2:
                work = an.isend(data, 1 - comm.rank, group=comm)
                an.recv(out := np.zeros_like(data), 1 - comm.rank, group=comm)
                work.wait()
                assert np.array_equal(out, data)
            else:
                time.sleep(0.02)
                if rank != "2":
                    an.barrier(group=comm)
            assert time.monotonic() < end, "nobody was lost"
    except PeerLostError as error:
        print(error)


def dropped(folder: str) -> None:
    """Rank 0 drops its communicator while MPI carries a call of it that will never end."""
    from mpi4py import MPI

    from alltoallv.launch import mpi

    comm = Communicator.from_mpi(MPI.COMM_WORLD, timeout=30)
    rank, counts = comm.rank, [250_000] * comm.size
    sent, out = np.ones(sum(counts)), np.empty(sum(counts))  # MPI may still use rank 0's: they stay
    if rank == 0:
        mpi.Engine.progress = lambda self: bool(time.sleep(0.005))
        mpi.Engine.missing = lambda self: [1]
        out, work = an.all_to_all_v(sent, counts, counts, group=comm, async_op=True)
        time.sleep(0.3)
        del work, comm
    else:
        try:
            an.all_to_all_v(sent, counts, counts, out=out, group=comm)
        except AllToAllVError as error:
            print(error)
        del comm
    print(f"rank {rank} goes on", flush=True)
    MPI.COMM_WORLD.Barrier()
    open(f"{folder}/{rank}", "w").close()
    while len(os.listdir(folder)) < len(counts):  # MPICH aborts a rank that still reads from one that has ended
        time.sleep(0.01)
    os._exit(0)  # messages are left that will never end


def ends_while_waiting() -> None:
    """Rank 0 ends while a daemon thread of it waits in what `split` has made."""
    comm = Communicator.from_env(timeout=30).split(0)
    assert comm is not None
    an.sendrecv(np.ones(1), 1 - comm.rank, np.empty(1), 1 - comm.rank, group=comm)  # both have joined
    before = comm.flight_record()["ranks"][0]["operators"][-1:]
    if comm.rank == 0:
        threading.Thread(target=an.barrier, kwargs={"group": comm}, daemon=True).start()
        while comm.flight_record()["ranks"][0]["operators"][-1:] == before:
            time.sleep(0.01)
        return
    try:
        an.recv(np.empty(1), 0, group=comm)
    except PeerLostError as error:
        print(error)


def two_halves(folder: str) -> None:
    """Ranks that do not see all others any more do not go on, but meet again once they do."""
    comm = Communicator.from_env(timeout=60)
    comm.core.set_timeout(1.0)
    assert comm._options is not None
    comm._options.timeout = 3.0  # of `rejoin`
    an.barrier(group=comm)
    Path(folder, f"works-{comm.rank}").touch()
    with contextlib.suppress(CommTimeoutError, PeerLostError):
        while True:
            an.all_reduce(np.ones(1), group=comm)
    while True:
        try:
            comm = comm.rejoin()
            break
        except CommTimeoutError as error:
            print(error, flush=True)
            Path(folder, f"refused-{comm.rank}").touch()
    print(f"epoch {comm.epoch}: {an.all_reduce(np.ones(1), group=comm).tolist()}")


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    globals()[name](*arguments)
