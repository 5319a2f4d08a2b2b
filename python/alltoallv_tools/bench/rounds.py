"""Measures one case: competitors take turns in short blocks, so that a slow spell of the machine meets all of them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from alltoallv_tools.bench.cases import Case, bus_factor, moved_bytes
from alltoallv_tools.bench.jobs import Job, LibraryError, Reply

# Long enough that ranks which outnumber the processors have settled on them, short enough that the turns of all
# competitors meet the same slow spells. The warm calls before a block are not timed.
BLOCK_SECONDS, WARM_SECONDS = 20e-3, 5e-3
MIN_ROUNDS, MAX_ROUNDS = 5, 400
MAX_CALLS = 20_000


@dataclass
class Entry:
    """A competitor of a case, with its samples."""

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

    ``warmup`` is the number of untimed calls before each block; None means as many as take 5 ms.
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
    jobs: dict[str, Job], case: Case, effort: Effort | float, columns: dict[str, tuple[str, ...]]
) -> dict[str, Any]:
    """Measures all competitors of all jobs.

    Args:
        jobs: the libraries that take part; one that fails is removed, and ``failed`` in the row gives its reason.
        case: what is measured.
        effort: how long to go on after the first few rounds; a number is in seconds.
        columns: the competitors of each library.

    Returns:
        A row of the schema in docs/bench.md.
    """
    effort = effort if isinstance(effort, Effort) else Effort(effort)
    failed: dict[str, str] = {}
    entries: list[Entry] = []
    times: dict[str, dict[str, Any]] = {}
    size = next(iter(jobs.values())).size

    @contextlib.contextmanager
    def taking_out(library: str) -> Iterator[None]:
        try:
            yield
        except LibraryError as error:
            failed[library] = str(error)
            del jobs[library]
            entries[:] = [entry for entry in entries if entry.job.library != library]

    for library, job in list(jobs.items()):
        with taking_out(library):
            for name in columns[library]:
                entries.append(_prepare(job, name, case))
                effort.fit(entries[-1])
    begun, rounds = time.monotonic(), 0
    while entries and effort.goes_on(entries, rounds, begun):
        first = rounds % len(entries)
        for entry in entries[first:] + entries[:first]:
            if entry.job.library in jobs:
                with taking_out(entry.job.library):
                    entry.play()
        rounds += 1
    for library in list(jobs):
        with taking_out(library):
            times |= {entry.name: _statistics(entry) for entry in entries if entry.job.library == library}
    row: dict[str, Any] = {"np": size, **case.asdict(), "count": case.count, "times": times, "failed": failed}
    if "ours" in times:
        row["algbw"] = moved_bytes(case, size) / times["ours"]["median_us"] / 1e3  # bytes per microsecond / 1000 = GB/s
        row["busbw"] = row["algbw"] * bus_factor(case.collective, size)
    return row


def _prepare(job: Job, name: str, case: Case) -> Entry:
    replies = job.ask(do="prepare", competitor=name, case=case.asdict())
    wrong = sum(reply["wrong"] for reply in replies)
    entry = Entry(job, name, *_block(max(reply["once"] for reply in replies)), wrong, [])
    for _ in range(3):  # the first calls were slow, the more so where memory was new: measure again
        entry.calls, entry.warm = _block(entry.play() / entry.calls)
    entry.samples.clear()
    return entry


def _block(seconds: float) -> tuple[int, int]:
    """Returns the numbers of timed and warm calls in a block, for calls that take ``seconds``."""
    seconds = max(seconds, 1e-7)
    return min(MAX_CALLS, max(1, int(BLOCK_SECONDS / seconds))), min(MAX_CALLS, int(WARM_SECONDS / seconds))


def _statistics(entry: Entry) -> dict[str, Any]:
    """Returns statistics over the blocks, in microseconds per call."""
    wrong = max(entry.wrong, sum(reply["wrong"] for reply in entry.job.ask(do="check", competitor=entry.name)))
    us = sorted(1e6 * sample for sample in entry.samples)
    return {
        "median_us": statistics.median(us),
        "min_us": us[0],
        "p90_us": us[min(len(us) - 1, int(len(us) * 0.9))],
        "max_us": us[-1],
        "blocks": len(us),
        "calls": len(us) * entry.calls,
        "wrong": wrong,
    }
