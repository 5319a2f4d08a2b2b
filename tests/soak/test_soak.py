"""Every kind of fault once on NumPy, a few on the frameworks, and jobs side by side with others in them.

``python tests/soak``, also with ``--jobs``, goes on for hours.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import rooms  # noqa: F401 - the modules below
from columns import FRAMEWORKS, RUNS
from faults import KINDS
from jobs import Found, Planned
from jobs import soak as soak_jobs
from soak import Table, episodes, soak

from alltoallv.testing import Ranks
from alltoallv_tools.ports import free_port

FEW = ["SIGKILL inside", "stopped inside", "counts"]  # what a framework could change
COLUMNS = [column for column in RUNS if column.module.startswith("alltoallv.")]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_faults(ranks: Ranks, column: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = list(KINDS) if column.package == "numpy" else FEW
    plans = itertools.islice(episodes(1, [column.name], tmp_path, 40, kinds), len(kinds))
    table = soak(ranks, plans, Table(), seconds=280, faults=len(kinds))
    with capsys.disabled():
        print(f"\ntests/soak, {column.name}:", *table.lines(), sep="\n")
    assert set(table.faults) == set(kinds)
    assert not table.failures(), "\n".join(table.failures())


@pytest.mark.skipif(bool(FRAMEWORKS), reason="the jobs are NumPy's: the session `tests` runs them")
def test_jobs_side_by_side_and_nested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wave = [
        Planned(kind, size, (("plain", 20), ("option", option), ("limit", limit), ("inner", inner), *more), free_port())
        for kind, size, option, limit, inner, *more in (
            ("run", 2, "root", "descriptors", "torchrun's variables", ("limit", "limits of groups")),
            ("torchrun's variables", 3, "bits", "limits of calls", "run", ("option", "payload")),
        )
    ]
    found = Found()
    soak_jobs(iter([wave]), found, tmp_path, seed=1, seconds=0)
    with capsys.disabled():
        print("\ntests/soak, jobs:", *found.lines(), sep="\n")
    assert found.jobs == 7
    assert sum(found.nested.values()) == 5
    assert found.operators > 100
    assert not found.failures(), "\n".join(found.failures())
