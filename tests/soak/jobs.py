"""Waves of jobs side by side, with others nested in them, and the table of what they came to."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from differences import OPTIONS
from environments import clean_environment
from launchers import BY_ADDRESS, NAMED, Job, kinds, left_behind, start

from alltoallv_tools.ports import free_port

LIMITS = ("limits of calls", "limits of groups", "descriptors", "address space", "size of files", "while joining")
SETTINGS = (*LIMITS, "processors")
SECONDS = 240  # for a job, those nested in it with it, on a busy machine


@dataclass(frozen=True)
class Planned:
    """A job of a wave.

    Attributes:
        rounds: What its ranks do: `job.Rank`'s methods, each with an argument.
        port: Which one its launcher is given; equal ones are a test of who meets whom.
    """

    kind: str
    size: int
    rounds: tuple[tuple[str, Any], ...]
    port: int

    @property
    def inner(self) -> list[str]:
        """The launchers of the jobs nested in it."""
        return [which for what, which in self.rounds if what == "inner"]


@dataclass
class Found:
    """What has been counted."""

    jobs: int = 0
    nested: Counter[str] = field(default_factory=Counter)
    beside: Counter[str] = field(default_factory=Counter)
    rounds: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    operators: int = 0
    errors: int = 0
    problems: dict[str, list[str]] = field(
        default_factory=lambda: {name: [] for name in ("hangs", "wrong values", "left behind", "other")}
    )

    def add(self, wave: list[tuple[Planned, Job, str]]) -> None:
        """Counts a wave: its jobs, and what each reported when it did not end in time."""
        ports = Counter(planned.port for planned, _, _ in wave)
        for planned, job, late in wave:
            self.jobs += 1
            if late:
                self.problems["hangs"].append(late)
            shares = ports[planned.port] > 1
            self._job(job, planned.kind, planned.size, may_refuse=shares)
            self.beside["the same port" if shares else f"{len(wave)} at once"] += 1
            for what, which in planned.rounds:
                self.rounds[what, str(which)] += what in ("option", "limit")
                if what == "inner":
                    for rank in range(planned.size):
                        self.jobs += 1
                        self.nested[f"{planned.kind} > {which}"] += 1
                        self._job(Job(f"{job.name}.{rank}", which, job.folder), f"{planned.kind} > {which}", 2, False)

    def _job(self, job: Job, kind: str, size: int, may_refuse: bool) -> None:
        found = job.found()
        refusals = [one["refused"] for one in found if "refused" in one]
        says = [one for one in found if "refused" not in one]
        if refusals:
            self.refused[kind] += 1
            print(f"refused: {job.name} ({kind}): {refusals[0]}", file=sys.stderr)
            if not may_refuse and "contradict" not in refusals[0]:
                self.problems["other"].append(f"{job.name} ({kind}) was refused: {refusals[0]}")
        if len(found) != size or (refusals and says):
            told = f"of {size} ranks {len(says)} reported, {len(refusals)} were refused"
            self.problems["other"].append(f"{job.name} ({kind}): {told}: {job.printed()}")
        for one in says:
            self.operators += one["counts"].get("operators", 0)
            self.errors += one["counts"].get("errors", 0)
            for text in one["odd"]:
                self.problems["hangs" if text.startswith("hang") else "other"].append(f"{kind}: {text}")
            self.problems["wrong values"] += one["wrong"]
        outcomes = [one["outcomes"] for one in says]
        if any(one != outcomes[0] for one in outcomes[1:]):
            self.problems["other"].append(f"{job.name}: ranks differ in what failed: {outcomes}")
        for text in outcomes[0] if outcomes else []:
            self.failed[text] += 1

    def lines(self) -> list[str]:
        """The table in Markdown, and what was found."""
        rows = ["| what | count | came to |", "|---|---|---|"]
        names = defaultdict(list)
        for name, count in sorted(self.nested.items()):
            names[name.partition(" > ")[0]].append(f"{name.partition(' > ')[2]} {count}")
        for outer, inner in names.items():
            refused = sum(count for kind, count in self.refused.items() if kind.startswith(f"{outer} > "))
            count = sum(count for kind, count in self.nested.items() if kind.startswith(f"{outer} > "))
            came = f"{count - refused} jobs of the inner launcher's ranks" + (f", {refused} refused" if refused else "")
            rows.append(f"| inside {outer}: {', '.join(inner)} | {count} | {came} |")
        for how, count in sorted(self.beside.items()):
            refused = sum(count for kind, count in self.refused.items() if " > " not in kind) if "port" in how else 0
            came = f"{count - refused} jobs with their own values" + (f", {refused} refused" if refused else "")
            rows.append(f"| side by side, {how} | {count} | {came} |")
        for group, what in (("option", "options that differ"), ("limit", "limits that change")):
            counted = [
                f"{which} {count}" for (one, which), count in sorted(self.rounds.items()) if one == group and count
            ]
            total = sum(count for (one, _), count in self.rounds.items() if one == group)
            if counted:
                rows.append(f"| {what}: {', '.join(counted)} | {total} | {self._came(group)} |")
        counted = ", ".join(f"{len(ones)} {name}" for name, ones in self.problems.items())
        return [
            *rows,
            "",
            f"{self.jobs:,} jobs, {self.operators:,} outputs compared, {self.errors:,} errors: {counted}.",
        ]

    def _came(self, group: str) -> str:
        mine = {text: count for text, count in self.failed.items() if text.startswith("option ") == (group == "option")}
        failed = sum(count for text, count in mine.items() if text.endswith("failed"))
        done = sum(mine.values()) - failed
        return f"{failed} times an error on all ranks" + (f", {done} times done without" if done else "")

    def failures(self) -> list[str]:
        """What should not have been, in words."""
        return [f"{name}: {one}" for name, ones in self.problems.items() for one in ones]


def waves(seed: int, real: bool = True) -> Iterator[list[Planned]]:
    """Without end: one to three jobs each, of every launcher, nesting, option and limit in turn."""
    rng = random.Random(seed)
    here = kinds(real)
    pairs = [(outer, inner) for outer in here for inner in here]
    decks: dict[str, list[Any]] = {"pair": [], "option": [], "limit": []}
    limits = [*SETTINGS, *["limits of torch's groups"] * ("torchrun" in here)]
    full = {"pair": pairs, "option": list(OPTIONS), "limit": limits}

    def take(name: str) -> Any:
        if not decks[name]:
            decks[name] = rng.sample(full[name], len(full[name]))
        return decks[name].pop()

    while True:
        shared = rng.random() < 0.2
        port = free_port()
        planned = []
        for _ in range(2 if shared else rng.choice((1, 2, 2, 3))):
            outer, inner = take("pair")
            rounds: list[tuple[str, Any]] = [("plain", rng.randrange(5, 60))]
            rounds += [("option", take("option")) for _ in range(3)] + [("limit", take("limit")) for _ in range(2)]
            nests = not shared and rng.random() < 0.7
            rounds += [("inner", inner)] * nests
            rng.shuffle(rounds)
            kind = (planned[0].kind if planned else rng.choice(BY_ADDRESS)) if shared else outer
            planned.append(Planned(kind, rng.choice((2, 2, 3)), tuple(rounds), port if shared else free_port()))
        yield planned


def soak(planned: Iterator[list[Planned]], found: Found, folder: Path, seed: int, seconds: float) -> None:
    """Runs waves until the time is over; one that has begun ends."""
    mark = f"{os.getpid()}-{seed}"
    env = clean_environment()
    env |= {NAMED: mark, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    begin = shown = time.monotonic()
    for number, wave in enumerate(planned):
        place = folder / str(number)
        place.mkdir()
        jobs: list[Job] = []
        try:
            for which, one in enumerate(wave):
                spec = {"seed": seed, "rounds": one.rounds}
                jobs.append(start(one.kind, f"{number}-{which}", one.size, spec, place, env, one.port))
            end = time.monotonic() + SECONDS
            late = [job.wait(max(end - time.monotonic(), 1)) for job in jobs]
        finally:
            for job in jobs:
                job.end()
            for pid in (orphans := gone(mark)):
                os.kill(pid, 9)
        if orphans:
            found.problems["left behind"].append(f"wave {number}, {wave}: {len(orphans)} processes")
        known = len(found.failures())
        found.add(list(zip(wave, jobs, late, strict=True)))
        print(*found.failures()[known:], sep="\n", end="\n" * (len(found.failures()) > known), file=sys.stderr)
        for file in place.iterdir():
            file.unlink()
        now = time.monotonic()
        if now - shown > 10 or now - begin >= seconds:
            shown = now
            problems = sum(map(len, found.problems.values()))
            print(
                f"{now - begin:6.0f} s: {found.jobs:,} jobs, {found.operators:,} outputs, {found.errors:,} errors, "
                f"{problems} problems", file=sys.stderr, flush=True,
            )  # fmt: skip
        if now - begin >= seconds:
            return


def gone(mark: str, seconds: float = 20.0) -> list[int]:
    """Waits for the processes of a wave to end, and returns those that have not."""
    end = time.monotonic() + seconds
    while (left := left_behind(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return left
