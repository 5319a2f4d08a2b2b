"""Episodes one after the other, and the table of what they came to."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rooms  # noqa: F401 - the modules below
from episode import Found, Plan
from faults import KINDS, TIMEOUT

from alltoallv.testing import RankExit, Ranks, RankTimeout

PATHS = (None, "push", "pull", "cma", "staged", "inline")
PROMPT = 0.3  # seconds until the victim is named, p99
WARM, GROWTH_KB = 5, 8192  # episodes of a process until its memory should not grow, and by how much it may


def episode(rank: int, size: int, plan: Plan) -> Found:
    """On the rank: `episode.run`, of the module, which is imported once."""
    import episode

    return episode.run(rank, size, plan)


@dataclass
class Table:
    """What has been counted.

    Attributes:
        faults: By kind.
        named: Seconds from the cause to the error on each rank other than the victim, by group.
        problems: Hangs, wrong bytes, leaks and other surprises, in words.
    """

    operators: int = 0
    outputs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    problems: dict[str, list[str]] = field(
        default_factory=lambda: {name: [] for name in ("hangs", "wrong bytes", "leaks", "other")}
    )
    memory: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, plan: Plan, outcomes: list[Any]) -> None:
        """Counts an episode."""
        kind = KINDS[plan.kind]
        self.faults[plan.kind] += 1
        founds = [outcome.result for outcome in outcomes if outcome.error is None]
        self.operators += max((found.operators for found in founds), default=0)
        self.outputs += sum(found.operators for found in founds)
        for outcome in outcomes:
            if isinstance(outcome.error, RankTimeout):
                self.problems["hangs"].append(f"{plan}: {outcome.report()}")
            elif outcome.error is not None and not (
                kind.victim is None and outcome.rank == plan.victim and isinstance(outcome.error, RankExit)
            ):
                self.problems["other"].append(f"{plan}: {outcome.traceback[-400:]}{outcome.error}")
        for found in founds:
            self.problems["wrong bytes"] += found.wrong
            self.problems["other"] += found.odd
            if found.leaks:
                self.problems["leaks"].append(f"{plan}: {found.leaks}")
            self.memory[found.pid].append(found.private_kb)
        self._time(plan, outcomes)

    def _time(self, plan: Plan, outcomes: list[Any]) -> None:
        kind = KINDS[plan.kind]
        errors = {
            o.rank: o.result.error for o in outcomes if o.error is None and o.result.error and o.rank != plan.victim
        }
        began = [error[2] for error in errors.values()]
        for error in errors.values():
            cause = max(began)  # of what all must enter: the last one does
            if kind.lasting and plan.cause.exists():
                cause = max(error[2], float(plan.cause.read_text()))
                if kind.peers == ("CommTimeoutError",):
                    cause = error[2] + TIMEOUT
            self.named[kind.group].append(max(error[3] - cause, 0.0))

    def grown(self) -> list[str]:
        """Processes whose private memory has grown steadily, from the first third of their episodes to the last."""
        found = []
        for pid, sizes in self.memory.items():
            kept = sizes[WARM:]
            third = len(kept) // 3
            if third >= 5 and min(kept[-third:]) - max(kept[:third]) > GROWTH_KB:
                found.append(f"pid {pid}: private memory in kB: {kept[:: max(third // 3, 1)]}")
        return found

    def lines(self) -> list[str]:
        """The table in Markdown, and what was found."""
        leaks = [*self.problems["leaks"], *self.grown()]
        rows = ["| fault | count | victim named after: p50 | p99 |", "|---|---|---|---|"]
        for group, kinds in itertools.groupby(KINDS, lambda name: KINDS[name].group):
            names = list(kinds)
            count = sum(self.faults[name] for name in names)
            times = sorted(t for t in self.named[group])
            p50, p99 = (f"{1000 * quantile(times, q):.1f} ms" if times else "-" for q in (0.5, 0.99))
            rows.append(f"| {group} ({', '.join(names)}) | {count} | {p50} | {p99} |")
        every = sorted(t for times in self.named.values() for t in times)
        p50, p99 = (f"{1000 * quantile(every, q):.1f} ms" if every else "-" for q in (0.5, 0.99))
        rows.append(f"| all | {self.faults.total()} | {p50} | {p99} |")
        problems = {**self.problems, "leaks": leaks}
        counted = ", ".join(f"{len(ones)} {name}" for name, ones in problems.items())
        rows += ["", f"{self.operators:,} operators, {self.outputs:,} outputs compared: {counted}."]
        return rows

    def failures(self) -> list[str]:
        """What should not have been, in words."""
        found = [*itertools.chain.from_iterable(self.problems.values()), *self.grown()]
        every = sorted(t for times in self.named.values() for t in times)
        if len(every) >= 100 and quantile(every, 0.99) > PROMPT:
            found.append(f"p99 until the victim is named: {quantile(every, 0.99):.3f} s, expected at most {PROMPT} s")
        return found


def quantile(values: list[float], q: float) -> float:
    """Of sorted values: the smallest below which that share of them lies."""
    return values[min(int(q * len(values)), len(values) - 1)]


def episodes(seed: int, front_ends: list[str], folder: Path, operators: int, kinds: list[str]) -> Iterator[Plan]:
    """Without end: every kind in turn, in front ends, sizes and data paths drawn at random."""
    rng = random.Random(seed)
    for number, kind in enumerate(itertools.cycle(kinds)):
        yield Plan(
            f"{seed}-{number}", rng.choice(front_ends), rng.choice((2, 3, 3, 4)), rng.choice(PATHS), kind,
            rng.randrange(operators + 1), folder / f"cause-{number}",
        )  # fmt: skip


def soak(ranks: Ranks, plans: Iterator[Plan], table: Table, seconds: float, faults: int) -> Table:
    """Runs episodes until the time is over or so many faults have been had; a terminal has a progress bar."""
    begin = time.monotonic()
    for plan in plans:
        done = max((time.monotonic() - begin) / seconds, table.faults.total() / faults)
        show(done, table)
        if done >= 1:
            break
        table.add(plan, ranks(plan.size, communicator=False, outcomes=True, timeout=90)(episode, plan))
        plan.cause.unlink(missing_ok=True)
    return table


def show(done: float, table: Table) -> None:
    """The progress bar, on standard error."""
    if not sys.stderr.isatty():
        return
    bar = "#" * int(30 * min(done, 1))
    found = sum(map(len, table.problems.values()))
    end = "\n" if done >= 1 else ""
    text = f"\r[{bar:30}] {table.faults.total()} faults, {table.operators:,} operators, {found} problems "
    print(text, end=end, file=sys.stderr, flush=True)
