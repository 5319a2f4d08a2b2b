"""The model of the row protocol in op_host/runtime/control holds, and breaking one of its rules is found."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from on_ranks import mostly_slow

MODEL = Path(__file__).resolve().parents[2] / "op_host/runtime/control/row_protocol.pml"
BROKEN = {
    1: "data",
    2: "copied",
    3: "invalid end state",
    4: "cut",
    5: "reused",
    6: "verdict|invalid end state",
    7: "freed",
}


def check(folder: Path, ranks: int, operators: int, fault: int = 0, *compiled: str, changes: bool = False) -> str:
    """What the checker prints, after every reachable state or its first error."""
    chosen = [f"-DN={ranks}", f"-DOPS={operators}", f"-DFAULT={fault}", *["-DCHANGES"] * changes]
    subprocess.run(["spin", *chosen, "-a", str(MODEL)], cwd=folder, check=True, capture_output=True)
    compile_ = ["cc", "-O1", "-w", "-DSAFETY", *compiled, "-o", "pan", "pan.c"]
    subprocess.run(compile_, cwd=folder, check=True)
    return subprocess.run(["./pan", "-m100000"], cwd=folder, capture_output=True, text=True, check=True).stdout


SLOW = (2, 3), (3, 1)


@pytest.mark.parametrize(
    ("ranks", "operators"), [(2, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_every_interleaving_is_right(tmp_path: Path, ranks: int, operators: int) -> None:
    said = check(tmp_path, ranks, operators, 0, "-DCOLLAPSE")
    assert "errors: 0" in said, said
    assert "max search depth too small" not in said, said
    assert int(re.search(r"(\d+) states, stored", said)[1]) > 10_000, said


@pytest.mark.parametrize(
    ("ranks", "operators"), [(2, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_a_row_that_changes(tmp_path: Path, ranks: int, operators: int) -> None:
    """Ranks may disagree on the outcome then, but none touches what another has given back to its caller."""
    said = check(tmp_path, ranks, operators, 0, "-DCOLLAPSE", changes=True)
    assert "errors: 0" in said, said
    assert "max search depth too small" not in said, said


@pytest.mark.slow
def test_three_ranks_by_hashing(tmp_path: Path) -> None:
    """More operators than memory has room for: states are told apart by three bits each, so a few may be left out."""
    said = check(tmp_path, 3, 2, 0, "-DBITSTATE")
    print(said)
    assert "errors: 0" in said, said


@pytest.mark.parametrize("fault", mostly_slow(BROKEN, (1, 4, 7)))
def test_a_broken_rule_is_found(tmp_path: Path, fault: int) -> None:
    said = check(tmp_path, 2, 2 if fault == 7 else 3, fault)  # three where an operator must follow two others
    assert "errors: 1" in said, said
    assert re.search(f"pan:1: .*({BROKEN[fault]})", said), said
