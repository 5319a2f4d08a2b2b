"""docs/compare.py: two trees beside each other."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import compare
import pytest
from measure import Run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_tree_beside_itself():
    run = Run("tiny", "alltoallv --api plan --np 2 --bytes 64,1K --output empty")
    rows = [row.strip("| ").split(" | ") for row, _ in compare.compare(run, ROOT, turns=1, seconds=0.01)]
    assert [(size, nbytes) for _, size, nbytes, *_ in rows] == [("2", "64"), ("2", "1,024")]
    for *_, mine, theirs, ratio in rows:
        assert 0 < float(mine) < 1e6
        assert abs(float(theirs) / float(mine) - float(ratio)) < 0.05 * float(ratio) + 0.01
