"""Calls that no other call has warmed: the first of a job, a new size at each call, and a call after other work.

    python docs/measure_steps.py --keep

Two ranks, each bound to a processor. A call is timed alone, from the moment at which the first rank begins it to the
end of the last. First calls are of jobs that have just started. A new size comes with a new input and a new output.
Before the call after other work each rank adds to an array of 1 MiB for 10 ms, and all stop at the same moment. All
times are medians, in microseconds; every result is compared with its prediction. pip makes the peers' environments
(docs/bench.md).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import performance_page as pages

from alltoallv_tools.bench.cases import Case
from alltoallv_tools.bench.jobs import Job, Jobs
from alltoallv_tools.tables import Table

RANKS, CALLS = 2, 8
SIZES = (1 << 10, 1 << 20, 16 << 20)  # bytes of a rank
# By column: the library, its competitor, and where it puts the result.
WAYS = {
    "plan": ("ours", "ours-plan", "empty"),
    "us": ("ours", "ours-numpy", "allocated"),
    "private": ("ours", "ours-numpy", "private"),
    **{name: (name, name, "private") for name in pages.MPI},
}


def calls(job: Job, way: str, sizes: list[int], work: float = 0.0) -> list[float]:
    """Returns the microseconds of a call for each size."""
    _, competitor, output = WAYS[way]
    cases = [Case("alltoallv", nbytes, output=output).asdict() for nbytes in sizes]
    replies = job.ask(do="each", competitor=competitor, cases=cases, work=work)
    if any(reply["wrong"] for reply in replies):
        raise SystemExit(f"{way}: a result is wrong")
    spans = zip(*(reply["spans"] for reply in replies), strict=True)
    return [1e6 * (max(end for _, end in span) - min(begin for begin, _ in span)) for span in spans]


def measure(jobs: Jobs, way: str, repeats: int) -> dict[tuple[str, int], float]:
    """Returns a way's medians, by what is called and the bytes of a rank."""
    samples: dict[tuple[str, int], list[float]] = {}
    library = WAYS[way][0]
    for nbytes in SIZES:
        for _ in range(repeats):
            job = jobs.start(library, RANKS)
            samples.setdefault(("the first call of a job", nbytes), []).extend(calls(job, way, [nbytes]))
            jobs.stop(job)
    job = jobs.start(library, RANKS)
    for nbytes in SIZES:
        near = [nbytes * (60 + number) // 64 // 8 * 8 for number in range(CALLS)]  # 0.94 to 1.05 of it
        same = [nbytes] * CALLS
        for _ in range(repeats):
            samples.setdefault(("the same again", nbytes), []).extend(calls(job, way, same)[1:])
            samples.setdefault(("a new size at each call", nbytes), []).extend(calls(job, way, near))
            samples.setdefault(("after 10 ms of other work", nbytes), []).extend(calls(job, way, same, 0.01)[1:])
    jobs.stop(job)
    return {key: statistics.median(us) for key, us in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="jobs for each first call, rounds for the others")
    parser.add_argument("--keep", action="store_true", help="put the figures into docs/measured.json and the page")
    arguments = parser.parse_args()
    with Jobs("numpy", bind=True, say=lambda text: print(f"# {text}", file=sys.stderr, flush=True)) as jobs:
        told = {way: measure(jobs, way, arguments.repeats) for way in WAYS}
    table = Table("call <26", "bytes >9", *(f"{way} >9.1f" for way in WAYS))
    print(f"# microseconds, {RANKS} ranks\n{table.head()}")
    rows: list[list[Any]] = []
    for kind, nbytes in told["us"]:
        rows.append([RANKS, kind, nbytes, *(round(told[way][kind, nbytes], 1) for way in WAYS)])
        print(table.row(*rows[-1][1:]))
    if arguments.keep:
        command = f"python docs/{Path(__file__).name} --repeats {arguments.repeats} --keep"
        pages.add("steps", command, ["np", "collective", "nbytes", *WAYS], rows)


if __name__ == "__main__":
    main()
