"""What README and docs/ show of emulated NPUs is what a user gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from documented import pages, run_page


@pytest.mark.parametrize("page", pages("npu"))
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLTOALLV_EMULATOR_ORDER", raising=False)  # a user has none
    run_page(page, "npu", tmp_path)
