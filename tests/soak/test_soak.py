"""Every kind of fault once on NumPy, one of every group on the frameworks; ``python tests/soak`` goes on for hours."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import rooms  # noqa: F401 - the modules below
from columns import RUNS
from faults import KINDS
from soak import Table, episodes, soak

from alltoallv.testing import Ranks

GROUPS = ["SIGKILL inside", "abort", "stopped inside", "descriptors", "counts"]
COLUMNS = [column for column in RUNS if column.module.startswith("alltoallv.")]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_faults(ranks: Ranks, column: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = list(KINDS) if column.package == "numpy" else GROUPS
    plans = itertools.islice(episodes(1, [column.name], tmp_path, 40, kinds), len(kinds))
    table = soak(ranks, plans, Table(), seconds=280, faults=len(kinds))
    with capsys.disabled():
        print(f"\ntests/soak, {column.name}:", *table.lines(), sep="\n")
    assert set(table.faults) == set(kinds)
    assert not table.failures(), "\n".join(table.failures())
