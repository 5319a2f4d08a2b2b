"""The contenders of a benchmark, and how one rank of each is made.

A *party* is a job with ranks of its own: ours, or one peer's. Its ranks hold one or more *contenders*, which turn a
case into a call that can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from alltoallv_tools.bench import environments
from alltoallv_tools.bench.cases import COUNTS, Case, outputs_of

Array = npt.NDArray[Any]


@dataclass
class Prepared:
    """A case that has been prepared on one rank.

    Attributes:
        call: what is timed.
        result: turns the call's return value into the result, a flat array.
        input: the memory that the call sends, not a copy of it: variants rewrite it.
        exact: False where there is no result to check (the limits).
        output: the memory that the call writes, if it is the same at every call; it is overwritten before the check.
    """

    call: Callable[[], Any]
    result: Callable[[Any], Array]
    input: Array
    exact: bool = True
    output: Array | None = None


class Contender(Protocol):
    """One column of the table."""

    def prepare(self, case: Case) -> Prepared: ...


class Party(Protocol):
    """One rank's side of a job. ``barrier`` is over the ranks of this job."""

    rank: int
    size: int
    contenders: Mapping[str, Contender]

    def barrier(self) -> None: ...


def join(name: str, api: str) -> Party:
    """Joins the job of ``party`` as this process's rank; collective over the job."""
    if name == "ours" and api == "backend":
        from alltoallv_tools.bench import backend

        return backend.BackendParty()
    if name == "ours":
        from alltoallv_tools.bench.ours import OurParty

        return OurParty(api)
    from alltoallv_tools.bench import peers

    if name == "gloo":
        return peers.GlooParty()
    if name == "mindspore":
        return peers.MindSporeParty()
    return peers.MpiParty(name)


def contenders_of(party: str, case: Case, api: str) -> tuple[str, ...]:
    """Returns the names of the party's columns for a case; ``api`` selects our interface."""
    if api == "backend":
        from alltoallv_tools.bench import backend

        return backend.contenders(case)
    if party == "ours":
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
        return (*names, "copy", "copy-nt")
    if party == "gloo" and case.collective == "quantized":
        return ("gloo", "gloo-bf16", "composed")
    return (party,)


def spoil(array: Array | None) -> None:
    """Overwrites an output with a value that no correct result contains."""
    if array is not None:
        array.view(np.uint8).fill(0xA5)
