"""One test per check of checks_*.py; they all run in one job of msrun with 2 workers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mint_page import PAGE, page
from msrun_jobs import HERE, outputs

CHECKS = [
    node.name
    for path in sorted(Path(__file__).parent.glob("checks_*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, outcomes: dict[str, dict[int, str]]) -> None:
    assert sorted(outcomes[name]) == [0, 1]
    for rank, text in outcomes[name].items():
        assert not text, f"on rank {rank}:\n{text}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_random_layouts(tmp_path: Path) -> None:
    for text in outputs(tmp_path, 4, HERE / "run_layouts.py", "10000", timeout=2900):
        assert "all have the values of the slices" in text


def test_the_page_of_mint_names_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python tests/mindspore/mint_page.py writes it again"
