"""Makes docs/performance.md of docs/measured.json, the figures that docs/measure.py keeps there.

The file has the machine, the versions of what took part, and the runs by name. A run has ``argv``, the options of
``bench``; the date; the load average at its end; and ``rows``, one a line, under ``columns``: of kernels GB/s, of all
others ``us``, ``min`` and ``max`` of ours and the medians of the other contenders, in microseconds, null where one is
missing (``failed`` says why).
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alltoallv.errors import InvalidParamError
from alltoallv_tools.planner import fit

Row = dict[str, Any]
Run = dict[str, Any]
Figures = dict[str, Any]
MPI = ("mpich", "openmpi", "impi")
KIB, MIB = 1 << 10, 1 << 20

PAYLOADS = (KIB, 16 * KIB, 256 * KIB, 4 * MIB, 16 * MIB, 64 * MIB)
MORE = (KIB, 16 * KIB, 64 * KIB, 128 * KIB, *PAYLOADS[2:])
COPIES = ("copy", "copy-nt")
LARGE = 4 * MIB  # payloads from which a copy of as many bytes is a bound, whatever the ranks wait for

Goals = dict[tuple[int, int], float]  # by ranks and bytes


def alike(goal: float, payloads: Iterable[int], sizes: tuple[int, ...] = (2, 4, 8)) -> Goals:
    """One goal for all of them."""
    return dict.fromkeys(itertools.product(sizes, payloads), goal)


# The best peer over ours: two ranks, four, eight.
FLOAT32 = (1.2, 2.0, 1.25, 1.05, 1.05, 2.0), (2.5, 3.0, 2.2, 1.15, 1.15, 1.9), (5.0, 4.0, 3.5, 1.3, 2.5, 2.0)
QUICKEST = dict(zip(alike(0, PAYLOADS), itertools.chain(*FLOAT32), strict=True))
COPIED = alike(0.85, PAYLOADS[3:])
GLOO, SUMMED = ("gloo",), alike(20.0, (MIB,), (2, 4)) | alike(4.0, (64 * MIB,), (2, 4))
MINDSPORE, MB64 = ("mindspore",), alike(20.0, (64_000_000,), (2,))
# Run, what is divided by our time, the contenders whose quickest it is.
RATIOS: tuple[tuple[str, str, tuple[str, ...], Goals], ...] = (
    ("float32", "float32, best MPI", MPI, QUICKEST),
    ("int8", "int8, best MPI", MPI, QUICKEST),
    ("float32", "float32 into empty(), the quicker copy", COPIES, COPIED),
    ("int8", "int8 into empty(), the quicker copy", COPIES, COPIED),
    ("allocated", "float32, allocated by the operator, the quicker copy", COPIES, COPIED),
    ("gloo", "alltoallv.torch into empty(), gloo", GLOO, alike(5.0, PAYLOADS) | {(2, KIB): 12.0, (4, KIB): 50.0}),
    ("private", "private output, best MPI", MPI, alike(0.95, MORE)),
    ("private-gloo", "alltoallv.torch with a private output, gloo", GLOO, alike(3.0, MORE)),
    ("cycle", "rewritten and consumed buffers, best MPI", MPI, alike(0.95, sorted((*MORE, MIB)), (2, 4))),
    ("allreduce", "all_reduce float32, best MPI", MPI, alike(1.5, (16 * MIB, 64 * MIB), (2, 4))),
    ("quantized", "int8 all-reduce, gloo float32", GLOO, SUMMED),
    ("quantized", "int8 all-reduce, best MPI float32", MPI, alike(1.0, (MIB, 16 * MIB, 64 * MIB), (2, 4))),
    *(
        (f"mindspore-{run}", f"alltoallv.mindspore's {what}", MINDSPORE, MB64)
        for run, what in (
            ("gather", "all_gather_into_tensor, MindSpore's all_gather"),
            ("reduce", "all_reduce, MindSpore's"),
            ("quantized", "quantized_all_reduce, MindSpore's all_reduce"),
        )
    ),
)
OVERHEADS = (("us", "the extension", 1.0), ("ours-plan", "NumPy", 3.0), ("ours-torch-plan", "torch", 6.0))


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


def load(path: Path) -> Figures:
    """The figures; none where there is no file."""
    figures: Figures = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    return figures


def save(figures: Figures, path: Path) -> None:
    """As JSON, with a line for every row."""
    about, runs = json.dumps({**figures, "runs": {}}), []
    for name, run in figures["runs"].items():
        head = json.dumps({key: value for key, value in run.items() if key != "rows"})
        runs.append(f'"{name}": {head[:-1]}, "rows": [\n' + ",\n".join(map(json.dumps, run["rows"])) + "]}")
    path.write_text(about[:-2] + "\n" + ",\n".join(runs) + "\n}}\n")


def rows(run: Run | None) -> list[Row]:
    """By column; what is missing is left out."""
    named = (zip(run["columns"], row, strict=True) for row in run["rows"]) if run else ()
    return [{column: figure for column, figure in row if figure is not None} for row in named]


def best_ratio(row: Row, names: tuple[str, ...]) -> float | None:
    """How many times ours the quickest of several contenders takes; None unless all of them were measured."""
    return min(row[name] for name in names) / row["us"] if row.keys() >= {"us", *names} else None


def planner(figures: Figures) -> fit.Fit:
    """The planner's model, fitted to its run."""
    kind = {"collective": "alltoallv", "pattern": "uniform"}
    found = [{**row, **kind, "times": {"ours": {"min_us": row["min"]}}} for row in rows(figures["runs"].get("fit"))]
    return fit.fit({"machine": figures.get("machine", {"cpus": 1}), "rows": found})


def targets(figures: Figures) -> Iterator[Target]:
    """Every target, whether there is a figure or not."""

    def find(run: str, size: int, nbytes: int) -> Row:
        found = (row for row in rows(figures["runs"].get(run)) if (row["np"], row["nbytes"]) == (size, nbytes))
        return next(found, {})

    for run, what, names, goals in RATIOS:
        for (size, nbytes), goal in goals.items():
            row = find(run, size, nbytes)
            figure, copy = best_ratio(row, names), best_ratio(row, COPIES)
            # Where ranks outnumber processors copies take turns, as the ranks of an exchange have to.
            bounds = names != COPIES and (nbytes >= LARGE or (row and size > figures["machine"]["cpus"]))
            bound = figure / copy if figure and copy and bounds else None
            yield Target(f"{what} / ours, W={size}, {human(nbytes)}", figure, goal, copy=bound)
    full = best_ratio(find("sparse", 8, 256 * KIB), ("full",))
    yield Target("sparse, ours / the full exchange, W=8, 256 KiB", full and 1 / full, 0.25, smaller=True)
    for column, what, goal in OVERHEADS:
        us = find("overhead", 1, 0).get(column)
        yield Target(f"a reused plan of nothing, W=1, through {what}, us", us, goal, smaller=True)
    try:
        model = planner(figures)
        share = model.within / len(model.checks)
    except InvalidParamError:
        share = None
    yield Target("planner: share of the sizes it was not fitted to that it predicts within 25 %", share, 1.0)


def human(nbytes: int) -> str:
    if nbytes >= MIB and nbytes % MIB == 0:
        return f"{nbytes // MIB} MiB"
    return f"{nbytes // KIB} KiB" if nbytes >= KIB and nbytes % KIB == 0 else f"{nbytes} B"


def table(run: Run) -> list[str]:
    """Microseconds with their spread, and every other contender's time with its ratio."""
    columns = run["columns"][6:]
    lines = ["| ranks | bytes | ours us (min, max) | GB/s | " + " | ".join(columns) + " |"]
    lines.append("|---:|---:|---|---:|" + "---:|" * len(columns))
    for row in sorted(rows(run), key=lambda row: (row["np"], row["nbytes"])):
        text = f"| {row['np']} | {human(row['nbytes'])} | {row['us']:.2f} ({row['min']:.2f}, {row['max']:.0f}) |"
        text += f" {row['GB/s']:.2f} |"
        for name in columns:
            text += f" {row[name]:.2f} ({row[name] / row['us']:.2f}) |" if name in row else " - |"
        lines.append(text)
    return lines


def kernels(run: Run) -> list[str]:
    columns = run["columns"][2:]
    lines = ["| kernel | bytes | " + " | ".join(columns) + " |", "|---|---:|" + "---:|" * len(columns)]
    for kernel, nbytes, *rates in run["rows"]:
        lines.append(f"| {kernel} | {human(nbytes)} | " + " | ".join(f"{rate:.1f}" for rate in rates) + " |")
    return lines


def fitted(figures: Figures) -> list[str]:
    try:
        return list(planner(figures).table())
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


def describe(figures: Figures) -> Iterator[str]:
    """The machine, and when the runs were."""
    if not figures["runs"]:
        return
    machine, runs = figures["machine"], figures["runs"].values()
    caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
    dates, loads = [run["date"] for run in runs], [run["load"] for run in runs]
    when = min(dates) if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"
    yield (
        f"Machine: {machine['model']}, {machine['cpus']} processors, caches {caches}, Linux {machine['kernel']}, "
        f"Python {machine['python']}; load average {min(loads)} to {max(loads)} at the ends of the runs, {when}."
    )
    yield f"Versions: {', '.join(f'{name} {version}' for name, version in figures['versions'].items())}."
    yield ""


def page(figures: Figures) -> str:
    """performance.md."""
    runs = {name: figures["runs"][name] for name in TITLES if name in figures["runs"]}
    lines = ["# Performance", ""]
    lines += [
        "Made by `python docs/measure.py` of the figures in [measured.json](measured.json); [bench.md](bench.md) says",
        "what the columns mean and how it is measured. A run with a wrong result is not kept. Times are medians of",
        "blocks, in microseconds; in brackets how many times ours. Ratios within a run count. What was tried and did",
        "not win stands in [tuning.md](tuning.md), and why figures move where a host moves a virtual machine's",
        "processors about. With `--plot FILE` a command draws its table.",
        "",
        *describe(figures),
    ]
    found = list(targets(figures))
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
    if missing := [title for name, title in TITLES.items() if name not in runs]:
        lines += ["", f"Not measured: {'; '.join(missing)}."]
    for name, run in runs.items():
        lines += ["", f"## {TITLES[name]}", "", f"`python -m alltoallv bench {shlex.join(run['argv'])}`", ""]
        lines += fitted(figures) if name == "fit" else kernels(run) if name == "kernels" else table(run)
        lines += [f"\n{party} failed: {why}" for party, why in run.get("failed", {}).items()]
    lines += ["", "## Where quantizing starts to win", ""]
    lines += ["`python -m alltoallv plan --plot wins.svg` draws it, by the model of [plan.md](plan.md), not measured."]
    return "\n".join(lines) + "\n"
