"""What a rank does in one episode: random collectives, a fault in the middle of them, what can go on after it."""

from __future__ import annotations

import gc
import importlib
import os
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from calls import Call, draw, make
from case import UNSEEN, Arguments
from faults import KINDS, TIMEOUT, continued, mistaken, starved, strike
from started import wait_for
from trouble import held, join

from alltoallv.errors import AllToAllVError
from alltoallv.numpy import barrier

AFTERWARDS = 5  # operators on what goes on after a fault
OURS = ("descriptors", "mappings", "threads")  # of what `held` finds, what is this process's alone
_warm = False


@dataclass(frozen=True)
class Plan:
    """One episode; all that is random in it comes of ``seed``."""

    seed: str
    front_end: str
    size: int
    path: str | None
    kind: str
    operators: int
    cause: Path

    @property
    def victim(self) -> int:
        """The rank that has the fault."""
        return random.Random(f"{self.seed} victim").randrange(self.size)


@dataclass
class Found:
    """What a rank has seen.

    Attributes:
        operators: How many outputs it has compared.
        wrong: Where they were wrong, or memory was written to after an error.
        odd: What else should not have been.
        error: Class, text, begin of the call and time of the error.
        leaks: What the process holds that it did not hold before.
        private_kb: Memory of the process alone, at the end.
    """

    pid: int = field(default_factory=os.getpid)
    operators: int = 0
    wrong: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    error: tuple[str, str, float, float] | None = None
    leaks: dict[str, list[str]] = field(default_factory=dict)
    private_kb: int = 0


class Rank:
    """This rank's part; the others draw the same calls."""

    def __init__(self, plan: Plan, column: Any, comm: Any) -> None:
        self.plan, self.column, self.comm = plan, column, comm
        self.rng = random.Random(plan.seed)
        self.found = Found()
        self.held: list[tuple[Any, bytes]] = []  # tensors of a call that failed, and their bytes then

    def draw(self, function: str = "", units: int | None = None) -> Call:
        """The next call."""
        size = self.comm.size
        if function:
            return make(function, self.rng, size, self.column.lacks, units)
        return draw(self.rng, size, self.column.lacks, units)

    def go(self, call: Call, limits: Callable[[], Any] = nullcontext, **more: Any) -> None:
        """Makes a call and compares what comes."""
        arguments = {**call.arguments[self.comm.rank], **more}
        theirs = {name: tensors(self.column, value) for name, value in arguments.items()}
        try:
            with limits():
                output = self.column.call(call.function, self.comm, theirs)
        except Exception:
            self.held = [(tensor, self.column.array(tensor).tobytes()) for tensor in tensors_of(theirs)]
            raise
        wanted = call.want(call.arguments)[self.comm.rank]
        self.found.operators += 1
        if wanted is UNSEEN or same(self.column, output, wanted):
            return
        self.found.wrong.append(f"{self.plan}: operator {self.found.operators}, {call.function}")

    def start(self) -> None:
        """Returns once all ranks have finished an operator: until then a fault would disturb the meeting."""

        def have_finished() -> bool:
            ranks = self.comm.flight_record()["ranks"]
            return all(one["operators"] and one["operators"][0]["state"] != "running" for one in ranks)

        barrier(group=self.comm)
        wait_for(have_finished, "the first operator of all ranks", 60)

    def several(self, count: int) -> None:
        """Random calls."""
        for _ in range(count):
            self.go(self.draw())

    def failing(self, act: Callable[[], None]) -> None:
        """Notes the error that ``act`` must raise."""
        began = time.monotonic()
        try:
            act()
        except (AllToAllVError, MemoryError) as error:
            self.found.error = type(error).__name__, str(error), began, time.monotonic()

    def fault(self, pids: list[int]) -> None:
        """The fault of the plan, and this rank's error."""
        plan, kind = self.plan, KINDS[self.plan.kind]
        is_victim = self.comm.rank == plan.victim
        if kind.group == "starved":
            limits: Callable[[], Any] = (lambda: starved(plan.kind)) if is_victim else nullcontext
            call = self.draw("all_to_all_v", self.rng.choice((50_000, 80_000)))
            self.failing(lambda: self.go(call, limits))
        elif kind.group == "disagrees":
            self.disagree(is_victim)
        elif kind.lasting:
            self.last(pids, is_victim)
        else:  # all wait, and go on
            waker = plan.kind == "paused" and self.comm.rank == (plan.victim + 1) % self.comm.size
            with continued(pids[plan.victim], 0.05) if waker else nullcontext():
                if is_victim:
                    strike(plan.kind, self.comm, plan.cause, 0)
                self.failing(lambda: self.go(self.draw()))

    def last(self, pids: list[int], is_victim: bool) -> None:
        """A fault that ends the communicator; an error must come on every rank that lives."""
        plan, kind = self.plan, KINDS[self.plan.kind]
        timeout = {"timeout": TIMEOUT} if "CommTimeoutError" in kind.peers else {}
        if is_victim:
            strike(plan.kind, self.comm, plan.cause, random.Random(f"{plan.seed} after").random() * 0.005)
        end = time.monotonic() + 20
        while self.found.error is None and time.monotonic() < end:
            units = random.Random(f"{plan.seed} {self.found.operators}").choice((5, 300, 40_000))
            call = make(
                "all_to_all_v", random.Random(f"{plan.seed} {self.found.operators} c"), self.comm.size, units=units
            )
            self.failing(lambda call=call: self.go(call, **timeout))
        if kind.group == "stopped" and not is_victim:
            first = min(rank for rank in range(self.comm.size) if rank != plan.victim)
            if self.comm.rank == first:
                with continued(pids[plan.victim], 0.02):
                    pass

    def disagree(self, is_victim: bool) -> None:
        kind = self.plan.kind
        function = "all_reduce" if kind in ("dtype", "shape") else "all_to_all_v"
        first, second = self.draw(function, 20), self.draw("barrier")
        if function == "all_to_all_v":
            sends = [arguments["send_counts"] for arguments in first.arguments]
            for arguments, recvs in zip(first.arguments, zip(*sends, strict=True), strict=True):
                arguments["recv_counts"] = list(recvs)  # counts that are learnt cannot disagree
        if kind == "order":
            for call in (second, first) if is_victim else (first, second):
                self.failing(lambda call=call: self.go(call))
            return
        if is_victim:
            name, arguments = mistaken(kind, first.arguments[self.comm.rank], self.comm.rank)
            alone = {**dict(enumerate(first.arguments)), self.comm.rank: arguments}
            first = Call(name, [alone[r] for r in range(self.comm.size)], first.want)
        self.failing(lambda: self.go(first))

    def look(self) -> None:
        """Whether the error is the right one, and names the victim."""
        kind, error, victim = KINDS[self.plan.kind], self.found.error, self.plan.victim
        wanted = kind.victim if self.comm.rank == victim else kind.peers
        if error is None:
            if wanted and self.plan.kind not in ("descriptors", "address space"):  # which may have been needless
                self.found.odd.append(f"{self.plan}: no error on rank {self.comm.rank}")
            return
        if error[0] not in (wanted or ()):
            self.found.odd.append(f"{self.plan}: on rank {self.comm.rank}: {error[0]}: {error[1]}")
        elif self.comm.rank != victim and f"rank {victim}" not in error[1]:
            self.found.odd.append(f"{self.plan}: rank {victim} is not named on rank {self.comm.rank}: {error[1]}")
        if self.comm.usable == kind.lasting and kind.group != "starved":
            self.found.odd.append(f"{self.plan}: usable is {self.comm.usable} after {error}")

    def go_on(self) -> None:
        """A communicator of the ranks that live."""
        unusable = self.comm
        self.comm = unusable.shrink()
        unusable.destroy()
        self.rng.seed(f"{self.plan.seed} afterwards")

    def untouched(self) -> None:
        """What a failed call held has not been written to since its error."""
        for tensor, before in self.held:
            if self.column.array(tensor).tobytes() != before:
                self.found.wrong.append(f"{self.plan}: written to after the error on rank {self.comm.rank}")


def tensors(column: Any, value: Any) -> Any:
    """An argument with tensors of the framework for arrays."""
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return [column.tensor(one) for one in value]
    return column.tensor(value) if isinstance(value, np.ndarray) else value


def tensors_of(arguments: Arguments) -> list[Any]:
    found = []
    for value in arguments.values():
        found += value if isinstance(value, list) else [value]
    return [one for one in found if hasattr(one, "dtype")]


def same(column: Any, output: Any, wanted: Any) -> bool:
    """Whether dtype, shape and all bits are."""
    if wanted is None or output is None:
        return output is wanted
    if isinstance(wanted, list):
        return len(output) == len(wanted) and all(same(column, *pair) for pair in zip(output, wanted, strict=True))
    got = column.array(output)
    return got.dtype == wanted.dtype and got.shape == wanted.shape and got.tobytes() == wanted.tobytes()


def private_kb() -> int:
    """Private memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0])


def run(rank: int, size: int, plan: Plan) -> Found:
    """The episode, on one rank; the victim of a fault that kills does not return."""
    global _warm
    gc.collect()
    before = held() if _warm else None
    found = play(rank, size, plan)
    if before is not None:
        found.leaks = left_since(before)
    else:
        left_since({"threads": [], **{name: held()[name] for name in OURS[:2]}})
    _warm = True
    found.private_kb = private_kb()
    return found


def play(rank: int, size: int, plan: Plan) -> Found:
    column = getattr(importlib.import_module(f"adapters.{plan.front_end}_column"), f"{plan.front_end.title()}Column")()
    mine = Rank(plan, column, join(rank, size, plan.seed, path=plan.path, timeout=20.0))
    pids = [one["pid"] for one in mine.comm.flight_record()["ranks"]]
    mine.start()
    mine.failing(lambda: mine.several(plan.operators))  # the victim may be ahead
    mine.fault(pids)
    mine.look()
    if not mine.comm.usable:
        mine.go_on()
    mine.several(AFTERWARDS)
    barrier(group=mine.comm)
    mine.untouched()
    mine.comm.destroy()
    return mine.found


def left_since(before: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is held now and was not before; what peers or threads give back soon is waited for."""

    def left() -> dict[str, list[str]]:
        gc.collect()
        now = held()
        more = {name: [one for one in now[name] if now[name].count(one) > before[name].count(one)] for name in OURS}
        # What opens /dev/null are descriptors kept for the day when there are no more.
        return {name: ones for name, ones in more.items() if set(ones) - {"/dev/null"}}

    try:
        wait_for(lambda: not left(), "nothing left")
    except AssertionError:
        maps = Path("/proc/self/maps").read_text().splitlines()  # private ones are cut out of shared ones
        return {**left(), "maps": [line for line in maps if "alltoallv" in line and "memfd" in line]}
    return {}
