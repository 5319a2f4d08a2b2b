"""Writes docs/performance.md and its plots from the results of docs/measure.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alltoallv.bench import report
from alltoallv.cli.plan import plot as plot_plan
from alltoallv.errors import InvalidParamError
from alltoallv.planner import fit

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
Goal = tuple[str, float, float, bool]  # what, figure, goal, whether a smaller figure is better


def goals(documents: Documents) -> Iterator[Goal]:
    """Every target with its figure."""
    for name in ("float32", "int8"):
        for row in rows(documents, name):
            if found := report.best_ratio(row, MPI):
                yield cell(f"{name}, best MPI / ours", row), found, GOALS[row["np"]][row["nbytes"]], False
    for row in rows(documents, "float32"):
        if row["nbytes"] >= 4 * MIB and (found := report.best_ratio(row, ("copy", "copy-nt"))):
            yield cell("float32, the quicker copy / ours", row), found, 0.85, False
    for row in rows(documents, "gloo"):
        goal = {2: 12.0, 4: 50.0}.get(row["np"], 5.0) if row["nbytes"] == KIB else 5.0
        if found := report.best_ratio(row, ("gloo",)):
            yield cell("alltoallv.torch, gloo / ours", row), found, goal, False
    for row in rows(documents, "private"):
        if found := report.best_ratio(row, MPI):
            yield cell("private output, best MPI / ours", row), found, 0.95, False
        if found := report.best_ratio(row, ("gloo",)):
            yield cell("private output, gloo / ours", row), found, 3.0, False
    for row in rows(documents, "cycle"):
        if found := report.best_ratio(row, MPI):
            yield cell("rewritten and consumed buffers, best MPI / ours", row), found, 0.95, False
    for row in rows(documents, "allreduce"):
        if row["nbytes"] >= 16 * MIB and (found := report.best_ratio(row, MPI)):
            yield cell("all_reduce float32, best MPI / ours", row), found, 1.5, False
    for row in rows(documents, "quantized"):
        goal = {MIB: 20.0, 64 * MIB: 4.0}.get(row["nbytes"])
        if goal and (found := report.best_ratio(row, ("gloo",))):
            yield cell("int8 all-reduce, gloo float32 / ours", row), found, goal, False
        if found := report.best_ratio(row, MPI):
            yield cell("int8 all-reduce, best MPI float32 / ours", row), found, 1.0, False
    for row in rows(documents, "mindspore-gather"):
        if found := report.best_ratio(row, ("mindspore",)):
            yield cell("alltoallv.mindspore, MindSpore's own all_gather / ours", row), found, 20.0, False
    for row in rows(documents, "mindspore-reduce"):
        if found := report.best_ratio(row, ("mindspore",)):
            yield cell("alltoallv.numpy's all_reduce, MindSpore's own / ours", row), found, 20.0, False
    for row in rows(documents, "sparse"):
        if "full" in row["times"]:
            yield cell("sparse, ours / the full exchange", row), 1 / report.ratio(row, "full"), 0.25, True
    for row in rows(documents, "overhead"):
        if row["np"] == 1:
            for column, what, goal in (
                ("ours", "extension", 1.0),
                ("ours-plan", "NumPy", 3.0),
                ("ours-torch-plan", "torch", 6.0),
            ):
                if column in row["times"]:
                    us = row["times"][column]["median_us"]
                    yield f"a reused plan of nothing, W=1, through {what}, us", us, goal, True


def rows(documents: Documents, name: str) -> list[Row]:
    """Complete rows of a run."""
    return [row for row in documents.get(name, {"rows": []})["rows"] if "ours" in row["times"]]


def cell(what: str, row: Row) -> str:
    return f"{what}, W={row['np']}, {human(row['nbytes'])}"


def human(nbytes: int) -> str:
    if nbytes >= MIB and nbytes % MIB == 0:
        return f"{nbytes // MIB} MiB"
    return f"{nbytes // KIB} KiB" if nbytes >= KIB and nbytes % KIB == 0 else f"{nbytes} B"


def table(document: dict[str, Any]) -> list[str]:
    """Microseconds with their spread, and every other contender's time with its ratio."""
    found = document["rows"]
    columns = list(dict.fromkeys(name for row in found for name in row["times"] if name != "ours"))
    lines = ["| ranks | bytes | ours us (min, max) | GB/s | #wrong | " + " | ".join(columns) + " |"]
    lines.append("|---:|---:|---|---:|---:|" + "---:|" * len(columns))
    for row in sorted(found, key=lambda row: (row["np"], row["nbytes"])):
        if "ours" not in row["times"]:
            continue
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
    "cycle": "Rewritten send buffer, consumed output",
    "allreduce": "all_reduce of float32",
    "quantized": "Quantized all-reduce",
    "sparse": "One non-empty peer of seven",
    "mindspore-gather": "alltoallv.mindspore: all_gather_into_tensor",
    "mindspore-reduce": "MindSpore's own all_reduce; alltoallv.mindspore has none, ours is that of NumPy",
    "fit": "The planner's model against this machine",
    "kernels": "CPU kernels, GB/s read and written",
}


def write_page(docs: Path, documents: Documents, commands: dict[str, str]) -> None:
    """docs/performance.md and the plots beside it."""
    lines = ["# Performance", ""]
    lines += [
        "Written by `python docs/measure.py`; [bench.md](bench.md) says what the columns mean and how it is measured."
    ]
    lines += [
        "Times are medians of blocks, in microseconds; in brackets how many times ours. Ratios within a run count."
    ]
    lines += [
        "What was tried and did not win stands in [tuning.md](tuning.md), and why figures move where a host",
        "moves a virtual machine's processors about.",
        "",
    ]
    if documents:
        loads = [document["machine"]["load"] for document in documents.values()]
        machine = next(iter(documents.values()))["machine"]
        caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
        lines += [
            f"Machine: {machine['model']}, {machine['cpus']} processors, caches {caches}, Linux {machine['kernel']}, "
            f"Python {machine['python']}; load average {min(loads)} to {max(loads)} at the ends of the runs.",
            "",
        ]
    found = list(goals(documents))
    met = [figure <= goal if smaller else figure >= goal for _, figure, goal, smaller in found]
    lines += ["## Targets", "", f"{sum(met)} of {len(met)} met.", ""]
    lines += ["| target | figure | goal | |", "|---|---:|---:|---|"]
    for (what, figure, goal, smaller), good in zip(found, met, strict=True):
        lines.append(
            f"| {what} | {figure:.2f} | {'<=' if smaller else '>='} {goal:g} | {'met' if good else '**not met**'} |"
        )
    missing = [TITLES[name] for name in TITLES if name not in documents]
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    for name, document in documents.items():
        lines += ["", f"## {TITLES[name]}", "", f"`python -m alltoallv {commands[name]}`", ""]
        lines += {"kernels": kernels, "fit": fitted}.get(name, table)(document)
        failed = {party: why for row in document["rows"] for party, why in row.get("failed", {}).items()}
        lines += [f"\n{party} failed: {why}" for party, why in failed.items()]
        if name in ("float32", "gloo", "private", "quantized"):
            columns = list(dict.fromkeys(c for row in document["rows"] for c in row["times"] if c != "ours"))
            report.plot(sorted(document["rows"], key=lambda r: r["nbytes"]), columns, docs / f"performance-{name}.svg")
            lines += ["", f"![time over size](performance-{name}.svg)"]
    plot_plan(docs / "performance-plan.svg")
    lines += ["", "## Where quantizing starts to win", "", "By the model of [plan.md](plan.md), not measured.", ""]
    lines += ["![size from which int8 is quicker](performance-plan.svg)"]
    (docs / "performance.md").write_text("\n".join(lines) + "\n")
