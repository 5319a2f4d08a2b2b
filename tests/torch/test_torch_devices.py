"""The tables of docs/api name every function, and what each does on a CPU; tests/npu and tests/gpu hold the rest."""

from __future__ import annotations

from typing import Any

from backend_groups import on_group
from torch_calls import calls, outcome, tables

import alltoallv.torch as at
from alltoallv.errors import AllToAllVError

NO_CALLS = {"Bounded", "ErrorFeedback", "GroupOptions", "Received", "Work", "functional", "nn"}


def test_the_tables_name_every_function() -> None:
    said, called = tables("CPU"), calls(0, 2).keys()
    assert set(said) == set(called)
    assert {name.partition(",")[0] for name in called if "." not in name} == set(at.__all__) - NO_CALLS
    assert set(tables("GPU").values()) == {"not run", "no"}
    assert set(tables("NPU").values()) == {"emulated", "no"}


@on_group(2, seconds=120)
def test_each_function_does_on_a_cpu_what_its_page_says(rank: int, size: int, group: Any) -> None:
    said = tables("CPU")
    for name, call in calls(rank, size).items():
        found = outcome(call, "cpu")
        wanted = {"yes": list, "no": AllToAllVError}[said[name]]
        assert isinstance(found, wanted), f"{name}: {found}"
