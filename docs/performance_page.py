"""Makes docs/performance.md of docs/measured.json, the figures that docs/measure.py keeps there.

The file has the machine, the versions of what took part, and the runs by name. A run has the command that made it; the
date; the load average at its end; and ``rows``, one a line, under ``columns``: of kernels GB/s, of all others ``us``,
``min`` and ``max`` of ours and the medians of the other competitors, in microseconds, and of what takes turns with ours
how many times as long it takes in the same round (``mpich/us``), null where one is missing (``failed`` explains why).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alltoallv.errors import InvalidParamError
from alltoallv_tools.bench import report
from alltoallv_tools.bench.cases import WAYS as PATHS
from alltoallv_tools.planner import fit

DOCS = Path(__file__).resolve().parent

Row = dict[str, Any]
Run = dict[str, Any]
Figures = dict[str, Any]
KIB, MIB = 1 << 10, 1 << 20
MPI = ("mpich", "openmpi", "impi")
COPIES = ("copy", "copy-nt")
LARGE = 4 * MIB  # payloads from which a copy of as many bytes is a limit, whatever the ranks wait for
OF_LIMIT = 0.9


@dataclass(frozen=True)
class Way:
    """One way to call the package, and what it is compared with.

    Attributes:
        reason: why it falls short of a goal, where it does.
        peers: the quickest of them counts.
        limited: whether a copy of the same bytes is a limit; a reduction computes, and gathers what it summed.
    """

    run: str
    title: str
    about: str = ""
    reason: str = ""
    peers: tuple[str, ...] = MPI
    limited: bool = True


CROSSED = "lines go from one processor's cache to another's, which a copy within a rank does not need"
CROWDED = "where ranks outnumber processors, an exchange switches between ranks more often than a copy does"
WAYS = (
    Way(
        "plan",
        "A plan, into `empty()`",
        "`alltoallv.numpy.Plan` of uneven counts, made once; the output is memory that peers can write.",
        CROSSED,
    ),
    Way(
        "function",
        "The function, which allocates its output",
        "`alltoallv.numpy.all_to_all_v` of uneven counts.",
        f"each call writes into memory that has left the caches, because outputs alternate; {CROWDED}",
    ),
    Way(
        "private",
        "The function, into an ordinary array",
        "`all_to_all_v(..., out=array)`: peers cannot write there, so the receiver reads.",
        "the kernel reads another process's memory page by page, which costs 0.2 to 0.8 µs more for 4 KiB than in huge "
        "pages. An array has huge pages only where it fills aligned blocks of 2 MiB. Open MPI makes the same system "
        "calls, and is quicker or slower by chance",
    ),
    Way(
        "cycle",
        "Buffers that a program writes and reads",
        "Between calls the program writes the send buffer anew and reads the output; the time of this is subtracted.",
        "the data lie in the other processor's cache when the exchange begins; in a virtual machine a cache line took "
        "60 to 350 ns from there, which changes from moment to moment",
    ),
    Way(
        "torch",
        "`alltoallv.torch.all_to_all_v`",
        "Over shared memory, beside gloo's `all_to_all_single` of the same tensors.",
        CROSSED,
        ("gloo",),
    ),
    Way(
        "allreduce",
        "`all_reduce`, float32",
        "Through NumPy.",
        CROWDED,
        (*MPI, "gloo"),
        limited=False,
    ),
    Way(
        "quantized",
        "`quantized_all_reduce`, int8 codes",
        "Peers sum in float32. Codes pay between hosts; inside one host they take longer to make than float32 to move.",
        "inside a host, codes take longer to make than float32 to move",
        (*MPI, "gloo"),
        limited=False,
    ),
    *(
        Way(f"mindspore-{run}", f"MindSpore, `{name}`", about, "", ("mindspore",), limited=False)
        for run, name, about in (
            ("gather", "all_gather_into_tensor", ""),
            ("reduce", "all_reduce", "In place, with the copy before it."),
            ("quantized", "quantized_all_reduce", "Beside MindSpore's own sum in float32."),
        )
    ),
)
OTHERS = {
    "calls": "What a small call costs",
    "backend": "`torch.distributed` on backend alltoallv",
    "steps": "The first call, new sizes, and a call after other work",
    "hosts": "Two hosts",
    "fit": "The planner's model against this machine",
    "kernels": "CPU kernels, GB/s read and written",
}


@dataclass(frozen=True)
class Shortfall:
    """A figure that misses its goal."""

    way: Way
    row: Row
    figure: float
    goal: float
    what: str

    def __str__(self) -> str:
        where = f"{self.row['np']} ranks, {human(self.row['nbytes'])}"
        return f"| {self.way.title} | {where} | {self.what} | {self.figure:.2f} | {self.goal:g} |"


def load(path: Path) -> Figures:
    """The figures; none where there is no file."""
    figures: Figures = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    return figures


def add(name: str, command: str, columns: list[str], table: list[list[Any]], folder: Path = DOCS) -> None:
    """Adds a run to the figures, and writes the page anew. ``machine`` is where it ran, if that is another one."""
    figures, here = load(folder / "measured.json"), report.machine()
    run = {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "load": here["load"],
    }
    if not figures["machine"].items() <= here.items():
        run["machine"] = f"{here['model']}, {here['cpus']} processors"
    figures["runs"][name] = {**run, "columns": columns, "rows": table}
    save(figures, folder / "measured.json")
    (folder / "performance.md").write_text(page(figures))


def save(figures: Figures, path: Path) -> None:
    """As JSON, with a line for every row."""
    about, runs = json.dumps({**figures, "runs": {}}), []
    for name, run in figures["runs"].items():
        head = json.dumps({key: value for key, value in run.items() if key != "rows"})
        runs.append(f'"{name}": {head[:-1]}, "rows": [\n' + ",\n".join(map(json.dumps, run["rows"])) + "]}")
    path.write_text(about[:-2] + "\n" + ",\n".join(runs) + "\n}}\n")


def rows(figures: Figures, name: str) -> list[Row]:
    """The rows of a run by column; what is missing is left out."""
    run = figures["runs"].get(name)
    named = (zip(run["columns"], row, strict=True) for row in run["rows"]) if run else ()
    return [{column: figure for column, figure in row if figure is not None} for row in named]


def best(row: Row, names: tuple[str, ...]) -> tuple[float, str]:
    """How many times ours the quickest of several competitors takes, and its name; infinite with none of them."""
    return min(((row[f"{name}/us"], name) for name in names if name in row), default=(float("inf"), "-"))


def limit(row: Row) -> float | None:
    """The time of the quicker copy of the same bytes over ours; None for payloads that no copy limits."""
    return best(row, COPIES)[0] if row["nbytes"] >= LARGE and "copy" in row else None


def shortfalls(figures: Figures) -> Iterator[Shortfall]:
    """Where ours is behind the best peer, or below `OF_LIMIT` of a copy's speed."""
    for way in WAYS:
        for row in rows(figures, way.run):
            figure, name = best(row, way.peers)
            if round(figure, 2) < 1:
                yield Shortfall(way, row, figure, 1, f"times as fast as {name}")
            share = limit(row) if way.limited else None
            if share is not None and round(share, 2) < OF_LIMIT:
                yield Shortfall(way, row, share, OF_LIMIT, "of a copy's speed")
            share, path = best(row, PATHS)
            if row["nbytes"] >= 64 * KIB and round(share, 2) < OF_LIMIT:
                yield Shortfall(way, row, share, OF_LIMIT, f"of the speed by {path} alone")


def human(nbytes: int) -> str:
    if nbytes >= MIB and nbytes % MIB == 0:
        return f"{nbytes // MIB} MiB"
    return f"{nbytes // KIB} KiB" if nbytes >= KIB and nbytes % KIB == 0 else f"{nbytes} B"


def microseconds(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:,.0f}"


def span(figures: list[float]) -> str:
    """The least and the largest of some ratios."""
    low, high = f"{min(figures):.2g}", f"{max(figures):.2g}" if max(figures) < 99.5 else f"{max(figures):.0f}"
    return low if low == high else f"{low} to {high}"


def summary(figures: Figures) -> Iterator[str]:
    """A line for each way: times as fast as the best peer, and the share of a copy's speed."""
    yield "| way | compared with | up to 256 KiB | from 1 MiB | of a copy's speed, from 4 MiB |"
    yield "|---|---|---:|---:|---:|"
    for way in WAYS:
        if not (found := rows(figures, way.run)):
            continue
        small = [best(row, way.peers)[0] for row in found if row["nbytes"] < MIB]
        large = [best(row, way.peers)[0] for row in found if row["nbytes"] >= MIB]
        shares = [share for row in found if way.limited and (share := limit(row)) is not None]
        cells = (f"{span(each)} x" if each else "" for each in (small, large))
        share = span(shares) if shares else ""
        yield f"| {way.title} | {', '.join(way.peers)} | {' | '.join(cells)} | {share} |"


def section(way: Way, figures: Figures) -> Iterator[str]:
    """A way's table."""
    found = rows(figures, way.run)
    copied = any("copy" in row for row in found)
    yield "| ranks | bytes | µs (min, max) | GB/s | best peer | µs | times as fast |" + (
        " of a copy |" if copied else ""
    )
    yield "|---:|---:|---|---:|---|---:|---:|" + ("---:|" if copied else "")
    for row in found:
        ratio, name = best(row, way.peers)
        ours = f"{microseconds(row['us'])} ({microseconds(row['min'])}, {microseconds(row['max'])})"
        line = f"| {row['np']} | {human(row['nbytes'])} | {ours} | {row['GB/s']:.2f} "
        line += f"| {name} | {microseconds(row[name])} | {ratio:.2f} |" if name in row else "| - | - | - |"
        if copied:
            share = limit(row)
            line += f" {share:.2f} |" if share is not None else " |"
        yield line


def by_path(figures: Figures) -> Iterator[str]:
    """The data path that is chosen beside each fixed one."""
    found = {way: [row for row in rows(figures, way.run) if not {*PATHS}.isdisjoint(row)] for way in WAYS}
    found = {way: measured for way, measured in found.items() if measured}
    if not found:
        return
    yield from ("## The chosen data path beside the best fixed one", "")
    yield "The least time with one path for all data (`--ways`, `ALLTOALLV_PATH`) over the time with the path that is"
    yield "chosen, and that path's name; of the runs above, on the same arrays. Where one path serves all data of a"
    yield "case, as `push` into `empty()`, the two are the same, and what differs from 1 is the machine's noise."
    yield ""
    yield f"| ranks | bytes | {' | '.join(way.title for way in found)} |"
    yield "|---:|---:|" + "---|" * len(found)
    cells: dict[tuple[int, int], list[str]] = {}
    for place, measured in enumerate(found.values()):
        for row in measured:
            share, path = best(row, PATHS)
            cells.setdefault((row["np"], row["nbytes"]), [""] * len(found))[place] = f"{share:.2f} {path}"
    for (ranks, nbytes), line in cells.items():
        yield f"| {ranks} | {human(nbytes)} | {' | '.join(line)} |"
    yield ""


def calls(figures: Figures) -> Iterator[str]:
    """Every interface's small call beside the peers'."""
    names = {
        "us": "a plan of the extension, on addresses",
        "ours-plan": "`alltoallv.numpy.Plan`",
        "ours-numpy": "`alltoallv.numpy.all_to_all_v`, counts that repeat, a list",
        "ours-numpy-new": "the same, new counts at each step",
        "ours-numpy-tuple": "the same, counts as a tuple",
        "ours-numpy-array": "the same, counts as an array",
        "ours-torch-plan": "`alltoallv.torch.Plan`",
        "ours-torch": "`alltoallv.torch.all_to_all_v`, counts that repeat, a list",
        "ours-torch-new": "the same, new counts at each step",
        "ours-torch-tensor": "the same, counts as a tensor",
        **{name: f"{name}, `Alltoallv` through mpi4py" for name in MPI},
        "gloo": "gloo, `all_to_all_single`",
    }
    found = rows(figures, "calls")
    yield "| call | " + " | ".join(f"{row['np']} ranks, {human(row['nbytes'])}, µs" for row in found) + " |"
    yield "|---|" + "---:|" * len(found)
    for column, name in names.items():
        if any(column in row for row in found):
            cells = (microseconds(row[column]) if column in row else "-" for row in found)
            yield f"| {name} | {' | '.join(cells)} |"


def backend(figures: Figures) -> Iterator[str]:
    """Calls of torch.distributed beside gloo's, and torch's own part of them."""
    yield "| call | µs | gloo, µs | times as fast | torch's own part, µs | the exchange alone, µs |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in rows(figures, "backend"):
        own = (microseconds(row[name]) if name in row else "" for name in ("floor", "exchange"))
        line = f"| {row['collective']} | {microseconds(row['us'])} | {microseconds(row['gloo'])} "
        yield line + f"| {row['gloo'] / row['us']:.2f} | {' | '.join(own)} |"


def steps(figures: Figures) -> Iterator[str]:
    """Calls that no other has warmed."""
    yield "Two ranks; each call is timed alone. First calls are of jobs that have just started, a new size comes with a"
    yield "new input and a new output, and other work is 10 ms of additions in an array of 1 MiB."
    yield ""
    names = {"plan": "a plan", "us": "the function", "private": "into an ordinary array"} | {name: name for name in MPI}
    yield f"| call, µs | bytes | {' | '.join(names.values())} |"
    yield "|---|---:|" + "---:|" * len(names)
    for row in rows(figures, "steps"):
        times = " | ".join(microseconds(row[name]) for name in names)
        yield f"| {row['collective']} | {human(row['nbytes'])} | {times} |"


def hosts(figures: Figures) -> Iterator[str]:
    """Collectives between two hosts."""
    yield "| bytes | collective | µs | gloo, µs | MPICH, µs | times as fast as gloo | as MPICH |"
    yield "|---:|---|---:|---:|---:|---:|---:|"
    for row in rows(figures, "hosts"):
        times = " | ".join(microseconds(row[name]) for name in ("us", "gloo", "mpich"))
        ratios = " | ".join(f"{row[name] / row['us']:.2f}" for name in ("gloo", "mpich"))
        yield f"| {human(row['nbytes'])} | {row['collective']} | {times} | {ratios} |"


def kernels(figures: Figures) -> Iterator[str]:
    """GB/s by instruction set."""
    columns = figures["runs"]["kernels"]["columns"][2:]
    yield "| kernel | bytes | " + " | ".join(columns) + " |"
    yield "|---|---:|" + "---:|" * len(columns)
    for row in rows(figures, "kernels"):
        yield (
            f"| {row['kernel']} | {human(row['nbytes'])} | " + " | ".join(f"{row[name]:.1f}" for name in columns) + " |"
        )


def fitted(figures: Figures) -> Iterator[str]:
    """How well the planner's model, fitted to every second size, predicts the others."""
    kind = {"collective": "alltoallv", "pattern": "uniform"}
    found = [{**row, **kind, "times": {"ours": {"min_us": row["min"]}}} for row in rows(figures, "fit")]
    try:
        yield from fit.fit({"machine": figures["machine"], "rows": found}).table()
    except InvalidParamError as error:
        yield f"Not fitted: {error}."


def describe(figures: Figures) -> Iterator[str]:
    """The machine, and when the runs were."""
    machine, runs = figures["machine"], [run for run in figures["runs"].values() if "machine" not in run]
    caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
    dates, loads = [run["date"] for run in runs], [run["load"] for run in runs]
    when = min(dates) if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"
    yield (
        f"Machine: {machine['model']}, {machine['cpus']} processors, caches {caches}, Linux {machine['kernel']}, "
        f"Python {machine['python']}; load average {min(loads)} to {max(loads)} at the ends of the runs, {when}."
    )
    yield f"Versions: {', '.join(f'{name} {version}' for name, version in figures['versions'].items())}."


INTRODUCTION = """\
This page compares alltoallv on one host with the best of three MPIs, gloo and MindSpore, and with a limit: a copy of
the same bytes within each rank, plain or with streaming stores, whichever is quicker. The goals are to be at least as
fast as the best MPI and to reach 0.9 of a copy's speed; [the last section](#what-falls-short) lists what misses them,
and why. All libraries of a table were measured in turns in one run, so compare the ratios: each is the median of what
the rounds of turns show, in several jobs one after the other where the command has `--jobs`, because memory lies
elsewhere in each. A run with a wrong result is not kept.
"""
PICTURE = "![By way: microseconds of a call over the bytes of a rank; the best peer, a copy.](performance.png)"


def page(figures: Figures) -> str:
    """performance.md."""
    if not figures["runs"]:
        return "# Performance\n\nNothing has been measured.\n"
    lines = ["# Performance", "", INTRODUCTION, *summary(figures), "", PICTURE, "", *describe(figures), ""]
    lines += [
        "`python docs/measure.py` measures all of it and writes this page and [measured.json](measured.json);",
        "[bench.md](bench.md) has the columns, [tuning.md](notes/tuning.md) what was tried and did not win.",
    ]
    tables = {"calls": calls, "backend": backend, "steps": steps, "hosts": hosts, "fit": fitted, "kernels": kernels}
    titles = {**{way.run: way.title for way in WAYS}, **OTHERS}
    by_run = {way.run: way for way in WAYS}
    for name in ("calls", "steps", "backend", *by_run, "hosts", "kernels", "fit"):
        if (run := figures["runs"].get(name)) is None:
            continue
        lines += ["", f"## {titles[name]}", ""]
        if (way := by_run.get(name)) and way.about:
            lines += [way.about, ""]
        if "machine" in run:
            lines += [f"On another machine: {run['machine']}; load average {run['load']}, {run['date']}.", ""]
        lines += [f"`{run['command']}`", "", *(section(way, figures) if way else tables[name](figures))]
        lines += [f"\n{party} failed: {why}" for party, why in run.get("failed", {}).items()]
    if missing := [title for name, title in titles.items() if name not in figures["runs"]]:
        lines += ["", f"Not measured: {'; '.join(missing)}."]
    return "\n".join([*lines, "", *by_path(figures), *appendix(figures)]) + "\n"


def appendix(figures: Figures) -> Iterator[str]:
    """The goals that were missed, and why."""
    found = list(shortfalls(figures))
    yield from ("## What falls short", "")
    if not found:
        yield "Nothing: every figure reaches its goal."
        return
    yield from ("| way | where | | figure | goal |", "|---|---|---|---:|---:|", *map(str, found), "")
    for way in dict.fromkeys(each.way for each in found):
        yield f"- {way.title}: {way.reason or 'not known'}."
