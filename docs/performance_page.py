"""Writes docs/performance.md and its plots from the results of docs/measure.py."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alltoallv.errors import InvalidParamError
from alltoallv_tools.bench import report
from alltoallv_tools.cli.plan import plot as plot_plan
from alltoallv_tools.planner import fit

Row = dict[str, Any]
Documents = dict[str, Any]
MPI = ("mpich", "openmpi", "impi")
KIB, MIB = 1 << 10, 1 << 20

# Of the best peer's time over ours; by ranks and bytes.
GOALS = {
    2: {KIB: 1.2, 16 * KIB: 2.0, 256 * KIB: 1.25, 4 * MIB: 1.05, 16 * MIB: 1.05, 64 * MIB: 2.0},
    4: {KIB: 2.5, 16 * KIB: 3.0, 256 * KIB: 2.2, 4 * MIB: 1.15, 16 * MIB: 1.15, 64 * MIB: 1.9},
    8: {KIB: 5.0, 16 * KIB: 4.0, 256 * KIB: 3.5, 4 * MIB: 1.3, 16 * MIB: 2.5, 64 * MIB: 2.0},
}
PAYLOADS = tuple(GOALS[2])


COPIES = ("copy", "copy-nt")
LARGE = 4 * MIB  # payloads from which a copy of as many bytes is a bound, whatever the ranks wait for


@dataclass(frozen=True)
class Target:
    """A figure that was asked for; None where it has not been measured."""

    what: str
    figure: float | None
    goal: float
    smaller: bool = False  # is better
    copy: float | None = None  # the figure, had ours been as quick as a rank's copy of its bytes

    def __str__(self) -> str:
        figure, verdict = "-", "not measured"
        if self.figure is not None:
            figure = f"{self.figure:.2f}"
            verdict = "met" if self.met else "**not met**"
        copy = "" if self.copy is None else f"{self.copy:.2f}"
        return f"| {self.what} | {figure} | {'<=' if self.smaller else '>='} {self.goal:g} | {copy} | {verdict} |"

    @property
    def met(self) -> bool:
        if self.figure is None:
            return False
        return self.figure <= self.goal if self.smaller else self.figure >= self.goal


@dataclass(frozen=True)
class Cell:
    """A line of a run; ``row`` is None where there is none."""

    size: int
    nbytes: int
    row: Row | None
    crowded: bool  # by more ranks than processors: copies take turns, as the ranks of an exchange have to

    def against(self, what: str, names: tuple[str, ...], goal: float) -> Target:
        """The quickest of the contenders over ours; all of them must have been there."""
        figure = self.row and report.best_ratio(self.row, names)
        copy = self.row and report.best_ratio(self.row, COPIES)
        bounds = names != COPIES and (self.crowded or self.nbytes >= LARGE)
        bound = figure / copy if figure and copy and bounds else None
        return Target(f"{what} / ours, W={self.size}, {human(self.nbytes)}", figure, goal, copy=bound)


def targets(documents: Documents) -> Iterator[Target]:
    """Every target, whether there is a figure or not."""

    def cells(run: str, sizes: Iterable[int], payloads: Iterable[int]) -> Iterator[Cell]:
        document = documents.get(run, {"rows": []})
        rows = {(row["np"], row["nbytes"]): row for row in document["rows"]}
        for size, nbytes in itertools.product(sizes, payloads):
            row = rows.get((size, nbytes))
            yield Cell(size, nbytes, row, row is not None and size > document["machine"]["cpus"])

    for dtype in ("float32", "int8"):
        for each in cells(dtype, GOALS, PAYLOADS):
            yield each.against(f"{dtype}, best MPI", MPI, GOALS[each.size][each.nbytes])
    for run, what in (
        ("float32", "float32 into empty()"),
        ("int8", "int8 into empty()"),
        ("allocated", "float32, allocated by the operator"),
    ):
        for each in cells(run, GOALS, (4 * MIB, 16 * MIB, 64 * MIB)):
            yield each.against(f"{what}, the quicker copy", COPIES, 0.85)
    for each in cells("gloo", GOALS, PAYLOADS):
        goal = {2: 12.0, 4: 50.0}.get(each.size, 5.0) if each.nbytes == KIB else 5.0
        yield each.against("alltoallv.torch into empty(), gloo", ("gloo",), goal)
    for each in cells("private", GOALS, sorted((*PAYLOADS, 64 * KIB, 128 * KIB))):
        yield each.against("private output, best MPI", MPI, 0.95)
    for each in cells("private-gloo", GOALS, sorted((*PAYLOADS, 64 * KIB, 128 * KIB))):
        yield each.against("alltoallv.torch with a private output, gloo", ("gloo",), 3.0)
    for each in cells("cycle", (2, 4), sorted((*PAYLOADS, 64 * KIB, 128 * KIB, MIB))):
        yield each.against("rewritten and consumed buffers, best MPI", MPI, 0.95)
    for each in cells("allreduce", (2, 4), (16 * MIB, 64 * MIB)):
        yield each.against("all_reduce float32, best MPI", MPI, 1.5)
    for each in cells("quantized", (2, 4), (MIB, 16 * MIB, 64 * MIB)):
        if goal := {MIB: 20.0, 64 * MIB: 4.0}.get(each.nbytes):
            yield each.against("int8 all-reduce, gloo float32", ("gloo",), goal)
        yield each.against("int8 all-reduce, best MPI float32", MPI, 1.0)
    for run, what in (
        ("mindspore-gather", "alltoallv.mindspore's all_gather_into_tensor, MindSpore's all_gather"),
        ("mindspore-reduce", "alltoallv.mindspore's all_reduce, MindSpore's"),
        ("mindspore-quantized", "alltoallv.mindspore's quantized_all_reduce, MindSpore's all_reduce"),
    ):
        for each in cells(run, (2,), (64_000_000,)):
            yield each.against(what, ("mindspore",), 20.0)
    for each in cells("sparse", (8,), (256 * KIB,)):
        full = each.row and report.best_ratio(each.row, ("full",))
        yield Target("sparse, ours / the full exchange, W=8, 256 KiB", full and 1 / full, 0.25, smaller=True)
    for each in cells("overhead", (1,), (0,)):
        for column, what, goal in (
            ("ours", "the extension", 1.0),
            ("ours-plan", "NumPy", 3.0),
            ("ours-torch-plan", "torch", 6.0),
        ):
            times = each.row["times"].get(column) if each.row else None
            us = times and times["median_us"]
            yield Target(f"a reused plan of nothing, W=1, through {what}, us", us, goal, smaller=True)
    what = "planner: share of the sizes it was not fitted to that it predicts within 25 %"
    try:
        model = fit.fit(documents["fit"])
        yield Target(what, model.within / len(model.checks), 1.0)
    except (KeyError, InvalidParamError):
        yield Target(what, None, 1.0)


def human(nbytes: int) -> str:
    if nbytes >= MIB and nbytes % MIB == 0:
        return f"{nbytes // MIB} MiB"
    return f"{nbytes // KIB} KiB" if nbytes >= KIB and nbytes % KIB == 0 else f"{nbytes} B"


def table(document: dict[str, Any]) -> list[str]:
    """Microseconds with their spread, and every other contender's time with its ratio."""
    found = document["rows"]
    columns = report.columns(found)
    lines = ["| ranks | bytes | ours us (min, max) | GB/s | #wrong | " + " | ".join(columns) + " |"]
    lines.append("|---:|---:|---|---:|---:|" + "---:|" * len(columns))
    for row in sorted(found, key=lambda row: (row["np"], row["nbytes"])):
        ours = row["times"]["ours"]
        text = f"| {row['np']} | {human(row['nbytes'])} | {ours['median_us']:.2f} ({ours['min_us']:.2f}, "
        text += f"{ours['max_us']:.0f}) | {row['algbw']:.2f} | {report.wrong(row)} |"
        for name in columns:
            times = row["times"].get(name)
            text += f" {times['median_us']:.2f} ({report.ratio(row, name):.2f}) |" if times else " - |"
        lines.append(text)
    return lines


def kernels(document: dict[str, Any]) -> list[str]:
    columns = list(document["rows"][0]["times"])
    lines = ["| kernel | bytes | " + " | ".join(columns) + " |", "|---|---:|" + "---:|" * len(columns)]
    for row in document["rows"]:
        rates = " | ".join(f"{row['times'][name]['GB/s']:.1f}" for name in columns)
        lines.append(f"| {row['kernel']} | {human(row['nbytes'])} | {rates} |")
    return lines


def fitted(document: dict[str, Any]) -> list[str]:
    try:
        return list(fit.fit(document).table())
    except InvalidParamError as error:
        return [f"Not fitted: {error}."]


TITLES = {
    "overhead": "What a call costs",
    "float32": "all_to_all_v, float32",
    "int8": "all_to_all_v, int8",
    "allocated": "all_to_all_v, float32, into outputs that the operator allocates",
    "gloo": "alltoallv.torch against gloo",
    "private": "Private outputs",
    "private-gloo": "alltoallv.torch with private outputs against gloo",
    "cycle": "Rewritten send buffer, consumed output",
    "allreduce": "all_reduce of float32",
    "quantized": "Quantized all-reduce",
    "sparse": "One non-empty peer of seven",
    "mindspore-gather": "alltoallv.mindspore: all_gather_into_tensor",
    "mindspore-reduce": "alltoallv.mindspore: all_reduce",
    "mindspore-quantized": "alltoallv.mindspore: quantized_all_reduce",
    "fit": "The planner's model against this machine",
    "kernels": "CPU kernels, GB/s read and written",
}


def describe_machines(documents: dict[str, Any]) -> Iterator[str]:
    """A paragraph for each machine that measured some of them; where there are several, of which runs it is."""
    runs: dict[str, list[str]] = {}
    loads: dict[str, list[float]] = {}
    for name, document in documents.items():
        machine = document["machine"]
        caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
        text = (
            f"{machine['model']}, {machine['cpus']} processors, caches {caches}, Linux {machine['kernel']}, "
            f"Python {machine['python']}"
        )
        runs.setdefault(text, []).append(name)
        loads.setdefault(text, []).append(machine["load"])
    for text, names in runs.items():
        whose = f" of {', '.join(names)}" if len(runs) > 1 else ""
        low, high = min(loads[text]), max(loads[text])
        yield f"Machine{whose}: {text}; load average {low} to {high} at the ends of the runs."
        yield ""


def write_page(folder: Path, documents: Documents) -> Path:
    """performance.md and the plots beside it; returns where the page is."""
    lines = ["# Performance", ""]
    lines += [
        "Written by `python docs/measure.py`; [bench.md](bench.md) says what the columns mean and how it is measured.",
        "Times are medians of blocks, in microseconds; in brackets how many times ours. Ratios within a run count.",
        "What was tried and did not win stands in [tuning.md](tuning.md), and why figures move where a host",
        "moves a virtual machine's processors about.",
        "",
    ]
    lines += describe_machines(documents)
    found = list(targets(documents))
    met, unknown = sum(target.met for target in found), sum(target.figure is None for target in found)
    lines += ["## Targets", "", f"{met} of {len(found)} met" + (f", {unknown} not measured." if unknown else "."), ""]
    beyond = sum(not target.met and target.copy is not None and target.copy < target.goal for target in found)
    lines += [
        "The column copy has the figure of an operator that takes as long as the quicker of two copies of the same",
        "bytes within each rank, plain and streaming, in the same run: from 4 MiB on, and for any payload where ranks",
        "outnumber processors, since there the copies take turns, as the ranks of an exchange cannot but do.",
        f"{beyond} of the goals that were not met lie beyond it: what reads and writes every byte once, and runs every",
        "rank once, cannot meet them on this machine.",
        "",
    ]
    lines += ["| target | figure | goal | copy | |", "|---|---:|---:|---:|---|", *map(str, found)]
    if missing := [title for name, title in TITLES.items() if name not in documents]:
        lines += ["", f"Not measured: {'; '.join(missing)}."]
    for name, document in documents.items():
        lines += ["", f"## {TITLES[name]}", "", f"`python -m alltoallv bench {shlex.join(document['argv'])}`", ""]
        lines += {"kernels": kernels, "fit": fitted}.get(name, table)(document)
        failed = {party: why for row in document["rows"] for party, why in row.get("failed", {}).items()}
        lines += [f"\n{party} failed: {why}" for party, why in failed.items()]
        if name in ("float32", "gloo", "private", "quantized"):
            report.plot(sorted(document["rows"], key=lambda r: r["nbytes"]), folder / f"performance-{name}.svg")
            lines += ["", f"![time over size](performance-{name}.svg)"]
    plot_plan(folder / "performance-plan.svg")
    lines += ["", "## Where quantizing starts to win", "", "By the model of [plan.md](plan.md), not measured.", ""]
    lines += ["![size from which int8 is quicker](performance-plan.svg)"]
    page = folder / "performance.md"
    page.write_text("\n".join(lines) + "\n")
    return page
