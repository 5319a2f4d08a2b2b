"""A rank of a job of the soak: ``job.py SPEC`` joins, makes rounds of calls, and writes what it found into a file.

A round is of collectives that are compared with their definitions, of an option that differs on one rank, of a limit
that changes, or of a job that every rank starts inside itself.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import rooms  # noqa: F401 - the modules below
from calls import Call, draw, make
from case import UNSEEN
from differences import OPTIONS
from episode import same, tensors
from launchers import start
from scarcity import no_more_descriptors, no_more_memory, no_room_in_files

from alltoallv import Communicator, empty
from alltoallv.errors import AllToAllVError, CommTimeoutError, ResourceError
from alltoallv.numpy import all_gather, barrier

SHORT, LONG = 0.4, 60.0  # limits of calls and groups, in seconds
OF_GROUP = 2.0  # a short one of a group, which is also that for joining it
SCARCE: dict[str, Callable[[], Any]] = {
    "descriptors": no_more_descriptors,
    "address space": no_more_memory,
    "size of files": no_room_in_files,
}
STARVED = ("ResourceError", "OutOfMemoryError", "MemoryError")


class Rank:
    """This rank, and what it has found."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import adapters.numpy_column

        self.spec = spec
        self.column = adapters.numpy_column.NumpyColumn()
        self.comm = Communicator.from_env(timeout=30.0)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.odd: list[str] = []
        self.outcomes: list[str] = []  # of calls that may fail: equal on all ranks
        self.round = self.drawn = 0

    @property
    def rng(self) -> random.Random:
        """A new one, the same on all ranks of the job and another one in every other job."""
        self.drawn += 1
        return random.Random(f"{self.spec['seed']} {self.spec['name']} {self.drawn}")

    def play(self) -> None:
        """All rounds."""
        name, size = self.spec["name"], self.spec["size"]
        if self.comm.size != size:
            self.odd.append(f"{name}: rank {self.comm.rank} of {self.comm.size}, expected of {size}")
            return
        told = all_gather(np.array([hash_of(name)]), group=self.comm).ravel().tolist()
        if told != [hash_of(name)] * size:
            self.wrong.append(f"{name}: ranks of several jobs have met")
        for what, which in self.spec["rounds"]:
            self.round += 1
            getattr(self, what)(which)
            self.calls(3)
        barrier(group=self.comm)
        self.comm.destroy()

    def calls(self, count: int, rng: random.Random | None = None, **more: Any) -> None:
        """Random collectives, whose values are compared."""
        rng = rng or self.rng
        for _ in range(count):
            self.compare(draw(rng, self.comm.size, self.column.lacks), **more)

    def compare(self, call: Call, **more: Any) -> None:
        self.judge(call, self.column.call(call.function, self.comm, {**self.arguments(call), **more}))

    def arguments(self, call: Call) -> dict[str, Any]:
        return {name: tensors(self.column, value) for name, value in call.arguments[self.comm.rank].items()}

    def judge(self, call: Call, output: Any) -> None:
        wanted = call.want(call.arguments)[self.comm.rank]
        self.counts["operators"] += 1
        if wanted is not UNSEEN and not same(self.column, output, wanted):
            self.wrong.append(f"{self.spec['name']}, round {self.round}: {call.function} on rank {self.comm.rank}")

    def failing(self, what: str, odd: int, classes: tuple[str, ...], act: Callable[[], Any], must: bool = True) -> bool:
        """Whether ``act`` raised one of these errors, which must name the odd rank to the others."""
        try:
            act()
        except (AllToAllVError, MemoryError) as error:
            name, text = type(error).__name__, str(error)
            self.outcomes.append(f"{what}: failed")
            self.counts["errors"] += 1
            if name not in classes:
                self.odd.append(f"{what} on rank {odd}: rank {self.comm.rank} got {name}: {text}")
            elif self.comm.rank != odd and f"rank {odd}" not in text:
                self.odd.append(f"{what} on rank {odd}: not named on rank {self.comm.rank}: {text}")
            return True
        self.outcomes.append(f"{what}: done")
        if must:
            self.odd.append(f"{what} on rank {odd}: rank {self.comm.rank} got no error")
        return False

    def plain(self, count: int) -> None:
        """So many collectives."""
        self.calls(count)

    def option(self, name: str) -> None:
        """An option that one rank has otherwise: an error on all, and then the same call with equal options."""
        rng, call = self.rng, OPTIONS[name]
        odd = rng.randrange(1, self.comm.size)  # whoever is compared with rank 0 is the one that is named
        self.failing(f"option {name}", odd, call.errors, lambda: call.act(self.comm, self.comm.rank == odd, self.round))
        if not self.comm.usable:
            self.odd.append(f"option {name}: the group is not usable afterwards")
            self.renew()
            return
        call.act(self.comm, False, -self.round)
        self.counts["operators"] += 1

    def limit(self, name: str) -> None:
        """A limit that changes on the way."""
        getattr(self, name.replace(" ", "_").replace("'", ""))()

    def limits_of_calls(self) -> None:
        """Every rank and call has another one, longer than anybody is late; then one that is too short."""
        rng, mine = self.rng, random.Random(f"{self.round} {self.comm.rank}")
        for _ in range(6):
            call = make("all_to_all_v", rng, self.comm.size)
            self.compare(call, timeout=mine.uniform(5, LONG))
        odd = rng.randrange(self.comm.size)
        self.late(odd, {"timeout": SHORT})

    def limits_of_groups(self) -> None:
        """Groups of several limits beside each other: a rank that is late ends one, and no other."""
        odd, world = self.rng.randrange(self.comm.size), self.comm
        with Communicator.from_env(f"short-{self.round}", timeout=30.0) as long:
            with Communicator.from_env(f"long-{self.round}", timeout=OF_GROUP) as short:
                barrier(group=short)
                self.comm = short
                self.late(odd, {}, renew=False)
            self.comm = long
            self.calls(3)
        self.comm = world

    def limits_of_torchs_groups(self) -> None:
        """A limit that is raised lets a late rank come, and one that is lowered does not."""
        import torch
        import torch.distributed as dist

        import alltoallv.torch  # noqa: F401 - the backend

        def set_limit(seconds: float) -> None:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)

        def call() -> None:
            x = torch.arange(size) + 100 * rank
            got = torch.full_like(x, -1)
            dist.all_to_all_single(got, x)
            self.counts["operators"] += 1
            if got.tolist() != [rank + 100 * source for source in range(size)]:
                self.wrong.append(f"{self.spec['name']}, round {self.round}: torch's all_to_all_single on rank {rank}")

        rank, size, odd = self.comm.rank, self.comm.size, self.rng.randrange(self.comm.size)
        store = dist.FileStore(f"{self.spec['folder']}/{self.spec['name']}-{self.round}.store", size)
        limit = timedelta(seconds=30)
        dist.init_process_group("alltoallv", store=store, rank=rank, world_size=size, timeout=limit)
        call()
        set_limit(SHORT)
        set_limit(LONG)
        if rank == odd:
            time.sleep(SHORT + 0.3)
        call()
        set_limit(SHORT)
        self.failing(
            "late in torch's group", odd, ("CommTimeoutError", "PeerLostError"), lambda: self.come_late(odd, call)
        )
        dist.destroy_process_group()

    def come_late(self, odd: int, call: Callable[[], None]) -> None:
        """The odd rank comes when the others have given up."""
        given_up = [Path(f"{self.spec['folder']}/{self.spec['name']}-{self.round}.{r}") for r in range(self.comm.size)]
        if self.comm.rank != odd:
            try:
                call()
            finally:
                given_up[self.comm.rank].touch()
            return
        end = time.monotonic() + 20
        while not all(one.exists() for r, one in enumerate(given_up) if r != odd) and time.monotonic() < end:
            time.sleep(0.02)
        call()

    def late(self, odd: int, limit: dict[str, float], renew: bool = True) -> None:
        """A rank that comes after the limit of the others."""
        call = make("all_to_all_v", self.rng, self.comm.size)
        least, told = SHORT if limit else OF_GROUP, []

        def act() -> None:
            if self.comm.rank == odd:
                end = time.monotonic() + 20
                while self.comm.usable and time.monotonic() < end:
                    time.sleep(0.02)
                self.compare(call)
            else:
                try:
                    self.compare(call, **limit)
                except CommTimeoutError as error:  # of the rank that has waited the longest
                    told.append(float(re.findall(r"waited ([\d.]+) s", str(error))[0]))
                    raise

        self.failing("late", odd, ("CommTimeoutError", "PeerLostError"), act)
        if told and told[0] < least:
            self.odd.append(f"late: rank {self.comm.rank} was told of {told[0]} s, expected at least {least}")
        if self.comm.usable:
            self.odd.append(f"late: the group is usable on rank {self.comm.rank}")
        if renew:
            self.renew()

    def starved(self, limits: Callable[[], Any], what: str) -> None:
        """Large calls and new memory, while one rank gets no more; afterwards it has its limit back."""
        rng = self.rng
        odd = rng.randrange(self.comm.size)
        calls = [make("all_to_all_v", rng, self.comm.size, units=rng.choice((30, 50_000))) for _ in range(4)]
        ready = [self.arguments(call) for call in calls]  # only what the call itself needs may be missing
        outputs: list[Any] = []

        def act() -> None:
            kept = []
            for call, arguments in zip(calls, ready, strict=True):
                outputs.append(self.column.call(call.function, self.comm, arguments))
                with suppress(MemoryError, ResourceError):  # which the others have no part in
                    kept.append(empty(1 << 20, "uint8"))

        def on_one() -> None:
            with limits() if self.comm.rank == odd else nullcontext():
                act()

        self.failing(what, odd, STARVED, on_one, must=False)
        for call, output in zip(calls, outputs, strict=False):
            self.judge(call, output)
        if not self.comm.usable:
            self.renew()

    def descriptors(self) -> None:
        self.starved(no_more_descriptors, "descriptors")

    def address_space(self) -> None:
        self.starved(no_more_memory, "address space")

    def size_of_files(self) -> None:
        self.starved(no_room_in_files, "size of files")

    def while_joining(self) -> None:
        """A group is made while one rank gets no more."""
        rng = self.rng
        odd, what = rng.randrange(self.comm.size), rng.choice(sorted(SCARCE))

        def act() -> None:
            with SCARCE[what]() if self.comm.rank == odd else nullcontext():
                part = self.comm.split(0)
                assert part is not None
            with part:
                barrier(group=part)

        self.failing(f"joining, {what}", odd, STARVED, act, must=False)
        if not self.comm.usable:
            self.renew()

    def processors(self) -> None:
        """Where a rank may run, and its soft limits, change between calls that must all be right."""
        rng, every = self.rng, os.sched_getaffinity(0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for number in range(4):
            os.sched_setaffinity(0, {sorted(every)[(self.comm.rank + number) % len(every)]})
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(512 << number % 2, hard), hard))
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            self.calls(3, rng)
        os.sched_setaffinity(0, every)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def inner(self, kind: str) -> None:
        """Every rank starts a job of its own, with what this one's launcher left in the environment."""
        spec = {"seed": self.spec["seed"], "rounds": [["plain", 5], ["option", "root"]]}
        name = f"{self.spec['name']}.{self.comm.rank}"
        job = start(kind, name, 2, spec, Path(self.spec["folder"]), os.environ)
        if late := job.wait(120):
            self.odd.append(f"hang: {late}")
        barrier(group=self.comm, timeout=150)  # the others' jobs may take as long

    def renew(self) -> None:
        """The same ranks go on, in a group that is theirs."""
        unusable = self.comm
        self.comm = unusable.shrink()
        unusable.destroy()
        if self.comm.size != self.spec["size"]:
            self.odd.append(f"{self.comm.size} ranks went on, expected {self.spec['size']}")

    def says(self) -> dict[str, Any]:
        return {
            "counts": self.counts, "wrong": self.wrong, "odd": self.odd, "outcomes": self.outcomes,
        }  # fmt: skip


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[-7:], "little")


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    spec["folder"] = str(Path(sys.argv[1]).parent)
    rank, says = None, {}
    try:
        rank = Rank(spec)
        rank.play()
        says = rank.says()
    except AllToAllVError as error:
        if rank is None or rank.round == 0:  # a rank of another job may have been refused by one of its peers
            says = {"refused": f"{type(error).__name__}: {error}"}
        else:
            rank.odd.append(f"{spec['name']}, round {rank.round} of {spec['rounds']}: {type(error).__name__}: {error}")
            says = rank.says()
    number = os.getpid() if rank is None else rank.comm.rank
    path = Path(spec["folder"]) / f"{spec['name']}={number}.json"
    with path.open("x") as file:  # two with one number would be a fault
        json.dump(says, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
