"""The tables of docs/api name every function, and what each does on a CPU; tests/npu and tests/gpu hold the rest."""

from __future__ import annotations

from typing import Any

from backend_groups import on_group
from torch_calls import calls, cells, outcome, tables

import alltoallv.torch as at
from alltoallv.errors import AllToAllVError


def test_the_tables_name_every_function() -> None:
    assert set(tables("CPU")) == set(calls(0, 2))
    assert set(cells("torch")) - {"all_to_all_v(capacity=)"} == set(at.__all__)
    assert set(tables("GPU").values()) == {"not run", "no"}
    assert set(tables("NPU").values()) == {"emulated", "no"}


@on_group(2, seconds=120)
def test_each_function_does_on_a_cpu_what_its_page_says(rank: int, size: int, group: Any) -> None:
    said = tables("CPU")
    for name, call in calls(rank, size).items():
        found = outcome(call, "cpu")
        wanted = {"yes": list, "no": AllToAllVError}[said[name]]
        assert isinstance(found, wanted), f"{name}: {found}"
