"""Measures one case: competitors take turns in short blocks, so that a slow spell of the machine meets all of them."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from alltoallv_tools.bench.cases import Case, bus_factor, moved_bytes
from alltoallv_tools.bench.jobs import Job, LibraryError, Reply

# Long enough that ranks which outnumber the processors have settled on them, short enough that the turns of all
# competitors meet the same slow spells. The warm calls before a block are not timed.
BLOCK_SECONDS, WARM_SECONDS = 20e-3, 5e-3
MIN_ROUNDS, MAX_ROUNDS = 5, 400
MAX_CALLS = 20_000


@dataclass
class Blocks:
    """What a competitor of a case has shown so far, in all jobs: seconds per call of its blocks, in order."""

    samples: list[float] = field(default_factory=list)
    calls: int = 0
    wrong: int = 0


Found = dict[str, Blocks]
Failed = dict[str, str]  # why libraries failed


@dataclass
class Entry:
    """A competitor of a case in one job."""

    job: Job
    name: str
    calls: int
    warm: int
    wrong: int
    samples: list[float]

    def play(self) -> float:
        """Runs one block, adds its seconds per call to the samples, and returns the block's seconds."""
        replies = self.job.ask(do="run", competitor=self.name, calls=self.calls, warm=self.warm)
        busy = _wall(replies, "span")
        work = _wall(replies, "work") if "work" in replies[0] else 0.0
        self.samples.append((busy - work) / self.calls)
        return busy


def _wall(replies: list[Reply], what: str) -> float:
    """Returns the seconds from the first rank's begin to the last rank's end; the ranks share the host's clock."""
    return float(max(reply[what][1] for reply in replies) - min(reply[what][0] for reply in replies))


@dataclass(frozen=True)
class Effort:
    """Holds how long a competitor is measured: for ``seconds``, or for at least ``iters`` calls.

    ``warmup`` is the number of untimed calls before each block; None means as many as take 5 ms, at least
    one.
    """

    seconds: float
    iters: int | None = None
    warmup: int | None = None

    def fit(self, entry: Entry) -> None:
        """Sets the length of a competitor's blocks."""
        entry.calls = min(entry.calls, self.iters or MAX_CALLS)
        entry.warm = entry.warm if self.warmup is None else self.warmup

    def goes_on(self, entries: list[Entry], rounds: int, begun: float) -> bool:
        """True if another round is due after ``rounds`` rounds; ``begun`` is the time when the first one started."""
        if self.iters is not None:
            return any(entry.calls * len(entry.samples) < self.iters for entry in entries)
        return rounds < MAX_ROUNDS and (rounds < MIN_ROUNDS or time.monotonic() - begun < self.seconds)


def measure(
    jobs: dict[str, Job], case: Case, effort: Effort | float, columns: dict[str, tuple[str, ...]], found: Found
) -> Failed:
    """Measures all competitors of all jobs.

    Args:
        jobs: the libraries that take part; one that fails is removed.
        case: what is measured.
        effort: how long to go on after the first few rounds; a number is in seconds.
        columns: the competitors of each library.
        found: by competitor what earlier jobs have shown of the case, to which these blocks are added; without those
            of a library that fails.

    Returns:
        Why libraries failed.
    """
    effort = effort if isinstance(effort, Effort) else Effort(effort)
    failed: Failed = {}
    entries: list[Entry] = []

    @contextlib.contextmanager
    def taking_out(library: str) -> Iterator[None]:
        try:
            yield
        except LibraryError as error:
            failed[library] = str(error)
            del jobs[library]
            for name in columns[library]:
                found.pop(name, None)
            entries[:] = [entry for entry in entries if entry.job.library != library]

    for library, job in list(jobs.items()):
        with taking_out(library):
            for name in columns[library]:
                entries.append(_prepare(job, name, case))
                effort.fit(entries[-1])
    begun, rounds, order = time.monotonic(), 0, random.Random()
    while entries and effort.goes_on(entries, rounds, begun):
        for entry in order.sample(entries, len(entries)):  # what one leaves in the caches meets no other always
            if entry.job.library in jobs:
                with taking_out(entry.job.library):
                    entry.play()
        rounds += 1
    for library in list(jobs):
        with taking_out(library):
            for entry in [entry for entry in entries if entry.job.library == library]:
                wrong = sum(reply["wrong"] for reply in entry.job.ask(do="check", competitor=entry.name))
                blocks = found.setdefault(entry.name, Blocks())
                blocks.samples += entry.samples
                blocks.calls += len(entry.samples) * entry.calls
                blocks.wrong = max(blocks.wrong, entry.wrong, wrong)
    return failed


def row_of(case: Case, size: int, found: Found, failed: Failed) -> dict[str, Any]:
    """Returns a row of the schema in docs/bench.md, of those that took part in every round."""
    ours = found["ours"].samples
    times = {name: _statistics(blocks, ours) for name, blocks in found.items() if len(blocks.samples) == len(ours)}
    median = times["ours"]["median_us"]
    algbw = moved_bytes(case, size) / median / 1e3  # bytes per microsecond / 1000 = GB/s
    speeds = {"algbw": algbw, "busbw": algbw * bus_factor(case.collective, size)}
    return {"np": size, **case.asdict(), "count": case.count, "times": times, "failed": failed, **speeds}


def _prepare(job: Job, name: str, case: Case) -> Entry:
    replies = job.ask(do="prepare", competitor=name, case=case.asdict())
    wrong = sum(reply["wrong"] for reply in replies)
    entry = Entry(job, name, *_block(max(reply["once"] for reply in replies)), wrong, [])
    for _ in range(3):  # the first calls were slow, the more so where memory was new: measure again
        entry.calls, entry.warm = _block(entry.play() / entry.calls)
    entry.samples.clear()
    return entry


def _block(seconds: float) -> tuple[int, int]:
    """Returns the numbers of timed and warm calls in a block, for calls that take ``seconds``. One at least is warm: it
    finds what another competitor has left in the caches.
    """
    seconds = max(seconds, 1e-7)
    calls, warm = (min(MAX_CALLS, max(1, int(each / seconds))) for each in (BLOCK_SECONDS, WARM_SECONDS))
    return calls, warm


def _statistics(blocks: Blocks, ours: list[float]) -> dict[str, Any]:
    """Returns statistics over the blocks: microseconds per call, and how many times ours they take in the same round.

    A slow spell meets both sides of a round's ratio. A block can be below zero where the work between calls is taken
    off.
    """
    us = sorted(1e6 * sample for sample in blocks.samples)
    pairs = zip(blocks.samples, ours, strict=True)
    median = statistics.median(us)
    usual = median / max(1e6 * statistics.median(ours), 1e-6)
    return {
        "median_us": median,
        "min_us": us[0],
        "p90_us": us[min(len(us) - 1, int(len(us) * 0.9))],
        "max_us": us[-1],
        "ratio": statistics.median([theirs / mine for theirs, mine in pairs if min(theirs, mine) > 0] or [usual]),
        "blocks": len(us),
        "calls": blocks.calls,
        "wrong": blocks.wrong,
    }
