"""The libraries of a measurement, and the columns that each has for a case.

A *library* takes part with a job of its own: ours, or a peer such as gloo. Its ranks hold one or more competitors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from alltoallv_tools.bench import environments
from alltoallv_tools.bench.cases import COUNTS, WAYS, Case, outputs_of
from alltoallv_tools.bench.competitors import Competitor


class Library(Protocol):
    """One rank's side of a job. ``barrier`` is over the ranks of this job."""

    rank: int
    size: int
    competitors: Mapping[str, Competitor]

    def barrier(self) -> None: ...


def join(name: str, api: str) -> Library:
    """Joins the job of ``library`` as this process's rank; collective over the job."""
    if name == "ours" and api == "backend":
        from alltoallv_tools.bench import backend

        return backend.BackendLibrary()
    if name == "ours":
        from alltoallv_tools.bench.ours import OurLibrary

        return OurLibrary(api)
    from alltoallv_tools.bench import peers

    if name == "gloo":
        return peers.GlooLibrary()
    if name == "mindspore":
        return peers.MindSporeLibrary()
    return peers.MpiLibrary(name)


def contenders_of(library: str, case: Case, api: str) -> tuple[str, ...]:
    """Returns the names of the library's columns for a case; ``api`` selects our interface."""
    if api == "backend":
        from alltoallv_tools.bench import backend

        return backend.competitors(case)
    if library == "ours":
        names: tuple[str, ...] = ("ours",)
        if case.collective == "quantized":
            names += ("ours-full", "ours-fp32") if outputs_of(api, "allreduce") else ("ours-full",)
            names += tuple(f"ours-{name}" for name in case.formats.split(",") if name)
        if case.collective == "overhead":
            apis = ["plan", "numpy", *(f"numpy-{counts}" for counts in COUNTS["numpy"])]
            if environments.has_here("torch"):
                apis += ["torch-plan", "torch", *(f"torch-{counts}" for counts in COUNTS["torch"])]
            return (*names, *(f"ours-{each}" for each in apis))
        if case.collective == "alltoallv" and case.pattern == "sparse":
            names += ("full",)
        names += WAYS if case.ways else ()
        return (*names, "copy", "copy-nt")
    if library == "gloo" and case.collective == "quantized":
        return ("gloo", "gloo-bf16", "composed")
    return (library,)
