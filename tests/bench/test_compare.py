"""docs/compare.py: two trees beside each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import compare
from measure import Run

ROOT = Path(__file__).resolve().parents[2]


def test_a_tree_beside_itself():
    run = Run("tiny", "alltoallv --api plan --np 2 --bytes 64,1K --output empty")
    rows = [row.strip("| ").split(" | ") for row, _ in compare.compare(run, ROOT, turns=1, seconds=0.01)]
    assert [(size, nbytes) for _, size, nbytes, *_ in rows] == [("2", "64"), ("2", "1,024")]
    for *_, mine, theirs, ratio in rows:
        assert 0 < float(mine) < 1e6
        assert abs(float(theirs) / float(mine) - float(ratio)) < 0.05 * float(ratio) + 0.01


def run_main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    return compare.main()


def test_a_run_that_the_other_tree_lacks_is_named(monkeypatch, capsys):
    monkeypatch.setattr(compare, "CHOSEN", {"new": Run("new", "alltoallv --an-option-of-tomorrow")})
    assert run_main(monkeypatch, str(ROOT), "--only", "new") == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 5, "the heads of the tables"
    assert printed.err.startswith("# new: left out")
    assert "--an-option-of-tomorrow" in printed.err


def test_a_tree_without_a_core_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, str(tmp_path))
    assert f"{tmp_path} has no built core" in capsys.readouterr().err
